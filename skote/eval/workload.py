"""A workload: the requests of a run as token ids, in blocks, and how they arrive. Made before any timing."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Protocol, cast

from skote.eval.prompts import load_prompts
from skote.types import CapacityError, Request, Sampling, UsageError

Load = Literal["closed", "burst"]
Block = tuple[Request, ...]


class Codec(Protocol):
    """Turns text into token ids, the model's way."""

    @property
    def vocab_size(self) -> int:
        """How many ids there are."""

    def encode(self, text: str) -> tuple[int, ...]:
        """The ids of `text` as it stands, with the tokens that the tokenizer itself puts in front."""

    def encode_chat(self, text: str) -> tuple[int, ...]:
        """The ids of `text` as a user's turn, up to where the answer starts; plain ids without a chat template."""


@dataclass(frozen=True, slots=True)
class HashCodec:
    """Ids for models that have no tokenizer (shapes with random weights): text made from them means nothing.

    One id a word or punctuation mark: SHA-256 of it and of all before it, modulo the vocabulary. So equal beginnings
    give equal ids, as with a tokenizer, and texts that differ in one word differ from there on.
    """

    vocab_size: int

    def encode(self, text: str) -> tuple[int, ...]:
        """The ids of `text`, one a word or punctuation mark."""
        state = b""
        ids = []
        for word in re.findall(r"\w+|[^\w\s]", text):
            state = hashlib.sha256(state + word.encode()).digest()
            ids.append(int.from_bytes(state[:8], "little") % self.vocab_size)
        return tuple(ids)

    def encode_chat(self, text: str) -> tuple[int, ...]:
        """The ids of `text` between the marks of a user's and an assistant's turn."""
        return self.encode(f"<user> {text} <assistant>")


@dataclass
class WorkloadConfig:
    """The options of `conf/workload/*.yaml`; `check_config` says what is allowed.

    Attributes:
        name: what reports call it.
        load: "closed" (`concurrency` requests in flight, the next starts when one ends) or "burst" (a block at once).
        concurrency: requests in flight in a closed loop; null with a burst.
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


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of a run. `sha256` covers ids, limits, sampling and schedule; the name is no part of it.

    `concurrency` is the number of requests in flight: in a burst, a whole block. `warmup` and `probe` hold requests
    with other prompts than the measured ones, to warm up at the measured shapes, and to compare outputs before timing
    (see `build_workload`).
    """

    name: str
    blocks: tuple[Block, ...]
    load: Load
    concurrency: int
    max_new_tokens: int
    greedy: bool
    respect_eos: bool
    warmup: tuple[Request, ...]
    probe: tuple[Request, ...]
    sha256: str

    @property
    def requests(self) -> tuple[Request, ...]:
        """All measured requests, block by block."""
        return tuple(itertools.chain.from_iterable(self.blocks))

    def describe(self) -> dict[str, Any]:
        """The manifest's "workload" entry. JSON values."""
        return {
            "name": self.name,
            "sha256": self.sha256,
            "load": self.load,
            "concurrency": self.concurrency,
            "blocks": len(self.blocks),
            "requests_per_block": len(self.blocks[0]),
            "max_new_tokens": self.max_new_tokens,
            "greedy": self.greedy,
            "respect_eos": self.respect_eos,
        }


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


def _check_load(config: WorkloadConfig) -> None:
    if config.load not in ("closed", "burst"):
        raise UsageError(f"workload.load must be closed or burst, got {config.load!r}.")
    if config.load == "burst":
        if config.concurrency is not None:
            raise UsageError(
                "A burst sends a whole block at once: set workload.concurrency=null with workload.load=burst."
            )
    elif config.concurrency is None or config.concurrency < 1:
        raise UsageError(f"workload.concurrency must be at least 1 in a closed loop, got {config.concurrency}.")
    elif config.concurrency > config.requests_per_block:
        raise UsageError(
            f"workload.concurrency={config.concurrency} is never reached with {config.requests_per_block} requests a "
            "block: raise workload.requests_per_block."
        )


