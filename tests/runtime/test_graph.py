"""The decode step: what happens where the compiler fails, and the smallest caches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._inductor.exc import InductorError

from skote.model.adapters import load_spec
from skote.model.decoder import Decoder
from skote.model.weights import load_weights
from skote.runtime.cache import StaticCache
from skote.runtime.graph import DecodeStep

CPU = torch.device("cpu")


def step_of(directory: Path, capacity: int, *, compiled: bool) -> DecodeStep:
    spec = load_spec(directory)
    weights = load_weights(directory, spec, dtype=torch.float32, device=CPU, random_seed=None)
    cache = StaticCache(spec, 1, capacity, dtype=torch.float32, device=CPU)
    return DecodeStep(Decoder(spec, weights, capacity), cache, compiled=compiled)


@torch.no_grad()
def test_a_compiler_that_fails_leaves_plain_ops_and_a_note(
    make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_compiler(function: Callable[..., torch.Tensor], **_: object) -> Callable[..., torch.Tensor]:
        def fail(*_: object) -> torch.Tensor:
            raise InductorError(RuntimeError("no C++ compiler\nwas found"), None)

        return fail

    monkeypatch.setattr(torch, "compile", no_compiler)

    failed = step_of(make_checkpoint(), 16, compiled=True)

    assert not failed.compiled
    assert failed.compile_s is None
    assert len(failed.notes) == 1
    assert "plain ops" in failed.notes[0]
    assert "no C++ compiler" in failed.notes[0]
    assert "\n" not in failed.notes[0]
    plain = step_of(make_checkpoint(), 16, compiled=False)
    assert plain.notes == []
    for position, token in enumerate((5, 6, 7)):
        assert failed(token, position).equal(plain(token, position))


@torch.no_grad()
@pytest.mark.parametrize("capacity", [1, 2, 3, 16])
def test_the_warm_up_stays_within_the_cache(
    make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capacity: int
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)

    step, roomy = (step_of(make_checkpoint(), positions, compiled=True) for positions in (capacity, 20))

    assert step.compiled
    for position in range(capacity):
        torch.testing.assert_close(step(5, position), roomy(5, position))


@torch.no_grad()
def test_compiled_and_plain_steps_share_one_arithmetic(
    make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The functions that are compiled, run as they are, against the decoder's forward pass."""
    plain = step_of(make_checkpoint(), 16, compiled=False)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    traced = step_of(make_checkpoint(), 16, compiled=True)

    for position in range(16):
        torch.testing.assert_close(traced(position + 3, position), plain(position + 3, position), rtol=1e-4, atol=1e-4)
