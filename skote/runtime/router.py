"""Text in, text out, over replicas: one engine a device, each in its own process. Also the command `skote-router`."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import operator
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from skote.flags import flags_for
from skote.runtime.answers import Answer
from skote.runtime.cli import run_command
from skote.runtime.codec import Codec
from skote.runtime.dispatch import ReplicaDispatcher
from skote.runtime.dispatch_options import DispatchOptions
from skote.runtime.lane import ReplicaCounts, ReplicaLoad
from skote.runtime.replica import check_hang_s
from skote.runtime.revivals import ReplicaEvent
from skote.runtime.router_command import PROG, SKOTERGY, answer_prompts, router_parser
from skote.runtime.stop_strings import cut_text
from skote.types import (
    Completion,
    EngineError,
    EngineSpec,
    Priority,
    Request,
    RequestError,
    Sampling,
    UsageError,
)


class _TextAnswer(Answer[str]):
    """The text of a completion; knows its future, by which the dispatcher can cancel it."""

    def __init__(self, completion: Future[Completion]) -> None:
        super().__init__()
        self.completion = completion


class Router:
    """Loads one replica a device and answers prompts, in the calling thread or through futures; safe among threads.

    Args:
        local_dir: a checkpoint directory with its tokenizer.
        devices: a count, "all", "cpu", "cuda:1" or a list; None takes what the machine has.
        dtype: fp32 (also where None), tf32, bf16 or fp16.
        policy: round_robin (also where None), shortest_queue, least_work, length_aware or prefix_aware.
        max_concurrency_per_device: launches that a replica may hold at one time; 1 where None.
        microbatch_window_ms: how long a request may wait for others to share its launch; 0 is off.
        microbatch_max: the most requests of a launch.
        max_queue: the most requests that may wait for a replica; past it a request is refused. None is no limit.
        max_restarts: how often a replica whose process ended is started again.
        hang_s: seconds without a token or an answer after which a busy replica's process is ended; None waits for ever.
        tpot_slo_ms: milliseconds between two tokens of a request: a replica is given as many requests at a time as keep
            it, of `max_concurrency_per_device` at most; None is no limit.
        engine: another engine than Skotergy's, or its options, such as `max_batch`; they add to, and win over, the
            common ones.
        codec: a tokenizer in place of the checkpoint's own.
        log_dir: a folder for one log a replica, replica-N.log; None lets them write to this process's stderr.
        backend: process, or ray, where replicas are Ray actors, on the machines of the Ray at `address` (HOST:PORT) or,
            where that is None, on a Ray that lives as long as this router.

    Callbacks of its futures run in one thread of its own: one that takes long holds up later answers, and no replica.

    Raises:
        UsageError: an argument of the wrong type, or that does not fit; `CheckpointError` and `CapacityError` are the
            engine's own.
        ReplicaError: a replica's process did not come up.
    """

    def __init__(
        self,
        local_dir: str | Path,
        devices: int | str | Sequence[str] | None = None,
        dtype: str | None = None,
        policy: str | None = None,
        max_concurrency_per_device: int | None = None,
        *,
        microbatch_window_ms: float = 0.0,
        microbatch_max: int = 8,
        max_queue: int | None = None,
        max_restarts: int = 1,
        hang_s: float | None = None,
        tpot_slo_ms: float | None = None,
        engine: EngineSpec | None = None,
        codec: Codec | None = None,
        log_dir: str | Path | None = None,
        backend: str = "process",
        address: str | None = None,
    ) -> None:
        from skote.runtime.backend import backend_devices, open_backend
        from skote.runtime.text import load_tokenizer

        _check(UsageError, "local_dir", local_dir, (str, Path), "a directory's path")
        _check(UsageError, "dtype", dtype, (str, type(None)), "text, or None")
        _check(UsageError, "engine", engine, (EngineSpec, type(None)), "an EngineSpec, or None")
        _check(UsageError, "log_dir", log_dir, (str, Path, type(None)), "a folder's path, or None")
        check_hang_s(hang_s)
        options = DispatchOptions(
            "round_robin" if policy is None else policy,
            1 if max_concurrency_per_device is None else max_concurrency_per_device,
            microbatch_window_ms,
            microbatch_max,
            max_queue,
            max_restarts,
            tpot_slo_ms,
        )
        self.codec: Codec = load_tokenizer(local_dir) if codec is None else codec
        self._ids = itertools.count()
        dtype = "fp32" if dtype is None else dtype
        flags_for(dtype)
        names = backend_devices(backend, address, devices)
        target = engine or EngineSpec(SKOTERGY, {})
        padding = {"pad_id": self.codec.pad_id} if target.target == SKOTERGY else {}
        with contextlib.ExitStack() as stack:
            home = stack.enter_context(open_backend(backend, address, names))
            threads = home.threads(names)
            replicas = []
            for index, device in enumerate(names):
                keywords = {
                    "local_dir": str(local_dir),
                    "device": home.device(device),
                    "dtype": dtype,
                    "threads": threads,
                    "random_seed": None,
                    **padding,
                    **target.options,
                }
                log = None if log_dir is None else Path(log_dir) / f"replica-{index}.log"
                spec = EngineSpec(target.target, keywords)
                flags = flags_for(dtype, threads)
                replica = home.start(spec, names, index, flags=flags, log=log, hide_ids=False, hang_s=hang_s)
                replicas.append(stack.enter_context(replica))
            self._dispatcher = ReplicaDispatcher(replicas, **dataclasses.asdict(options))
            stack.enter_context(self._dispatcher)
            for replica in replicas:
                replica.wait_ready()
            self._replicas = replicas
            self._home = stack.pop_all()  # all is well: from here on `close` does it

    def __enter__(self) -> Router:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(grace_s=5.0 if error is None else 0.0)

    @property
    def counts(self) -> list[ReplicaCounts]:
        """What each replica has had to do so far."""
        return self._dispatcher.counts

    @property
    def loads(self) -> list[ReplicaLoad]:
        """What each replica has to do now."""
        return self._dispatcher.loads

    @property
    def events(self) -> list[ReplicaEvent]:
        """Replicas that ended and came back so far."""
        return self._dispatcher.events

    def submit(
        self,
        text: str,
        *,
        max_new_tokens: int,
        greedy: bool = True,
        sampling: Sampling | None = None,
        priority: Priority = "interactive",
        stop_strings: Sequence[str] = (),
    ) -> str:
        """The answer to `text`, without it. Greedy, else with temperature 1; `sampling`, where given, wins over both.

        A `priority` "batch" lets interactive requests go before; it still gets its turn. The answer ends where the
        first of `stop_strings` begins.

        Raises:
            RequestError: an empty prompt, `max_new_tokens` below 1, an unknown priority.
            EngineError: the request failed.
            UsageError: called in a callback of one of this router's futures, where it would wait for itself.
        """
        self._refuse_in_callback()
        completion = self._dispatch(text, max_new_tokens, greedy, sampling, priority, stop_strings)
        return self._text(completion.result(), stop_strings)

    def submit_many(
        self,
        texts: Sequence[str],
        *,
        max_new_tokens: int,
        greedy: bool = True,
        sampling: Sampling | None = None,
        priority: Priority = "interactive",
        stop_strings: Sequence[str] = (),
    ) -> list[str]:
        """The answers to `texts`, in their order; all run to their end before the first failure is raised.

        Raises:
            RequestError: an empty prompt, `max_new_tokens` below 1, an unknown priority; prompts before it have run.
            EngineError: a request failed.
            UsageError: called in a callback of one of this router's futures, where it would wait for itself.
        """
        self._refuse_in_callback()
        _check(RequestError, "texts", texts, Iterable, "a list of prompts")
        futures: list[Future[Completion]] = []
        try:
            futures.extend(
                self._dispatch(text, max_new_tokens, greedy, sampling, priority, stop_strings) for text in texts
            )
        finally:
            wait(futures)
        return [self._text(future.result(), stop_strings) for future in futures]

    def submit_future(
        self,
        text: str,
        *,
        max_new_tokens: int,
        greedy: bool = True,
        sampling: Sampling | None = None,
        priority: Priority = "interactive",
        stop_strings: Sequence[str] = (),
    ) -> Future[str]:
        """As `submit`, with the answer, or the `EngineError`, in a future.

        Raises:
            RequestError: an empty prompt, `max_new_tokens` below 1, an unknown priority.
        """
        completion = self._dispatch(text, max_new_tokens, greedy, sampling, priority, stop_strings)
        future = _TextAnswer(completion)

        def answer(done: Future[Completion]) -> None:
            try:
                future.set_result(self._text(done.result(), stop_strings))
            except EngineError as error:
                future.set_exception(error)
            finally:
                if not future.done():  # the trace of what the tokenizer raised goes to the log of concurrent.futures
                    future.set_exception(EngineError(f"The answer to {text[:40]!r} could not be decoded."))

        completion.add_done_callback(answer)
        return future

    def submit_ids(
        self,
        input_ids: tuple[int, ...],
        *,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        priority: Priority = "interactive",
        ignore_eos: bool = False,
        stop_ids: Sequence[int] = (),
        stop_strings: Sequence[str] = (),
        hear: Callable[[Sequence[int]], None] | None = None,
    ) -> Future[Completion]:
        """Token ids in, a completion with its stamps out; a failure is a completion, and never raises.

        With `ignore_eos` exactly `max_new_tokens` tokens come, or fewer where one of `stop_ids`, or the one that
        completes one of `stop_strings` in the answer's text, is the last. `hear` is told all of them as they come,
        before the future resolves, in a thread of the replica's that it must not hold up; from a Ray they come with the
        answer.

        Raises:
            RequestError: an empty prompt, `max_new_tokens` below 1, an unknown priority.
        """
        try:
            ids = tuple(map(operator.index, input_ids))
        except TypeError:
            raise RequestError(f"input_ids must be whole numbers, got {str(input_ids)[:60]}.") from None
        _check(RequestError, "ignore_eos", ignore_eos, bool, "True or False")
        _check(RequestError, "hear", hear, (Callable, type(None)), "a function, or None")
        return self._dispatch_ids(
            ids,
            max_new_tokens,
            sampling,
            priority,
            ignore_eos=ignore_eos,
            stop_ids=stop_ids,
            stop_strings=stop_strings,
            hear=hear,
        )

    def describe(self) -> list[dict[str, Any]]:
        """What each replica's engine says of itself (`Engine.describe`), once it has nothing else to do.

        Raises:
            EngineError: a replica has ended, or its engine failed.
        """
        return [future.result() for future in [replica.call("describe") for replica in self._replicas]]

    def cancel(self, future: Future[Completion] | Future[str]) -> bool:
        """Drop the request of a future that `submit_ids` or `submit_future` gave; False where it was answered already.

        One that runs is left within a step. Its completion has the tokens until then, its text future an `EngineError`.
        """
        return self._dispatcher.cancel(future.completion if isinstance(future, _TextAnswer) else future)

    def withdraw(self, future: Future[Completion]) -> bool:
        """`cancel` a request of `submit_ids` that still waits for a replica; False where one has taken it."""
        return self._dispatcher.withdraw(future)

    def close(self, grace_s: float = 5.0) -> None:
        """Cancel what is queued and end the replicas; what runs has `grace_s` seconds to finish. Twice is once.

        Raises:
            UsageError: called in a callback of one of this router's futures, where it would wait for itself.
        """
        self._refuse_in_callback()
        self._dispatcher.close()
        deadline = time.monotonic() + grace_s
        for replica in self._replicas:  # all at once: the last one has no more time than the first
            replica.stop()
        for replica in self._replicas:
            replica.close(max(0.0, deadline - time.monotonic()))
        self._dispatcher.close()  # now that nothing runs, it waits for the last callbacks
        self._home.close()

    def _dispatch(
        self,
        text: str,
        max_new_tokens: int,
        greedy: bool,
        sampling: Sampling | None,
        priority: Priority,
        stop_strings: Sequence[str],
    ) -> Future[Completion]:
        _check(RequestError, "A prompt", text, str, "text")
        _check(RequestError, "greedy", greedy, bool, "True or False")
        if sampling is None and not greedy:
            sampling = Sampling(temperature=1.0)
        ids = self.codec.encode(text)
        return self._dispatch_ids(ids, max_new_tokens, sampling, priority, stop_strings=stop_strings)

    def _dispatch_ids(
        self,
        input_ids: tuple[int, ...],
        max_new_tokens: int,
        sampling: Sampling | None,
        priority: Priority,
        *,
        ignore_eos: bool = False,
        stop_ids: Sequence[int] = (),
        stop_strings: Sequence[str] = (),
        hear: Callable[[Sequence[int]], None] | None = None,
    ) -> Future[Completion]:
        _check(RequestError, "sampling", sampling, (Sampling, type(None)), "a Sampling, or None")
        if isinstance(stop_strings, str):
            raise RequestError(f"stop_strings must be a list of texts, got the text {stop_strings!r}.")
        request_id = f"router-{next(self._ids)}"
        request = Request(
            request_id,
            input_ids,
            max_new_tokens,
            sampling or Sampling(),
            ignore_eos,
            priority,
            stop_ids=tuple(stop_ids),
            stop_strings=tuple(stop_strings),
        )
        return self._dispatcher.dispatch(request, hear)

    def _refuse_in_callback(self) -> None:
        if self._dispatcher.in_callback:
            raise UsageError(
                "A callback of a router's future must not wait for that router: use submit_future there, and call "
                "submit, submit_many and close from another thread."
            )

    def _text(self, completion: Completion, stop_strings: Sequence[str]) -> str:
        if completion.status != "ok":
            raise EngineError(completion.error or f"Request {completion.request_id!r} was {completion.status}.")
        return cut_text(self.codec.decode(completion.output_ids), stop_strings)


def _check(error: type[UsageError], name: str, value: object, kinds: Any, what: str) -> None:  # noqa: ANN401 - of isinstance
    if not isinstance(value, kinds):
        raise error(f"{name} must be {what}, got {value!r}.")


def main(argv: Sequence[str] | None = None) -> int:
    """The command `skote-router`: prompts from a file or standard input, answers to stdout in the same order.

    Returns the exit code: 0, 1 where a prompt failed, 4 for wrong usage, 130 after Ctrl-C.
    """
    return run_command(PROG, lambda: answer_prompts(router_parser().parse_intermixed_args(argv), Router))


if __name__ == "__main__":
    sys.exit(main())
