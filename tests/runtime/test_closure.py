"""When a row ends."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from skote.runtime.closure import emit_row, ended
from skote.types import Request


@pytest.mark.parametrize(
    ("token", "generated", "ignore_eos", "reason"),
    [
        (7, 1, False, "stop"),
        (8, 1, False, "stop"),
        (7, 1, True, None),
        (7, 3, True, "length"),
        (7, 3, False, "stop"),
        (9, 2, False, None),
        (9, 3, False, "length"),
    ],
)
def test_end_tokens_and_limits(token: int, generated: int, ignore_eos: bool, reason: str | None) -> None:
    request = Request("r", (1,), 3, ignore_eos=ignore_eos)

    assert ended(request, token, generated, (7, 8)) == reason


def test_a_row_is_emitted_token_by_token_to_its_end() -> None:
    emitted: list[tuple[int, Sequence[int]]] = []
    tokens = iter([4, 5, 7, 6])

    reason = emit_row(2, Request("r", (1,), 9), tokens, {7}, lambda row, ids: emitted.append((row, ids)))

    assert reason == "stop"
    assert emitted == [(2, (4,)), (2, (5,)), (2, (7,))]
    assert next(tokens) == 6
