"""E15 and E23: what a kernel's launcher does with tensors that it cannot take, and whether slow paths are counted."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from skote.contracts.check import Figures, Subject, greedy, prompts


def boundary(subject: Subject) -> Figures:
    """Give every launcher a tensor on the CPU and, on CUDA, one that is strided.

    `accepted`: launches that went through. `refused`: launches that raised. `uncounted_calls`: 1 where an engine's
    description does not say which path its norms took.
    """
    from skote.runtime.engine import SkotergyEngine

    launches = _launches("cpu", strided=False)
    if subject.device.startswith("cuda"):
        launches |= {f"strided {name}": launch for name, launch in _launches(subject.device, strided=True).items()}
    refused = sum(_refuses(launch) for launch in launches.values())
    engine = SkotergyEngine(**subject.options(max_model_len=32))
    greedy(engine, prompts(256, (5,)), 4)
    counted = engine.describe()["paths"].get("rms_norm", {})
    return {
        "accepted": len(launches) - refused,
        "refused": refused,
        "uncounted_calls": int(not any(counted.values())),
    }


def _refuses(launch: Callable[[], object]) -> bool:
    try:
        launch()
    except (TypeError, ValueError):
        return True
    return False


def _launches(device: str, *, strided: bool) -> dict[str, Callable[[], object]]:
    """Launches over small tensors on `device`, by the kernel's name; with `strided` the first one is not contiguous."""
    from skote.kernels.add_rms_norm_triton import add_rms_norm
    from skote.kernels.gate_up_gemv_triton import gate_up_gemv
    from skote.kernels.head_gemv_triton import head_gemv
    from skote.kernels.launch import Tile
    from skote.kernels.residual_gemv_triton import residual_gemv
    from skote.kernels.rms_norm_triton import rms_norm_triton

    def rows(*shape: int) -> torch.Tensor:
        return torch.ones(*shape, device=device)

    first = rows(64, 4).T[0] if strided else rows(64)
    matrix = rows(64, 4).T if strided else rows(4, 64)
    tile, norm = Tile(2, 1), rows(64)
    ids = torch.zeros(32, dtype=torch.int32, device=device)
    return {
        "rms_norm": partial(rms_norm_triton, matrix, norm, 1e-5),
        "add_rms_norm": partial(add_rms_norm, matrix, None, norm, rows(4, 64), eps=1e-5, pdl=False),
        "gate_up_gemv": partial(gate_up_gemv, first, norm, rows(64, 64), rows(32), eps=1e-5, tile=tile, pdl=False),
        "residual_gemv": partial(residual_gemv, first, norm, rows(64, 64), tile=tile, pdl=False),
        "head_gemv": partial(
            head_gemv, first, norm, rows(64, 64), norm.clone(), rows(32), ids, eps=1e-5, tile=tile, pdl=False
        ),
    }
