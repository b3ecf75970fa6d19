"""The command `skote-serve`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from skote.runtime.cli import run_command
from skote.types import ExitCode, UsageError

PROG = "skote-serve"


def main(argv: Sequence[str] | None = None) -> int:
    """Serve a model until SIGTERM or Ctrl-C.

    Returns the exit code: 0 after SIGTERM, 1 where the engine failed, 4 for wrong usage, 130 after Ctrl-C.
    """
    return run_command(PROG, lambda: _serve(sys.argv[1:] if argv is None else argv))


def _serve(arguments: Sequence[str]) -> int:
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as missing:
        raise UsageError(f"{PROG} needs the package {missing.name}: pip install 'skotergy[serve]'.") from missing
    from skote.serve.settings import keys, parse_settings

    if {"-h", "--help"} & set(arguments):
        rows = [f"  {f'{key}={default}':<36} {what}" for key, default, what in keys()]
        sys.stdout.write("\n".join([f"usage: {PROG} model.path=DIR [KEY=VALUE ...]", "", *rows, ""]))
        return ExitCode.DONE
    settings = parse_settings(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    from skote.serve.serving import serve

    return serve(settings)


if __name__ == "__main__":
    sys.exit(main())
