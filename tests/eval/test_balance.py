"""The load of each replica, worked out by hand."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pandas as pd

from skote.eval.balance import by_replica, imbalance
from skote.eval.report import render_run

ROWS = [
    # replica, status, input, output, e2el, queue
    (0, "ok", 10, 20, 100.0, 1.0),
    (0, "ok", 10, 40, 300.0, 3.0),
    (1, "ok", 10, 10, 50.0, 2.0),
    (1, "error", 10, 0, None, None),
]
COLUMNS = ["replica", "status", "input_tokens", "output_tokens", "e2el_ms", "queue_ms"]


def measured() -> SimpleNamespace:
    rows = pd.DataFrame(ROWS, columns=COLUMNS).assign(arm="candidate")
    return SimpleNamespace(requests=rows.astype({"e2el_ms": float, "queue_ms": float}))


def test_each_replica_has_its_requests_tokens_and_times() -> None:
    first, second, idle = by_replica(measured(), "candidate", ["cpu", "cpu", "cpu"])  # type: ignore[arg-type]
    assert first == {
        "replica": 0,
        "device": "cpu",
        "requests": {"ok": 2, "failed": 0},
        "tokens": 80,
        "share": 0.8,
        "e2el_ms": {"p50": 200.0, "p95": 290.0},
        "queue_ms": {"p50": 2.0, "p95": 2.9},
    }
    assert (second["requests"], second["tokens"], second["share"]) == ({"ok": 1, "failed": 1}, 20, 0.2)
    assert (idle["requests"], idle["tokens"], idle["e2el_ms"]) == (
        {"ok": 0, "failed": 0},
        0,
        {"p50": None, "p95": None},
    )
    assert imbalance([first, second, idle]) == 80 * 3 / 100


def test_one_replica_has_no_balance() -> None:
    assert by_replica(measured(), "candidate", ["cpu"]) == []  # type: ignore[arg-type]
    assert imbalance([]) is None


def test_the_report_has_a_section_where_there_are_several(synthetic) -> None:
    directory = synthetic().write()
    page, manifest = directory / "report.html", directory / "manifest.json"
    render_run(directory)
    assert '<h2 id="replicas">' not in page.read_text(encoding="utf-8")

    content = json.loads(manifest.read_text(encoding="utf-8"))
    content["arms"]["candidate"]["replicas"] *= 2  # the second one idle
    manifest.write_text(json.dumps(content), encoding="utf-8")
    render_run(directory)
    assert '<h2 id="replicas">' in page.read_text(encoding="utf-8")
    assert "The most loaded replica had 2.00 times the mean's tokens" in " ".join(
        page.read_text(encoding="utf-8").split()
    )


def test_the_section_tells_when_a_replica_ended_and_came_back(synthetic) -> None:  # type: ignore[no-untyped-def]
    directory = synthetic().write()
    manifest = directory / "manifest.json"
    content = json.loads(manifest.read_text(encoding="utf-8"))
    content["arms"]["candidate"]["replicas"] *= 2
    start = content["clock"]["monotonic_ns"]
    content["arms"]["candidate"]["events"] = [
        {"t_ns": start + 1_500_000_000, "replica": 1, "what": "ended", "sentence": "Replica 1 (cpu) was killed."},
        {"t_ns": start + 4_000_000_000, "replica": 1, "what": "restarted", "sentence": "Replica 1 was ready again."},
    ]
    manifest.write_text(json.dumps(content), encoding="utf-8")
    page = " ".join(re.sub(r"<[^>]+>", " ", render_run(directory)[0].read_text(encoding="utf-8")).split())

    assert "after 1.5 s Replica 1 (cpu) was killed. after 4.0 s Replica 1 was ready again." in page
    assert re.search(r"0 on cpu 72 0 \S+ 100\.0 % [\d., ]+ 0 0 1 on cpu 0 0 0 0\.0 % (not available ){4}1 1", page)


def test_the_report_says_how_many_requests_waited_for_the_limit_of_tpot(synthetic) -> None:
    directory = synthetic().write()
    page, manifest = directory / "report.html", directory / "manifest.json"
    render_run(directory)
    assert "Limit of TPOT" not in page.read_text(encoding="utf-8")

    content = json.loads(manifest.read_text(encoding="utf-8"))
    content["config"].setdefault("router", {})["tpot_slo_ms"] = 8.0
    content["arms"]["candidate"]["replicas"][0]["slowed"] = 12
    manifest.write_text(json.dumps(content), encoding="utf-8")
    render_run(directory)
    assert "8.00 ms; for its sake 12 requests waited that there was room for" in page.read_text(encoding="utf-8")
