"""Whether a model fits, with sizes that a test chooses."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest
import torch

from skote.model.spec import DecoderSpec, RopeSpec
from skote.runtime import capacity
from skote.runtime.capacity import available_bytes, check_memory, describe_accelerators
from skote.types import CapacityError

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
    check_memory(SPEC, dtype, devices, arms=arms, positions=50)

    there(monkeypatch, round(needed) - 1)
    with pytest.raises(
        CapacityError, match=rf"does not fit: .*{dtype} weights .*{arms} arm.*{copies // arms} replica.*on cpu"
    ):
        check_memory(SPEC, dtype, devices, arms=arms, positions=50)


def test_the_fp32_reference_takes_room_on_the_first_device(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = REPLICA_VALUES * 2 * 2 * 1.1 + 10730 * 4 * 1.1
    there(monkeypatch, round(needed) + 1)
    check_memory(SPEC, "bf16", ["cpu"], arms=2, positions=50, reference=True)

    there(monkeypatch, round(needed) - 1)
    with pytest.raises(CapacityError, match="an fp32 reference"):
        check_memory(SPEC, "bf16", ["cpu"], arms=2, positions=50, reference=True)


def test_each_device_is_asked_for_its_own_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"cuda:0": 10**9, "cuda:1": 10}
    monkeypatch.setattr(capacity, "available_bytes", sizes.__getitem__)

    check_memory(SPEC, "fp32", ["cuda:0"], arms=2, positions=50)
    with pytest.raises(CapacityError, match=r"on cuda:1, which has 0\.0 GB"):
        check_memory(SPEC, "fp32", ["cuda:0", "cuda:1"], arms=2, positions=50)


def test_an_unknown_size_is_not_held_against_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    there(monkeypatch, None)

    check_memory(SPEC, "fp32", ["mps"], arms=2, positions=50)


def test_the_sentence_names_the_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    there(monkeypatch, 10**4)

    with pytest.raises(CapacityError) as refused:
        check_memory(SPEC, "fp32", ["cpu"], arms=2, positions=50)

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
