"""What the text commands share: arguments, prompts from a file or standard input, and how a command ends."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

from skote.types import ExitCode, Sampling, SkoteError, UsageError

_Number = TypeVar("_Number", int, float)
_KINDS = {int: "a whole number", float: "a number"}
NO_TEMPLATE = "The tokenizer has no chat template: the prompt is used as plain text."


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are `UsageError`s."""

    def error(self, message: str) -> NoReturn:
        """Raises UsageError: always."""
        raise UsageError(f"{message}; see {self.prog} --help.")


def add_text_arguments(parser: Parser, max_new_tokens: int) -> None:
    """The arguments that every text command has: the directory, the dtype, the limit, sampling, chat or raw."""
    parser.add_argument("directory", metavar="DIR", help="a checkpoint directory with its tokenizer")
    parser.add_argument("--dtype", help="fp32 (default), tf32, bf16 or fp16")
    parser.add_argument(
        "--max-new-tokens", type=positive, default=max_new_tokens, metavar="N", help="at most so many (%(default)s)"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="sample from the K likeliest tokens (0: all)")
    parser.add_argument("--top-p", type=float, default=1.0, help="and of these from the likeliest of this mass (1)")
    parser.add_argument("--seed", type=int, default=0, help="of sampling, the same for each prompt (0)")
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end an answer where this text begins in it; may be given several times",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--chat", action="store_true", help="send the prompt as a message in the model's chat template")
    form.add_argument("--raw", dest="chat", action="store_false", help="continue the prompt as it is (default)")


def sampling_of(options: argparse.Namespace) -> Sampling:
    """What the arguments of `add_text_arguments` say about sampling.

    Raises:
        RequestError: a value out of its range.
    """
    return Sampling(options.temperature, options.top_k, options.top_p, options.seed)


def positive(value: str) -> int:
    """A whole number of at least 1, for argparse."""
    if not value.isdecimal() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"{value!r} is not a whole number of at least 1")
    return int(value)


def not_negative(kind: type[_Number]) -> Callable[[str], _Number]:
    """A number of `kind`, 0 or more, for argparse."""

    def parse(value: str) -> _Number:
        try:
            number = kind(value)
        except ValueError:
            number = None
        if number is None or not 0 <= number < math.inf:
            raise argparse.ArgumentTypeError(f"{value!r} is not {_KINDS[kind]}, 0 or more")
        return number

    return parse


def read_prompts(file: str) -> list[str]:
    """The lines of `file`, or of standard input where it is "-"; empty ones are left out.

    Raises:
        UsageError: the file cannot be read, is not UTF-8, or holds no prompt.
    """
    try:
        content = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"The prompts' file {file} cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"The prompts ({file}) are not UTF-8 text: {error.reason}.") from error
    prompts = [line.removesuffix("\r") for line in content.split("\n") if line.strip()]
    if not prompts:
        raise UsageError("There is no prompt: give one a line, in a file or on standard input.")
    return prompts


def complain(prog: str, sentence: str) -> None:
    """One sentence to stderr, with the command's name in front."""
    sys.stderr.write(f"{prog}: {sentence}\n")


def run_command(prog: str, body: Callable[[], int]) -> int:
    """Run a command's `body`; its errors become a sentence on stderr and an exit code."""
    try:
        return body()
    except SkoteError as error:
        complain(prog, str(error))
        return error.exit_code
    except KeyboardInterrupt:
        complain(prog, "interrupted.")
        return ExitCode.INTERRUPTED
    except BrokenPipeError:  # the reader of our stdout has enough; the flush at exit must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.FAILED
