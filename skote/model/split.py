"""A module whose layers are dealt out over several devices, as `device_map="auto"` does it, and what that moves."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from skote.types import UsageError

_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


def check_split(arm: str, devices: Sequence[str], backend: str) -> None:
    """Check that an arm's model can be dealt out over `devices`, before anything starts.

    Raises:
        UsageError: one device alone, replicas that are not this machine's processes, a package that is missing.
    """
    if backend != "process":
        raise UsageError(
            f"engine.split needs the devices of one process, which router/backend={backend} does not give."
        )
    if len(set(devices)) < 2:
        raise UsageError(
            f"engine.split deals one model out over several devices, and the {arm} arm has {devices[0]} alone: it "
            "needs devices=2 or more on a machine with as many accelerators."
        )
    if importlib.util.find_spec("accelerate") is None:
        raise UsageError('engine.split needs Accelerate, which is an extra: pip install "skotergy[split]".')


def split_module(module: Any, devices: Sequence[torch.device]) -> None:  # noqa: ANN401 (Transformers' are untyped)
    """Move `module`, which lies on one device, to `devices`, each of which gets layers in a row of about equal bytes.

    The map is that of `device_map="auto"`, by Accelerate's own functions, and so are the hooks that move a layer's
    inputs to its device. Left in `module.hf_device_map`.
    """
    from accelerate import dispatch_model, infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    whole = module.get_memory_footprint()
    by_number = {device.index: device for device in devices}
    kept_whole = list(module._no_split_modules)
    shares = get_balanced_memory(module, dict.fromkeys(by_number, 2 * whole), no_split_module_classes=kept_whole)
    numbers = infer_auto_device_map(module, shares, no_split_module_classes=kept_whole)
    parts = {name: by_number[number] for name, number in numbers.items()}
    dispatch_model(module, parts, main_device=devices[0], skip_keys=module._skip_keys_device_placement)
    for device in devices if devices[0].type == "cuda" else ():
        torch.cuda.reset_peak_memory_stats(device)  # the first one held all of it for a moment


class TransferCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts, while it is entered, the tensors that are copied from one of `devices` to another one, and their bytes.

    Copies from and to the host are not counted where the host is none of `devices`.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._devices = frozenset(devices)
        self.tensors = 0
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        del types
        out = func(*args, **(kwargs or {}))
        if func in _COPIES:
            source = args[0] if func is _COPIES[0] else args[1]
            if source.device != out.device and {source.device, out.device} <= self._devices:
                self.tensors += 1
                self.bytes += source.nbytes
        return out
