"""What a decoder-only model is, as data: everything that the lean decoder needs to know besides its weights."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from skote.types import CheckpointError


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: base frequency and, for `llama3` and `linear`, how it is stretched to longer contexts."""

    theta: float
    kind: str = "default"  # default | linear | llama3
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Shapes and constants of a pre-norm decoder with grouped-query attention and a gated SiLU feed-forward."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    rope: RopeSpec
    tied_embeddings: bool
    eos_ids: tuple[int, ...]
    added_tokens: int = 0  # rows of zeros at the end of `vocab` that the checkpoint does not hold

    def __post_init__(self) -> None:
        for name in ("vocab", "hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim", "max_positions"):
            if getattr(self, name) < 1:
                raise CheckpointError(f"config.json gives {name}={getattr(self, name)}; it must be at least 1.")
        for name, value in (("norm_eps", self.norm_eps), ("rope theta", self.rope.theta)):
            if not 0 < value < math.inf:
                raise CheckpointError(f"config.json gives {name}={value}; it must be a finite number above 0.")
        if self.heads % self.kv_heads:
            raise CheckpointError(f"{self.heads} attention heads cannot share {self.kv_heads} key-value heads evenly.")

    @property
    def qkv_rows(self) -> int:
        """Rows of the fused projection: all q heads, then all k heads, then all v heads."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def with_layers(self, layers: int) -> DecoderSpec:
        """The same model cut to its first `layers` layers."""
        return replace(self, layers=layers)

    def with_token(self, token_id: int) -> DecoderSpec:
        """The same model with embedding rows up to `token_id`: itself, unless its vocabulary is too small for it."""
        missing = token_id + 1 - self.vocab
        return self if missing <= 0 else replace(self, vocab=token_id + 1, added_tokens=self.added_tokens + missing)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor of the checkpoint, by its name there; a tied lm_head is left out."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        for index in range(self.layers):
            prefix = f"model.layers.{index}."
            shapes |= {
                f"{prefix}input_layernorm.weight": (self.hidden,),
                f"{prefix}self_attn.q_proj.weight": (q, self.hidden),
                f"{prefix}self_attn.k_proj.weight": (kv, self.hidden),
                f"{prefix}self_attn.v_proj.weight": (kv, self.hidden),
                f"{prefix}self_attn.o_proj.weight": (self.hidden, q),
                f"{prefix}post_attention_layernorm.weight": (self.hidden,),
                f"{prefix}mlp.gate_proj.weight": (self.intermediate, self.hidden),
                f"{prefix}mlp.up_proj.weight": (self.intermediate, self.hidden),
                f"{prefix}mlp.down_proj.weight": (self.hidden, self.intermediate),
            }
        shapes["model.norm.weight"] = (self.hidden,)
        if not self.tied_embeddings:
            shapes["lm_head.weight"] = (self.vocab, self.hidden)
        return shapes

    @property
    def parameters(self) -> int:
        """Number of parameters, a tied lm_head counted once."""
        return sum(_product(shape) for shape in self.tensor_shapes().values())

    def bytes_per_token(self, element_size: int) -> int:
        """Bytes of weights that one decode step must read: every matrix once, of the embedding table one row."""
        read = self.parameters - (0 if self.tied_embeddings else self.vocab * self.hidden)
        return read * element_size

    def kv_bytes_per_token(self, element_size: int) -> int:
        """Bytes that one position takes in the KV cache."""
        return 2 * self.layers * self.kv_heads * self.head_dim * element_size


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def read_config(local_dir: Path) -> dict[str, Any]:
    """The config.json of a checkpoint directory.

    Raises:
        CheckpointError: the directory or the file is missing, or it is not a JSON object.
    """
    path = local_dir / "config.json"
    if not local_dir.is_dir():
        raise CheckpointError(f"There is no model directory {local_dir}.")
    if not path.is_file():
        raise CheckpointError(f"{local_dir} has no config.json: it is not a checkpoint directory.")
    return read_json(path)


def model_config(local_dir: Path) -> dict[str, Any]:
    """As `read_config`, with the end-of-sequence ids of generation_config.json, which decides them where it exists.

    Raises:
        CheckpointError: as `read_config`.
    """
    config = read_config(local_dir)
    generation = local_dir / "generation_config.json"
    if not generation.is_file():
        return config
    return config | {"eos_token_id": read_json(generation).get("eos_token_id")}


def eos_ids(config: dict[str, Any]) -> tuple[int, ...]:
    """The tokens that end a text: a config's `eos_token_id` is null, a number, or a list."""
    value = config.get("eos_token_id")
    if value is None:
        return ()
    return tuple(int(token) for token in value) if isinstance(value, list) else (int(value),)


def read_json(path: Path) -> dict[str, Any]:
    """A file of a checkpoint directory that holds one JSON object.

    Raises:
        CheckpointError: the file cannot be read, or is not a JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object.")
    return content
