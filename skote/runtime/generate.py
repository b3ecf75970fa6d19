"""Text from one model on one device, as it is generated. Also the command `skote-generate`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from skote.flags import applied, flags_for
from skote.model.facts import load_facts
from skote.model.source import model_directory
from skote.runtime.cli import (
    NO_TEMPLATE,
    Parser,
    add_text_arguments,
    complain,
    read_prompts,
    run_command,
    sampling_of,
)
from skote.runtime.devices import resolve_devices, threads_per_replica
from skote.runtime.engine import SkotergyEngine
from skote.runtime.family_table import families_text
from skote.runtime.stops import AnswerText
from skote.runtime.text import TextCodec, load_tokenizer
from skote.types import Engine, ExitCode, Request, Sampling, UsageError

_PROG = "skote-generate"


class _StoppedError(Exception):
    """Raised through an engine, out of its emit, at a stop string."""


class TextStream:
    """Token ids in, text out, held back while a character is incomplete or a stop string may begin."""

    def __init__(self, codec: TextCodec, write: Callable[[str], object], stop_strings: Sequence[str] = ()) -> None:
        self._text, self._write = AnswerText(codec.decode, stop_strings), write
        self._pieces: list[str] = []

    def run(self, engine: Engine, request: Request) -> str:
        """Write the answer of `engine` to `request` as it comes, up to a stop string; the whole text."""
        with suppress(_StoppedError):
            engine.generate([request], self.emit)
        return self.finish()

    def emit(self, _: int, ids: Sequence[int]) -> None:
        """Write what `ids` complete; an `Emit` for a batch of one."""
        text, _ = self._text.add(ids)
        self._put(text)
        if self._text.is_stopped:
            raise _StoppedError

    def finish(self) -> str:
        """Write what was held back; the whole text."""
        self._put(self._text.finish())
        return "".join(self._pieces)

    def _put(self, piece: str) -> None:
        self._write(piece)
        self._pieces.append(piece)


def generate(
    local_dir: str, prompt: str, *, max_new_tokens: int, greedy: bool = True, stop_strings: Sequence[str] = ()
) -> str:
    """The continuation of `prompt` by the model in `local_dir`, on this machine's first device, in fp32.

    It ends where the first of `stop_strings` begins.

    Where there is no such directory, and the name reads OWNER/NAME, it is the hub's model of that name.

    Loads the model anew at each call; `Router` keeps one. Not greedy is temperature 1.

    Raises:
        CheckpointError: the directory holds no model or tokenizer that can be loaded.
        RequestError: an empty prompt, or `max_new_tokens` below 1.
        CapacityError: the request does not fit the model's context.
    """
    local_dir = str(model_directory(local_dir))
    codec = load_tokenizer(local_dir)
    sampling = Sampling(0.0 if greedy else 1.0)
    request = Request("generate", codec.encode(prompt), max_new_tokens, sampling, stop_strings=tuple(stop_strings))
    device = resolve_devices(1)
    with applied(flags_for("fp32", threads_per_replica(device))):
        engine = SkotergyEngine(local_dir=local_dir, device=device[0], dtype="fp32", pad_id=codec.pad_id)
        return TextStream(codec, lambda _: None, stop_strings).run(engine, request)


def main(argv: Sequence[str] | None = None) -> int:
    """The command `skote-generate`: one prompt, or one a line from standard input; the answers stream to stdout.

    Returns the exit code: 0, 1 where the engine failed, 4 for wrong usage, 130 after Ctrl-C.
    """
    return run_command(_PROG, lambda: _stream(argv))


def _stream(argv: Sequence[str] | None) -> int:
    options = _parser().parse_args(argv)
    sampling = sampling_of(options)
    prompts = [options.prompt] if options.prompt is not None else read_prompts("-")
    devices = resolve_devices(options.device)
    if len(devices) > 1:
        raise UsageError(f"--device {options.device} names {len(devices)} devices; {_PROG} takes one.")
    dtype = options.dtype or "fp32"
    directory = str(model_directory(options.directory))
    load_facts(Path(directory))  # a directory that holds no model is to blame before its tokenizer
    codec = load_tokenizer(directory)
    if options.chat and not codec.has_chat_template:
        complain(_PROG, NO_TEMPLATE)
    encode = codec.encode_chat if options.chat else codec.encode
    requests = [
        Request(
            f"prompt-{index + 1}", encode(prompt), options.max_new_tokens, sampling, stop_strings=tuple(options.stop)
        )
        for index, prompt in enumerate(prompts)
    ]
    with applied(flags_for(dtype, threads_per_replica(devices))):
        engine = SkotergyEngine(local_dir=directory, device=devices[0], dtype=dtype, pad_id=codec.pad_id)
        described = engine.describe()
        if described["tier"] > 1:
            complain(_PROG, f"tier {described['tier']}: {described['tier_reason']}.")
        for number, request in enumerate(requests, 1):
            if len(requests) > 1:
                sys.stderr.write(f"--- {number}/{len(requests)}\n")
            TextStream(codec, _write, options.stop).run(engine, request)
            _write("\n")
    return ExitCode.DONE


class _Families(argparse.Action):
    """Prints the table of families and ends, whatever else is asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """As `argparse.Action`."""
        _write(families_text())
        parser.exit()


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _parser() -> Parser:
    parser = Parser(prog=_PROG, description="Generate text with one model on one device.")
    add_text_arguments(parser, 128)
    parser.add_argument("--prompt", metavar="TEXT", help="the prompt; without it, one a line from standard input")
    parser.add_argument("--families", action=_Families, help="print which model families run in which tier, and end")
    parser.add_argument("--device", default=None, help="cpu, cuda:1, ...; by default the machine's first")
    return parser


if __name__ == "__main__":
    sys.exit(main())
