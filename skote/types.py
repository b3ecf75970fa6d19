"""The nouns that every layer shares: requests, completions, the engine protocol, and the errors.

Imports the standard library alone, so that any module, and any spawned process, can afford it.

Errors::

    SkoteError            exit 1   something failed while it ran
      EngineError                  an engine failed on a request
        ReplicaError               a replica's process ended or never came up
      RecordError                  a run's files could not be written or read
      UsageError          exit 4   the command line, the configuration or an input is wrong
        CheckpointError            a model directory is missing something or holds something unreadable
        CapacityError              what was asked for does not fit (memory, context, devices)
        RequestError               a request that no engine can serve
      InvalidRunError     exit 2   a run whose figures must not be believed
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class ExitCode(enum.IntEnum):
    """How a run's process ends."""

    DONE = 0
    FAILED = 1
    INVALID = 2
    INCONCLUSIVE = 3
    USAGE = 4
    INTERRUPTED = 130  # Ctrl-C, as shells report it

    @staticmethod
    def worst(codes: Iterable[int]) -> ExitCode:
        """The code that speaks for several jobs: 130, then 4, 2, 1, 3, and 0 where nothing went wrong."""
        order = (130, 4, 2, 1, 3)
        return ExitCode(min(codes, key=lambda code: order.index(code) if code in order else len(order), default=0))


class SkoteError(Exception):
    """Base of every error that Skotergy raises; its text is one sentence for the user."""

    exit_code = ExitCode.FAILED


class EngineError(SkoteError):
    """An engine failed on a request."""


class ReplicaError(EngineError):
    """A replica's process ended, or never came up."""


class RecordError(SkoteError):
    """A run's files could not be written or read."""


class UsageError(SkoteError):
    """The command line, the configuration or an input is wrong."""

    exit_code = ExitCode.USAGE


class CheckpointError(UsageError):
    """A model directory is missing something, or holds something unreadable."""


class CapacityError(UsageError):
    """What was asked for does not fit: memory, context length, devices."""


class RequestError(UsageError):
    """A request that no engine can serve."""


class InvalidRunError(SkoteError):
    """A run whose figures must not be believed."""

    exit_code = ExitCode.INVALID


def is_whole(value: object) -> bool:
    """Whether `value` is an int; a bool is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether `value` is an int or a float; a bool is neither."""
    return is_whole(value) or isinstance(value, float)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. `temperature` 0 is greedy, and then nothing else has an effect.

    In this order: logits / `temperature`, then the `top_k` most likely tokens (0: all of them; what ties with the last
    of them stays too), then the smallest set of those whose probability among them reaches `top_p`, then a draw.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not is_number(self.temperature) or not self.temperature >= 0.0:
            raise RequestError(f"temperature must be 0 (greedy) or more, got {self.temperature!r}.")
        if not is_whole(self.top_k) or self.top_k < 0:
            raise RequestError(f"top_k must be a whole number, 0 (no limit) or more, got {self.top_k!r}.")
        if not is_number(self.top_p) or not 0.0 < self.top_p <= 1.0:
            raise RequestError(f"top_p must lie in (0, 1], got {self.top_p!r}.")
        if not is_whole(self.seed):
            raise RequestError(f"seed must be a whole number, got {self.seed!r}.")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0.0


Priority = Literal["interactive", "batch"]


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, as token ids. With `ignore_eos` the model's own end of a text ends nothing.

    An answer ends with a token of `stop_ids`, and with the token that completes one of `stop_strings` in its text
    (`skote.runtime.stops`), whatever `ignore_eos` says; without any of these it has exactly `max_new_tokens` tokens.
    A `priority` "batch" lets interactive requests go before, in a replica's queue. Only requests of one `cache_salt`
    share what an engine keeps of earlier prompts.
    """

    request_id: str
    input_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    ignore_eos: bool = False
    priority: Priority = "interactive"
    cache_salt: str = ""
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.input_ids:
            raise RequestError(f"Request {self.request_id!r} has an empty prompt: give it at least one token.")
        if not is_whole(self.max_new_tokens) or self.max_new_tokens < 1:
            raise RequestError(f"max_new_tokens must be a whole number of at least 1, got {self.max_new_tokens!r}.")
        if self.priority not in get_args(Priority):
            raise RequestError(f"priority must be one of {', '.join(get_args(Priority))}, got {self.priority!r}.")
        if not isinstance(self.cache_salt, str):
            raise RequestError(f"cache_salt must be text, got {self.cache_salt!r}.")
        if not isinstance(self.stop_ids, tuple) or not all(is_whole(each) and each >= 0 for each in self.stop_ids):
            raise RequestError(f"stop_ids must be a tuple of token ids, 0 or more, got {self.stop_ids!r}.")
        if not isinstance(self.stop_strings, tuple) or not all(
            isinstance(each, str) and each for each in self.stop_strings
        ):
            raise RequestError(f"stop_strings must be a tuple of texts that are not empty, got {self.stop_strings!r}.")

    @property
    def may_stop(self) -> bool:
        """Whether it has stop ids or stop strings."""
        return bool(self.stop_ids or self.stop_strings)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens that became available to the host together, at `t_ns` (`time.monotonic_ns`)."""

    t_ns: int
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Completion:
    """What became of a request. Stamps are `time.monotonic_ns`; `chunks` were stamped in the replica's process."""

    request_id: str
    input_tokens: int
    output_ids: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    dispatched_ns: int
    admitted_ns: int | None
    end_ns: int
    status: Literal["ok", "error", "cancelled"]
    finish_reason: Literal["stop", "length"] | None = None
    error: str | None = None
    replica: int = 0
    device: str = "cpu"
    cached_tokens: int | None = None  # None: the engine does not count them
    untouched: bool = False  # an error: its replica ended before an engine had begun it, so that another may take it


