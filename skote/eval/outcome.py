"""How a run is told to whoever asked: on the terminal, in junit.xml and summary.md, and in GitHub's step summary."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from skote.eval.claims import claim_line
from skote.eval.junit import junit_xml
from skote.eval.record import write_text
from skote.eval.wording import arm_labels, number, percent, percent_interval, verdict_sentence
from skote.types import RecordError

STEP_SUMMARY = "GITHUB_STEP_SUMMARY"
"""Where GitHub says to which file a step appends its summary (docs.github.com, Workflow commands)."""

FIGURES = (("e2el_ms", "p50"), ("e2el_ms", "p95"), ("ttft_ms", "p50"), ("tpot_ms", "p50"))


def closing_lines(directory: Path, manifest: dict[str, Any], metrics: dict[str, Any]) -> Iterator[str]:
    """What a terminal is told at a run's end: checks, failed requests, the claim, the verdict or why there is none."""
    for check in metrics["checks"] if metrics["status"] == "complete" else ():
        yield f"  {check['outcome']}: {check['name']}: {check['sentence']}"
    for finding in metrics["findings"]:
        if finding["code"] == "requests_failed":
            yield f"{finding['sentence']} Each one's error is in {directory / 'requests.parquet'}."
    if "claim" in metrics:
        yield claim_line(metrics["claim"])
    if metrics["arms"]:
        label = metrics["verdict"]["label"]
        invalid = [finding["sentence"] for finding in metrics["findings"] if finding["severity"] == "invalid"]
        said = invalid[0] if invalid else verdict_sentence(metrics, arm_labels(manifest))
        yield said if label is None else f"{label}: {said}"


def write_outcome(directory: Path, manifest: dict[str, Any], metrics: dict[str, Any]) -> None:
    """Write junit.xml and summary.md, and append the latter to GitHub's step summary where there is one.

    Raises:
        RecordError: a file could not be written.
    """
    summary = summary_markdown(manifest, metrics)
    write_text(directory / "junit.xml", junit_xml(manifest, metrics))
    write_text(directory / "summary.md", summary)
    step_summary = os.environ.get(STEP_SUMMARY)
    if step_summary:
        try:
            with Path(step_summary).open("a", encoding="utf-8") as file:
                file.write(summary)
        except OSError as error:
            raise RecordError(f"{STEP_SUMMARY} names {step_summary}, which cannot be written: {error}.") from error


def summary_markdown(manifest: dict[str, Any], metrics: dict[str, Any]) -> str:
    """The run in a screenful of Markdown: verdict, checks, main figures."""
    labels = arm_labels(manifest)
    model, workload = manifest["model"]["name"], manifest["workload"]["name"]
    verdict = metrics["verdict"]["label"] or "MEASURED"
    lines = [f"### {' against '.join(labels.values())}: {verdict}, exit {metrics['exit_code']}", ""]
    lines += [f"{model}, {manifest['dtype']}, workload {workload}. {verdict_sentence(metrics, labels)}", ""]
    lines += [f"- invalid: {each['sentence']}" for each in metrics["findings"] if each["severity"] == "invalid"]
    if metrics["checks"]:
        lines += ["", "| check | outcome | |", "|---|---|---|"]
        lines += [_row(check["name"], check["outcome"], check["sentence"]) for check in metrics["checks"]]
    return "\n".join([*lines, "", *_figures(metrics, labels), ""])


def _figures(metrics: dict[str, Any], labels: dict[str, str]) -> list[str]:
    arms = metrics["arms"]
    if not arms:
        return []
    compared = bool(metrics["deltas"])
    lines = [_row("", *(labels[arm] for arm in arms), *(["difference", "95 % interval"] if compared else []))]
    lines.append("|---" + "|--:" * (len(arms) + 2 * compared) + "|")
    for name, q in FIGURES:
        cells = [number(arm["metrics"][name][q]["value"]) for arm in arms.values()]
        lines.append(_row(f"{name} {q}", *cells, *(_difference(metrics["deltas"][name][q]) if compared else [])))
    cells = [number(arm["throughput"]["output_tok_s"]) for arm in arms.values()]
    lines.append(_row("output tok/s", *cells, *(_difference(metrics["deltas"]["output_tok_s"]) if compared else [])))
    return lines


def _difference(delta: dict[str, Any]) -> list[str]:
    return [percent(delta["delta_pct"]), percent_interval(delta["interval_pct"])]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
