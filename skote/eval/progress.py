"""What a person sees while a run goes on: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

PLAIN_EVERY_S = 10.0
DRAWN_EVERY_S = 0.2


class RunProgress:
    """Stages as lines; the measured requests as a bar with arm, block, remaining time and each arm's median so far."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._latencies: dict[str, list[float]] = defaultdict(list)
        self._done = self._total = 0
        self._last_line = 0.0
        self._started = 0.0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[medians]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None, medians="", visible=False)

    def __enter__(self) -> RunProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """One line about what comes next or was found."""
        self._console.print(escape(text), highlight=False, soft_wrap=True)

    def start(self, total: int) -> None:
        """The measured passes begin; `total` requests are to come."""
        self._total, self._started = total, time.monotonic()
        self._last_line = self._started
        self._bar.update(self._task, total=total, visible=True)

    def extend(self, requests: int) -> None:
        """So many more requests are to come."""
        self._total += requests
        self._bar.update(self._task, total=self._total)

    def advance(self, arm: str, block: int, e2el_ms: float | None) -> None:
        """A measured request of `arm` has ended, after `e2el_ms` milliseconds if it succeeded."""
        self._done += 1
        if e2el_ms is not None:
            self._latencies[arm].append(e2el_ms)
        now = time.monotonic()
        every_s = DRAWN_EVERY_S if self._console.is_terminal else PLAIN_EVERY_S
        if now - self._last_line < every_s and self._done < self._total:
            return  # the next request of a schedule may be due: medians of thousands would hold it up
        self._last_line = now
        medians = "  ".join(f"{name} p50 {_ms(statistics.median(v))}" for name, v in self._latencies.items())
        if self._console.is_terminal:
            self._bar.update(self._task, completed=self._done, description=f"block {block + 1} {arm}", medians=medians)
            return
        left = (now - self._started) / self._done * (self._total - self._done)
        self.say(f"  {self._done}/{self._total} requests, block {block + 1}, {left:.0f} s left, {medians}")


def _ms(value: float) -> str:
    return f"{value:.0f} ms" if value >= 100.0 else f"{value:.3g} ms"
