"""report.html: the page of one run, from its manifest, its figures and its rows.

The same files always give the same page, to the byte, so that a page can be checked by rendering it again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from skote.eval import figures
from skote.eval.derive import METRICS, Measured
from skote.eval.summary import PERCENTILES, PRIMARY
from skote.eval.wording import arm_labels, environment, load_phrase, verdict_sentence

KEY_METRICS = (
    ("e2el_ms", "p50", "End to end p50", "ms, dispatch to last token"),
    ("e2el_ms", "p95", "End to end p95", "ms"),
    ("ttft_ms", "p50", "TTFT p50", "ms, dispatch to first token"),
    ("ttft_ms", "p95", "TTFT p95", "ms"),
    ("tpot_ms", "p50", "TPOT p50", "ms a token after the first"),
    ("tpot_ms", "p95", "TPOT p95", "ms"),
)
METHODS = {"t": "t interval", "bootstrap": "paired bootstrap"}


@dataclass(frozen=True, slots=True)
class Cell:
    """One arm's figure in the main table; `refused` says why there is no interval."""

    value: float | str | None
    interval: list[float | str] | None
    refused: str


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the main table: one figure in each arm, and the difference where two arms ran."""

    label: str
    note: str
    cells: list[Cell]
    delta: dict[str, Any] | None
    primary: bool


def report_html(manifest: dict[str, Any], metrics: dict[str, Any], measured: Measured) -> str:
    """The page of the run that all three are of, `metrics` from `summarize`: one file, no network, no script."""
    labels = arm_labels(manifest)
    deltas = metrics["deltas"]
    primary = deltas[PRIMARY[0]][PRIMARY[1]] if deltas else None
    arms = list(metrics["arms"])
    return (
        environment()
        .get_template("report.html.j2" if arms or "claim" not in metrics else "contract.html.j2")
        .render(
            manifest=manifest,
            metrics=metrics,
            labels=labels,
            arms=arms,
            headline=" against ".join(labels.values()),
            primary=primary,
            method=METHODS.get(primary["method"]) if primary else None,
            verdict_word=metrics["verdict"]["label"] or ("MEASURED" if arms else "NOTHING MEASURED"),
            sentence=verdict_sentence(metrics, labels),
            key_rows=_key_rows(metrics, PRIMARY),
            steady_rows=_key_rows(metrics["steady"], None) if metrics["steady"] else [],
            charts=_charts(measured, labels),
            metric_names=list(metrics["arms"][arms[0]]["metrics"]) if arms else [],
            percentiles=PERCENTILES,
            definitions=METRICS,
            bandwidth=(metrics["roofline"] or {}).get("read_bandwidth_bytes_per_s"),
            peak=(metrics["roofline"] or {}).get("matmul_peak_flops_per_s"),
            workload=_workload(manifest["workload"]),
            git=_git(manifest["machine"]["git"]),
            packages=", ".join(
                f"{name} {version}" for name, version in sorted(manifest["machine"]["packages"].items())
            ),
        )
    )


def _key_rows(metrics: dict[str, Any], primary: tuple[str, str] | None) -> list[Row]:
    """The main table of the whole run, or of its steady state; `primary` is what the verdict is about."""
    arms, deltas = metrics["arms"], metrics["deltas"]
    rows = []
    for name, q, label, note in KEY_METRICS:
        figures_ = [content["metrics"][name][q] for content in arms.values()]
        cells = [Cell(f["value"], f["interval"], f"{q} refused: {f['reason']}") for f in figures_]
        delta = deltas[name][q] if deltas else None
        rows.append(Row(label, note, cells, delta, (name, q) == primary))
    cells = [Cell(content["throughput"]["output_tok_s"], None, "") for content in arms.values()]
    delta = deltas["output_tok_s"] if deltas else None
    rows.append(Row("Output throughput", "tok/s", cells, delta, primary=False))
    return rows


def _charts(measured: Measured, labels: dict[str, str]) -> dict[str, Any]:
    chosen = {metric.name: metric for metric in METRICS}
    return {
        "ecdf": [figures.ecdf(measured, chosen[name], labels) for name in ("e2el_ms", "ttft_ms", "tpot_ms")],
        "gaps": figures.token_gaps(measured, labels),
        "timeline": [figures.timeline(measured, arm, labels[arm]) for arm in measured.arms],
    }


def _workload(workload: dict[str, Any]) -> str:
    load = load_phrase(workload)
    limit = workload["max_new_tokens"]
    answers = (
        "" if limit is None else f", up to {limit} new tokens" if "source" in workload else f", {limit} new tokens each"
    )
    return (
        f"{workload['name']}: {workload['blocks']} blocks of {workload['requests_per_block']} requests, {load}"
        f"{answers}, {'greedy' if workload['greedy'] else 'sampled'}"
    )


def _git(git: dict[str, Any] | None) -> str:
    if git is None:
        return "not a checkout"
    return f"{git['commit']}{', with uncommitted changes' if git['dirty'] else ''}"
