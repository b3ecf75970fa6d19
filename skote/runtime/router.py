"""Text in, text out, over replicas: one engine a device, each in its own process. Also the command `skote-router`."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
from collections.abc import Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from types import TracebackType
from typing import Protocol

from skote.flags import flags_for
from skote.runtime.cli import (
    NO_TEMPLATE,
    Parser,
    add_text_arguments,
    complain,
    positive,
    read_prompts,
    run_command,
    sampling_of,
)
from skote.runtime.dispatch import ReplicaDispatcher, ReplicaEvent
from skote.runtime.lane import ReplicaCounts
from skote.types import (
    Completion,
    EngineError,
    EngineSpec,
    ExitCode,
    Priority,
    Request,
    RequestError,
    Sampling,
    UsageError,
)

_PROG = "skote-router"
_SKOTERGY = "skote.runtime.engine.SkotergyEngine"


class Codec(Protocol):
    """A tokenizer, as far as a router needs one (`skote.runtime.text.TextCodec`)."""

    pad_id: int
    has_chat_template: bool

    def encode(self, text: str) -> tuple[int, ...]:
        """The prompt's token ids."""

    def encode_chat(self, text: str) -> tuple[int, ...]:
        """The token ids of `text` as a user's message in the model's chat template."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""


class Router:
    """Loads one replica a device and answers prompts, in the calling thread or through futures; safe among threads.

    Args:
        local_dir: a checkpoint directory with its tokenizer.
        devices: a count, "all", "cpu", "cuda:1" or a list; None takes what the machine has.
        dtype: fp32 (also where None), tf32, bf16 or fp16.
        policy: round_robin (also where None), shortest_queue, least_work or length_aware.
        max_concurrency_per_device: launches that a replica may hold at one time; 1 where None.
        microbatch_window_ms: how long a request may wait for others to share its launch; 0 is off.
        microbatch_max: the most requests of a launch.
        max_queue: the most requests that may wait for a replica; past it a request is refused. None is no limit.
        max_restarts: how often a replica whose process ended is started again.
        hang_s: seconds without a token or an answer after which a busy replica's process is ended; None waits for ever.
        engine: another engine than Skotergy's; its options add to, and win over, the common ones.
        codec: a tokenizer in place of the checkpoint's own.
        log_dir: a folder for one log a replica, replica-N.log; None lets them write to this process's stderr.
        backend: process, or ray, where replicas are Ray actors, on the machines of the Ray at `address` (HOST:PORT) or,
            where that is None, on a Ray that lives as long as this router.

    Raises:
        UsageError: an argument that does not fit; `CheckpointError` and `CapacityError` are the engine's own.
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
        engine: EngineSpec | None = None,
        codec: Codec | None = None,
        log_dir: Path | None = None,
        backend: str = "process",
        address: str | None = None,
    ) -> None:
        from skote.runtime.backend import backend_devices, open_backend
        from skote.runtime.text import load_tokenizer

        self.codec: Codec = load_tokenizer(local_dir) if codec is None else codec
        self._ids = itertools.count()
        dtype = dtype or "fp32"
        flags_for(dtype)
        names = backend_devices(backend, address, devices)
        target = engine or EngineSpec(_SKOTERGY, {"pad_id": self.codec.pad_id})
        with contextlib.ExitStack() as stack:
            home = stack.enter_context(open_backend(backend, address, names))
            threads = home.threads(names)
            replicas = []
            for index, device in enumerate(names):
                options = {
                    "local_dir": str(local_dir),
                    "device": home.device(device),
                    "dtype": dtype,
                    "threads": threads,
                    "random_seed": None,
                    **target.options,
                }
                log = None if log_dir is None else log_dir / f"replica-{index}.log"
                spec = EngineSpec(target.target, options)
                flags = flags_for(dtype, threads)
                replica = home.start(spec, names, index, flags=flags, log=log, hide_ids=False, hang_s=hang_s)
                replicas.append(stack.enter_context(replica))
            self._dispatcher = ReplicaDispatcher(
                replicas,
                policy or "round_robin",
                max_concurrency_per_device=1 if max_concurrency_per_device is None else max_concurrency_per_device,
                microbatch_window_ms=microbatch_window_ms,
                microbatch_max=microbatch_max,
                max_queue=max_queue,
                max_restarts=max_restarts,
            )
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
    ) -> str:
        """The answer to `text`, without it. Greedy, else with temperature 1; `sampling`, where given, wins over both.

        A `priority` "batch" lets interactive requests go before; it still gets its turn.

        Raises:
            RequestError: an empty prompt, `max_new_tokens` below 1, an unknown priority.
            EngineError: the request failed.
            UsageError: called in a callback of one of this router's futures, where it would wait for itself.
        """
        self._refuse_in_callback()
        return self._text(self._dispatch(text, max_new_tokens, greedy, sampling, priority).result())

    def submit_many(
        self,
        texts: Sequence[str],
        *,
        max_new_tokens: int,
        greedy: bool = True,
        sampling: Sampling | None = None,
        priority: Priority = "interactive",
    ) -> list[str]:
        """The answers to `texts`, in their order; all run to their end before the first failure is raised.

        Raises:
            RequestError: an empty prompt, `max_new_tokens` below 1, an unknown priority; prompts before it have run.
            EngineError: a request failed.
            UsageError: called in a callback of one of this router's futures, where it would wait for itself.
        """
        self._refuse_in_callback()
        futures: list[Future[Completion]] = []
        try:
            futures.extend(self._dispatch(text, max_new_tokens, greedy, sampling, priority) for text in texts)
        finally:
            wait(futures)
        return [self._text(future.result()) for future in futures]

    def submit_future(
        self,
        text: str,
        *,
        max_new_tokens: int,
        greedy: bool = True,
        sampling: Sampling | None = None,
        priority: Priority = "interactive",
    ) -> Future[str]:
        """As `submit`, with the answer, or the `EngineError`, in a future.

        Raises:
            RequestError: an empty prompt, `max_new_tokens` below 1, an unknown priority.
        """
        future: Future[str] = Future()
        future.set_running_or_notify_cancel()

        def answer(done: Future[Completion]) -> None:
            try:
                future.set_result(self._text(done.result()))
            except EngineError as error:
                future.set_exception(error)
            finally:
                if not future.done():  # the trace of what the tokenizer raised goes to the log of concurrent.futures
                    future.set_exception(EngineError(f"The answer to {text[:40]!r} could not be decoded."))

        self._dispatch(text, max_new_tokens, greedy, sampling, priority).add_done_callback(answer)
        return future

    def submit_ids(
        self,
        input_ids: tuple[int, ...],
        *,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        priority: Priority = "interactive",
    ) -> Future[Completion]:
        """Token ids in, a completion with its stamps out; a failure is a completion, and never raises.

        Raises:
            RequestError: an empty prompt, `max_new_tokens` below 1, an unknown priority.
        """
        request_id = f"router-{next(self._ids)}"
        return self._dispatcher.dispatch(
            Request(request_id, input_ids, max_new_tokens, sampling or Sampling(), priority=priority)
        )

    def cancel(self, future: Future[Completion]) -> bool:
        """Drop the request of a future that `submit_ids` gave; False where it was answered already.

        One that runs is left within a step, and its completion has the tokens until then.
        """
        return self._dispatcher.cancel(future)

    def close(self, grace_s: float = 5.0) -> None:
        """Cancel what is queued and end the replicas; what runs has `grace_s` seconds to finish. Twice is once.

        Raises:
            UsageError: called in a callback of one of this router's futures, where it would wait for itself.
        """
        self._refuse_in_callback()
        self._dispatcher.close()
        for replica in self._replicas:
            replica.close(grace_s)
        self._home.close()

    def _dispatch(
        self, text: str, max_new_tokens: int, greedy: bool, sampling: Sampling | None, priority: Priority
    ) -> Future[Completion]:
        if sampling is None and not greedy:
            sampling = Sampling(temperature=1.0)
        ids = self.codec.encode(text)
        return self.submit_ids(ids, max_new_tokens=max_new_tokens, sampling=sampling, priority=priority)

    def _refuse_in_callback(self) -> None:
        if any(replica.answering for replica in self._replicas):
            raise UsageError(
                "A callback of a router's future must not wait for that router: use submit_future there, and call "
                "submit, submit_many and close from another thread."
            )

    def _text(self, completion: Completion) -> str:
        if completion.status != "ok":
            raise EngineError(completion.error or f"Request {completion.request_id!r} was {completion.status}.")
        return self.codec.decode(completion.output_ids)


