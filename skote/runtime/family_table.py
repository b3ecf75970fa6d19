"""Does it run mine? The families with an adapter as a table: the tier of each, and what it was tested with."""

from __future__ import annotations

from typing import Any

from skote.model.adapters import FAMILIES, models_of, spec_of
from skote.runtime.tier_choice import missing_switches

TESTED = "Transformers 5.24"
"""What the tests of all families hold them against."""

_POSITIONS = 4096
_USUAL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "hidden_size", "n_embd", "intermediate_size", "ffn_dim"), 256),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "n_layer", "n_head"), 4),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"), 1e-5),
    "max_position_embeddings": _POSITIONS,
    # Granite's multipliers, which every model of it sets and which default to 1.
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}
"""A config.json that leaves to each family what makes it one."""


def family_table() -> str:
    """The table as Markdown, a row a family."""
    rows = ["| model_type | models | CPU | CUDA | tested with |", "|---|---|---|---|---|"]
    for model_type in FAMILIES:
        spec = spec_of({"model_type": model_type} | _USUAL).within(_POSITIONS)
        missing = missing_switches(spec)
        on_cuda = f"tier 2 or 3, for {', '.join(missing)}" if missing else "tier 1"
        rows.append(f"| {model_type} | {models_of(model_type)} | tier 1 | {on_cuda} | {TESTED} |")
    return "\n".join(rows)


def families_text() -> str:
    """What `skote-generate --families` prints."""
    return (
        f"{family_table()}\n\nWhere a model of theirs has what the decoder, or on CUDA a kernel, does not compute, and "
        "for all other model types, Transformers' module runs: captured on CUDA where it allows that (tier 2), else as "
        "it is (tier 3). A run prints and records which tier it was, and why.\n"
    )
