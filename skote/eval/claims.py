"""Claims: a published statement with its pass rules as data, and what a run's figures make of them.

A claim's verdict is the worst of its rules':

- HOLDS: the figure, with its whole interval, is at the claimed one or beyond it, within the rule's tolerance.
- DIRECTION ONLY: the whole interval lies on the claimed side of no effect, but not within the tolerance.
- INCONCLUSIVE: the interval holds both no effect and the claimed one (of an equal figure: values within the tolerance
  and beyond it), or there is none, or the run is no evidence.
- NOT REPRODUCED: everything else; also where the candidate's output is not that of the baseline.

A claim without rules is PENDING where code for it is missing, NOT TESTABLE HERE where hardware is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from skote.eval.stats import MEDIAN, minimum_samples, percentile, percentile_interval
from skote.types import ExitCode, UsageError

HOLDS, DIRECTION_ONLY, NOT_REPRODUCED = "HOLDS", "DIRECTION ONLY", "NOT REPRODUCED"
INCONCLUSIVE, PENDING, NOT_TESTABLE = "INCONCLUSIVE", "PENDING", "NOT TESTABLE HERE"
VERDICTS = (NOT_REPRODUCED, INCONCLUSIVE, DIRECTION_ONLY, HOLDS, PENDING, NOT_TESTABLE)  # a rule's, the worst first
DIRECTIONS = ("lower", "higher", "equal")
EXIT_CODES = {HOLDS: ExitCode.DONE, DIRECTION_ONLY: ExitCode.FAILED, NOT_REPRODUCED: ExitCode.FAILED}
CONTRACTS = "contracts."


@dataclass
class RuleConfig:
    """One figure that a claim stands on.

    Attributes:
        name: what it is called beside the claim.
        figure: where it stands in metrics.json, such as deltas.e2el_ms.p50 or contracts.padding.rows_differing.
        claimed, unit: the claimed figure.
        direction: lower or higher (such figures are as good or better), or equal.
        tolerance: how far on the wrong side of `claimed` still holds, in the same unit.
        neutral: the figure of no effect, for lower and higher.
    """

    name: str = ""
    figure: str = ""
    claimed: float = 0.0
    unit: str = ""
    direction: str = "equal"
    tolerance: float = 0.0
    neutral: float = 0.0


@dataclass
class OpenPartConfig:
    """A part that no rule covers: `verdict` is PENDING or NOT TESTABLE HERE, and `missing` says what it takes."""

    part: str = ""
    verdict: str = PENDING
    missing: str = ""


@dataclass
class ClaimConfig:
    """A claim of an experiment file; an empty `id` is none.

    Attributes:
        id: E01 to E28, or AA, the harness against itself.
        statement, claimed, source: the claim, its figure as published, and where.
        subject: what is judged: Skotergy unless another engine is.
        rules: what must be so. Figures under `contracts.` come from `contracts`, the others from measured arms.
        contracts: names of `skote.contracts`' checks to run.
        open: parts that are not covered.
        needs: cpu, cuda where the run needs a CUDA device, two_cuda where it needs two of one host, none for no run.
        weights: the `weights_sha256` of the weights that are meant; only then may a run take them from `model.path`.
    """

    id: str = ""
    statement: str = ""
    claimed: str = ""
    source: str = ""
    subject: str = "Skotergy 2"
    rules: list[RuleConfig] = field(default_factory=list)
    contracts: list[str] = field(default_factory=list)
    open: list[OpenPartConfig] = field(default_factory=list)
    needs: str = "cpu"
    weights: str = ""

    @property
    def measures(self) -> bool:
        """Whether arms are measured: always where there is no claim."""
        return not self.id or any(not rule.figure.startswith(CONTRACTS) for rule in self.rules)


def check_claim(claim: ClaimConfig) -> None:
    """Check what the types cannot.

    Raises:
        UsageError: a rule or an open part that cannot be judged, or a claim with neither.
    """
    if claim.id and not claim.rules and not claim.open:
        raise UsageError(f"Claim {claim.id} has neither rules nor open parts; it needs one of them to be judged by.")
    for rule in claim.rules:
        if rule.direction not in DIRECTIONS:
            raise UsageError(
                f"claim.rules: {rule.name} has direction {rule.direction!r}; choose one of {', '.join(DIRECTIONS)}."
            )
        if rule.tolerance < 0:
            raise UsageError(f"claim.rules: {rule.name} has a tolerance below 0.")
    for part in claim.open:
        if part.verdict not in (PENDING, NOT_TESTABLE):
            raise UsageError(f"claim.open: {part.part} must be {PENDING} or {NOT_TESTABLE}, got {part.verdict!r}.")


def judge_claim(manifest: Mapping[str, Any], metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The entries "claim", "contracts" and "exit_code" of metrics.json, from the other ones and the manifest.

    Nothing where the run's configuration has no claim. "claim" says what was claimed, what was measured, and the
    verdict, of the whole and of each rule. A claim that holds adds no exit code; one that does not adds 1, and 3 where
    nothing could be said.
    """
    claim: Mapping[str, Any] = manifest["config"].get("claim") or {}
    if not claim.get("id"):
        return {}
    contracts = {
        check: {name: _repeated(value) if isinstance(value, list) else value for name, value in figures.items()}
        for check, figures in manifest["contracts"].items()
    }
    rules = [_judge_rule(rule, {**metrics, "contracts": contracts}) for rule in claim["rules"]]
    refused = _refusal(metrics) if rules else None
    if refused is not None:
        verdict, reason = refused
        rules = [rule | {"verdict": verdict, "reason": "The run's figures count for nothing."} for rule in rules]
    elif rules:
        worst = min(rules, key=lambda rule: VERDICTS.index(rule["verdict"]))
        verdict, reason = worst["verdict"], worst["reason"]
    else:
        verdict, reason = open_verdict(claim["open"])
    judged = {key: claim[key] for key in ("id", "statement", "claimed", "source", "subject", "open")}
    code = EXIT_CODES.get(verdict, ExitCode.INCONCLUSIVE)
    return {
        "claim": judged | {"verdict": verdict, "reason": reason, "rules": rules},
        "contracts": contracts,
        "exit_code": int(ExitCode.worst([metrics["exit_code"], code])),
    }


