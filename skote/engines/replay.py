"""An engine without a model that plays back the timings of a recorded run."""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skote.engines.delays import wait_until
from skote.engines.simulated import SimulatedEngine
from skote.types import Emit, FinishReason, Request, UsageError

KEY = ["block", "round", "request_id"]
"""Of a measured request of one arm, in requests.parquet and tokens.parquet."""


@dataclass(slots=True)
class Timing:
    """A recorded request: its prompt's tokens, and its chunks: ns since it was admitted, and tokens."""

    input_tokens: int
    chunks: tuple[tuple[int, int], ...]
    plays: int = 0

    def chunk(self, index: int) -> tuple[int, int]:
        """The chunk of that index; beyond the last one the gaps and sizes of those after the first come again."""
        if index < len(self.chunks):
            return self.chunks[index]
        again = self.chunks[1:] or self.chunks
        turns, place = divmod(index - len(self.chunks), len(again))
        before_ns = self.chunks[0][0] if len(self.chunks) > 1 else 0
        length_ns = self.chunks[-1][0] - before_ns
        t_ns, tokens = again[place]
        return t_ns + (turns + 1) * length_ns, tokens


class ReplayEngine(SimulatedEngine):
    """Emits what `SimulatedEngine` does, when the requests of a recorded run emitted theirs.

    A request takes the times of the recorded one whose prompt is as long, or of the nearest length; where there are
    several, of the one that was played least, the earliest first. It ends after its own number of tokens. Only
    requests that finished in the measured phase are played; a delay that the router added is none of an engine's.

    Args:
        run: the directory of the run.
        arm: whose timings: candidate or baseline.

    Raises:
        UsageError: no run there, no such arm, or nothing that finished.
    """

    def __init__(
        self,
        *,
        local_dir: str | Path | None = None,
        device: str = "cpu",
        dtype: str = "fp32",
        threads: int | None = None,
        random_seed: int | None = None,
        layers: int | None = None,
        pad_id: int | None = None,
        max_model_len: int | None = None,
        run: str | None = None,
        arm: str = "candidate",
        vocab_size: int = 49152,
    ) -> None:
        del local_dir, threads, random_seed, layers, pad_id, max_model_len
        super().__init__(device=device, dtype=dtype, vocab_size=vocab_size)
        if run is None:
            raise UsageError("engine=replay plays back a recorded run: give engine.run=RUN_DIR (or compare.run).")
        self._run, self._arm = run, arm
        self._timings = _read_timings(Path(run), arm)

    def generate(self, requests: Sequence[Request], emit: Emit) -> list[FinishReason]:
        """As `Engine.generate`: each row by its own recorded times."""
        started_ns = time.monotonic_ns()
        ids = [self.output_ids(request.input_ids, request.max_new_tokens) for request in requests]
        timings = [self._next_timing(len(request.input_ids)) for request in requests]
        sent = [0] * len(requests)
        moments = [(*timing.chunk(0), row, 0) for row, timing in enumerate(timings)]
        heapq.heapify(moments)
        while moments:
            t_ns, tokens, row, index = heapq.heappop(moments)
            wait_until(started_ns + t_ns)
            emit(row, ids[row][sent[row] : sent[row] + tokens])
            sent[row] += tokens
            if sent[row] < len(ids[row]):
                heapq.heappush(moments, (*timings[row].chunk(index + 1), row, index + 1))
        return ["length"] * len(requests)

    def describe(self) -> dict[str, Any]:
        """What is played, and that no model runs."""
        return super().describe() | {
            "tier_reason": f"the {self._arm}'s timings of {self._run}, {len(self._timings)} requests, no model",
            "speculative": any(tokens > 1 for timing in self._timings for _, tokens in timing.chunks),
        }

    def _next_timing(self, input_tokens: int) -> Timing:
        timing = min(self._timings, key=lambda each: (abs(each.input_tokens - input_tokens), each.plays))
        timing.plays += 1
        return timing


def _read_timings(directory: Path, arm: str) -> list[Timing]:
    import pandas as pd

    try:
        requests, tokens = (pd.read_parquet(directory / f"{name}.parquet") for name in ("requests", "tokens"))
    except (OSError, ValueError) as error:
        raise UsageError(f"run={directory} has no timings of a run: {str(error).rstrip('.')}.") from error
    finished = requests.query("arm == @arm and phase == 'measure' and status == 'ok'").sort_values("admitted_ns")
    chunks = tokens.query("arm == @arm and phase == 'measure'").sort_values("index").groupby(KEY)
    timings = []
    for row in finished.to_dict("records"):
        played = chunks.get_group(tuple(row[name] for name in KEY))
        since_ns = played["t_ns"].to_numpy() - int(row["admitted_ns"])
        pairs = zip(since_ns.tolist(), played["n_tokens"].tolist(), strict=True)
        timings.append(Timing(int(row["input_tokens"]), tuple(pairs)))
    if not timings:
        known = ", ".join(sorted(map(str, requests["arm"].unique()))) or "none"
        raise UsageError(f"The run in {directory} has no request of the arm {arm} that finished; its arms are {known}.")
    return timings
