"""What kernels do to single numbers: the activations of `skote.kernels.activation`, and the soft cap of scores."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import math

import triton
import triton.language as tl

from skote.kernels.activation import ACTIVATIONS


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """The activation of that name of fp32 `x`."""
    if ACTIVATION == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh(z)) / 2 is 1 / (1 + exp(-2 z))
        y = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(0.7071067811865476 * x))
    elif ACTIVATION == "relu":
        y = tl.maximum(x, 0.0)
    else:
        tl.static_assert(ACTIVATION == "relu2", "an activation that no kernel computes")
        y = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    return y


@triton.jit
def capped(x, CAP: tl.constexpr):
    """CAP * tanh(x / CAP), fp32, to 1e-7 of CAP; `x` where CAP is 0."""
    if CAP > 0.0:
        x = CAP - 2.0 * CAP / (1.0 + tl.exp(x * (2.0 / CAP)))
    return x


def check_activation(op: str, activation: str) -> None:
    """Raises:
    ValueError: an `activation` that the kernels do not know.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"{op}: the activation is {activation!r}; the kernel computes {', '.join(ACTIVATIONS)}.")


def cap_argument(op: str, softcap: float | None) -> float:
    """A kernel's CAP for a `softcap`, 0 where there is none.

    Raises:
        ValueError: a `softcap` that is not a finite number above 0.
    """
    if softcap is not None and not 0.0 < softcap < math.inf:
        raise ValueError(f"{op}: the soft cap is {softcap}; it must be a finite number above 0.")
    return softcap or 0.0
