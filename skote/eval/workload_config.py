"""The options of a workload, and what is allowed."""

from __future__ import annotations

from dataclasses import dataclass, field

from skote.eval.arrivals import LOADS, ArrivalConfig, check_arrivals
from skote.eval.sources.source_config import SourceConfig, check_source
from skote.types import UsageError


@dataclass
class WorkloadConfig:
    """The options of `conf/workload/*.yaml`; `check_config` says what is allowed.

    Attributes:
        name: what reports call it.
        load: "closed" (`concurrency` requests in flight, the next starts when one ends), "burst" (a block at once), or
            by the clock: constant, poisson, gamma, ramp, step, trace (the times that `source` has).
        concurrency: requests in flight in a closed loop; null with any other load.
        blocks: passes over fresh requests; 5 is the least that an interval of a delta takes.
        requests_per_block: requests of one pass.
        max_new_tokens: tokens of the longest answer.
        output_mix: shares of `max_new_tokens` that a block's requests take in turn.
        prompts: a list that comes with Skotergy (chat, short, sentences), or a file: .yaml or .yml with a list of texts
            or of mappings `text` (with `{slot}`) and `fillings`, anything else with one prompt a line.
        prompt_tokens: null takes the prompts as a user's turn each; N makes documents of exactly N tokens out of them.
        prompt_mix: shares of `prompt_tokens` that a block's requests take in turn.
        temperature, top_k, top_p: sampling (`skote.types.Sampling`); temperature 0 is greedy, top_k 0 is no limit.
        respect_eos: whether an answer may end before its limit; then the arms' token counts may differ.
        arrivals: when requests are sent, of a load by the clock (`skote.eval.arrivals`).
        source: the file that requests come from, or how their lengths are drawn, instead of `prompts`, of which then
            only what has no text of its own is made; `max_new_tokens` bounds answers (`skote.eval.sources`).
    """

    name: str = "chat"
    load: str = "closed"
    concurrency: int | None = 1
    blocks: int = 6
    requests_per_block: int = 12
    max_new_tokens: int = 16
    output_mix: list[float] = field(default_factory=lambda: [1.0])
    prompts: str = "chat"
    prompt_tokens: int | None = None
    prompt_mix: list[float] = field(default_factory=lambda: [1.0])
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    respect_eos: bool = False
    arrivals: ArrivalConfig = field(default_factory=ArrivalConfig)
    source: SourceConfig = field(default_factory=SourceConfig)


def check_config(config: WorkloadConfig) -> None:
    """Check the options that can be judged without a model.

    Raises:
        UsageError: an option is out of its range, or two of them contradict each other.
    """
    counts = {
        "blocks": config.blocks,
        "requests_per_block": config.requests_per_block,
        "max_new_tokens": config.max_new_tokens,
        "prompt_tokens": config.prompt_tokens,
    }
    for key, value in counts.items():
        if value is not None and value < 1:
            raise UsageError(f"workload.{key} must be at least 1, got {value}.")
    for key, shares in {"output_mix": config.output_mix, "prompt_mix": config.prompt_mix}.items():
        if not shares or not all(0.0 < share <= 1.0 for share in shares):
            raise UsageError(f"workload.{key} must be a list of shares above 0 and up to 1, got {list(shares)}.")
    if config.prompt_tokens is None and list(config.prompt_mix) != [1.0]:
        raise UsageError("workload.prompt_mix needs workload.prompt_tokens=N, the length that its shares are taken of.")
    if not config.temperature >= 0.0:
        raise UsageError(f"workload.temperature must be 0 (greedy) or more, got {config.temperature}.")
    if config.top_k < 0:
        raise UsageError(f"workload.top_k must be 0 (no limit) or more, got {config.top_k}.")
    if not 0.0 < config.top_p <= 1.0:
        raise UsageError(f"workload.top_p must lie in (0, 1], got {config.top_p}.")
    _check_load(config)
    check_arrivals(config.load, config.arrivals)
    check_source(config.source)
    if config.source.gives_rows and (config.prompt_tokens is not None or list(config.output_mix) != [1.0]):
        raise UsageError(
            "workload.prompt_tokens and workload.output_mix make prompts and answers, and the rows of workload.source "
            "have their own: set them to null and [1.0]."
        )


def _check_load(config: WorkloadConfig) -> None:
    if config.load not in LOADS:
        raise UsageError(f"workload.load must be one of {', '.join(LOADS)}, got {config.load!r}.")
    if config.load != "closed":
        if config.concurrency is not None:
            what = (
                "A burst sends a whole block at once"
                if config.load == "burst"
                else "A load by the clock waits for no answer"
            )
            raise UsageError(f"{what}: set workload.concurrency=null with workload.load={config.load}.")
    elif config.concurrency is None or config.concurrency < 1:
        raise UsageError(f"workload.concurrency must be at least 1 in a closed loop, got {config.concurrency}.")
    elif config.concurrency > config.requests_per_block:
        raise UsageError(
            f"workload.concurrency={config.concurrency} is never reached with {config.requests_per_block} requests a "
            "block: raise workload.requests_per_block."
        )
