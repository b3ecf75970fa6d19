"""The report in a real browser: what is seen, on a wide screen and on a telephone, in light, in dark and on paper."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from skote.eval.report import render_run

spec = importlib.util.spec_from_file_location("browser", Path(__file__).with_name("browser.py"))
browser_module = importlib.util.module_from_spec(spec)
sys.modules["browser"] = browser_module
spec.loader.exec_module(browser_module)

pytestmark = pytest.mark.skipif(browser_module.CHROMIUM is None, reason="no Chromium is installed")

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


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_report_is_read_without_complaint(browser, page, width, dark):
    browser.open(page, width, dark=dark)

    assert complaints(browser) == []
    seen = browser.evaluate("document.body.innerText")
    for words in ("FASTER", "95 % interval", "Validity", "End to end p50", "Distributions", "Roofline", "Provenance"):
        assert words in seen
    assert "Workload SHA-256" not in seen  # folded away
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(CONTRAST) == []
    assert browser.evaluate(UNNAMED) == []


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
