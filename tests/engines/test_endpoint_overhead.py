"""The benchmark of the endpoint's client: every token of every answer is counted once, with a time that was added."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from skote.types import Chunk, Completion

FILE = Path(__file__).parent.parent.parent / "benchmarks" / "endpoint_overhead.py"


@pytest.fixture(scope="module")
def benchmark():
    return runpy.run_path(str(FILE))


def test_what_was_added_is_the_stamp_less_what_the_token_says(benchmark):
    chunks = (Chunk(5_000_000, 1), Chunk(9_000_000, 2))
    answer = Completion("a", 1, (4_000_000, 6_000_000, 8_500_000), chunks, 0, 0, 0, "ok")
    assert list(benchmark["added_ms"]([answer, answer])) == [1.0, 3.0, 0.5] * 2
