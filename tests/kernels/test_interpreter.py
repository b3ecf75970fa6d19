"""Runs the kernels' tests through Triton's interpreter, in a process of its own: it is chosen at Triton's import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
# What Triton 3.6's interpreter does in every loop; numpy 2.4 turns it into an error.
ALLOWED = "ignore:Conversion of an array with ndim:DeprecationWarning"
FILES = (
    "test_decode_triton.py",
    "test_batch_triton.py",
    "test_gumbel_best_triton.py",
    "test_prefill_triton.py",
    "test_switches_triton.py",
    "test_expert_triton.py",
    "test_odd_sizes_triton.py",
)


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_kernels_equal_their_references_in_the_interpreter(file):
    path = Path(__file__).with_name(file)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", ALLOWED, str(path)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
