"""What a decoder-only model is, as data: everything that the lean decoder needs to know besides its weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from skote.model.names import LLAMA, Names
from skote.types import CheckpointError

ROPE_KINDS = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: base frequency, and how it is stretched to longer contexts.

    `amplitude` multiplies cos and sin. `divisors` (longrope) divides each pair's frequency; they hold for texts of up
    to `original_max_positions`, and so does `dynamic`, which is the plain rotation there.
    """

    theta: float
    kind: str = "default"  # one of ROPE_KINDS
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    amplitude: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """A mixture of experts: `chosen` of `count` feed-forwards a token, weighted by the softmax over all of them.

    `normalised`: the weights of the chosen ones are brought to a sum of 1.
    """

    count: int
    chosen: int
    normalised: bool


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Shapes, constants and switches of a decoder. Without any switch it is a Llama: pre-norm, grouped-query
    attention, a gated SiLU feed-forward, no biases.

    Attributes:
        tied_embeddings: the head is the embedding table.
        added_tokens: rows of zeros at the end of `vocab` that the checkpoint does not hold.
        names: what the checkpoint calls its tensors.
        layer_norm: LayerNorm instead of RMSNorm; `norm_bias`: with a bias; `norm_plus_one`: norms multiply by 1 + w.
        pre_norms: a norm before attention and one before the feed-forward; `post_norms`: a norm of what each of them
            gives, before it is added.
        parallel: attention and feed-forward both start from the layer's input, each with a norm of its own;
            `shared_norm`: so do they, with one norm.
        qk_norm: norms of q and k before their rotation: "head" (one weight for all heads), "heads" (one a head) or
            "width" (over all heads together).
        attention_scale: of q k^T; None is 1 / sqrt(head_dim).
        attention_softcap, logits_softcap: x becomes cap * tanh(x / cap).
        windows: of each layer, how many of the newest positions, itself among them, a token attends to; None is all of
            them. Empty where all layers attend to everything.
        rope: None where nothing is rotated. `ropes`: of each layer, where they differ; None is a layer without.
        rotary_dim: of a head's elements, the first ones are rotated; 0 is all. `rope_interleaved`: pairs are (2i,
            2i + 1) in the checkpoint instead of (i, i + rotary_dim / 2).
        positions_offset: a learned embedding is added, of row position + offset; None where there is none.
        activation: one of `skote.kernels.activation.ACTIVATIONS`; `gated`: it multiplies a second projection.
        qkv_order: rows of a packed projection lie "parts" (all q, all k, all v), "heads" (q, k, v of a head) or
            "groups" (the q heads of a group, its k, its v). `transposed`: matrices are stored as [columns, rows].
    """

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    rope: RopeSpec | None
    tied_embeddings: bool
    eos_ids: tuple[int, ...]
    added_tokens: int = 0
    family: str = "llama"
    names: Names = LLAMA
    layer_norm: bool = False
    norm_bias: bool = False
    norm_plus_one: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    shared_norm: bool = False
    parallel: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str | None = None
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    windows: tuple[int | None, ...] = ()
    ropes: tuple[RopeSpec | None, ...] = ()
    rotary_dim: int = 0
    rope_interleaved: bool = False
    positions_offset: int | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    activation: str = "silu"
    gated: bool = True
    qkv_order: str = "parts"
    transposed: bool = False
    experts: ExpertSpec | None = None

    def __post_init__(self) -> None:
        for name in ("vocab", "hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim", "max_positions"):
            if getattr(self, name) < 1:
                raise CheckpointError(f"config.json gives {name}={getattr(self, name)}; it must be at least 1.")
        bases = [("rope theta", rope.theta) for rope in self.layer_ropes if rope is not None]
        for name, value in (("norm_eps", self.norm_eps), *bases):
            if not 0 < value < math.inf:
                raise CheckpointError(f"config.json gives {name}={value}; it must be a finite number above 0.")
        if self.heads % self.kv_heads:
            raise CheckpointError(f"{self.heads} attention heads cannot share {self.kv_heads} key-value heads evenly.")
        rotated = self.rotary_dim or self.head_dim
        for rope in self.layer_ropes:
            if rope is not None and len(rope.divisors) not in (0, rotated // 2):
                raise CheckpointError(
                    f"config.json gives {len(rope.divisors)} factors for {rotated // 2} rotated pairs of a head."
                )
        if self.rotary_dim and (self.head_dim % 2 or self.rotary_dim % 2 or self.rotary_dim > self.head_dim):
            raise CheckpointError(
                f"config.json asks for {self.rotary_dim} rotated elements of head_dim={self.head_dim}; both must be "
                "even, and no more can be rotated than there are."
            )

    @property
    def qkv_rows(self) -> int:
        """Rows of the fused projection: all q heads, then all k heads, then all v heads."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def up_rows(self) -> int:
        """Rows of the feed-forward's first projection: the gate, where there is one, then what it multiplies."""
        return (2 if self.gated else 1) * self.intermediate

    @property
    def layer_ropes(self) -> tuple[RopeSpec | None, ...]:
        """The rotary embedding of each layer."""
        return self.ropes or (self.rope,) * self.layers

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """The window of each layer; None attends to everything."""
        return self.windows or (None,) * self.layers

    def with_layers(self, layers: int) -> DecoderSpec:
        """The same model cut to its first `layers` layers."""
        return replace(self, layers=layers, windows=self.windows[:layers], ropes=self.ropes[:layers])

    def with_token(self, token_id: int) -> DecoderSpec:
        """The same model with embedding rows up to `token_id`: itself, unless its vocabulary is too small for it."""
        missing = token_id + 1 - self.vocab
        return self if missing <= 0 else replace(self, vocab=token_id + 1, added_tokens=self.added_tokens + missing)

    def within(self, positions: int) -> DecoderSpec:
        """The same model for texts of up to `positions`, without the windows that no such text fills."""
        windows = tuple(None if window is None or window >= positions else window for window in self.windows)
        return replace(self, windows=windows if any(windows) else ())

    def switches(self) -> tuple[str, ...]:
        """The switches that are on, by name: what a step computes beyond a Llama's."""
        plain = {field.name: field.default for field in fields(DecoderSpec) if field.name not in _NO_SWITCHES}
        return tuple(name for name, default in plain.items() if getattr(self, name) != default)

    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of a layer's weights in the order in which a step reads them, by the fields of `LayerWeights`."""
        heads, kv_heads, bias = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.norm_bias
        q_norm, k_norm = {
            None: (0, 0),
            "head": (self.head_dim, self.head_dim),
            "heads": (heads, kv_heads),
            "width": (heads, kv_heads),
        }[self.qk_norm]
        second_norm = self.pre_norms and not self.shared_norm
        stacked = (self.experts.count,) if self.experts else ()
        asked: dict[str, tuple[bool, tuple[int, ...]]] = {
            "attn_norm": (self.pre_norms, (self.hidden,)),
            "attn_norm_bias": (self.pre_norms and bias, (self.hidden,)),
            "qkv": (True, (self.qkv_rows, self.hidden)),
            "qkv_bias": (self.qkv_bias, (self.qkv_rows,)),
            "q_norm": (q_norm > 0, (q_norm,)),
            "k_norm": (k_norm > 0, (k_norm,)),
            "o": (True, (self.hidden, heads)),
            "o_bias": (self.o_bias, (self.hidden,)),
            "attn_post_norm": (self.post_norms, (self.hidden,)),
            "mlp_norm": (second_norm, (self.hidden,)),
            "mlp_norm_bias": (second_norm and bias, (self.hidden,)),
            "router": (self.experts is not None, (*stacked, self.hidden)),
            "gate_up": (True, (*stacked, self.up_rows, self.hidden)),
            "gate_up_bias": (self.mlp_bias, (self.up_rows,)),
            "down": (True, (*stacked, self.hidden, self.intermediate)),
            "down_bias": (self.mlp_bias, (self.hidden,)),
            "mlp_post_norm": (self.post_norms, (self.hidden,)),
        }
        return {name: shape for name, (present, shape) in asked.items() if present}

    def model_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the weights beside the layers, by the fields of `DecoderWeights`; of a tied head none."""
        shapes: dict[str, tuple[int, ...]] = {"embed": (self.vocab, self.hidden)}
        if self.positions_offset is not None:
            shapes["positions"] = (self.max_positions + self.positions_offset, self.hidden)
        shapes["norm"] = (self.hidden,)
        if self.norm_bias:
            shapes["norm_bias"] = (self.hidden,)
        if not self.tied_embeddings:
            shapes["lm_head"] = (self.vocab, self.hidden)
        return shapes

    @property
    def parameters(self) -> int:
        """Number of parameters, a tied lm_head counted once."""
        layer = sum(map(math.prod, self.layer_shapes().values()))
        return self.layers * layer + sum(map(math.prod, self.model_shapes().values()))

    def bytes_per_token(self, element_size: int) -> int:
        """Bytes of weights that one decode step must read: every matrix once, of the embedding tables one row, which
        is not counted, of a mixture the experts that one token chooses."""
        shapes = self.model_shapes()
        unread = math.prod(shapes.get("positions", (0,)))
        if not self.tied_embeddings:
            unread += math.prod(shapes["embed"])
        if self.experts is not None:
            layer = self.layer_shapes()
            one = (math.prod(layer["gate_up"]) + math.prod(layer["down"])) // self.experts.count
            unread += self.layers * (self.experts.count - self.experts.chosen) * one
        return (self.parameters - unread) * element_size

    def kv_bytes_per_token(self, element_size: int) -> int:
        """Bytes that one position takes in the KV cache."""
        return 2 * self.layers * self.kv_heads * self.head_dim * element_size


_NO_SWITCHES = frozenset(
    {"vocab", "hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim", "norm_eps", "max_positions", "rope"}
    | {"tied_embeddings", "eos_ids", "added_tokens", "family", "names"}
    # What loading undoes: see `skote.model.layout`.
    | {"rotary_dim", "rope_interleaved", "qkv_order", "transposed"}
)
