"""`resume=DIR`: the command line becomes that of the sweep, or of the search, that it goes on with."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from skote.eval.sweep import SEARCH, Sweep, read_sweep
from skote.types import UsageError


def take_resume() -> Sweep | None:
    """The sweep or search that `resume=DIR` names: the command line becomes its own, with its directory.

    Raises:
        UsageError: there is none in DIR, or the rest of the command line is another one's.
    """
    values = [argument.partition("=")[2].strip("'\"") for argument in sys.argv[1:] if argument.startswith("resume=")]
    if not values or values[-1] in ("", "null"):
        return None
    sweep = read_sweep(Path(values[-1]))
    kind, place = ("search", "hydra.run.dir=") if sweep.name == SEARCH else ("sweep", "hydra.sweep.dir=")
    own = [argument for argument in sweep.arguments if not argument.startswith(place)]
    given = [argument for argument in sys.argv[1:] if not argument.startswith(("resume=", place))]
    if given and sorted(given) != sorted(own):
        raise UsageError(
            f"resume={values[-1]} goes on with a {kind} whose command was {shlex.join(own)!r}: repeat that, or give "
            "resume=DIR alone."
        )
    quoted = str(sweep.directory).replace("\\", "\\\\").replace("'", "\\'")
    sys.argv[1:] = [*own, f"{place}'{quoted}'"]
    return sweep
