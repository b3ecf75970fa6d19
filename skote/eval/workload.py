"""A workload: the requests of a run as token ids, in blocks, and how they arrive. Made before any timing."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, cast

from skote.eval.arrivals import NEEDED, S, Times, arrival_times, offered_rate
from skote.eval.cache_probe import CacheProbe, cache_probe
from skote.eval.codec import Codec
from skote.eval.conversation import Turns, at_full_length
from skote.eval.dealing import Ids, document_lengths
from skote.eval.dealt import Block, block_of, dealt_prompts, dealt_rows
from skote.eval.shared_prefix import SharedPrefix, shared_prefix
from skote.eval.warmup import Unmeasured, warmup_requests
from skote.eval.workload_config import WorkloadConfig, check_config
from skote.types import CapacityError, Request, UsageError

Load = Literal["closed", "burst", "constant", "poisson", "gamma", "ramp", "step", "trace"]
PROBES = 12
"""The most requests of a file's form that are compared before timing."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of a run. `sha256` covers ids, limits, sampling and schedule; the name is no part of it.

    `concurrency` is the number of requests in flight: in a burst, a whole block; None where they are sent by the clock,
    at the `times` of each block, spare ones included (ns from its start). `warmup` and `probe` hold requests
    with other prompts than the measured ones, to warm up at the measured shapes, and to compare outputs before timing
    (see `build_workload`). `spare` blocks may follow the planned ones, where more are needed; `sha256` covers `blocks`
    alone. `listed` holds the prompts of the list that the blocks came from, None where they are made, or a file's.
    `prefix` is what the measured prompts share with earlier ones. `source` says what was found in the file that the
    requests came from. Where they are conversations, `turns` has how many requests each of a block's has, spare blocks
    included, and `think_ns` how long passes between each request and the answer before it (0 for first turns); then a
    later turn's ids are `skote.eval.conversation`'s. `cache_probes` has what is asked after a pass of each block, spare
    ones included.
    """

    name: str
    blocks: tuple[Block, ...]
    spare: tuple[Block, ...]
    listed: frozenset[Ids] | None
    load: Load
    concurrency: int | None
    max_new_tokens: int
    greedy: bool
    respect_eos: bool
    warmup: tuple[Request, ...]
    probe: tuple[Request, ...]
    sha256: str
    prefix: SharedPrefix
    times: tuple[Times, ...] = ()
    source: dict[str, Any] | None = None
    turns: tuple[Turns, ...] = ()
    think_ns: tuple[Times, ...] = ()
    cache_probes: tuple[CacheProbe | None, ...] = ()

    @property
    def requests(self) -> tuple[Request, ...]:
        """All measured requests, block by block."""
        return tuple(itertools.chain.from_iterable(self.blocks))

    @property
    def repeated_prompts(self) -> int:
        """How many measured requests have a prompt of the list once more, with a number in front."""
        return 0 if self.listed is None else sum(each.input_ids not in self.listed for each in self.requests)

    @property
    def at_full_length(self) -> list[Request]:
        """`possible`, with prompts as long as they will be where they are later turns."""
        return _at_full_length(self.possible, self.turns)

    @property
    def possible(self) -> tuple[Request, ...]:
        """The measured requests, and those of the spare blocks."""
        return tuple(itertools.chain.from_iterable(self.blocks + self.spare))

    def extended(self, add: int) -> Workload:
        """The workload that measures the next `add` of its spare blocks, too."""
        blocks = self.blocks + self.spare[:add]
        sha256 = _fingerprint(blocks, self.load, self.concurrency, self.times, self.turns, self.think_ns)
        return replace(self, blocks=blocks, spare=self.spare[add:], sha256=sha256, prefix=_prefix(blocks, self.turns))

    def describe(self) -> dict[str, Any]:
        """The manifest's "workload" entry. JSON values."""
        return {
            "name": self.name,
            "sha256": self.sha256,
            "load": self.load,
            "concurrency": self.concurrency,
            "blocks": len(self.blocks),
            "requests_per_block": len(self.turns[0] if self.turns else self.blocks[0]),
            "repeated_prompts": self.repeated_prompts,
            "shared_prefix_tokens": self.prefix.tokens,
            "shared_prefix_share": self.prefix.share,
            "max_new_tokens": self.max_new_tokens,
            "greedy": self.greedy,
            "respect_eos": self.respect_eos,
            **({"turns": sum(map(sum, self.turns[: len(self.blocks)]))} if self.turns else {}),
            **({} if self.source is None else {"source": self.source}),
            **({"schedule": self._schedule()} if self.times else {}),
        }

    def _schedule(self) -> dict[str, Any]:
        times = self.times[: len(self.blocks)]
        return {
            "sha256": hashlib.sha256(json.dumps(times).encode()).hexdigest(),
            "offered_req_s": [offered_rate(block) for block in times],
            "length_s": [block[-1] / S for block in times],
        }


