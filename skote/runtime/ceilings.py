"""What a device can read and multiply, measured in a process of its own."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from skote.flags import TORCH_DTYPES, flags_for, set_flags
from skote.kernels.cache_size import cache_size
from skote.kernels.matmul_peak import matmul_peak
from skote.kernels.read_bandwidth import read_bandwidth
from skote.runtime.replica import Replica
from skote.types import EngineSpec


class Ceilings:
    """Stands where a replica has its engine, so that no engine's code shares the process that is asked."""

    def __init__(self, *, device: str, dtype: str) -> None:
        self._device = torch.device(device)
        self._dtype: torch.dtype = getattr(torch, TORCH_DTYPES[dtype])

    def measure(self) -> dict[str, float | None]:
        """Bytes a second, bytes of the caches that may hold what is read again, and operations a second.

        None for what cannot be measured on this device.
        """
        return {
            "read_bandwidth_bytes_per_s": read_bandwidth(self._device),
            "cache_bytes": cache_size(self._device),
            "matmul_peak_flops_per_s": matmul_peak(self._device, self._dtype),
        }


def measure_ceilings(
    device: str, dtype: str, *, threads: int | None, log: Path, timeout_s: float
) -> dict[str, float | None]:
    """`Ceilings.measure` in a fresh process, with the flags and `threads` that a replica for `dtype` has there.

    Raises:
        SkoteError: the process did not come up within `timeout_s` seconds, or ended.
    """
    spec = EngineSpec(f"{__name__}.{Ceilings.__name__}", {"device": device, "dtype": dtype})
    setup = partial(set_flags, flags_for(dtype, threads))
    with Replica(spec, index=0, device=device, setup=setup, log=log) as replica:
        replica.wait_ready(timeout_s)
        measured: dict[str, float | None] = replica.call("measure").result()
    return measured
