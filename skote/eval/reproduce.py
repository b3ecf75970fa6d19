"""What `check=reproduce` compares: a run, and the earlier one whose configuration it repeated."""

from __future__ import annotations

from typing import Any

from skote.eval.check import Check
from skote.eval.record import Run
from skote.eval.summary import PRIMARY, summarize
from skote.eval.wording import hardware, percent_interval

NOT_OF_OUTPUTS = {"pandas", "pyarrow", "hydra-core", "omegaconf"}  # packages that no token depends on


def compare_runs(run: Run, against: Run) -> list[Check]:
    """The checks of a reproduction: requests, weights and outputs are equal, and the intervals of the ratio overlap."""
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
    overlap = intervals[0][0] <= intervals[1][1] and intervals[1][0] <= intervals[0][1]
    shown = [percent_interval(each) for each in intervals]
    sentence = (
        f"The 95 % intervals of the median latency's difference {'overlap' if overlap else 'do not overlap'}: "
        f"{shown[0]} now, {shown[1]} then."
    )
    return Check("ratio", "passed" if overlap else "failed", shown[0], shown[1], sentence)


def _primary(run: Run) -> dict[str, Any] | None:
    deltas = summarize(run)["deltas"]
    primary: dict[str, Any] | None = deltas[PRIMARY[0]][PRIMARY[1]] if deltas else None
    return primary
