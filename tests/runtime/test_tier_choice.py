"""Which models tier 1 leaves to others, and what it says: by their switches on CUDA, by their rotation everywhere."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from skote.model.adapters import load_spec
from skote.model.spec import DecoderSpec, ExpertSpec, RopeSpec
from skote.runtime.engine import SkotergyEngine
from skote.runtime.tier_choice import KERNEL_SWITCHES, tier_1_refusal

SPEC = DecoderSpec(97, 64, 96, 2, 6, 2, 16, 1e-5, 2048, RopeSpec(10000.0), False, ())
ON: dict[str, Any] = {
    "layer_norm": True,
    "norm_bias": True,
    "norm_plus_one": True,
    "pre_norms": False,
    "post_norms": True,
    "shared_norm": True,
    "parallel": True,
    "qkv_bias": True,
    "o_bias": True,
    "mlp_bias": True,
    "qk_norm": "head",
    "attention_scale": 0.5,
    "attention_softcap": 30.0,
    "logits_softcap": 30.0,
    "windows": (8, None),
    "ropes": (None, RopeSpec(10000.0)),
    "positions_offset": 2,
    "embedding_scale": 2.0,
    "residual_scale": 2.0,
    "logits_scale": 2.0,
    "activation": "gelu",
    "gated": False,
    "experts": ExpertSpec(4, 2, normalised=True),
}
UNDONE_BY_LOADING = {"rotary_dim": 8, "rope_interleaved": True, "qkv_order": "heads", "transposed": True}


def test_every_switch_is_one_and_what_loading_undoes_is_none() -> None:
    assert SPEC.switches() == ()
    assert replace(SPEC, **ON).switches() == tuple(ON)
    assert replace(SPEC, **UNDONE_BY_LOADING, kv_heads=6).switches() == ()


@pytest.mark.parametrize("name", ON)
def test_the_kernels_take_the_switches_that_they_compute(name: str) -> None:
    refusal = tier_1_refusal(replace(SPEC, **{name: ON[name]}), 2048, captured=True)

    assert refusal == (None if name in KERNEL_SWITCHES else f"the CUDA kernels do not compute {name} of its spec")
    assert tier_1_refusal(replace(SPEC, **{name: ON[name]}), 2048, captured=False) is None


@pytest.mark.parametrize("qk_norm", ["heads", "width"])
def test_norms_with_a_weight_a_head_or_over_the_whole_width_are_not_the_kernels(qk_norm: str) -> None:
    refusal = tier_1_refusal(replace(SPEC, qk_norm=qk_norm), 2048, captured=True)

    assert refusal == "the CUDA kernels do not compute qk_norm of its spec"


def test_scales_that_would_change_the_eps_of_other_norms_are_not_folded() -> None:
    scaled = replace(SPEC, residual_scale=0.5, qk_norm="head")

    refusal = tier_1_refusal(scaled, 2048, captured=True)
    assert refusal == "the CUDA kernels do not compute residual_scale of its spec"
    assert tier_1_refusal(replace(scaled, post_norms=True), 2048, captured=True) is None


def test_several_switches_are_all_named() -> None:
    refusal = tier_1_refusal(replace(SPEC, layer_norm=True, gated=False), 2048, captured=True)

    assert refusal == "the CUDA kernels do not compute layer_norm and gated of its spec"


def test_a_window_that_no_text_fills_is_none() -> None:
    spec = replace(SPEC, windows=(512, None))

    assert spec.within(512).windows == ()
    assert spec.within(513).windows == (512, None)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@pytest.mark.parametrize("where", ["rope", "ropes"])
def test_rotations_by_the_length_of_the_text_are_right_up_to_the_original_one(kind: str, where: str) -> None:
    rope = RopeSpec(10000.0, kind, original_max_positions=64)
    spec = replace(SPEC, **{where: (None, rope) if where == "ropes" else rope})

    assert tier_1_refusal(spec, 64, captured=False) is None
    assert tier_1_refusal(spec, 65, captured=False) == (
        f"its rope type {kind!r} rotates by the length of the whole text beyond 64 positions; "
        "engine.max_model_len=64 keeps to them"
    )


def test_a_refused_model_is_run_by_transformers_with_the_sentence(tmp_path: Path) -> None:
    config = {
        "model_type": "phi3",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "original_max_position_embeddings": 16,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))

    def tier(**options: Any) -> tuple[int, str]:
        engine = SkotergyEngine(
            local_dir=str(tmp_path), device="cpu", dtype="fp32", random_seed=0, compile=False, **options
        )
        described = engine.describe()
        return described["tier"], described["tier_reason"]

    assert load_spec(tmp_path).rope.amplitude == pytest.approx((1 + 1.3862943611 / 2.7725887222) ** 0.5)
    assert tier(max_model_len=16)[0] == 1
    assert tier()[0] == 3
    assert "no tier 1, because its rope type 'longrope' rotates by" in tier()[1]


def test_the_engine_asks_for_the_kernels_where_it_captures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `captured` decides is decided by a device, which is not here: so the question is looked at."""
    asked: list[bool] = []

    def refuse(spec: DecoderSpec, positions: int, *, captured: bool) -> str:
        del spec, positions
        asked.append(captured)
        return "it was only asked"

    monkeypatch.setattr("skote.runtime.engine.tier_1_refusal", refuse)
    config = {
        "model_type": "llama",
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
    }
    config |= {"num_attention_heads": 2, "max_position_embeddings": 32, "rms_norm_eps": 1e-5}
    config |= {"bos_token_id": 1, "eos_token_id": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = SkotergyEngine(local_dir=str(tmp_path), device="cpu", dtype="fp32", random_seed=0)

    assert asked == [False]
    assert engine.describe()["tier_reason"].endswith("no tier 1, because it was only asked")
