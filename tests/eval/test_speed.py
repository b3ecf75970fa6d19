"""What statistics and reports may take: the default run, and 100,000 requests of 256 tokens."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from skote.eval.record import REQUEST_SCHEMA, TOKEN_SCHEMA, read_run
from skote.eval.summary import summarize

BLOCKS, TOKENS, SLOTS = 10, 256, 8
SHA = "aa" * 32
RENDER = (
    "import resource, sys, pathlib; from skote.eval.report import render_run;"
    "path, _ = render_run(pathlib.Path(sys.argv[1])); used = resource.getrusage(resource.RUSAGE_SELF);"
    "print(used.ru_utime + used.ru_stime, used.ru_maxrss / 2**20, path.stat().st_size)"
)


def write_run(directory, manifest, requests):
    """`requests` requests in two arms: token gaps of 10 ms, 8 requests at a time."""
    per_pass = requests // 2 // BLOCKS
    ids = [f"b{block:02d}-r{index:05d}" for block in range(BLOCKS) for index in range(per_pass)]
    manifest["workload"] |= {"blocks": BLOCKS, "requests_per_block": per_pass, "concurrency": SLOTS}
    manifest["requested_tokens"] = dict.fromkeys(ids, TOKENS)
    manifest["parity"]["outputs"] = {arm: dict.fromkeys(ids, SHA) for arm in ("candidate", "baseline")}
    rng = np.random.default_rng(0)
    now = 10**15
    with (
        pq.ParquetWriter(directory / "requests.parquet", REQUEST_SCHEMA) as to_requests,
        pq.ParquetWriter(directory / "tokens.parquet", TOKEN_SCHEMA) as to_tokens,
    ):
        for block in range(BLOCKS):
            for turn, arm in enumerate(("candidate", "baseline")):
                mine = ids[block * per_pass : (block + 1) * per_pass]
                start = now + np.arange(per_pass) // SLOTS * 2_700_000_000
                gaps = (rng.normal(10, 1, (per_pass, TOKENS)) * 1e6).astype(np.int64)
                stamps = start[:, None] + np.cumsum(gaps, axis=1)
                now = int(stamps.max()) + 10**7
                key = {"arm": arm, "block": block, "round": turn, "phase": "measure"}
                row = key | {
                    "run_id": manifest["run_id"], "engine": "x", "replica": 0, "device": "cpu", "input_tokens": 40,
                    "output_tokens": TOKENS, "first_chunk_tokens": 1, "cached_tokens": None, "status": "ok",
                    "finish_reason": "length", "error": None, "workload_sha256": "5b" * 32, "output_sha256": SHA,
                }  # fmt: skip
                columns = {name: [value] * per_pass for name, value in row.items()} | {
                    "request_id": mine, "scheduled_ns": start, "dispatched_ns": start, "admitted_ns": start + 1000,
                    "first_token_ns": stamps[:, 0], "last_token_ns": stamps[:, -1], "end_ns": stamps[:, -1] + 1000,
                }  # fmt: skip
                to_requests.write_table(pa.table(columns, schema=REQUEST_SCHEMA))
                columns = {name: [value] * stamps.size for name, value in key.items()} | {
                    "request_id": np.repeat(np.array(mine), TOKENS), "index": np.tile(np.arange(TOKENS), per_pass),
                    "t_ns": stamps.ravel(), "n_tokens": np.ones(stamps.size),
                }  # fmt: skip
                to_tokens.write_table(pa.table(columns, schema=TOKEN_SCHEMA))
    (directory / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


def test_the_statistics_of_the_default_run_take_two_seconds_at_most(synthetic):
    """6 blocks of 12 requests of 16 tokens in two arms, read and summed up; seconds of the processor."""
    directory = synthetic().write()
    start = time.process_time()
    metrics = summarize(read_run(directory))

    assert time.process_time() - start <= 2
    assert metrics["arms"]["candidate"]["requests"]["ok"] == 72


@pytest.mark.slow
def test_a_large_report_is_fast_and_small(synthetic):
    """At most 20 s and 2 GiB; seconds of the processor, which other processes do not lengthen as much as the clock's.

    The page stays under 2 MB whatever the size.
    """
    directory = synthetic(blocks=1, requests=1).write()
    write_run(directory, json.loads((directory / "manifest.json").read_text(encoding="utf-8")), 100_000)
    done = subprocess.run([sys.executable, "-c", RENDER, directory], capture_output=True, text=True, check=True)
    seconds, gib, page_bytes = map(float, done.stdout.split())
    metrics = json.loads((directory / "metrics.json").read_text(encoding="utf-8"))
    shutil.rmtree(directory)  # 190 MB

    assert {arm: each["requests"]["ok"] for arm, each in metrics["arms"].items()} == {
        "candidate": 50_000,
        "baseline": 50_000,
    }
    assert metrics["arms"]["candidate"]["metrics"]["itl_ms"]["n"] == 50_000 * (TOKENS - 1)
    assert seconds <= 20
    assert gib <= 2
    assert page_bytes < 2_000_000
