"""Whole runs whose requests have stops of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from skote.eval.record import read_run

RUN = Path(__file__).parents[2] / "run.py"
PROMPT, SPECIAL = (7, 8, 9, 10), (0, 1, 2, 3, 95)


@pytest.mark.slow
def test_both_arms_end_at_a_rows_stops_and_the_run_is_valid(tmp_path, copy_checkpoint, write_tokenizer, reference_ids):
    directory = copy_checkpoint(eos_token_id=None)
    write_tokenizer(directory)
    whole = reference_ids(directory, PROMPT, 12)
    at = next(index for index in range(2, 12) if whole[index] not in (*whole[:index], *SPECIAL))
    text = " ".join(f"w{each}" for each in PROMPT)
    rows = [
        {"prompt": text, "stop": [f"w{whole[at]}", "never"]},
        {"prompt": f"{text} w11", "max_tokens": 3},
        {"prompt": f"{text} w12", "stop_token_ids": list(range(96))},  # whatever comes first
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    done = subprocess.run(
        [
            sys.executable, RUN, "workload=trace", "workload.load=closed", "workload.concurrency=1",
            "workload.arrivals.speed_up=null", f"workload.source.path={path}", "workload.blocks=1",
            "workload.requests_per_block=3", "workload.max_new_tokens=12", "model=local", f"model.path={directory}",
            "engine.compile=false", "measure.harness_overhead=false", "report=none",
            "hydra.run.dir=run",
        ],
        cwd=tmp_path, text=True, check=False, stdin=subprocess.DEVNULL, capture_output=True
    )  # fmt: skip
    run = read_run(tmp_path / "run")
    assert (done.stderr, done.returncode) == ("", 0)
    assert run.manifest["may_stop"] == ["b00-r00", "b00-r02"]
    measured = run.requests[run.requests["phase"] == "measure"].sort_values(["arm", "request_id"])
    assert measured["finish_reason"].tolist() == ["stop", "length", "stop"] * 2
    assert measured["output_tokens"].tolist() == [at + 1, 3, 1] * 2
    assert run.manifest["parity"]["passed"]
