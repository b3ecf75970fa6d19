"""What a process with an engine can tell of itself: the memory that it has taken, and whether its device is lost."""

from __future__ import annotations

import resource
import sys
from pathlib import Path


def device_is_lost() -> bool:
    """Whether a CUDA device that torch uses fails whatever it is asked, as after an illegal access."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        for index in range(torch.cuda.device_count()):
            if torch.cuda.memory_allocated(index):  # another one would be initialised by the question
                torch.cuda.synchronize(index)
    except RuntimeError:
        return True
    return False


def peak_memory() -> dict[str, int]:
    """`host_bytes`: the process's largest resident set; `device_bytes`: torch's largest CUDA allocation, or 0."""
    device_bytes = 0
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        device_bytes = sum(torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count()))
    return {"host_bytes": _peak_resident_bytes(), "device_bytes": device_bytes}


def _peak_resident_bytes() -> int:
    # On Linux ru_maxrss survives exec, so that it reports the parent's size in a small child; VmHWM does not.
    status = Path("/proc/self/status")
    if status.exists():
        fields = dict(line.split(":", 1) for line in status.read_text(encoding="utf-8").splitlines() if ":" in line)
        return int(fields["VmHWM"].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
