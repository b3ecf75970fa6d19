"""Our attention function in a Transformers module, and what it must not be asked for.

Transformers builds no mask for an attention function that has registered none; causality and length are the function's.
What it does not apply it refuses: a model is never computed wrongly.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from skote.runtime.module_cache import ModuleCache
from skote.types import EngineError

NAME = "skotergy"

_WITHOUT_EFFECT = frozenset(
    {"position_ids", "cache_position", "position_embeddings", "use_cache", "layer_idx", "output_router_logits"}
)
"""Arguments that a layer hands on to its attention function and that say nothing about the attention."""

_CHANGING_ROPE = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies the host chooses by position, which a captured step cannot."""


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    skotergy_cache: ModuleCache | None = None,
    **others: Any,  # noqa: ANN401 (whatever a model family hands on)
) -> tuple[torch.Tensor, None]:
    """As an attention function of Transformers: (`[1, tokens, heads, head_dim]`, no weights).

    `query` [1, heads, tokens, head_dim]; `key`, `value` [1, kv_heads, tokens, head_dim] of the new tokens alone.

    Raises:
        EngineError: the model asks for something that is not applied here.
    """
    if skotergy_cache is None:
        raise EngineError("its layers do not hand arguments on to the attention function")
    causal = module.is_causal if is_causal is None and hasattr(module, "is_causal") else is_causal
    if causal is False:
        raise EngineError("its attention is not causal")
    if attention_mask is not None:
        raise EngineError("it builds an attention mask of its own")
    if dropout:
        raise EngineError(f"it asks for dropout={dropout}")
    if sliding_window is not None and sliding_window < skotergy_cache.capacity:
        raise EngineError(f"its sliding window of {sliding_window} is shorter than the context")
    if key.shape[-1] != query.shape[-1] or value.shape[-1] != key.shape[-1]:
        raise EngineError("its keys and values differ in head_dim")
    for name, asked in sorted(others.items()):
        if name not in _WITHOUT_EFFECT and asked is not None and asked is not False:
            raise EngineError(f"it asks its attention for {name}")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    attended = skotergy_cache.attend(int(module.layer_idx), query, key, value, scaling)  # type: ignore[arg-type]
    return attended.contiguous(), None


def module_refusal(module: Any, capacity: int) -> str | None:  # noqa: ANN401 (Transformers' models are untyped)
    """Why `attention` cannot stand in for the module's own over `capacity` positions, as its config tells; or None.

    Masks that never reach an attention function (chunks, windows, prefixes) can be seen nowhere else.
    """
    if not module._supports_attention_backend:
        return f"{type(module).__name__} takes no attention function from outside"
    config = module.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - {"full_attention", "sliding_attention"}:
        return f"its layers are of the kinds {', '.join(sorted(kinds))}"
    windows = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
    for kind, key in windows.items():
        window = getattr(config, key, None)
        if window is not None and window < capacity and (not kinds or kind in kinds):
            return f"its {key} of {window} is shorter than the context of {capacity}"
    if not getattr(config, "is_causal", True):
        return "its attention is not causal"
    rope = getattr(config, "rope_parameters", None) or {}
    for settings in (rope, *rope.values()):
        rope_type = settings.get("rope_type") if isinstance(settings, dict) else None
        if rope_type in _CHANGING_ROPE:
            return f"rope type {rope_type!r} changes with the position by a decision of the host"
    return None


def use_attention(module: Any, name: str) -> None:  # noqa: ANN401
    """Let `module` compute its attention by the function `name`: ours or one of Transformers' own.

    Raises:
        EngineError: the model's class does not let its attention be set.
    """
    AttentionInterface.register(NAME, attention)
    module.set_attn_implementation(name)
    if module.config._attn_implementation != name:
        raise EngineError(f"{type(module).__name__} does not let its attention be set")
