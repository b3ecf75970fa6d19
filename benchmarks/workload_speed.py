"""How long large workloads take to make: `python benchmarks/workload_speed.py`.

20,000 prompts of 8,192 tokens each, made, kept, and read again; and a sample of a trace of ten million rows. The first
needs 5 GB of memory, and 650 MB on disk for a while. Exits with 1 beyond the limits of 60 s and, per row, 20 us.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from skote.eval.codec import HashCodec
from skote.eval.sources.lengths import LengthConfig
from skote.eval.sources.row_file import RowFile
from skote.eval.sources.source_config import SourceConfig
from skote.eval.workload import build_workload
from skote.eval.workload_cache import WorkloadCache, ingredients
from skote.eval.workload_config import WorkloadConfig

MAX_S = 60.0
MAX_US_PER_ROW = 20.0


def main() -> None:
    """Measure once, print wall clock and CPU time, and judge the wall clock."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=20_000)
    parser.add_argument("--rows", type=int, default=10_000_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = WorkloadConfig(
            prompts="sentences",
            load="burst",
            concurrency=None,
            blocks=1,
            requests_per_block=options.prompts,
            source=SourceConfig(input=LengthConfig("fixed", mean=8192)),
        )
        codec, cache = HashCodec(49152), WorkloadCache(Path(folder), print)
        made_of = ingredients(config, "hash of 49152", 0, 0, None)
        name = f"{options.prompts} prompts of 8192 tokens"
        seconds = [
            timed(f"{name}, {how}", lambda: cache.workload(made_of, lambda: build_workload(config, codec, 0)))
            for how in ("made", "read again")
        ]
        path = Path(folder) / "trace.csv"
        with path.open("w", encoding="utf-8") as file:
            file.write("TIMESTAMP,ContextTokens,GeneratedTokens\n")
            file.writelines(
                f"2023-11-16 18:17:03.{row % 10**7:07d},{row % 4000 + 1},9\n" for row in range(options.rows)
            )
        trace = RowFile(SourceConfig(str(path), sample="rows"))
        sampled = timed(
            f"1,000 of {options.rows} rows",
            lambda: trace.take(1000, 0, 100, lambda row: row, random.Random(0)),  # noqa: S311
        )
    sys.exit(0 if max(seconds) <= MAX_S and sampled / options.rows * 1e6 <= MAX_US_PER_ROW else 1)


def timed(what: str, action: Callable[[], object]) -> float:
    """Run `action`, print how long it took, and return the seconds by the clock."""
    started, cpu = time.perf_counter(), time.process_time()
    action()
    seconds = time.perf_counter() - started
    print(f"{what}: {seconds:.1f} s, {time.process_time() - cpu:.1f} s of a core")
    return seconds


if __name__ == "__main__":
    main()
