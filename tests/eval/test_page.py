"""Every page in a real browser: what is seen, on a wide screen and on a telephone, in light, in dark and on paper."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from skote.eval.claims import ClaimConfig, OpenPartConfig, RuleConfig
from skote.eval.comparison import read_comparison, render_comparison
from skote.eval.ledger import ledger_html, read_ledger
from skote.eval.report import render_run

spec = importlib.util.spec_from_file_location("browser", Path(__file__).with_name("browser.py"))
browser_module = importlib.util.module_from_spec(spec)
sys.modules["browser"] = browser_module
spec.loader.exec_module(browser_module)

pytestmark = pytest.mark.skipif(browser_module.CHROMIUM is None, reason="no Chromium is installed")

ROOT = Path(__file__).parent.parent.parent
LOOKS = [(width, dark) for width in (1280, 390) for dark in (False, True)]
MOST_BYTES = 2_000_000

CONTRAST = """(() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgba = text => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = text;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => [r, g, b]
    .map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = element => {
    for (; element; element = element.parentElement) {
      const found = rgba(getComputedStyle(element).backgroundColor);
      if (found[3] === 255) return found;
    }
    return [255, 255, 255];
  };
  const low = [];
  for (const element of document.querySelectorAll('body *:not(script):not(style)')) {
    const text = [...element.childNodes].filter(node => node.nodeType === 3 && node.data.trim());
    if (!text.length || !element.checkVisibility()) continue;
    const style = getComputedStyle(element);
    const ink = rgba(element instanceof SVGElement ? style.fill : style.color);
    const [a, b] = [light(ink), light(ground(element))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) low.push(text[0].data.trim().slice(0, 40) + ' ' + ink);
  }
  return low;
})()"""
UNNAMED = """(() => [
  ...document.querySelectorAll('svg:not([role=img][aria-labelledby])'),
  ...document.querySelectorAll('img:not([alt])'),
  ...document.querySelectorAll('th:not([scope])'),
  ...[...document.querySelectorAll('table')].filter(each => !each.caption),
  ...[...document.querySelectorAll('[aria-labelledby]')].filter(
    each => !each.getAttribute('aria-labelledby').split(' ').every(
      name => document.getElementById(name)?.textContent.trim())),
].map(each => each.outerHTML.slice(0, 80)))()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    started = browser_module.Browser(tmp_path_factory.mktemp("profile"))
    yield started
    started.close()


@pytest.fixture
def page(synthetic):
    return render_run(synthetic().write())[0]


def complaints(browser):
    """Whatever the page logged, and every address that it asked for beside its own."""
    said = [event for event in browser.events if event["method"] in ("Runtime.exceptionThrown", "Log.entryAdded")]
    said += [event for event in browser.events if event["method"] == "Runtime.consoleAPICalled"]
    asked = [
        event["params"]["request"]["url"] for event in browser.events if event["method"] == "Network.requestWillBeSent"
    ]
    return said + [url for url in asked if not url.startswith(("file:", "data:"))]


def read_well(browser, path, words, folded=()):
    """Every look of a page: all that is asked of it, with what is folded away and without."""
    assert path.stat().st_size < MOST_BYTES
    for width, dark in LOOKS:
        browser.open(path, width, dark=dark)
        assert complaints(browser) == []
        seen = browser.evaluate("document.body.innerText").replace("\N{NO-BREAK SPACE}", " ")
        assert [each for each in words if each not in seen] == []
        assert [each for each in folded if each in seen] == []
        browser.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        assert [each for each in folded if each not in browser.evaluate("document.body.innerText")] == []
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert browser.evaluate(CONTRAST) == []
        assert browser.evaluate(UNNAMED) == []


