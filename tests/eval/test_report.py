from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from skote.eval.record import TELEMETRY_SCHEMA, read_run
from skote.eval.report import main, render_run
from skote.types import RecordError

COMMITTED = sorted(path.parent for path in (Path(__file__).parents[2] / "reports").glob("*/manifest.json"))
VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """Checks that tags nest, and keeps the text and what is loaded from elsewhere."""

    def __init__(self, html):
        super().__init__()
        self.open, self.text, self.loads, self.headers = [], [], [], []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "th":
            self.headers.append(attributes.get("scope"))
        assert tag != "script"
        if "src" in attributes or tag == "link":
            self.loads.append(attributes.get("src", attributes.get("href")))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text.append(data)

    @property
    def words(self):
        return re.sub(r"\s+", " ", " ".join(self.text))


def page_of(directory):
    path, _ = render_run(directory)
    return Page(path.read_text(encoding="utf-8"))


def test_report_of_a_plain_run(synthetic):
    directory = synthetic().write()
    path, metrics = render_run(directory)
    page = Page(path.read_text(encoding="utf-8"))

    assert path == directory / "report.html"
    assert json.loads((directory / "metrics.json").read_text()) == metrics
    assert page.loads == ["data:,"]
    assert None not in page.headers
    delta = metrics["deltas"]["e2el_ms"]["p50"]
    for words in (
        "skotergy against baseline on SmolLM2-135M-Instruct",
        "FASTER",
        f"\N{MINUS SIGN}{abs(delta['delta_pct']):.1f} %",
        f"95 % interval \N{MINUS SIGN}{abs(delta['interval_pct'][0]):.1f} to",
        "AMD EPYC 7B13, 2 cores, 8.00 GiB, no accelerator",
        "Nothing was found wanting",
        "All 12 prompts give the same tokens in both arms.",
        "21.30 \N{MICRO SIGN}s over 1024 tokens",
    ):
        assert words in page.words


def test_roofline_of_each_arm_and_the_kernels_of_a_step(synthetic, timeline):
    """538.06 MB of weights and 2.47 MB of cache (53.5 x 46,080 bytes) at 20 GB/s take 27.03 ms."""
    words = page_of(synthetic().write(lambda arm, block, request: timeline(0.2, 100, [40.0] * 15))).words

    assert "cpu reads 20.00 GB/s, measured" in words
    assert "540.5 MB 538.1 MB weights, 2.47 MB KV at 53.50 tokens 27.03 40.00 67.6 %" in words
    assert "Where a step of skotergy goes" in words
    assert "200.0 \N{MICRO SIGN}s in all; the measured TPOT p50 is 40.00 ms" in words
    assert "gate_up_gemv_kernel 30 150.0 75.0 % flash_decode_kernel 30 50.00 25.0 %" in words
    assert "Where a step of baseline goes" not in words


def test_prefill_against_what_the_device_multiplies(synthetic, timeline):
    """45.5 tokens of 2 GFLOP at the median, at 1 TFLOP/s: 91 ms of a TTFT of 100."""
    directory = synthetic().write(lambda arm, block, request: timeline(0.2, 100, [40.0] * 15))
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["roofline"] |= {"cache_bytes": 0, "matmul_peak_flops_per_s": 1e12}
    manifest["model"]["prefill_flops"] = {"fixed": 0, "per_token": 2 * 10**9, "per_pair": 0}
    (directory / "manifest.json").write_text(json.dumps(manifest))
    words = page_of(directory).words

    assert "cpu multiplies 1,000 GFLOP/s in fp32" in words
    assert "skotergy 91.00 100.0 91.0 %" in words


def test_state_of_the_machine_and_what_it_did_not_tell(synthetic):
    directory = synthetic(blocks=1).write()
    run = read_run(directory)
    stamp = int(run.requests["last_token_ns"].max())
    rows = [
        {"t_ns": stamp, "device": "host", "cpu_busy_share": 0.25, "load_1m": 1.5, "memory_used_bytes": 2**31},
        {"t_ns": stamp, "device": "cuda:0", "sm_clock_mhz": 1980, "temperature_c": 60, "throttle_reasons": 0},
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=TELEMETRY_SCHEMA), directory / "telemetry.parquet")
    words = page_of(directory).words

    assert "CPU busy, mean of all cores 25.0 % Load average, mean 1.50 CPU clock, median not available" in words
    assert "SM clock, median and least 1,980 MHz, 1,980 MHz Memory clock, median not available" in words
    assert "Clocks held down 0.0 % Power, mean not available Temperature, at most 60 \N{DEGREE SIGN}C" in words
    assert "Processes not ours, at most not available" in words
    assert "Energy an output token, skotergy not available" in words


def test_a_run_that_was_not_sampled_says_so(synthetic):
    assert "This run was not sampled" in page_of(synthetic(blocks=1).write()).words


def test_a_run_without_a_roofline_says_so(synthetic):
    directory = synthetic(blocks=1).write()
    manifest = json.loads((directory / "manifest.json").read_text())
    del manifest["roofline"], manifest["model"]["kv_bytes_per_token"]
    del manifest["arms"]["candidate"]["replicas"][0]["info"]["step_kernels"]
    (directory / "manifest.json").write_text(json.dumps(manifest))
    words = page_of(directory).words

    assert "What the device can read was not measured in this run." in words
    assert "Where a step" not in words


@pytest.mark.parametrize("directory", COMMITTED, ids=lambda directory: directory.name)
def test_committed_runs_can_still_be_rebuilt(directory, tmp_path):
    metrics = render_run(shutil.copytree(directory, tmp_path / "run"))[1]

    assert metrics["deltas"] == json.loads((directory / "metrics.json").read_text())["deltas"]


