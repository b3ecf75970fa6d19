"""The command `skote-router`: its arguments, and its prompts put through a router."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from skote.runtime.cli import (
    NO_TEMPLATE,
    Parser,
    add_text_arguments,
    complain,
    not_negative,
    positive,
    read_prompts,
    sampling_of,
)
from skote.runtime.policies import POLICIES
from skote.runtime.stop_strings import cut_text
from skote.types import Completion, EngineSpec, ExitCode, RecordError, RequestError, Sampling, UsageError

if TYPE_CHECKING:
    from skote.runtime.router import Router

PROG = "skote-router"
SKOTERGY = "skote.runtime.engine.SkotergyEngine"


def router_parser() -> Parser:
    """The command's arguments."""
    parser = Parser(prog=PROG, description="Answer many prompts, one a line, over replicas of one model.")
    add_text_arguments(parser, 64)
    parser.add_argument("file", metavar="FILE", nargs="?", default="-", help="prompts, one a line; - is stdin")
    parser.add_argument("--devices", type=parse_devices, help="a count, all, cpu, cuda:1, or cuda:0,cuda:2")
    parser.add_argument(
        "--policy", choices=POLICIES, default="round_robin", help="which replica takes a prompt (%(default)s)"
    )
    parser.add_argument(
        "--max-batch",
        type=positive,
        default=1,
        metavar="N",
        help="prompts that a GPU advances together, joining and leaving between two steps, at most 128 (%(default)s)",
    )
    parser.add_argument(
        "--max-concurrency", type=positive, metavar="N", help="launches in flight a device (default: as --max-batch)"
    )
    parser.add_argument(
        "--microbatch-window-ms",
        type=not_negative(float),
        default=0.0,
        metavar="MS",
        help="how long a prompt may wait for others to share its launch; 0 (default) is off",
    )
    parser.add_argument(
        "--microbatch-max",
        type=positive,
        default=8,
        metavar="N",
        help="prompts of such a launch at most (%(default)s); greedy ones alone share one",
    )
    parser.add_argument(
        "--max-queue",
        type=not_negative(int),
        metavar="N",
        help="prompts that may wait for a replica; all come at once, and those past it fail (default: no limit)",
    )
    parser.add_argument(
        "--max-restarts",
        type=not_negative(int),
        default=1,
        metavar="N",
        help="how often a replica whose process ended is started again (%(default)s)",
    )
    parser.add_argument(
        "--hang-s",
        type=float,
        metavar="S",
        help="seconds without a token after which a busy replica's process is ended (default: never)",
    )
    parser.add_argument(
        "--backend", choices=("process", "ray"), default="process", help="where replicas run (%(default)s)"
    )
    parser.add_argument("--address", metavar="HOST:PORT", help="of a Ray's head, instead of a Ray of its own")
    parser.add_argument(
        "--tpot-slo-ms",
        type=float,
        metavar="MS",
        help="milliseconds between two tokens of a prompt, for whose sake others wait (default: no limit)",
    )
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="one log a replica goes here, instead of stderr")
    parser.add_argument("--json", action="store_true", help="one JSON object a prompt instead of plain text")
    return parser


def parse_devices(value: str) -> int | str | list[str]:
    """Devices as text: a count, all, cpu, cuda:1, or cuda:0,cuda:2."""
    if value.isdecimal():
        return int(value)
    return value.split(",") if "," in value else value


def answer_prompts(options: argparse.Namespace, open_router: Callable[..., Router]) -> ExitCode:
    """Put the prompts through a router, and write the answers in their order; FAILED where a prompt failed.

    Raises:
        UsageError: there is no prompt, or an argument does not fit; further errors are `Router`'s.
        RecordError: the folder for logs cannot be made.
    """
    if options.address is not None and options.backend != "ray":
        raise UsageError(f"--address {options.address} is of a Ray: add --backend ray.")
    sampling = sampling_of(options)
    prompts = read_prompts(options.file)
    if options.log_dir is not None:
        try:
            options.log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as refused:
            reason = f"--log-dir {options.log_dir} cannot be made a folder ({refused.strerror})."
            raise RecordError(reason) from refused
    failures = 0
    with open_router(
        options.directory,
        options.devices,
        options.dtype,
        options.policy,
        options.max_batch if options.max_concurrency is None else options.max_concurrency,
        microbatch_window_ms=options.microbatch_window_ms,
        microbatch_max=options.microbatch_max,
        max_queue=options.max_queue,
        max_restarts=options.max_restarts,
        hang_s=options.hang_s,
        backend=options.backend,
        address=options.address,
        **({} if options.max_batch == 1 else {"engine": EngineSpec(SKOTERGY, {"max_batch": options.max_batch})}),
        tpot_slo_ms=options.tpot_slo_ms,
        log_dir=options.log_dir,
    ) as router:
        if options.chat and not router.codec.has_chat_template:
            complain(PROG, NO_TEMPLATE)
        encode = router.codec.encode_chat if options.chat else router.codec.encode
        answers = [_submit(router, encode(prompt), options, sampling) for prompt in prompts]
        for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            completion = answer.result() if isinstance(answer, Future) else None
            error = str(answer) if completion is None else completion.error
            failures += error is not None
            text = None
            if completion is not None and error is None:
                text = cut_text(router.codec.decode(completion.output_ids), options.stop)
            if error is not None:
                complain(PROG, f"prompt {index + 1} of {len(prompts)} failed: {error}")
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
    router: Router, input_ids: tuple[int, ...], options: argparse.Namespace, sampling: Sampling
) -> Future[Completion] | RequestError:
    try:
        return router.submit_ids(
            input_ids, max_new_tokens=options.max_new_tokens, sampling=sampling, stop_strings=options.stop
        )
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
