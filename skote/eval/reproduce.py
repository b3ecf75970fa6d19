"""What `check=reproduce` compares: a run, and the earlier one whose configuration it repeated."""

from __future__ import annotations

import math
from typing import Any

from skote.eval.check import Check
from skote.eval.record import Run
from skote.eval.summary import PRIMARY, summarize
from skote.eval.wording import hardware, percent_interval

DETECTABLE = 0.10  # relative: two runs that would not show a change of the ratio by more than this show nothing
NOT_OF_OUTPUTS = {"pandas", "pyarrow", "hydra-core", "omegaconf"}  # packages that no token depends on


def compare_runs(run: Run, against: Run) -> list[Check]:
    """The checks of a reproduction: requests, weights and outputs are equal, and the intervals of the ratio overlap.

    Where they overlap because they are wide (`DETECTABLE`) the ratio is inconclusive.
    """
    return [
        _equal("workload", "requests", _workload(run), _workload(against)),
        _equal("weights", "weights", _weights(run), _weights(against)),
        _outputs(run, against),
        _overlap(run, against),
    ]


def _workload(run: Run) -> str | None:
    sha256: str = run.manifest["workload"]["sha256"]
    return sha256


def _weights(run: Run) -> str | None:
    sha256: str | None = run.manifest["model"]["weights_sha256"]
    return sha256


def _equal(name: str, words: str, now: str | None, then: str | None) -> Check:
    if now is None and then is None:
        return Check(name, "skipped", None, None, f"Neither run has a hash of its {words}.")
    if now == then:
        return Check(name, "passed", now, then, f"Both runs have the same {words}.")
    return Check(name, "failed", now, then, f"The runs have different {words}: {_short(now)}, and then {_short(then)}.")


def _short(sha256: str | None) -> str:
    return "none" if sha256 is None else f"SHA-256 {sha256[:12]}"


def _outputs(run: Run, against: Run) -> Check:
    """Of each arm and request; other hardware and other versions may round differently, so there it says nothing."""
    changed = sorted(_changed(_conditions(run), _conditions(against)))
    if changed:
        sentence = f"Outputs are compared under equal conditions, and these differ: {', '.join(changed)}."
        return Check("outputs", "skipped", None, None, sentence)
    now, then = _hashes(run), _hashes(against)
    differing = sorted(key for key in now | then if now.get(key) != then.get(key))
    count = f"{len(now.keys() | then.keys()) - len(differing)} of {len(now.keys() | then.keys())}"
    if not differing:
        return Check("outputs", "passed", count, "all", f"All {len(now)} outputs are the same, token for token.")
    sentence = f"{len(differing)} outputs differ, the first of them {differing[0]}."
    return Check("outputs", "failed", count, "all", sentence)


def _conditions(run: Run) -> dict[str, str]:
    machine = run.manifest["machine"]
    packages = {name: version for name, version in machine["packages"].items() if name not in NOT_OF_OUTPUTS}
    return {"hardware": hardware(machine), "dtype": run.manifest["dtype"], **packages}


def _changed(now: dict[str, str], then: dict[str, str]) -> list[str]:
    return [name for name in now.keys() | then.keys() if now.get(name) != then.get(name)]


def _hashes(run: Run) -> dict[str, str]:
    rows = run.requests[(run.requests["phase"] == "measure") & (run.requests["status"] == "ok")]
    keys = rows["arm"].astype(str) + " " + rows["request_id"].astype(str)
    return dict(zip(keys, rows["output_sha256"].astype(str), strict=True))


def _overlap(run: Run, against: Run) -> Check:
    now, then = (_primary(each) for each in (run, against))
    if now is None or then is None:
        return Check("ratio", "skipped", None, None, "One arm ran, so there is no ratio to compare.")
    intervals = now["interval_pct"], then["interval_pct"]
    if intervals[0] is None or intervals[1] is None:
        return Check("ratio", "inconclusive", None, None, "A run has no interval of its ratio: it had too few blocks.")
    bounds = [[math.log1p(bound / 100) for bound in interval] for interval in intervals]
    overlap = bounds[0][0] <= bounds[1][1] and bounds[1][0] <= bounds[0][1]
    # Half the width of [now's low - then's high, now's high - then's low]: that interval of the difference of the two
    # log ratios holds 0 exactly where the two overlap, so a change beyond it is what they show.
    visible = math.expm1(sum(high - low for low, high in bounds) / 2)
    shown = [percent_interval(each) for each in intervals]
    medians = f"The 95 % intervals of the median latency's difference {'overlap' if overlap else 'do not overlap'}"
    sentence = f"{medians}: {shown[0]} now, {shown[1]} then."
    if not overlap:
        return Check("ratio", "failed", shown[0], shown[1], sentence)
    if visible > DETECTABLE:
        sentence += (
            f" But only a change of the ratio by more than {100 * visible:.1f} % would have shown, and "
            f"{100 * DETECTABLE:g} % is the limit: repeat it on a quieter machine, or a run of more blocks."
        )
        return Check("ratio", "inconclusive", shown[0], shown[1], sentence)
    sentence += f" A change of the ratio by more than {100 * visible:.1f} % would have shown."
    return Check("ratio", "passed", shown[0], shown[1], sentence)


def _primary(run: Run) -> dict[str, Any] | None:
    deltas = summarize(run)["deltas"]
    primary: dict[str, Any] | None = deltas[PRIMARY[0]][PRIMARY[1]] if deltas else None
    return primary
