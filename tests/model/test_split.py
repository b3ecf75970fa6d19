"""A module dealt out over devices that do not exist: fake tensors know where they would lie, and compute nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig, LlamaForCausalLM

from skote.model.split import TransferCounter, check_split
from skote.types import UsageError, device_parts

FIRST, SECOND, HOST = torch.device("lazy:0"), torch.device("lazy:1"), torch.device("cpu")
"""Devices that the build of torch has no kernels for, so that nothing runs there by mistake."""


@pytest.fixture
def fakes() -> Iterator[None]:
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        yield


def test_the_devices_of_a_replica_are_read_from_its_name() -> None:
    assert device_parts("cuda:0") == ["cuda:0"]
    assert device_parts("cuda:0+cuda:1") == ["cuda:0", "cuda:1"]


@pytest.mark.usefixtures("fakes")
def test_counted_is_what_crosses_from_one_of_the_devices_to_another() -> None:
    here = torch.empty(3, 5, dtype=torch.bfloat16, device=FIRST)
    with TransferCounter([FIRST, SECOND]) as counter:
        there = here.to(SECOND)  # 3 x 5 x 2 bytes
        there.to(SECOND)  # it is there already
        here.float()  # another dtype, the same device
        torch.empty(7, device=SECOND).copy_(torch.empty(7, device=FIRST))  # 7 x 4 bytes
        there.cpu()  # to the host, which is none of the devices
        torch.empty(9).to(FIRST)
    here.to(SECOND)  # after its time

    assert (counter.tensors, counter.bytes) == (2, 30 + 28)


def place(module: torch.nn.Module, name: str, device: torch.device) -> None:
    parent, _, leaf = name.rpartition(".")
    owner = module.get_submodule(parent)
    if leaf in owner._parameters:
        owner._parameters[leaf] = torch.nn.Parameter(getattr(owner, leaf).to(device), requires_grad=False)
    else:
        owner._buffers[leaf] = getattr(owner, leaf).to(device)


@pytest.mark.usefixtures("fakes")
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")  # older ones know no other name
def test_a_decode_step_of_a_dealt_llama_moves_what_its_hooks_send() -> None:
    """By hand: the hidden state once, cos, sin and positions to each layer of the second device, the logits back."""
    accelerate = pytest.importorskip("accelerate")
    module: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=96, hidden_size=48, intermediate_size=80, num_hidden_layers=5, num_attention_heads=6,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
        )
    ).eval()  # fmt: skip
    at_first = {"model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.layers.1"}
    parts = {
        name: FIRST if name in at_first else SECOND
        for name in [*at_first, "model.layers.2", "model.layers.3", "model.layers.4", "model.norm", "lm_head"]
    }
    for name in [name for name, _ in [*module.named_parameters(), *module.named_buffers()]]:
        place(module, name, next(device for part, device in parts.items() if name.startswith(f"{part}.")))
    module = accelerate.dispatch_model(module, parts, main_device=FIRST, skip_keys=module._skip_keys_device_placement)
    ids = torch.ones(1, 5, dtype=torch.long, device=FIRST)
    cache = module(ids, use_cache=True).past_key_values
    with TransferCounter([FIRST, SECOND]) as counter:
        logits = module(ids[:, :1], use_cache=True, past_key_values=cache).logits

    assert logits.device == FIRST
    assert counter.tensors == 1 + 3 * 3 + 1
    assert counter.bytes == 48 * 4 + 3 * (8 * 4 + 8 * 4 + 8) + 96 * 4


def test_a_split_needs_several_devices_of_one_process() -> None:
    with pytest.raises(UsageError, match="the baseline arm has cpu alone: it needs devices=2 or more"):
        check_split("baseline", ["cpu", "cpu"], "process")
    with pytest.raises(UsageError, match="router/backend=ray does not give"):
        check_split("candidate", ["cuda:0", "cuda:1"], "ray")


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r'pip install "skotergy\[split\]"'):
        check_split("candidate", ["cuda:0", "cuda:1"], "process")
