from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from skote.eval import figures
from skote.eval.derive import METRICS, Measured
from skote.eval.record import read_run

LABELS = {"candidate": "skotergy", "baseline": "a < b"}
E2EL = METRICS[0]


@pytest.fixture
def measured(synthetic):
    return Measured(read_run(synthetic(blocks=2, requests=4).write()))


def every_chart(measured):
    entries = [figures.Bar("1 skotergy", "candidate", 10.0, 9.0, 11.0), figures.Bar("1 a < b", "baseline", 20.0)]
    return [
        figures.ecdf(measured, E2EL, LABELS),
        figures.timeline(measured, "candidate", LABELS["candidate"]),
        figures.timeline(measured, "baseline", LABELS["baseline"]),
        figures.token_gaps(measured, LABELS),
        figures.bars(entries, "bars", "E2EL p50 (ms)", "Shorter is faster."),
    ]


def test_charts_are_well_formed_titled_and_free_of_fixed_colours(measured):
    for chart in every_chart(measured):
        root = ET.fromstring(chart.svg)
        title, description = root[0], root[1]

        assert root.attrib["role"] == "img"
        assert root.attrib["aria-labelledby"] == f"{title.attrib['id']} {description.attrib['id']}"
        assert description.text == chart.caption
        assert not re.search(r"(?:fill|stroke): #", chart.svg)
        assert "font-family" not in chart.svg
        assert "<style" not in chart.svg
        assert "<metadata" not in chart.svg


def test_ids_are_unique_over_the_charts_of_a_page_and_every_reference_resolves(measured):
    page = "".join(chart.svg for chart in every_chart(measured))
    ids = re.findall(r'\bid="([^"]+)"', page)
    used = re.findall(r"url\(#([^)]+)\)", page) + re.findall(r'href="#([^"]+)"', page)

    assert len(ids) == len(set(ids))
    assert used
    assert set(used) <= set(ids)


def test_the_same_data_give_the_same_drawing(measured):
    assert [chart.svg for chart in every_chart(measured)] == [chart.svg for chart in every_chart(measured)]


def test_labels_name_metric_unit_arm_and_n(measured):
    texts = [element.text for element in ET.fromstring(figures.ecdf(measured, E2EL, LABELS).svg).iter() if element.text]

    assert "E2EL (ms)" in texts
    assert "skotergy, n = 8" in texts
    assert "a < b, n = 8" in texts


def test_steps_of_the_distribution():
    values, shares = figures._steps(np.array([1.0, 2.0, 4.0]))

    assert values.tolist() == [1, 1, 2, 4]
    assert shares == pytest.approx([0, 1 / 3, 2 / 3, 1])


def test_long_distributions_are_thinned_between_their_ends():
    values, shares = figures._steps(np.arange(100_000, dtype=np.float64))

    assert len(values) == figures.MAX_POINTS + 1
    assert (values[0], values[-1], shares[-1]) == (0, 99_999, 1)


def test_overlapping_requests_get_lanes_of_their_own():
    spans = np.array([(0, 1, 4), (0, 2, 3), (3, 4, 5), (3.5, 4, 6), (4, 5, 7)])

    assert figures._lanes(spans) == [0, 1, 1, 2, 0]


def test_gap_of_each_token_of_a_chunk(synthetic, timeline):
    """Three chunks of two tokens, the gaps 10 and 20 ms: tokens 2 and 3 waited 5 ms each, 4 and 5 waited 10."""
    directory = synthetic(blocks=1, requests=1, tokens=6, arms={"candidate": "baseline"}).write(
        lambda arm, block, request: timeline(0.2, 100, [10.0, 20.0], tokens_per_chunk=2)
    )
    index, gaps = figures._gap_per_token(Measured(read_run(directory)), "candidate")

    assert index.tolist() == [2, 3, 4, 5]
    assert gaps.tolist() == [5, 5, 10, 10]


def test_a_long_timeline_says_what_it_leaves_out(synthetic):
    directory = synthetic(blocks=3, requests=300, tokens=2, arms={"candidate": "baseline"}).write()
    chart = figures.timeline(Measured(read_run(directory)), "candidate", "baseline")

    assert chart.caption.endswith("The first 300 of 900 requests are drawn.")


def test_no_chart_without_data(synthetic, timeline):
    directory = synthetic(blocks=1).write(lambda arm, block, request: timeline(0.2, 100, [40.0], ok=False))
    measured = Measured(read_run(directory))

    assert figures.ecdf(measured, E2EL, LABELS) is None
    assert figures.timeline(measured, "candidate", "skotergy") is None
    assert figures.token_gaps(measured, LABELS) is None
    assert figures.bars([], "bars", "ms", "") is None


WIDE = {
    "candidate": "skotergy (cuda:0, cuda:1, policy=shortest_queue, max_concurrency_per_device=16)",
    "baseline": "skotergy (cuda:0, policy=round_robin, max_concurrency_per_device=16)",
}


@pytest.mark.parametrize("labels", [LABELS, WIDE], ids=["short", "long"])
def test_a_legend_lies_within_its_chart(measured, labels, monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "_svg", lambda figure, *texts: drawn.append(figure) or "")
    figures.ecdf(measured, E2EL, labels)
    figures.token_gaps(measured, labels)

    for figure in drawn:
        figure.draw_without_rendering()
        [legend] = figure.legends
        box = legend.get_window_extent()
        assert (box.x0 >= 0, box.x1 <= figure.bbox.x1, box.y1 <= figure.bbox.y1) == (True, True, True)
        shown = " ".join(" ".join(text.get_text() for text in legend.get_texts()).split())
        assert all(label in shown for label in labels.values())
