"""Run the experiments that this machine can judge, one after another, and render the ledger: `make claims`.

Without names, every experiment whose claim needs no more than a CPU; with names, those. Runs go to outputs/claims/NAME,
and what a report needs to be rebuilt is copied to reports/claims/NAME, unless overrides made it another run than the
file's: the ledger would leave it out. A claim that does not hold is a result, not a failure: the exit code is 1 only
where a run could not be made.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from skote.eval.experiment import deviation
from skote.eval.ledger import claims_command, read_claims
from skote.types import ExitCode, SkoteError

EXPERIMENTS, OUTPUTS, REPORTS = Path("experiments"), Path("outputs/claims"), Path("reports/claims")
KEPT = ("manifest.json", "metrics.json", "report.html", "*.parquet")
JUDGED = (ExitCode.DONE, ExitCode.FAILED, ExitCode.INVALID, ExitCode.INCONCLUSIVE)


def main(argv: Sequence[str] | None = None) -> int:
    """0 where every experiment came to a verdict, else 1; 4 for a name that there is none of."""
    parser = argparse.ArgumentParser(prog="tools/claims.py", description=__doc__)
    parser.add_argument("names", metavar="NAME", nargs="*", help="experiments, such as E05 (default: all a CPU can do)")
    parser.add_argument(
        "--needs", default="cpu", choices=["cpu", "cuda", "two_cuda"], help="which ones, where none is named"
    )
    parser.add_argument("--override", metavar="KEY=VALUE", action="append", default=[], help="added to each run")
    arguments = parser.parse_args(argv)
    claims = read_claims(EXPERIMENTS)
    unknown = [name for name in arguments.names if name not in claims]
    if unknown:
        print(f"There is no experiment {unknown[0]}; there are {', '.join(claims)}.", file=sys.stderr)
        return ExitCode.USAGE
    names = arguments.names or [name for name, claim in claims.items() if claim["needs"] == arguments.needs]
    failed = [name for name in names if not _run(name, arguments.override)]
    claims_command([])
    for name in failed:
        print(f"{name} came to no verdict.", file=sys.stderr)
    return ExitCode.FAILED if failed else ExitCode.DONE


def _run(name: str, overrides: Sequence[str]) -> bool:
    """Run one experiment and keep its report; whether it came to a verdict."""
    directory = OUTPUTS / name
    shutil.rmtree(directory, ignore_errors=True)
    print(f"--- {name}", flush=True)
    command = [sys.executable, "run.py", "-cd", str(EXPERIMENTS), "-cn", name, f"hydra.run.dir={directory}", *overrides]
    code = subprocess.run(command, check=False).returncode
    metrics = directory / "metrics.json"
    if code not in JUDGED or not metrics.is_file() or '"status": "complete"' not in metrics.read_text(encoding="utf-8"):
        return False
    manifest = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))
    differs = deviation(EXPERIMENTS / f"{name}.yaml", manifest)
    if differs is not None:
        print(f"{name} ran, and is not kept for the ledger: {differs}", flush=True)
        return True
    kept = REPORTS / name
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    for pattern in KEPT:
        for path in directory.glob(pattern):
            shutil.copy2(path, kept)
    return True


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SkoteError as error:
        sys.exit(f"{error}")