def open_verdict(parts: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Verdict and reason of a claim that has only open `parts`."""
    verdict = PENDING if any(part["verdict"] == PENDING for part in parts) else NOT_TESTABLE
    return verdict, " ".join(_open_text(part, verdict) for part in parts)


def claim_line(judged: Mapping[str, Any]) -> str:
    """The verdict for a terminal: "E01, Skotergy 2: HOLDS. p50: claimed -23.04 %, measured -62.1 (-64 to -60) %."."""
    figures = " ".join(
        f"{rule['name']}: claimed {rule['claimed_text']}, measured {rule['measured_text']}." for rule in judged["rules"]
    )
    open_parts = " ".join(_open_text(part, judged["verdict"]) for part in judged["open"])
    said = " ".join(text for text in (figures, open_parts) if text)
    return f"{judged['id']}, {judged['subject']}: {judged['verdict']}. {said}"


def _open_text(part: Mapping[str, Any], verdict: str) -> str:
    """A sentence of an open part, with its own verdict where that is not the claim's `verdict`."""
    name = part["part"]
    said = f"{name[:1].upper()}{name[1:]}" if part["verdict"] == verdict else f"{part['verdict']}: {name}"
    return f"{said}: {part['missing']}."


def _repeated(repeats: Sequence[float]) -> dict[str, Any]:
    """A figure that a check timed several times: the median with its distribution-free 95 % interval."""
    values = np.array(repeats, dtype=np.float64)
    interval = percentile_interval(values, MEDIAN)
    return {
        "value": percentile(values, MEDIAN),
        "interval": None if interval is None else [interval.low, interval.high],
        "n": len(repeats),
        "reason": None if interval else f"n={len(repeats)} < {minimum_samples(MEDIAN)}",
    }


def _refusal(metrics: Mapping[str, Any]) -> tuple[str, str] | None:
    """Why the run's figures say nothing about the claim, or refute it at once."""
    if metrics["status"] != "complete":
        return INCONCLUSIVE, f"The run is {metrics['status']}."
    invalid = [finding for finding in metrics["findings"] if finding["severity"] == "invalid"]
    for finding in invalid:
        if finding["code"] == "parity_failed":
            return (
                NOT_REPRODUCED,
                f"The speed of an output that is not the baseline's says nothing. {finding['sentence']}",
            )
    if invalid:
        return INCONCLUSIVE, f"The run is invalid. {invalid[0]['sentence']}"
    return None


def _judge_rule(rule: Mapping[str, Any], metrics: Mapping[str, Any]) -> dict[str, Any]:
    value, interval, refused = _figure(rule["figure"], metrics)
    sign = -1.0 if rule["direction"] == "lower" else 1.0
    claimed, tolerance, neutral = rule["claimed"], rule["tolerance"], rule["neutral"]
    judged = dict(rule) | {
        "claimed_text": f"{_AT[rule['direction']]}{_short(claimed)} {rule['unit']}".rstrip(),
        "measured": value,
        "measured_text": _measured(value, interval, rule["unit"]),
        "interval": interval,
    }
    if value is None or refused:
        return judged | {"verdict": INCONCLUSIVE, "reason": refused or f"{rule['name']} was not measured."}
    low, high = interval or (value, value)
    if rule["direction"] == "equal":
        least, most = claimed - tolerance, claimed + tolerance
        verdict = INCONCLUSIVE if low <= most and least <= high else NOT_REPRODUCED
        if least <= low and high <= most:
            verdict = HOLDS
        reason = f"{rule['name']} is {_short(value)}, claimed {_short(claimed)} \N{PLUS-MINUS SIGN}{_short(tolerance)}."
        return judged | {"verdict": verdict, "reason": reason}
    # Turned so that more is better: then `worst` is the end of the interval that a claim has to fear.
    worst, best = sorted((sign * low, sign * high))
    bound, zero = sign * claimed - tolerance, sign * neutral
    if worst >= bound:
        verdict, what = HOLDS, "reaches"
    elif worst > zero:
        verdict, what = DIRECTION_ONLY, "has the direction of, and does not reach,"
    elif best >= bound:
        verdict, what = INCONCLUSIVE, "may or may not reach"
    else:
        verdict, what = NOT_REPRODUCED, "does not reach"
    reason = f"{rule['name']} {what} {_short(sign * bound)} {rule['unit']}".rstrip() + "."
    return judged | {"verdict": verdict, "reason": reason}


_AT = {"lower": "at most ", "higher": "at least ", "equal": ""}


def _figure(path: str, metrics: Mapping[str, Any]) -> tuple[float | None, list[float] | None, str | None]:
    """Value, interval, and why there is none, at a dotted `path`; a difference is in percent, a yes is 1."""
    node: Any = metrics
    for key in path.split("."):
        node = node.get(key) if isinstance(node, Mapping) else None
    if isinstance(node, Mapping):
        value, interval = node.get("delta_pct", node.get("value")), node.get("interval_pct", node.get("interval"))
        if interval is None:
            return value, None, f"{path} has no interval ({node.get('reason')})."
        return value, list(interval), None
    return None if node is None else float(node), None, None


def _measured(value: float | None, interval: list[float] | None, unit: str) -> str:
    if value is None:
        return "nothing"
    bounds = "" if interval is None else f" ({_short(interval[0])} to {_short(interval[1])})"
    return f"{_short(value)}{bounds} {unit}".rstrip()


def _short(value: float) -> str:
    """Up to four significant digits."""
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