def main(argv: Sequence[str] | None = None) -> int:
    """The command `skote-router`: prompts from a file or standard input, answers to stdout in the same order.

    Returns the exit code: 0, 1 where a prompt failed, 4 for wrong usage, 130 after Ctrl-C.
    """
    return run_command(_PROG, lambda: _answer_prompts(_parser().parse_intermixed_args(argv)))


def _parser() -> Parser:
    parser = Parser(prog=_PROG, description="Answer many prompts, one a line, over replicas of one model.")
    add_text_arguments(parser, 64)
    parser.add_argument("file", metavar="FILE", nargs="?", default="-", help="prompts, one a line; - is stdin")
    parser.add_argument("--devices", type=_devices, help="a count, all, cpu, cuda:1, or cuda:0,cuda:2")
    parser.add_argument("--policy", help="round_robin (default), shortest_queue, least_work or length_aware")
    parser.add_argument("--max-concurrency", type=positive, metavar="N", help="launches in flight a device (1)")
    parser.add_argument("--backend", default="process", help="process (default) or ray")
    parser.add_argument("--address", metavar="HOST:PORT", help="of a Ray's head, instead of a Ray of its own")
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="one log a replica goes here, instead of stderr")
    parser.add_argument("--json", action="store_true", help="one JSON object a prompt instead of plain text")
    return parser