def build_workload(config: WorkloadConfig, codec: Codec, seed: int) -> Workload:
    """Make the requests of `config`; the same arguments give the same workload on every machine.

    Prompts as they stand (`prompt_tokens` null): taken evenly over the lengths where there are more than needed, and
    dealt so that every block holds a similar mix of lengths. Where there are fewer than needed the list is gone through
    again with a number in front, "(2) ...", so that no prompt repeats. Documents (`prompt_tokens` N): the sentences in
    a new order for each request, under a numbered heading, cut at N tokens.

    Warm-up: one request for each distinct shape (prompt tokens, new tokens) where there are at most five, else for the
    shortest, the longest, the quartiles between them by prompt length, and the shape with the most new tokens. Its ids
    are drawn at random and start with an id that no measured prompt starts with, so that no prefix is shared. It never
    stops early.

    Probe: as many requests as a block has, made like the measured ones, of texts that start with "Check N.", so that
    no measured prompt is seen before it is timed.

    Raises:
        UsageError: an option is out of range, the prompts cannot be read, or they do not make distinct requests.
        RequestError: a prompt has no tokens.
    """
    check_config(config)
    texts = load_prompts(config.prompts)
    rng = random.Random(f"{seed}/prompts")  # noqa: S311 - a reproducible shuffle; a string seed goes through SHA-512
    if config.prompt_tokens is None:
        prompts = _deal(config, [codec.encode_chat(text) for text in _numbered(texts, _count(config))], rng)
    else:
        prompts = _documents(config, config.prompt_tokens, texts, codec, rng)
    if len(set(itertools.chain.from_iterable(prompts))) < _count(config):
        raise UsageError(
            f"workload.prompts={config.prompts} does not make {_count(config)} prompts with distinct token ids: raise "
            "workload.prompt_tokens, lower workload.blocks, or give other prompts."
        )
    blocks = tuple(_block(config, index, ids, seed, rng) for index, ids in enumerate(prompts))
    load = cast("Load", config.load)
    concurrency = config.concurrency or config.requests_per_block
    return Workload(
        name=config.name,
        blocks=blocks,
        load=load,
        concurrency=concurrency,
        max_new_tokens=config.max_new_tokens,
        greedy=config.temperature == 0.0,
        respect_eos=config.respect_eos,
        warmup=_warmup(tuple(itertools.chain.from_iterable(blocks)), codec.vocab_size, seed),
        probe=_probe(config, texts, codec, seed),
        sha256=_fingerprint(blocks, load, concurrency),
    )


def check_fits(workload: Workload, max_positions: int) -> None:
    """Check every request against the model's context of `max_positions` tokens.

    Raises:
        CapacityError: a prompt is longer than the context, or leaves too little of it for its answer.
    """
    for request in workload.requests:
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