def test_a_bad_page_is_found_out(browser, tmp_path):
    """What the tests below hold pages to, each broken once."""
    page = tmp_path / "bad.html"
    page.write_text(
        "<style>body {background: #fff} @media (prefers-color-scheme: dark) {body {background: #000; color: #444}}"
        "</style><p>dim in the dark</p><p style='color: #999'>pale</p><p style='width: 900px'>wide</p>"
        "<table><caption>c</caption><tr><th>x</th></tr></table><img src='http://127.0.0.1:9/x.png'>"
        "<svg role=img></svg><script>console.error('oh')</script>"
    )
    browser.open(page, 390)
    said = complaints(browser)
    assert "http://127.0.0.1:9/x.png" in said
    assert "Runtime.consoleAPICalled" in [each["method"] for each in said if isinstance(each, dict)]
    assert [each.split(" ")[0] for each in browser.evaluate(CONTRAST)] == ["pale"]
    assert [each.split(" ")[0] for each in browser.evaluate(UNNAMED)] == ["<svg", "<img", "<th>x</th>"]
    assert browser.evaluate("document.documentElement.scrollWidth") > 390

    browser.open(page, 1280, dark=True)
    assert [each.split(" ")[0] for each in browser.evaluate(CONTRAST)] == ["dim", "wide", "c", "x"]


def test_the_report_is_read_without_complaint(browser, page):
    words = ("FASTER", "95 % interval", "Validity", "End to end p50", "Distributions", "Roofline", "Provenance")
    read_well(browser, page, words, folded=["Workload SHA-256"])


def test_the_ledger_of_claims_is_read_without_complaint(browser, tmp_path):
    """The experiments and runs of this checkout."""
    page = tmp_path / "index.html"
    page.write_text(ledger_html(read_ledger(ROOT / "experiments", ROOT / "reports" / "claims")), encoding="utf-8")

    words = ("Ledger of claims", "Claimed", "Measured", "Verdict", "E01, Skotergy 2", "E28", "PENDING", "NOT RUN")
    read_well(browser, page, words)


def test_the_comparison_of_runs_is_read_without_complaint(browser, synthetic, tmp_path):
    """Of two that may be compared, and of one with other requests, which may not."""
    runs = [tmp_path / name for name in ("first", "second", "other_requests")]
    for seed, directory in enumerate(runs):
        shutil.move(synthetic(seed=seed).write(), directory)
    manifest = runs[2] / "manifest.json"
    manifest.write_text(manifest.read_text(encoding="utf-8").replace("5b" * 32, "77" * 32), encoding="utf-8")
    for directory in runs:
        render_run(directory)

    page = render_comparison(read_comparison(runs[:2]), tmp_path)
    read_well(browser, page, ("2 runs side by side", "Own verdict", "FASTER", "Against run 1", "run 1", "Charts"))
    page = render_comparison(read_comparison(runs), tmp_path, "not_comparable.html")
    read_well(browser, page, ("3 runs side by side", "NOT COMPARABLE", "Charts"))


def test_the_page_of_a_contract_is_read_without_complaint(browser, synthetic):
    """A claim that is judged without measured requests, one of its parts open."""
    rule = RuleConfig("rows added", "contracts.pad_token.rows_added_beyond", 1.0)
    part = OpenPartConfig("two GPUs", "NOT TESTABLE HERE", "a second device")
    claim = ClaimConfig("E10", "Embeddings grow for a pad token alone", "1", "the document", rules=[rule], open=[part])
    manifest = {"config": {"claim": asdict(claim)}, "contracts": {"pad_token": {"rows_added_beyond": 1.0}}}
    page = render_run(synthetic(arms={}, manifest=manifest).write())[0]

    words = ("E10: HOLDS", "rows added", "NOT TESTABLE HERE: two GPUs", "What was counted", "rows added beyond")
    read_well(browser, page, words, folded=["bench-01"])


def test_the_verdict_is_seen_first(browser, page):
    browser.open(page, 390)

    assert browser.evaluate("document.querySelector('.verdict').getBoundingClientRect().bottom") < 900


def test_what_is_folded_away_is_printed(browser, page):
    browser.open(page, 1280, dark=True, media="print")

    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.evaluate("document.querySelector('details dl').checkVisibility({contentVisibilityAuto: true})")
    assert browser.evaluate(CONTRAST) == []


def test_an_invalid_run_shows_why(browser, synthetic):
    page = render_run(synthetic(manifest={"parity": None}).write())[0]
    browser.open(page, 390)
    seen = browser.evaluate("document.body.innerText")

    assert seen.index("INVALID") < seen.index("parity was not checked") < seen.index("End to end p50")
    assert "FASTER" not in seen
    assert browser.evaluate(CONTRAST) == []
