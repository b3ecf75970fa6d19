"""The options of `workload.source`, and what is allowed."""

from __future__ import annotations

from dataclasses import dataclass, field

from skote.eval.sources.formats import FORMATS
from skote.eval.sources.lengths import LengthConfig, check_lengths
from skote.types import UsageError


@dataclass
class SourceConfig:
    """The file that requests are read from, and what becomes of rows that cannot be served as they stand.

    Attributes:
        path: a file, also one that ends in .gz or .zst; null takes `workload.prompts`.
        format: one of `skote.eval.sources.formats.FORMATS`; auto recognises it by the first row.
        sample: which rows: "first" (as many as are needed), "window" (so many that follow each other, from a place that
            the seed draws), "rows" (each block drawn row by row from the whole file, in its order: a thinner load).
        malformed: "refuse" names the first row that cannot be read and ends, "skip" counts such rows and goes on.
        too_long: of a prompt that `max_input_tokens`, or the context less the answer, cannot hold: "refuse", "truncate"
            (its end is cut off) or "drop".
        max_input_tokens: tokens of the longest prompt; null is the context.
        length_scale: prompts and answers of traces are so many times as long, and at least 1 token.
        shared_prefix: the share of each prompt that all have in common, where rows state lengths alone.
        turns: "first" sends one request a row, its first turn or its messages up to their last answer; "all" sends a
            conversation: each next turn, of a user or a tool, begins with all before it and the model's own answers, in
            place of recorded ones. Turns that no longer fit into the context are left out.
        think_ms: from the end of an answer to the next turn, where the row does not say.
        think: instead of `think_ms`, how these milliseconds are drawn, turn by turn.
        input, output: instead of a file: lengths of prompts, and of answers, that are drawn; without `output` an answer
            has `workload.max_new_tokens`.
    """

    path: str | None = None
    format: str = "auto"
    sample: str = "first"
    malformed: str = "refuse"
    too_long: str = "refuse"
    max_input_tokens: int | None = None
    length_scale: float = 1.0
    shared_prefix: float = 0.0
    turns: str = "first"
    think_ms: float = 0.0
    think: LengthConfig = field(default_factory=LengthConfig)
    input: LengthConfig = field(default_factory=LengthConfig)
    output: LengthConfig = field(default_factory=LengthConfig)

    @property
    def gives_rows(self) -> bool:
        """Whether requests come from here, and not from `workload.prompts`."""
        return self.path is not None or self.input.distribution is not None


_CHOICES = {
    "format": ("auto", *FORMATS),
    "sample": ("first", "window", "rows"),
    "malformed": ("refuse", "skip"),
    "too_long": ("refuse", "truncate", "drop"),
    "turns": ("first", "all"),
}


def check_source(config: SourceConfig) -> None:
    """Check the options that can be judged without the file.

    Raises:
        UsageError: an option is out of its range.
    """
    for name, choices in _CHOICES.items():
        if getattr(config, name) not in choices:
            raise UsageError(
                f"workload.source.{name} must be one of {', '.join(choices)}, got {getattr(config, name)!r}."
            )
    if config.max_input_tokens is not None and config.max_input_tokens < 1:
        raise UsageError(f"workload.source.max_input_tokens must be at least 1, got {config.max_input_tokens}.")
    if not config.length_scale > 0:
        raise UsageError(f"workload.source.length_scale must be above 0, got {config.length_scale:g}.")
    if config.think_ms < 0 or (config.think_ms and config.turns == "first"):
        raise UsageError(
            f"workload.source.think_ms must be 0 or more, and has no effect with workload.source.turns=first, got "
            f"{config.think_ms:g}."
        )
    check_lengths("workload.source.think", config.think)
    if config.think.distribution is not None and (config.think_ms or config.turns == "first"):
        raise UsageError(
            "workload.source.think draws the times before further turns: set workload.source.turns=all and think_ms=0."
        )
    if config.think.distribution == "empirical":
        raise UsageError("workload.source.think has no file of times to draw from: choose another distribution.")
    if not 0.0 <= config.shared_prefix < 1.0:
        raise UsageError(f"workload.source.shared_prefix must be 0 or more and below 1, got {config.shared_prefix:g}.")
    check_lengths("workload.source.input", config.input)
    check_lengths("workload.source.output", config.output)
    if config.path is not None and (config.input.distribution or config.output.distribution):
        raise UsageError(
            "workload.source.path has lengths of its own: set the distributions of workload.source.input and output to "
            "null, or leave the path out."
        )
    if config.output.distribution is not None and not config.gives_rows:
        raise UsageError("workload.source.output needs workload.source.input: both lengths are drawn, or none.")