def _probe(config: WorkloadConfig, texts: Sequence[str], codec: Codec, seed: int) -> Block:
    rng = random.Random(f"{seed}/probe")  # noqa: S311
    count = config.requests_per_block
    if config.prompt_tokens is None:
        chosen = [texts[index * len(texts) // count] for index in range(count)]
        prompts = [codec.encode_chat(f"Check {number}. {text}") for number, text in enumerate(chosen, 1)]
    else:
        prompts = [
            _document(f"Check {index + 1}.", length, texts, codec, rng)
            for index, length in zip(
                range(count), itertools.cycle(_lengths(config, config.prompt_tokens)), strict=False
            )
        ]
    block = _block(config, 0, prompts, seed, rng)
    return tuple(replace(request, request_id=f"p{index:02d}") for index, request in enumerate(block))


def _lengths(config: WorkloadConfig, prompt_tokens: int) -> list[int]:
    return [max(1, round(share * prompt_tokens)) for share in config.prompt_mix]


def _count(config: WorkloadConfig) -> int:
    return config.blocks * config.requests_per_block


def _numbered(texts: Sequence[str], count: int) -> list[str]:
    """All of `texts`; where `count` is larger, then again from the first on with "(2) " in front, up to `count`."""
    cycles = -(-count // len(texts))
    numbered = [text if cycle == 1 else f"({cycle}) {text}" for cycle in range(1, cycles + 1) for text in texts]
    return numbered[: max(count, len(texts))]


def _deal(config: WorkloadConfig, prompts: list[tuple[int, ...]], rng: random.Random) -> list[list[tuple[int, ...]]]:
    """Sort by length, pick evenly, and give each block one of every `blocks` neighbours, in a shuffled order."""
    count = _count(config)
    ordered = sorted(prompts, key=lambda ids: (len(ids), ids))
    picked = [ordered[index * len(ordered) // count] for index in range(count)]
    dealt: list[list[tuple[int, ...]]] = [[] for _ in range(config.blocks)]
    for start in range(0, count, config.blocks):
        stratum = picked[start : start + config.blocks]
        rng.shuffle(stratum)
        for block, ids in zip(dealt, stratum, strict=True):
            block.append(ids)
    for block in dealt:
        rng.shuffle(block)
    return dealt


def _documents(
    config: WorkloadConfig, prompt_tokens: int, sentences: Sequence[str], codec: Codec, rng: random.Random
) -> list[list[tuple[int, ...]]]:
    lengths = _lengths(config, prompt_tokens)
    numbers = itertools.count(1)
    return [
        [
            _document(f"Report {next(numbers)}.", lengths[index % len(lengths)], sentences, codec, rng)
            for index in range(config.requests_per_block)
        ]
        for _ in range(config.blocks)
    ]


def _document(text: str, length: int, sentences: Sequence[str], codec: Codec, rng: random.Random) -> tuple[int, ...]:
    ids = codec.encode(text)
    while len(ids) < length:
        text = " ".join([text, *rng.sample(sentences, len(sentences))])
        ids = codec.encode(text)
    return ids[:length]


def _block(config: WorkloadConfig, block: int, prompts: list[tuple[int, ...]], seed: int, rng: random.Random) -> Block:
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
            Sampling(
                config.temperature,
                config.top_k,
                config.top_p,
                _sampling_seed(config.temperature, seed, request_id),
            ),
            ignore_eos=not config.respect_eos,
        )
        for index, (ids, limit) in enumerate(shapes)
    )


def _sampling_seed(temperature: float, seed: int, request_id: str) -> int:
    """A seed of 31 bits for each sampled request; greedy ones have none, so that their hash does not depend on it."""
    if temperature == 0.0:
        return 0
    return int.from_bytes(hashlib.sha256(f"{seed}/{request_id}".encode()).digest()[:4], "little") >> 1


def _warmup(requests: Sequence[Request], vocab_size: int, seed: int) -> tuple[Request, ...]:
    rng = random.Random(f"{seed}/warmup")  # noqa: S311
    taken = sorted({request.input_ids[0] for request in requests})
    free = vocab_size - len(taken)
    if free < 1:
        raise UsageError(
            f"The measured prompts start with all of the {vocab_size} tokens of the vocabulary, which leaves none for "
            "the warm-up: lower workload.requests_per_block or workload.blocks."
        )
    warmup = []
    for index, (length, new) in enumerate(_warmup_shapes(requests)):
        first = _nth_free(taken, rng.randrange(free))
        ids = (first, *(rng.randrange(vocab_size) for _ in range(length - 1)))
        warmup.append(Request(f"w{index:02d}", ids, new, requests[0].sampling, ignore_eos=True))
    return tuple(warmup)


def _warmup_shapes(requests: Sequence[Request]) -> Iterator[tuple[int, int]]:
    shapes = sorted({(len(request.input_ids), request.max_new_tokens) for request in requests})
    last = len(shapes) - 1
    indices = {round(last * quarter / 4) for quarter in range(5)}
    indices.add(max(range(len(shapes)), key=lambda index: (shapes[index][1], shapes[index][0])))
    return (shapes[index] for index in sorted(indices))


def _nth_free(taken: Sequence[int], n: int) -> int:
    """The n-th (from 0) of the ids that are not in `taken`, which is sorted."""
    return n + bisect.bisect_right([used - index for index, used in enumerate(taken)], n)


def _fingerprint(blocks: Sequence[Block], load: Load, concurrency: int) -> str:
    content = {
        "load": load,
        "concurrency": concurrency,
        "blocks": [
            [
                {
                    "input_ids": request.input_ids,
                    "max_new_tokens": request.max_new_tokens,
                    "ignore_eos": request.ignore_eos,
                    **asdict(request.sampling),
                }
                for request in block
            ]
            for block in blocks
        ],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
