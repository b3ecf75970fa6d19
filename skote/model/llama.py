"""The Llama family: config.json to `DecoderSpec`. Tensor names are those of `DecoderSpec.tensor_shapes`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from skote.model.spec import DecoderSpec, RopeSpec, eos_ids, model_config
from skote.types import CheckpointError

ROPE_KINDS = ("default", "linear", "llama3")


def load_spec(local_dir: Path, layers: int | None = None) -> DecoderSpec:
    """The spec of a checkpoint directory; `layers` cuts it to its first layers.

    Raises:
        CheckpointError: no readable config.json, a family without an adapter, or a feature that the decoder lacks.
    """
    spec = llama_spec(model_config(local_dir))
    if layers is None:
        return spec
    if not 1 <= layers <= spec.layers:
        raise CheckpointError(f"layers must lie between 1 and {spec.layers}, got {layers}.")
    return spec.with_layers(layers)


def adapter_refusal(config: dict[str, Any]) -> str | None:
    """Why the lean decoder does not compute the model of a config.json, or None."""
    if config.get("model_type") != "llama":
        return f"model_type {config.get('model_type')!r} has no adapter in skote.model; there is one for 'llama'"
    for key, wanted in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        if config.get(key, wanted) != wanted:
            return f"config.json has {key}={config[key]!r}; the Llama decoder computes only {wanted!r}"
    rope = _rope_settings(config)
    kind = _rope_kind(rope) if isinstance(rope, dict) else ROPE_KINDS[0]
    return None if kind in ROPE_KINDS else f"rope type {kind!r} is not one of {', '.join(ROPE_KINDS)}"


def llama_spec(config: dict[str, Any]) -> DecoderSpec:
    """The spec that a Llama config.json describes, old (`rope_theta`) or new (`rope_parameters`) style.

    Raises:
        CheckpointError: a key is missing, or names something that the lean decoder does not compute.
    """
    refusal = adapter_refusal(config)
    if refusal is not None:
        raise CheckpointError(f"{refusal}.")
    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        return DecoderSpec(
            vocab=int(config["vocab_size"]),
            hidden=hidden,
            intermediate=int(config["intermediate_size"]),
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            norm_eps=float(config["rms_norm_eps"]),
            max_positions=int(config["max_position_embeddings"]),
            rope=_rope(config),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            eos_ids=eos_ids(config),
        )
    except KeyError as error:
        raise CheckpointError(f"config.json lacks {error.args[0]!r}, which a Llama model must state.") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"config.json holds a value of the wrong type: {error}.") from error


def _rope_settings(config: dict[str, Any]) -> Any:  # noqa: ANN401 (JSON)
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _rope_kind(rope: dict[str, Any]) -> str:
    return rope.get("rope_type") or rope.get("type") or ROPE_KINDS[0]


def _rope(config: dict[str, Any]) -> RopeSpec:
    rope = _rope_settings(config)
    return RopeSpec(
        theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        kind=_rope_kind(rope),
        factor=float(rope.get("factor", 1.0)),
        low_freq_factor=float(rope.get("low_freq_factor", 1.0)),
        high_freq_factor=float(rope.get("high_freq_factor", 4.0)),
        original_max_positions=int(rope.get("original_max_position_embeddings") or config["max_position_embeddings"]),
    )
