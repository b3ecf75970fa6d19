"""What the adapters of all families share: config.json's keys to the fields of a `DecoderSpec`.

Keys that a config.json may leave out have the defaults that Transformers gives them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from skote.model.config_file import eos_ids
from skote.model.spec import ROPE_KINDS, DecoderSpec, RopeSpec
from skote.types import CheckpointError

Config = Mapping[str, Any]
"""A config.json."""

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


class NotComputedError(CheckpointError):
    """The lean decoder does not compute what a config.json asks for; other tiers may."""


def decoder_spec(
    config: Config,
    *,
    eps: str = "rms_norm_eps",
    activation: str = "hidden_act",
    default_activation: str = "silu",
    tied: bool = False,
    theta: float = 10000.0,
    **switches: Any,  # noqa: ANN401 (fields of DecoderSpec)
) -> DecoderSpec:
    """The spec of a config.json with the keys that most families share; `switches` are fields of the spec.

    Args:
        eps, activation: the keys of the norms' epsilon and of the activation.
        default_activation, tied, theta: what holds where the config.json says nothing.

    Raises:
        KeyError, TypeError, ValueError: a key that is missing, or a value of another kind.
        NotComputedError: an activation or a rotation that the decoder lacks.
    """
    hidden, heads, layers = (int(config[key]) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    head_dim = int(config.get("head_dim") or hidden // heads)
    fields: dict[str, Any] = {
        "family": str(config["model_type"]),
        "vocab": int(config["vocab_size"]),
        "hidden": hidden,
        "intermediate": int(config["intermediate_size"]) if "intermediate" not in switches else 0,
        "layers": layers,
        "heads": heads,
        "kv_heads": int(config.get("num_key_value_heads") or heads),
        "head_dim": head_dim,
        "norm_eps": float(config[eps]),
        "max_positions": int(config["max_position_embeddings"]),
        "rope": rope_spec(config, rope_settings(config), theta=theta) if "rope" not in switches else None,
        "tied_embeddings": bool(config.get("tie_word_embeddings", tied)),
        "eos_ids": eos_ids(config),
        "activation": activation_name(config.get(activation) or default_activation),
    }
    return DecoderSpec(**fields | switches)


def activation_name(name: str) -> str:
    """Ours for Transformers' name of an activation.

    Raises:
        NotComputedError: there is none.
    """
    if name not in _ACTIVATIONS:
        raise NotComputedError(f"its activation is {name!r}; the decoder computes {', '.join(sorted(_ACTIVATIONS))}")
    return _ACTIVATIONS[name]


def rope_settings(config: Config) -> Mapping[str, Any]:
    """What a config.json says of the rotation, old (`rope_scaling`) or new (`rope_parameters`) style."""
    settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(settings, Mapping):
        raise TypeError(f"the rotation is {settings!r}, not an object")
    return settings


def rope_spec(config: Config, settings: Mapping[str, Any], *, theta: float = 10000.0) -> RopeSpec:
    """The rotation that `settings` of a config.json describe; without a base of their own its `rope_theta`, or `theta`.

    Raises:
        NotComputedError: a kind that the decoder lacks.
    """
    kind = str(settings.get("rope_type") or settings.get("type") or "default")
    kind = "longrope" if kind == "su" else kind  # the name in the first Phi-3 files
    if kind not in ROPE_KINDS:
        raise NotComputedError(f"rope type {kind!r} is not one of {', '.join(ROPE_KINDS)}")
    positions = int(config["max_position_embeddings"])
    stated = config.get("original_max_position_embeddings") or settings.get("original_max_position_embeddings")
    original = positions if kind == "dynamic" else int(stated or positions)
    factor = float(settings.get("factor") or (positions / original if kind in ("yarn", "longrope") else 1.0))
    return RopeSpec(
        theta=float(settings.get("rope_theta") or config.get("rope_theta") or theta),
        kind=kind,
        factor=factor,
        low_freq_factor=float(settings.get("low_freq_factor", 1.0)),
        high_freq_factor=float(settings.get("high_freq_factor", 4.0)),
        original_max_positions=original,
        amplitude=_amplitude(settings, kind, factor, original),
        beta_fast=float(settings.get("beta_fast") or 32.0),
        beta_slow=float(settings.get("beta_slow") or 1.0),
        truncate=bool(settings.get("truncate", True)),
        divisors=tuple(float(each) for each in settings["short_factor"]) if kind == "longrope" else (),
    )


def rotary_dim(config: Config, *, default: float, key: str = "partial_rotary_factor") -> int:
    """Rotated elements of a head, of which a config.json gives a fraction; 0 is all of them."""
    head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // int(config["num_attention_heads"]))
    fraction = rope_settings(config).get("partial_rotary_factor") or config.get(key) or default
    rotated = int(head_dim * float(fraction))
    return 0 if rotated == head_dim else rotated


def windows(config: Config, sliding: list[bool], default: int | None) -> tuple[int | None, ...]:
    """The window of each layer, where `sliding` says which have one: config.json's `sliding_window`, or `default`."""
    window = config.get("sliding_window", default)
    if window is None or not any(sliding):
        return ()
    return tuple(int(window) if slides else None for slides in sliding)


def sliding_layers(config: Config, otherwise: list[bool]) -> list[bool]:
    """Which layers have a window, as `layer_types` says, or `otherwise`.

    Raises:
        NotComputedError: a layer of another kind.
    """
    kinds = config.get("layer_types")
    if kinds is None:
        return otherwise
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise NotComputedError(f"it has layers of the kind {kind!r}")
    return [kind == "sliding_attention" for kind in kinds]


def refuse(config: Config, key: str, *, wanted: Any, default: Any = None) -> None:  # noqa: ANN401 (JSON)
    """Raise a `NotComputedError` where config.json's `key`, or its `default`, is not `wanted`."""
    value = config.get(key, default)
    if value != wanted:
        raise NotComputedError(f"config.json has {key}={value!r}; the decoder computes only {wanted!r}")


def _amplitude(settings: Mapping[str, Any], kind: str, factor: float, original: int) -> float:
    """What cos and sin are multiplied by: stated, or as the papers of YaRN and LongRoPE advise."""
    if kind not in ("yarn", "longrope"):
        return 1.0
    if settings.get("attention_factor") is not None:
        return float(settings["attention_factor"])
    if factor <= 1.0:
        return 1.0
    if kind == "longrope":
        return math.sqrt(1.0 + math.log(factor) / math.log(original))
    scales = [float(settings.get(key) or 0.0) for key in ("mscale", "mscale_all_dim")]
    if all(scales):
        return (0.1 * scales[0] * math.log(factor) + 1.0) / (0.1 * scales[1] * math.log(factor) + 1.0)
    return 0.1 * math.log(factor) + 1.0
