"""The published package's own environment: a folder of packages that only its subprocess looks into.

    python -m skote.engines.published_environment [DIR]

makes it with pip. torch is this interpreter's own, so that both arms compute with the same build.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import platformdirs

from skote.types import ExitCode, RecordError, SkoteError, UsageError

VERSION = "1.0.1"
WITH_DEPENDENCIES = (f"skotergy=={VERSION}", "transformers==4.57.6")
ALONE = ("accelerate==1.15.0",)
"""What Transformers needs to place a model on a device; pip would fetch another torch for it."""


def default_environment() -> Path:
    """Where the environment lies unless the configuration says otherwise."""
    return Path(platformdirs.user_cache_dir("skotergy")) / f"published-{VERSION}"


def find_environment(directory: Path) -> Path:
    """`directory`, made absolute, where it holds the published package and a Transformers that it accepts.

    Raises:
        UsageError: it does not; the sentence says how to make it.
    """
    for name in (f"skotergy-{VERSION}.dist-info", "transformers", "accelerate"):
        if not (directory / name).is_dir():
            raise UsageError(
                f"{directory} has no {name.removesuffix('.dist-info')}: make the environment of the published package "
                "with `python -m skote.engines.published_environment`, or name one with engine.environment=DIR."
            )
    return directory.resolve()


def make_environment(directory: Path) -> None:
    """Fill `directory` from the package index.

    Raises:
        RecordError: pip could not; its last line is in the sentence.
    """
    for packages, options in ((WITH_DEPENDENCIES, ()), (ALONE, ("--no-deps",))):
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(directory), *options, *packages]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise RecordError(f"pip could not install {' '.join(packages)} into {directory}: {last}")


def main(argv: Sequence[str] | None = None) -> None:
    """`python -m skote.engines.published_environment [DIR]`: make the environment unless it is there."""
    parser = argparse.ArgumentParser(prog="skote.engines.published_environment", description=main.__doc__)
    parser.add_argument("directory", metavar="DIR", nargs="?", type=Path, default=default_environment())
    directory: Path = parser.parse_args(argv).directory
    try:
        find_environment(directory)
    except UsageError:
        try:
            make_environment(directory)
        except SkoteError as error:
            sys.exit(f"{error}")
    print(directory)  # noqa: T201
    sys.exit(ExitCode.DONE)


if __name__ == "__main__":
    main()