def device_parts(device: str) -> list[str]:
    """The devices of a replica: of most their one, of "cuda:0+cuda:1", over which one model is dealt out, both."""
    return device.split("+")


UNKNOWN_ID = -1
"""Stands for a token that was generated and whose id nobody told: a server's that streams text alone.

Only an engine whose `describe` has scores false may emit it; its `answer(request)` then is the text of its answer."""

Emit = Callable[[int, Sequence[int]], None]
"""`emit(row, token_ids)`: new tokens of one row of a batch, called when the host holds them."""

RowEnded = Callable[[int, Completion], None]
"""`ended(row, completion)`: what became of one row of a launch, before all of its rows have ended."""

FinishReason = Literal["stop", "length"]


class Engine(Protocol):
    """One model on one device. Speaks token ids; text and time live outside.

    A class that implements it is built as `Engine(local_dir=..., device=..., dtype=..., threads=..., random_seed=...,
    **options)`, loads in its constructor, and raises `SkoteError`s with a sentence each.
    """

    def generate(self, requests: Sequence[Request], emit: Emit) -> list[FinishReason]:
        """Run `requests` as one batch, calling `emit` as tokens arrive; the reason why each row ended, in order."""

    def score(self, request: Request, forced_ids: Sequence[int]) -> NDArray[np.float32]:
        """Logits `[len(forced_ids), vocab]` with `forced_ids` fed one by one through the very path that is timed.

        Row i is what the engine would have chosen token i from, after the prompt and `forced_ids[:i]`.
        """

    def describe(self) -> dict[str, Any]:
        """What runs, as JSON values. All keys may be missing; these are printed and reported:

        tier (number or null) and tier_reason (sentence), weights_fingerprint (`skote.model.fingerprint.fingerprint`),
        parameters (a number; 0 where there is no model), compile_s (seconds or null), notes (a sentence for each slow
        path that runs), paths (op -> path -> calls), speculative (true where one reading of the weights may give
        several tokens), scores (false where `score` can only refuse), caveats (a sentence for each thing that the
        figures of all requests so far leave open).
        """


class Desk(Protocol):
    """Where an engine that batches in flight takes requests and leaves what becomes of them, between its steps.

    A request is known by its key. `end` and `fail` are called once for each that was taken, one of them, and nothing
    for its key after that.
    """

    def arrivals(self) -> Sequence[tuple[int, Request]]:
        """Requests that have come since the last call, with their keys; it does not wait."""

    def on_arrival(self, wake: Callable[[], None] | None) -> None:
        """Have `wake` called, in another thread, when there is something to look at; None ends that.

        For engines that wait for others, and so have no steps to look between.
        """

    def is_cancelled(self, key: int) -> bool:
        """Whether nobody waits for the request any more; the engine then ends it, within a step."""

    def admit(self, key: int) -> None:
        """The request takes part in the batch from now on."""

    def cached(self, key: int, tokens: int) -> None:
        """So many tokens of its prompt were computed for earlier requests; said once, before it ends.

        An engine that keeps nothing of earlier prompts does not call it.
        """

    def keeps(self, tokens: int) -> None:
        """So many tokens of prompts are in store now for requests that begin with them; said by who keeps any."""

    def emit(self, key: int, token_ids: Sequence[int]) -> None:
        """New tokens of a request, called when the host holds them."""

    def end(self, key: int, reason: FinishReason | None) -> None:
        """The request has ended; None where it was cancelled."""

    def fail(self, key: int, error: SkoteError) -> None:
        """The request has failed, and no other one."""


@runtime_checkable
class BatchingEngine(Engine, Protocol):
    """An engine whose batch requests may join and leave between two steps."""

    @property
    def rows(self) -> int:
        """How many requests a step advances; where it is 1, `generate` serves as well."""

    def serve(self, desk: Desk) -> None:
        """Run what `desk` has and what comes meanwhile; returns when nothing is left."""


@runtime_checkable
class StoppingEngine(Engine, Protocol):
    """An engine that ends answers at their requests' stops by itself; those of all others a worker ends."""

    @property
    def ends_at_stops(self) -> bool:
        """True."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """How to build an engine in another process: the class's import path and its keyword arguments."""

    target: str
    options: dict[str, Any] = field(default_factory=dict)


class Dispatcher(Protocol):
    """Takes requests, and answers each with a future that always resolves to a completion, errors included."""

    def dispatch(self, request: Request) -> Future[Completion]:
        """Queue `request`; the future never raises: a failure is a completion with status "error"."""
