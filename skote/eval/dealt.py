"""Blocks of requests: dealt from the texts of a list, or read from the rows of a source."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from skote.eval.arrivals import Times, trace_times
from skote.eval.codec import Codec
from skote.eval.conversation import Turns
from skote.eval.dealing import Dealer, Ids
from skote.eval.filler import Filler
from skote.eval.prompts import load_held_out, load_prompts
from skote.eval.row_requests import take_rows
from skote.eval.row_turns import NextTurn
from skote.eval.workload_config import WorkloadConfig
from skote.types import Request, Sampling, UsageError

Block = tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Dealt:
    """The blocks of a workload, spare ones included, and where other prompts of their form come from.

    Attributes:
        undealt: makes a prompt of about so many tokens that no block has or will have.
        listed, source, times, turns, think_ns: as in `skote.eval.workload.Workload`; `times` are a trace's alone.
    """

    blocks: tuple[Block, ...]
    undealt: Callable[[int], Ids]
    listed: frozenset[Ids] | None = None
    source: dict[str, Any] | None = None
    times: tuple[Times, ...] = ()
    turns: tuple[Turns, ...] = ()
    think_ns: tuple[Times, ...] = ()


def dealt_prompts(config: WorkloadConfig, codec: Codec, seed: int, count: int) -> Dealt:
    """`count` blocks of the texts of `config.prompts`.

    Raises:
        UsageError: the texts cannot be read, or do not make so many distinct prompts.
    """
    texts = load_prompts(config.prompts)
    dealer = Dealer(config, texts, codec, seed, load_held_out(config.prompts))
    every = _blocks(config, dealer, seed, count)
    requests = count * config.requests_per_block
    if len({request.input_ids for block in every for request in block}) < requests:
        raise UsageError(
            f"workload.prompts={config.prompts} does not make {requests} prompts with distinct token ids: raise "
            "workload.prompt_tokens, lower workload.blocks or measure.stop.max_blocks, or give other prompts."
        )
    listed = frozenset(codec.encode_chat(text) for text in texts) if config.prompt_tokens is None else None
    return Dealt(every, dealer.undealt, listed)


def dealt_rows(config: WorkloadConfig, codec: Codec, seed: int, count: int, max_positions: int | None) -> Dealt:
    """`count` blocks of the rows of `config.source`.

    Raises:
        UsageError: as `take_rows`; or times are wanted, and rows have none.
    """
    size = config.requests_per_block
    sizes = (config.blocks * size, (count - config.blocks) * size, size)
    filler = Filler(load_prompts(config.prompts), codec, seed, config.source.shared_prefix)
    taken = take_rows(config.source, codec, filler, config.max_new_tokens, max_positions, sizes, seed)
    requests = [
        Request(
            request_id := f"b{index // size:02d}-r{index % size:02d}",
            each.ids,
            each.max_new_tokens,
            _sampling(config, each.row.sampling, seed, request_id),
            ignore_eos=not config.respect_eos,
            stop_ids=each.row.stop_ids,
            stop_strings=each.row.stop_strings,
        )
        for index, each in enumerate(taken.requests)
    ]
    starts = range(0, len(requests), size)
    times: tuple[Times, ...] = ()
    if config.load == "trace":
        stamps = taken.stamps()
        times = tuple(trace_times(stamps[start : start + size], config.arrivals) for start in starts)
    blocks = tuple(tuple(requests[start : start + size]) for start in starts)
    if config.source.turns == "first":
        return Dealt(blocks, taken.undealt, source=taken.facts, times=times)
    later = {request.request_id: each.later for request, each in zip(requests, taken.requests, strict=True)}
    talks = tuple(tuple(turn for first in block for turn in _turns(config, first, later, seed)) for block in blocks)
    turns = tuple(tuple(1 + len(later[first.request_id]) for first in block) for block in blocks)
    think_ns = tuple(
        tuple(ns for first in block for ns in (0, *(each.think_ns for each in later[first.request_id])))
        for block in blocks
    )
    return Dealt(talks, taken.undealt, source=taken.facts, times=times, turns=turns, think_ns=think_ns)


def _turns(
    config: WorkloadConfig, first: Request, later: Mapping[str, Sequence[NextTurn]], seed: int
) -> Iterator[Request]:
    """A conversation: `first`, and what follows its answers, with ids "b00-r00-t0" and so on."""
    own = {"temperature": first.sampling.temperature, "top_k": first.sampling.top_k, "top_p": first.sampling.top_p}
    yield replace(first, request_id=f"{first.request_id}-t0")
    for number, each in enumerate(later[first.request_id], start=1):
        request_id = f"{first.request_id}-t{number}"
        sampling = _sampling(config, own, seed, request_id)
        yield replace(
            first,
            request_id=request_id,
            input_ids=each.ids,
            max_new_tokens=each.max_new_tokens,
            sampling=sampling,
        )


def _blocks(config: WorkloadConfig, dealer: Dealer, seed: int, count: int) -> tuple[Block, ...]:
    blocks: list[Block] = []
    while len(blocks) < count:
        dealt, rng = dealer.deal()
        blocks += [block_of(config, index, ids, seed, rng) for index, ids in enumerate(dealt, start=len(blocks))]
    return tuple(blocks[:count])


def block_of(
    config: WorkloadConfig, block: int, prompts: list[tuple[int, ...]], seed: int, rng: random.Random
) -> Block:
    """Block number `block`: requests with `prompts`, in an order that `rng` draws, answers by `output_mix`."""
    limits = [max(1, round(share * config.max_new_tokens)) for share in config.output_mix]
    # The shift after each turn of the prompt lengths pairs every prompt length with every output length.
    turn = len(config.prompt_mix)
    shapes = [(ids, limits[(index % turn + index // turn) % len(limits)]) for index, ids in enumerate(prompts)]
    rng.shuffle(shapes)
    return tuple(
        Request(
            request_id := f"b{block:02d}-r{index:02d}",
            ids,
            limit,
            _sampling(config, {}, seed, request_id),
            ignore_eos=not config.respect_eos,
        )
        for index, (ids, limit) in enumerate(shapes)
    )


def _sampling(config: WorkloadConfig, own: Mapping[str, Any], seed: int, request_id: str) -> Sampling:
    """How a request is sampled: as the run's configuration says, but for what its row has of its `own`."""
    temperature = own.get("temperature", config.temperature)
    drawn = own.get("seed", _sampling_seed(temperature, seed, request_id))
    return Sampling(temperature, own.get("top_k", config.top_k), own.get("top_p", config.top_p), drawn)


def _sampling_seed(temperature: float, seed: int, request_id: str) -> int:
    """A seed of 31 bits for each sampled request; greedy ones have none, so that their hash does not depend on it."""
    if temperature == 0.0:
        return 0
    return int.from_bytes(hashlib.sha256(f"{seed}/{request_id}".encode()).digest()[:4], "little") >> 1