def _devices(value: str) -> int | str | list[str]:
    if value.isdecimal():
        return int(value)
    return value.split(",") if "," in value else value


def _answer_prompts(options: argparse.Namespace) -> int:
    sampling = sampling_of(options)
    prompts = read_prompts(options.file)
    failures = 0
    with Router(
        options.directory,
        options.devices,
        options.dtype,
        options.policy,
        options.max_concurrency,
        log_dir=options.log_dir,
        backend=options.backend,
        address=options.address,
    ) as router:
        if options.chat and not router.codec.has_chat_template:
            complain(_PROG, NO_TEMPLATE)
        encode = router.codec.encode_chat if options.chat else router.codec.encode
        answers = [_submit(router, encode(prompt), options.max_new_tokens, sampling) for prompt in prompts]
        for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            completion = answer.result() if isinstance(answer, Future) else None
            error = str(answer) if completion is None else completion.error
            failures += error is not None
            text = None if completion is None or error is not None else router.codec.decode(completion.output_ids)
            if error is not None:
                complain(_PROG, f"prompt {index + 1} of {len(prompts)} failed: {error}")
            if options.json:
                record = {"index": index, "prompt": prompt, "text": text, "error": error, **_figures(completion)}
                sys.stdout.write(json.dumps(record) + "\n")
            elif text is not None:
                ran = ", ".join(f"{name} {value:g}" for name, value in _figures(completion).items())
                sys.stderr.write(f"--- {index + 1}/{len(prompts)} ({ran})\n")
                sys.stderr.flush()
                sys.stdout.write(text + "\n")
            sys.stdout.flush()
    return ExitCode.FAILED if failures else ExitCode.DONE


def _submit(
    router: Router, input_ids: tuple[int, ...], max_new_tokens: int, sampling: Sampling
) -> Future[Completion] | RequestError:
    try:
        return router.submit_ids(input_ids, max_new_tokens=max_new_tokens, sampling=sampling)
    except RequestError as error:  # this prompt is at fault, the others are not
        return error


def _figures(completion: Completion | None) -> dict[str, float]:
    """Where a prompt ran and how long it took (e2el_ms of METRICS.md); nothing for one that gave no token."""
    if completion is None or not completion.chunks:
        return {}
    e2el_ms = (completion.chunks[-1].t_ns - completion.dispatched_ns) / 1e6
    return {
        "replica": completion.replica,
        "output_tokens": len(completion.output_ids),
        "e2el_ms": round(e2el_ms, 3),
    }


if __name__ == "__main__":
    sys.exit(main())
