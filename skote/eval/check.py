"""What a run is held against when somebody asks: limits, each with the figure, the outcome and a sentence.

Limits on a ratio are judged by its 95 % interval: it passes where the whole interval keeps the limit, fails where the
whole interval breaks it, and is inconclusive in between. Rates of one arm (`tok_s_min`, `error_rate_max`) are judged as
they stand, over the whole run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from skote.types import ExitCode, UsageError

CHECKS = ("none", "ci", "reproduce")
MEDIANS = (("e2el_ms", "end-to-end latency"), ("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"))
OF_TWO_ARMS = ("p50_delta_max", "ratio_to_baseline_max")

Outcome = Literal["passed", "failed", "inconclusive", "skipped"]
CODES = {"failed": ExitCode.FAILED, "inconclusive": ExitCode.INCONCLUSIVE}


@dataclass
class CheckConfig:
    """The options of `conf/check/*.yaml`; a limit that is None checks nothing.

    Attributes:
        name: none, ci (the limits below) or reproduce (the run in `against`).
        p50_delta_max: percent by which the candidate's e2el_ms p50 may lie above the baseline's.
        ratio_to_baseline_max: candidate / baseline that the p50 of e2el_ms, ttft_ms and tpot_ms may each reach.
        tok_s_min: output tokens a second of the candidate over all its passes, at least.
        error_rate_max: the share of an arm's requests that may fail.
        parity: the arms' outputs must have been compared, and agree.
    """

    name: str = "none"
    p50_delta_max: float | None = None
    ratio_to_baseline_max: float | None = None
    tok_s_min: float | None = None
    error_rate_max: float | None = None
    parity: bool = False


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was asked of a run: the figure, its limit, and what became of it in a sentence."""

    name: str
    outcome: Outcome
    observed: float | str | None
    limit: float | str | None
    sentence: str


def check_limits(config: CheckConfig, *, two_arms: bool) -> None:
    """Check the options before a run starts.

    Raises:
        UsageError: an unknown check, a limit out of its range, or one that needs the arm that does not run.
    """
    if config.name not in CHECKS:
        raise UsageError(f"check.name must be one of {', '.join(CHECKS)}, got {config.name!r}.")
    limits = {name: value for name, value in asdict(config).items() if name not in ("name", "parity")}
    if config.name != "ci" and (config.parity or any(value is not None for value in limits.values())):
        raise UsageError(f"The limits of check.* are judged with check=ci alone, and this run has check={config.name}.")
    if config.p50_delta_max is not None and not config.p50_delta_max > -100:
        raise UsageError(
            f"check.p50_delta_max is in percent and must be above -100, which is no time at all; got "
            f"{config.p50_delta_max}."
        )
    for name in ("ratio_to_baseline_max", "tok_s_min"):
        if limits[name] is not None and not limits[name] > 0:
            raise UsageError(f"check.{name} must be above 0, got {limits[name]}.")
    if config.error_rate_max is not None and not 0 <= config.error_rate_max <= 1:
        raise UsageError(f"check.error_rate_max is a share from 0 to 1, got {config.error_rate_max}.")
    if config.name == "ci" and not two_arms:
        needing = [name for name in OF_TWO_ARMS if limits[name] is not None] + ["parity"] * config.parity
        if needing:
            raise UsageError(
                "check=ci compares with the baseline arm, which this run does not have: drop compare=none, or turn off "
                f"{', '.join(f'check.{name}' for name in needing)} (null, parity=false)."
            )


def judge_checks(manifest: dict[str, Any], metrics: dict[str, Any]) -> dict[str, Any]:
    """The entries "checks" and "exit_code" of metrics.json, from the other ones and the manifest.

    The limits are those of the manifest's configuration; the outcome of `check=reproduce` is the manifest's own. An
    invalid or unfinished run keeps its code. Requests that failed are then a matter of `error_rate_max`, where that is
    set.
    """
    config: dict[str, Any] = manifest["config"].get("check") or {}
    checks = [Check(**each) for each in manifest.get("reproduction") or ()]
    if config.get("name") == "ci":
        checks += _ci_checks(config, metrics)
    code = ExitCode(metrics["exit_code"])
    tolerated = any(check.name == "error_rate_max" and check.outcome == "passed" for check in checks)
    if code == ExitCode.FAILED and tolerated and metrics["status"] == "complete":
        code = ExitCode.DONE
    return {
        "checks": [asdict(check) for check in checks],
        "exit_code": int(ExitCode.worst([code, *codes(checks)])),
    }


