"""A report of 100,000 requests of 256 tokens takes at most 20 s and 2 GiB, extrapolated from two smaller ones."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from skote.eval.record import REQUEST_SCHEMA, TOKEN_SCHEMA

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


@pytest.mark.slow
def test_a_large_report_is_fast_and_small(synthetic):
    """Seconds of the processor, which other processes do not lengthen; the page stays under 2 MB whatever the size."""
    directory = synthetic(blocks=1, requests=1).write()
    manifest = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))
    sizes, used = (4_000, 16_000), []
    for requests in sizes:
        write_run(directory, manifest, requests)
        done = subprocess.run([sys.executable, "-c", RENDER, directory], capture_output=True, text=True, check=True)
        used.append([float(figure) for figure in done.stdout.split()])
    small, large = np.array(used)

    seconds, gib, _ = small + (large - small) / (sizes[1] - sizes[0]) * (100_000 - sizes[0])
    assert seconds <= 20
    assert gib <= 2
    assert large[2] < 2_000_000
