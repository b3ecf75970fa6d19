"""The door of `skote-eval` and `python run.py`: it is open to Ctrl-C while the rest is still being imported."""

from __future__ import annotations

import sys

from skote.types import ExitCode


def main() -> None:
    """As `skote.eval.runner.main`, whose imports take a second or two."""
    try:
        from skote.eval.runner import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