def codes(checks: Iterable[Check]) -> list[ExitCode]:
    """The exit code of each check: 0, 1 where it failed, 3 where it is inconclusive."""
    return [CODES.get(check.outcome, ExitCode.DONE) for check in checks]


def _ci_checks(limits: dict[str, Any], metrics: dict[str, Any]) -> Iterator[Check]:
    if limits["parity"]:
        yield _parity(metrics)
    if limits["error_rate_max"] is not None:
        yield _error_rate(metrics, limits["error_rate_max"])
    if limits["p50_delta_max"] is not None:
        percent = limits["p50_delta_max"]
        yield _ratio(metrics, "p50_delta_max", "e2el_ms", "end-to-end latency", percent, f"{percent:+g} %")
    if limits["ratio_to_baseline_max"] is not None:
        ratio = limits["ratio_to_baseline_max"]
        for metric, words in MEDIANS:
            name = f"ratio_to_baseline_max.{metric.removesuffix('_ms')}"
            yield _ratio(metrics, name, metric, words, 100 * (ratio - 1), f"{ratio:g} x")
    if limits["tok_s_min"] is not None:
        yield _throughput(metrics, limits["tok_s_min"])


def _parity(metrics: dict[str, Any]) -> Check:
    parity = metrics["parity"]
    if parity is None:
        return Check("parity", "failed", None, "passed", "Parity was not checked: measure.parity must be true.")
    outcome: Outcome = "inconclusive" if parity["passed"] is None else "passed" if parity["passed"] else "failed"
    return Check("parity", outcome, outcome, "passed", parity["sentence"])


def _error_rate(metrics: dict[str, Any], limit: float) -> Check:
    """Of the arm that failed more often: a baseline that fails is nothing to compare with."""
    rates = {arm: each["requests"]["failed"] / each["requests"]["scheduled"] for arm, each in metrics["arms"].items()}
    if not rates:
        return Check("error_rate_max", "failed", None, limit, "No request was measured.")
    arm = max(rates, key=lambda name: rates[name])
    requests = metrics["arms"][arm]["requests"]
    sentence = f"{requests['failed']} of {requests['scheduled']} requests of the {arm} failed."
    return Check("error_rate_max", "passed" if rates[arm] <= limit else "failed", rates[arm], limit, sentence)


def _ratio(metrics: dict[str, Any], name: str, metric: str, words: str, limit_pct: float, limit: str) -> Check:
    delta = metrics["deltas"][metric]["p50"] if metrics["deltas"] else None
    if delta is None or delta["delta_pct"] is None:
        return Check(name, "failed", None, limit, f"An arm has no {words}, so there is no ratio.")
    observed = f"{delta['delta_pct']:+.1f} %"
    if delta["interval_pct"] is None:
        sentence = f"The median {words} differs by {observed}, without an interval ({delta['reason']}): add blocks."
        return Check(name, "inconclusive", observed, limit, sentence)
    low, high = delta["interval_pct"]
    outcome: Outcome = "passed" if high <= limit_pct else "failed" if low > limit_pct else "inconclusive"
    where = {"passed": "within the limit", "failed": "beyond the limit", "inconclusive": "across the limit: add blocks"}
    sentence = (
        f"The median {words} differs by {observed} from the baseline's, 95 % interval {low:+.1f} to {high:+.1f} %, "
        f"{where[outcome]}."
    )
    return Check(name, outcome, observed, limit, sentence)


def _throughput(metrics: dict[str, Any], limit: float) -> Check:
    candidate = metrics["arms"].get("candidate")
    rate = candidate["throughput"]["output_tok_s"] if candidate else None
    if rate is None:
        return Check("tok_s_min", "failed", None, limit, "The candidate finished no request.")
    sentence = f"The candidate put out {rate:.1f} tokens a second."
    return Check("tok_s_min", "passed" if rate >= limit else "failed", rate, limit, sentence)
