"""Whether a model fits, with sizes that a test chooses."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest
import torch

from skote.model.spec import DecoderSpec, RopeSpec
from skote.runtime import capacity
from skote.runtime.capacity import (
    available_bytes,
    check_context,
    check_memory,
    check_request,
    context_length,
    describe_accelerators,
    free_bytes,
)
from skote.types import CapacityError, Request, UsageError

# 1000 x 10 embedding, a layer of 2 x 10 + 4 x 100 + 3 x 100 and the last norm of 10: 10730 parameters; a position
# takes 2 x 10 values.
SPEC = DecoderSpec(
    vocab=1000,
    hidden=10,
    intermediate=10,
    layers=1,
    heads=1,
    kv_heads=1,
    head_dim=10,
    norm_eps=1e-5,
    max_positions=64,
    rope=RopeSpec(theta=10000.0),
    tied_embeddings=True,
    eos_ids=(),
)
REPLICA_VALUES = 10730 + 20 * 50


def there(monkeypatch: pytest.MonkeyPatch, size: int | None) -> None:
    monkeypatch.setattr(capacity, "available_bytes", lambda device: size)


@pytest.mark.parametrize(("dtype", "element"), [("fp32", 4), ("tf32", 4), ("bf16", 2), ("fp16", 2)])
@pytest.mark.parametrize(("devices", "arms", "copies"), [(["cpu"], 1, 1), (["cpu"], 2, 2), (["cpu"] * 3, 2, 6)])
def test_the_limit_is_every_copy_with_a_tenth_to_spare(
    monkeypatch: pytest.MonkeyPatch, dtype: str, element: int, devices: list[str], arms: int, copies: int
) -> None:
    needed = REPLICA_VALUES * element * copies * 1.1
    there(monkeypatch, round(needed) + 1)
    check_memory(SPEC, dtype, devices, caches=[50] * arms)

    there(monkeypatch, round(needed) - 1)
    with pytest.raises(
        CapacityError, match=rf"does not fit: .*{dtype} weights .*{arms} arm.*{copies // arms} replica.*on cpu"
    ):
        check_memory(SPEC, dtype, devices, caches=[50] * arms)


def test_the_fp32_reference_takes_room_on_the_first_device(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = REPLICA_VALUES * 2 * 2 * 1.1 + 10730 * 4 * 1.1
    there(monkeypatch, round(needed) + 1)
    check_memory(SPEC, "bf16", ["cpu"], caches=[50, 50], reference=True)

    there(monkeypatch, round(needed) - 1)
    with pytest.raises(CapacityError, match="an fp32 reference"):
        check_memory(SPEC, "bf16", ["cpu"], caches=[50, 50], reference=True)


def test_an_arm_with_a_larger_cache_counts_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = (2 * 10730 + 20 * 50 + 20 * 4000) * 4 * 1.1
    there(monkeypatch, round(needed) + 1)
    check_memory(SPEC, "fp32", ["cpu"], caches=[50, 4000])

    there(monkeypatch, round(needed) - 1)
    with pytest.raises(CapacityError, match="does not fit"):
        check_memory(SPEC, "fp32", ["cpu"], caches=[50, 4000])


def test_each_device_is_asked_for_its_own_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"cuda:0": 10**9, "cuda:1": 10}
    monkeypatch.setattr(capacity, "available_bytes", sizes.__getitem__)

    check_memory(SPEC, "fp32", ["cuda:0"], caches=[50, 50])
    with pytest.raises(CapacityError, match=r"on cuda:1, which has 0\.0 GB"):
        check_memory(SPEC, "fp32", ["cuda:0", "cuda:1"], caches=[50, 50])


def test_an_unknown_size_is_not_held_against_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    there(monkeypatch, None)

    check_memory(SPEC, "fp32", ["mps"], caches=[50, 50])


def test_the_sentence_names_the_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    there(monkeypatch, 10**4)

    with pytest.raises(CapacityError) as refused:
        check_memory(SPEC, "fp32", ["cpu"], caches=[50, 50])

    assert all(way in str(refused.value) for way in ("model.layers=N", "smaller dtype", "compare=none"))


def test_available_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=123, total=999))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=456))

    assert available_bytes("cpu") == 123
    assert available_bytes("cuda:1") == 456
    assert available_bytes("mps") is None


def test_accelerators_for_the_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    def properties(index: int) -> SimpleNamespace:
        return SimpleNamespace(name=f"card {index}", total_memory=10 + index)

    two = [{"name": "card 0", "memory_bytes": 10}, {"name": "card 1", "memory_bytes": 11}]
    mps = [{"name": "MPS"}]
    for kind in (torch.cuda, torch.xpu):
        monkeypatch.setattr(kind, "is_available", lambda: False)
        monkeypatch.setattr(kind, "device_count", lambda: 2)
        monkeypatch.setattr(kind, "get_device_properties", properties)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert describe_accelerators() == []

    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert describe_accelerators() == mps
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    assert describe_accelerators() == two + mps
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert describe_accelerators() == two + two + mps


CPU = torch.device("cpu")
BYTES = 20 * 2  # of a position, in a dtype of two bytes


class TestContext:
    @pytest.mark.parametrize("given", [None, "auto", 1, 64])
    def test_what_is_a_context(self, given: int | str | None) -> None:
        check_context(given, SPEC)

    @pytest.mark.parametrize("given", [0, -1, 65])
    def test_a_number_that_the_model_does_not_have(self, given: int) -> None:
        with pytest.raises(CapacityError, match=f"max_model_len={given} must lie between 1 and the model's 64"):
            check_context(given, SPEC)

    @pytest.mark.parametrize("given", ["all", 1.5])
    def test_another_word(self, given: str) -> None:
        with pytest.raises(UsageError, match=rf"max_model_len={given} must be a whole number of positions, auto or"):
            check_context(given, SPEC)

    @staticmethod
    def length(given: int | str | None, rows: int = 1) -> int:
        return context_length(given, SPEC, rows=rows, element_size=2, device=CPU)

    def test_a_number_is_itself_and_nothing_is_the_models_own(self) -> None:
        assert self.length(17) == 17
        assert self.length(None) == 64

    @pytest.mark.parametrize(
        ("free", "rows", "positions"),
        [
            (1000 + 30 * BYTES, 1, 30),
            (1000 + 31 * BYTES - 1, 1, 30),
            (1000 + 31 * BYTES, 2, 15),
            (1000 + 10**6, 1, 64),
        ],
    )
    def test_auto_leaves_a_tenth_of_the_device(
        self, monkeypatch: pytest.MonkeyPatch, free: int, rows: int, positions: int
    ) -> None:
        monkeypatch.setattr(capacity, "free_bytes", lambda device: (free, 10_000))

        assert self.length("auto", rows) == positions

    def test_auto_without_room_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(capacity, "free_bytes", lambda device: (1000 + BYTES - 1, 10_000))

        with pytest.raises(CapacityError, match="no room for a KV cache"):
            self.length("auto")

    def test_auto_on_a_device_that_does_not_tell(self) -> None:
        with pytest.raises(CapacityError, match=r"memory of mps is unknown: give engine\.max_model_len a number"):
            context_length("auto", SPEC, rows=1, element_size=2, device=torch.device("mps"))


def test_free_memory_counts_what_the_allocator_holds_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=123, total=999))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 500))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 70)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 50)

    assert free_bytes(CPU) == (123, 999)
    assert free_bytes(torch.device("cuda:0")) == (120, 500)


class TestRequest:
    """The last token needs no position."""

    @pytest.mark.parametrize(("prompt", "new"), [(1, 9), (9, 1), (5, 5), (1, 1)])
    def test_what_fits(self, prompt: int, new: int) -> None:
        check_request(Request("r", (0,) * prompt, new), capacity=9, vocab=1)

    @pytest.mark.parametrize(("prompt", "new", "needed"), [(1, 10, 10), (10, 1, 10), (500, 500, 999)])
    def test_what_does_not(self, prompt: int, new: int, needed: int) -> None:
        with pytest.raises(CapacityError, match=f"'r' needs {needed} positions .{prompt} prompt .* {new} .* holds 9"):
            check_request(Request("r", (0,) * prompt, new), capacity=9, vocab=1)

    @pytest.mark.parametrize("token", [10, -1])
    def test_a_token_that_is_not_there(self, token: int) -> None:
        with pytest.raises(CapacityError, match="'r' has a token id outside the vocabulary of 10"):
            check_request(Request("r", (9, token, 0), 1), capacity=9, vocab=10)
