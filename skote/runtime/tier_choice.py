"""Whether tier 1 runs a model: what depends on the device and on how long its texts may become."""

from __future__ import annotations

from skote.model.folding import FOLDED, foldable
from skote.model.spec import DecoderSpec

KERNEL_SWITCHES = FOLDED | {
    "qkv_bias",
    "qk_norm",
    "attention_scale",
    "attention_softcap",
    "logits_softcap",
    "windows",
    "ropes",
    "post_norms",
    "embedding_scale",
    "activation",
    "experts",
}
"""The switches of a `DecoderSpec` that the kernels on CUDA compute, in both sets and in all prefills, and those that
folding takes away; of the norms of q and k those with one weight for all heads."""
_BY_LENGTH = ("dynamic", "longrope")


def tier_1_refusal(spec: DecoderSpec, positions: int, *, captured: bool) -> str | None:
    """Why tier 1 does not run `spec` for texts of up to `positions`, or None; `captured`: on the CUDA kernels."""
    for rope in spec.layer_ropes:
        if rope is not None and rope.kind in _BY_LENGTH and positions > rope.original_max_positions:
            original = rope.original_max_positions
            return (
                f"its rope type {rope.kind!r} rotates by the length of the whole text beyond {original} positions; "
                f"engine.max_model_len={original} keeps to them"
            )
    if not captured:
        return None
    missing = missing_switches(spec)
    if missing:
        return f"the CUDA kernels do not compute {' and '.join(missing)} of its spec"
    from skote.runtime.cuda_closure import CudaClosure

    return CudaClosure.refusal(spec)


def missing_switches(spec: DecoderSpec) -> list[str]:
    """The switches of `spec` that the kernels on CUDA do not compute."""
    known = KERNEL_SWITCHES if spec.qk_norm in (None, "head") else KERNEL_SWITCHES - {"qk_norm"}
    known = known if foldable(spec) else known - FOLDED
    known = known - {"experts"} if spec.post_norms else known
    return [switch for switch in spec.switches() if switch not in known]
