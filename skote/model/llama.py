"""The Llama family: config.json to `DecoderSpec`. Tensor names are those of `DecoderSpec.tensor_shapes`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from skote.model.spec import DecoderSpec, RopeSpec, read_config, read_json
from skote.types import CheckpointError


def load_spec(local_dir: Path, layers: int | None = None) -> DecoderSpec:
    """The spec of a checkpoint directory; `layers` cuts it to its first layers.

    Raises:
        CheckpointError: no readable config.json, a family without an adapter, or a feature that the decoder lacks.
    """
    config = read_config(local_dir)
    generation = local_dir / "generation_config.json"
    if generation.is_file():  # where there is one, it decides which tokens end a text
        config = config | {"eos_token_id": read_json(generation).get("eos_token_id")}
    spec = llama_spec(config)
    if layers is None:
        return spec
    if not 1 <= layers <= spec.layers:
        raise CheckpointError(f"layers must lie between 1 and {spec.layers}, got {layers}.")
    return spec.with_layers(layers)


def llama_spec(config: dict[str, Any]) -> DecoderSpec:
    """The spec that a Llama config.json describes, old (`rope_theta`) or new (`rope_parameters`) style.

    Raises:
        CheckpointError: a key is missing, or names something that the lean decoder does not compute.
    """
    if config.get("model_type") != "llama":
        raise CheckpointError(
            f"model_type {config.get('model_type')!r} has no adapter in skote.model; there is one for 'llama'."
        )
    for key, wanted in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        if config.get(key, wanted) != wanted:
            raise CheckpointError(f"config.json has {key}={config[key]!r}; the Llama decoder computes only {wanted!r}.")
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
            eos_ids=_eos_ids(config.get("eos_token_id")),
        )
    except KeyError as error:
        raise CheckpointError(f"config.json lacks {error.args[0]!r}, which a Llama model must state.") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"config.json holds a value of the wrong type: {error}.") from error


def _rope(config: dict[str, Any]) -> RopeSpec:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "linear", "llama3"):
        raise CheckpointError(f"rope type {kind!r} is not one of default, linear, llama3.")
    return RopeSpec(
        theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        kind=kind,
        factor=float(rope.get("factor", 1.0)),
        low_freq_factor=float(rope.get("low_freq_factor", 1.0)),
        high_freq_factor=float(rope.get("high_freq_factor", 4.0)),
        original_max_positions=int(rope.get("original_max_position_embeddings") or config["max_position_embeddings"]),
    )


def _eos_ids(value: Any) -> tuple[int, ...]:  # noqa: ANN401 (JSON: null, a number, or a list)
    if value is None:
        return ()
    return tuple(int(token) for token in value) if isinstance(value, list) else (int(value),)
