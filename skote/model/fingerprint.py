"""What proves that two engines multiply by the same numbers.

Imports nothing of this package, so that `engines.published_driver` can load it where another package has the name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

_CHUNK = 1 << 20
_PRIME = 65521


def fingerprint(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """SHA-256 over the names, shapes, dtypes and two exact integer checksums of `tensors`, in any order, on any device.

    The checksums are the sum of a tensor's bit patterns and their sum weighted by position modulo a prime, both
    modulo 2^64, so that the same weights give the same fingerprint whichever engine holds them.
    """
    lines = sorted(f"{name}|{tuple(tensor.shape)}|{tensor.dtype}|{_checksum(tensor)}" for name, tensor in tensors)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _checksum(tensor: torch.Tensor) -> str:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    flat = tensor.detach().contiguous().view(-1).view(integers)
    plain = weighted = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK):
        chunk = flat[start : start + _CHUNK].to(torch.int64)
        place = torch.arange(start, start + chunk.numel(), device=chunk.device) % _PRIME + 1
        plain, weighted = plain + chunk.sum(), weighted + (chunk * place).sum()
    return f"{int(plain) % 2**64:016x}{int(weighted) % 2**64:016x}"