def test_nothing_is_loaded_from_a_network(synthetic):
    html = render_run(synthetic().write())[0].read_text(encoding="utf-8")
    addresses = set(re.findall(r"https?://[^\"' )]+", html))

    assert addresses <= {"http://www.w3.org/1999/xlink", "http://www.w3.org/2000/svg"}
    assert "@import" not in html


def test_an_invalid_run_says_so_first(synthetic):
    words = page_of(synthetic(manifest={"parity": None}).write()).words

    assert "FASTER or SLOWER" in words  # the definitions at the end
    assert "FASTER" not in words[: words.index("FASTER or SLOWER")]
    assert words.index("INVALID") < words.index("parity was not checked") < words.index("End to end p50")


def test_a_single_arm_has_no_differences(synthetic):
    words = page_of(synthetic(arms={"candidate": "baseline"}).write()).words

    assert "One arm ran, so nothing is compared" in words
    assert "Difference " not in words[: words.index("Definitions")]


def test_a_refused_interval_says_why(synthetic):
    words = page_of(synthetic(blocks=3).write()).words

    assert "p95 refused: n=36 < 72" in words
    assert "INCONCLUSIVE" in words
    assert "3 paired blocks are too few to say more" in words


def test_text_from_a_run_is_escaped(synthetic):
    directory = synthetic(manifest={"status": "failed", "error": "<b>no</b> & 'why'"}).write()

    assert "<b>no</b> & 'why'" in page_of(directory).words


def test_teacher_forced_parity_shows_ratios_and_divergences(synthetic):
    parity = {
        "mode": "teacher_forced",
        "passed": True,
        "compared": 12,
        "equal": 11,
        "agreement": 0.9948,
        "near_ties": 1,
        "divergences": [
            {
                "request_id": "chat-07",
                "position": 9,
                "gap": 0.0123,
                "candidate_token": 11,
                "baseline_token": 12,
                "near_tie": True,
            }
        ],
        "kl_ratio": {"value": 0.98, "upper": 1.013},
        "nll_ratio": {"value": 1.001, "upper": 1.004},
        "limit": 1.05,
        "sentence": "The candidate's error is no worse than the baseline's.",
        "outputs": {"candidate": {}, "baseline": {}},
    }
    words = page_of(synthetic(manifest={"parity": parity, "dtype": "bf16"}).write()).words

    assert "99.48 %" in words
    assert "0.980, at most 1.013 (95 %), limit 1.05" in words
    assert "chat-07 9 11 12 0.012 yes" in words


def test_a_run_that_failed_before_it_measured_has_a_report(synthetic):
    words = page_of(synthetic(blocks=0, manifest={"status": "failed", "error": "The device is lost."}).write()).words

    assert "Nothing was measured." in words
    assert "The device is lost." in words


@pytest.mark.slow
def test_thousands_of_requests_stay_under_two_megabytes(synthetic):
    path, _ = render_run(synthetic(blocks=20, requests=200, tokens=64, concurrency=8).write())

    assert path.stat().st_size < 2_000_000


def test_the_page_is_the_same_every_time(synthetic):
    directory = synthetic().write()
    once, again = (render_run(directory)[0].read_bytes() for _ in range(2))

    assert once == again


def test_reports_are_rebuilt_without_an_engines_libraries():
    code = (
        "import sys, skote.eval.report;"
        "print(sorted({'torch', 'transformers', 'hydra', 'omegaconf', 'matplotlib.pyplot'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "[]\n"


def test_command_line_rebuilds_one_run(synthetic, capsys):
    directory = synthetic().write()
    with pytest.raises(SystemExit) as end:
        main([str(directory)])

    assert end.value.code == 0
    assert capsys.readouterr().out == f"{directory / 'report.html'}\n"


def test_command_line_names_what_is_missing(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main([str(tmp_path / "nothing")])
    captured = capsys.readouterr()

    assert end.value.code == 1
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert str(tmp_path / "nothing") in captured.err


@pytest.mark.parametrize(("word", "meant"), [("verfy", " Did you mean verify?"), ("frobnicate", "")])
def test_a_misspelt_command_is_not_taken_for_a_run(synthetic, capsys, word, meant):
    with pytest.raises(SystemExit) as end:
        main([word, str(synthetic().write())])
    captured = capsys.readouterr()

    assert (end.value.code, captured.out) == (4, "")
    assert captured.err == (
        f"skote-report: {word} is neither a command (verify, rerun, claims, capacity) nor the directory of a run."
        f"{meant}\n"
    )


def test_a_run_whose_directory_is_called_like_a_command_is_meant_by_its_path(synthetic, monkeypatch, tmp_path, capsys):
    synthetic().write().rename(tmp_path / "verfy")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["verfy"])

    assert (end.value.code, capsys.readouterr().out) == (0, "verfy/report.html\n")


def test_command_line_without_a_run_is_wrong_usage(capsys):
    with pytest.raises(SystemExit) as end:
        main([])

    assert end.value.code == 4
    assert "RUN_DIR" in capsys.readouterr().err


def test_command_line_compares_several(synthetic, tmp_path, capsys):
    first = synthetic().write()
    out = tmp_path / "both.html"
    with pytest.raises(SystemExit) as end:
        main([str(first), str(first), "--out", str(out)])

    assert end.value.code == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(out)
    assert "2 runs side by side" in out.read_text(encoding="utf-8")


def test_an_unwritable_folder_is_one_sentence(synthetic):
    directory = synthetic().write()
    (directory / "metrics.json").mkdir()

    with pytest.raises(RecordError, match=r"metrics\.json could not be written"):
        render_run(directory)
