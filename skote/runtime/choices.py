"""What an engine's logits say of given tokens: of a long answer the logits themselves are 100 MB and more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Choices:
    """Of tokens one after another: their own logits and the best of each row, `[tokens]`; a row has `vocab` columns."""

    vocab: int
    chosen: NDArray[np.float32]
    best: NDArray[np.float32]


def choices(logits: NDArray[np.float32], ids: Sequence[int]) -> Choices:
    """The choices `ids` under `logits` `[len(ids), vocab]`; a row that holds NaN has NaN as its best."""
    return Choices(logits.shape[-1], logits[np.arange(len(ids)), np.asarray(ids)], logits.max(-1))
