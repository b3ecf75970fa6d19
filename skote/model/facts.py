"""What a run has to know of a model before it loads it: sizes, limits, and which tokens end a text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from skote.model.adapters import adapter_refusal, load_spec
from skote.model.config_file import eos_ids, model_config
from skote.model.spec import DecoderSpec
from skote.types import CheckpointError


@dataclass(frozen=True, slots=True)
class ModuleFacts:
    """A model as Transformers runs it, told by the same names as `DecoderSpec`.

    `refusal` says why the lean decoder does not run it. `read_parameters` are those that a decode step reads, all
    experts of a mixture among them; `kv_values` is how many numbers a position takes in the cache.
    """

    refusal: str
    vocab: int
    max_positions: int
    eos_ids: tuple[int, ...]
    parameters: int
    read_parameters: int
    kv_values: int

    def bytes_per_token(self, element_size: int) -> int:
        """Bytes of weights that one decode step must read: every matrix once, of an embedding table one row."""
        return self.read_parameters * element_size

    def kv_bytes_per_token(self, element_size: int) -> int:
        """Bytes that one position takes in the KV cache."""
        return self.kv_values * element_size


ModelFacts = DecoderSpec | ModuleFacts
"""A `DecoderSpec` is a model with an adapter, and runs in tier 1; `ModuleFacts` runs in tier 2 or 3."""


def load_facts(local_dir: Path, layers: int | None = None) -> ModelFacts:
    """The facts of a checkpoint directory, without its weights; `layers` cuts the model to its first layers.

    Raises:
        CheckpointError: no readable config.json, or a model that neither the lean decoder nor Transformers knows.
    """
    refusal = adapter_refusal(model_config(local_dir))
    if refusal is None:
        return load_spec(local_dir, layers)
    return load_module_facts(local_dir, layers, refusal)


def load_module_facts(local_dir: Path, layers: int | None, refusal: str) -> ModuleFacts:
    """The facts of a checkpoint directory as those of a Transformers module, which runs because of `refusal`.

    Raises:
        CheckpointError: as `load_facts`.
    """
    from skote.model.causal_lm import empty_module

    return module_facts(empty_module(local_dir, layers), local_dir, refusal)


def module_facts(module: Any, local_dir: Path, refusal: str) -> ModuleFacts:  # noqa: ANN401 (Transformers' own)
    """The facts of a Transformers module (weights or not) that was made from `local_dir`.

    Raises:
        CheckpointError: its configuration does not say how many positions it has.
    """
    config = module.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    if positions is None:
        raise CheckpointError(
            f"{local_dir}/config.json states no max_position_embeddings: how long a request may become is unknown."
        )
    head = module.get_output_embeddings().weight
    tables = [each.weight for each in module.modules() if isinstance(each, torch.nn.Embedding)]
    parameters = sum(parameter.numel() for parameter in module.parameters())
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return ModuleFacts(
        refusal=refusal,
        vocab=module.get_input_embeddings().weight.shape[0],
        max_positions=int(positions),
        eos_ids=eos_ids(model_config(local_dir)),
        parameters=parameters,
        read_parameters=parameters - sum(table.numel() for table in tables if table is not head),
        kv_values=2 * config.num_hidden_layers * kv_heads * head_dim,
    )