def build_workload(
    config: WorkloadConfig, codec: Codec, seed: int, max_blocks: int = 0, max_positions: int | None = None
) -> Workload:
    """Make the requests of `config`; the same arguments give the same workload on every machine.

    Prompts are dealt as `Dealer` says, so that none repeats; those of a file as it has them. Where `max_blocks` is
    above `config.blocks` the rest are spare blocks, dealt in the same way: the first ones are the same whatever it is.
    Warm-up is that of `warmup_requests`, for all blocks. Probe: as many
    requests as a block has, made like the measured ones; of a file's no more than `PROBES`. Both have prompts that no
    block has, of the same form (`undealt`): no measured prompt is seen before it is timed, and none tells whether it
    is. `max_positions` bounds the rows of a file.

    Raises:
        UsageError: an option is out of range, prompts cannot be read, or they do not make distinct requests.
        RequestError: a prompt has no tokens.
    """
    check_config(config)
    if config.load == "trace" and config.source.path is None:
        raise UsageError("workload.load=trace sends at the times of a file: name it with workload.source.path=FILE.")
    count = max(config.blocks, max_blocks)
    if config.source.gives_rows:
        dealt = dealt_rows(config, codec, seed, count, max_positions)
    else:
        dealt = dealt_prompts(config, codec, seed, count)
    every, blocks = dealt.blocks, dealt.blocks[: config.blocks]
    possible = tuple(itertools.chain.from_iterable(every))
    unmeasured = Unmeasured(dealt.undealt, [request.input_ids for request in possible])
    probe = _probe(config, _at_full_length(possible, dealt.turns), unmeasured, seed)
    warmup = warmup_requests(_at_full_length(possible, dealt.turns), unmeasured)
    load = cast("Load", config.load)
    times = dealt.times or _times(config, seed, count)
    rng = random.Random(f"{seed}/cache")  # noqa: S311
    concurrency = None if times else config.concurrency or config.requests_per_block
    return Workload(
        name=config.name,
        blocks=blocks,
        spare=every[config.blocks :],
        listed=dealt.listed,
        load=load,
        concurrency=concurrency,
        max_new_tokens=config.max_new_tokens,
        greedy=all(request.sampling.greedy for request in possible),
        respect_eos=config.respect_eos,
        warmup=warmup,
        probe=probe,
        sha256=_fingerprint(blocks, load, concurrency, times, dealt.turns, dealt.think_ns),
        prefix=_prefix(blocks, dealt.turns),
        times=times,
        source=dealt.source,
        turns=dealt.turns,
        think_ns=dealt.think_ns,
        cache_probes=tuple(cache_probe(block, unmeasured, rng) for block in every),
    )


def _at_full_length(requests: Sequence[Request], turns: Sequence[Turns]) -> list[Request]:
    return at_full_length(requests, list(itertools.chain.from_iterable(turns))) if turns else list(requests)


def _times(config: WorkloadConfig, seed: int, count: int) -> tuple[Times, ...]:
    """The send times of `count` blocks, each with a pattern of its own; none for a load that asks no clock."""
    if config.load not in NEEDED:
        return ()
    rngs = (random.Random(f"{seed}/arrivals/{block}") for block in range(count))  # noqa: S311
    return tuple(arrival_times(config.load, config.arrivals, config.requests_per_block, rng) for rng in rngs)


def check_fits(workload: Workload, max_positions: int) -> None:
    """Check every request against the model's context of `max_positions` tokens.

    Raises:
        CapacityError: a prompt is longer than the context, or leaves too little of it for its answer.
    """
    for request in workload.at_full_length:
        length, new = len(request.input_ids), request.max_new_tokens
        if length >= max_positions:
            raise CapacityError(
                f"Request {request.request_id} has a prompt longer than the context: {length} tokens, and the model "
                f"takes {max_positions} with the answer; shorten it (workload.prompts, workload.prompt_tokens)."
            )
        if length + new > max_positions:
            raise CapacityError(
                f"Request {request.request_id} needs {length} prompt + {new} new tokens, and the model's context is "
                f"{max_positions}: lower workload.max_new_tokens to {max_positions - length} or shorten the prompt."
            )


def _probe(config: WorkloadConfig, possible: Sequence[Request], unmeasured: Unmeasured, seed: int) -> Block:
    rng = random.Random(f"{seed}/probe")  # noqa: S311
    if config.source.gives_rows:
        some = rng.sample(possible, min(PROBES, config.requests_per_block))
        return tuple(
            replace(request, request_id=f"p{index:02d}", input_ids=unmeasured.fitted(len(request.input_ids)))
            for index, request in enumerate(some)
        )
    lengths = itertools.cycle(document_lengths(config) or [0])
    prompts = [unmeasured.drawn(length) for length in itertools.islice(lengths, config.requests_per_block)]
    block = block_of(config, 0, prompts, seed, rng)
    return tuple(replace(request, request_id=f"p{index:02d}") for index, request in enumerate(block))


def _prefix(blocks: Sequence[Block], turns: Sequence[Turns]) -> SharedPrefix:
    requests = list(itertools.chain.from_iterable(blocks))
    return shared_prefix([request.input_ids for request in _at_full_length(requests, turns[: len(blocks)])])


def _fingerprint(
    blocks: Sequence[Block],
    load: Load,
    concurrency: int | None,
    times: Sequence[Times],
    turns: Sequence[Turns],
    think_ns: Sequence[Times],
) -> str:
    """SHA-256 of the JSON of all that is sent, and when; hashed request by request, since it may be gigabytes."""
    digest = hashlib.sha256(b'{"blocks":[')
    for number, block in enumerate(blocks):
        digest.update(b",[" if number else b"[")
        for index, request in enumerate(block):
            content = {
                "input_ids": request.input_ids,
                "max_new_tokens": request.max_new_tokens,
                "ignore_eos": request.ignore_eos,
                **asdict(request.sampling),
                **({"stop_ids": request.stop_ids, "stop_strings": request.stop_strings} if request.may_stop else {}),
            }
            digest.update(b"," * bool(index) + _json(content))
        digest.update(b"]")
    rest: dict[str, Any] = {"concurrency": concurrency, "load": load}
    if times:
        rest["times"] = times[: len(blocks)]
    if turns:
        rest |= {"turns": turns[: len(blocks)], "think_ns": think_ns[: len(blocks)]}
    digest.update(b"]," + _json(rest)[1:])
    return digest.hexdigest()


def _json(content: object) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
