"""Charts as inline SVG strings, drawn by matplotlib without a display and without pyplot's global state.

Colours are drawn as placeholders and handed to the page as CSS variables, so that one drawing serves light, dark and
print. Text stays text. The same data always gives the same string.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from skote.eval.derive import Ints, Measured, Metric
from skote.eval.stats import Floats

# Placeholder -> the CSS variable that the page's style sheet defines.
COLOURS = {
    "#0a0001": "var(--arm-candidate)",
    "#0a0002": "var(--arm-baseline)",
    "#0a0003": "var(--ink-soft)",
    "#0a0004": "var(--rule)",
}
ARM_COLOUR = {"candidate": "#0a0001", "baseline": "#0a0002"}
INK, RULE = "#0a0003", "#0a0004"
DASHES = {"candidate": "solid", "baseline": (0, (4, 1.5))}  # told apart without colour too

MAX_POINTS = 400  # a line on a page: more points than this cannot be seen
MAX_BARS = 480
LEGEND_LINE = 50  # characters that fit across a chart

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 11,
    "axes.edgecolor": RULE,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 10.5,
}


@dataclass(frozen=True, slots=True)
class Chart:
    """An inline SVG and the sentence below it, which is also its text for those who cannot see it."""

    svg: str
    caption: str


def ecdf(measured: Measured, metric: Metric, labels: Mapping[str, str]) -> Chart | None:
    """Share of requests at or below each value of `metric`, one line an arm; None without a sample."""
    samples = {arm: np.sort(measured.samples(arm, metric).values) for arm in measured.arms}
    samples = {arm: values for arm, values in samples.items() if values.size}
    if not samples:
        return None
    name = metric.name.removesuffix("_ms").upper()
    with mpl.rc_context(STYLE | {"svg.hashsalt": metric.name}):
        figure, axes = _axes(5.4, 3.3)
        for arm, values in samples.items():
            points, shares = _steps(values)
            label = f"{labels[arm]}, n = {values.size}"
            axes.step(points, 100 * shares, where="post", color=ARM_COLOUR[arm], ls=DASHES[arm], lw=1.8, label=label)
        axes.set_xlim(left=0)
        axes.set_ylim(0, 101)
        axes.set_xlabel(f"{name} (ms)")
        axes.set_ylabel("requests at or below (%)")
        axes.grid(visible=True)
        _legend(figure, axes)
        medians = "; ".join(f"{labels[arm]} median {np.median(values):.4g} ms" for arm, values in samples.items())
        caption = f"Distribution of {name} over requests: {medians}. A line further left is faster."
        if any(values.size > MAX_POINTS for values in samples.values()):
            caption += f" Drawn through {MAX_POINTS} evenly spaced ranks of each arm."
        return Chart(_svg(figure, f"ecdf-{metric.name}", f"Distribution of {name}", caption), caption)


def timeline(measured: Measured, arm: str, label: str) -> Chart | None:
    """Each request of `arm` as a bar from dispatch over its first to its last token, a band a pass, time in seconds.

    Every arm's chart has the same time axis. None without a finished request.
    """
    rows = measured.requests[measured.requests["status"] == "ok"]
    mine = rows[rows["arm"] == arm].sort_values(["block", "dispatched_ns"], kind="stable")
    if mine.empty:
        return None
    passes = [part for _, part in mine.groupby("block")]
    shown = max(1, min(len(passes), MAX_BARS // max(len(part) for part in passes)))
    longest = max(_seconds(part, part["dispatched_ns"].min())[:, 2].max() for _, part in rows.groupby(["arm", "block"]))
    with mpl.rc_context(STYLE | {"svg.hashsalt": f"timeline-{arm}"}):
        figure, axes = _axes(5.4, 3.3)
        waiting, decoding, ticks, y = [], [], [], 0.0
        for part in passes[:shown]:
            bars = _seconds(part, part["dispatched_ns"].min())[:MAX_BARS]
            lanes = _lanes(bars)
            for (start, first, end), lane in zip(bars, lanes, strict=True):
                waiting.append(_box(start, first, y + lane))
                decoding.append(_box(first, end, y + lane))
            ticks.append((y + max(lanes) / 2, f"{part['block'].iloc[0]}"))
            y += max(lanes) + 1.6
        for boxes, alpha, text in ((waiting, 0.4, "dispatch to first token"), (decoding, 1.0, "first to last token")):
            axes.add_collection(
                PolyCollection(boxes, facecolor=ARM_COLOUR[arm], edgecolor="none", alpha=alpha, label=text)
            )
        axes.set_xlim(0, longest * 1.02)
        axes.set_ylim(y - 0.8, -0.8)
        step = -(-len(ticks) // 12)
        axes.set_yticks([tick for tick, _ in ticks[::step]], [name for _, name in ticks[::step]])
        axes.set_xlabel("time since the pass began (s)")
        axes.set_ylabel("block")
        axes.grid(visible=True, axis="x")
        axes.set_axisbelow(True)
        _legend(figure, axes)
        caption = f"{label}: every request of its measured passes; requests side by side ran at the same time."
        drawn = len(waiting)
        if drawn < len(mine):
            caption += f" The first {drawn} of {len(mine)} requests are drawn."
        return Chart(_svg(figure, f"timeline-{arm}", f"Timeline of {label}", caption), caption)


def token_gaps(measured: Measured, labels: Mapping[str, str]) -> Chart | None:
    """Median and 5 to 95 % band of the gap before each token, against the token's index; None without a gap."""
    if measured.gaps.empty:
        return None
    with mpl.rc_context(STYLE | {"svg.hashsalt": "token-gaps"}):
        figure, axes = _axes(5.4, 3.3)
        binned = False
        for arm in measured.arms:
            index, gaps = _gap_per_token(measured, arm)
            if not index.size:
                continue
            last = int(index.max())
            width = -(-last // MAX_POINTS)
            binned |= width > 1
            bins = ((index - 1) // width).astype(np.int16)  # fewer than MAX_POINTS; 16 bits are sorted in linear time
            order = np.argsort(bins, kind="stable")
            names, starts = np.unique(bins[order], return_index=True)
            quantiles = np.array([np.percentile(part, [5, 50, 95]) for part in np.split(gaps[order], starts[1:])])
            x = names * width + (width - 1) / 2 + 1
            marker = "o" if names.size == 1 else None
            axes.fill_between(x, quantiles[:, 0], quantiles[:, 2], color=ARM_COLOUR[arm], alpha=0.18, lw=0)
            label = f"{labels[arm]}, n = {gaps.size} gaps"
            axes.plot(x, quantiles[:, 1], color=ARM_COLOUR[arm], ls=DASHES[arm], lw=1.8, label=label, marker=marker)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("index of the token in the output")
        axes.set_ylabel("gap before the token (ms)")
        axes.grid(visible=True)
        _legend(figure, axes)
        caption = "Gap before each output token: the line is the median over requests, the band holds 90 % of them."
        if binned:
            caption += f" Neighbouring tokens are drawn together, at most {MAX_POINTS} points a line."
        return Chart(_svg(figure, "token-gaps", "Gap before each output token", caption), caption)


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of `bars`: a value with its interval, in the colour of an arm."""

    label: str
    arm: str
    value: float
    low: float | None = None
    high: float | None = None


def bars(entries: Sequence[Bar], name: str, axis: str, caption: str) -> Chart | None:
    """Horizontal bars from zero, one an entry, in order from the top; None without an entry."""
    if not entries:
        return None
    with mpl.rc_context(STYLE | {"svg.hashsalt": name}):
        figure, axes = _axes(5.4, 0.9 + 0.34 * len(entries))
        for y, entry in enumerate(entries):
            axes.barh(y, entry.value, height=0.62, color=ARM_COLOUR[entry.arm], alpha=0.75)
            if entry.low is not None and entry.high is not None:
                axes.plot([entry.low, entry.high], [y, y], color=INK, lw=1.2, marker="|", ms=6)
        axes.set_yticks(range(len(entries)), [entry.label for entry in entries])
        axes.set_ylim(len(entries) - 0.4, -0.6)
        axes.set_xlim(left=0)
        axes.set_xlabel(axis)
        axes.grid(visible=True, axis="x")
        axes.set_axisbelow(True)
        return Chart(_svg(figure, name, axis, caption), caption)


def load_curve(
    curves: Mapping[str, Sequence[tuple[float, float, float]]],
    name: str,
    limit: float | None,
    labels: Mapping[str, str],
) -> Chart | None:
    """A latency against the load: for each arm (requests a second, p50, p95) a probe, and the `limit` as a line.

    None without a probe.
    """
    curves = {arm: sorted(points) for arm, points in curves.items() if points}
    if not curves:
        return None
    title = name.removesuffix("_ms").upper()
    with mpl.rc_context(STYLE | {"svg.hashsalt": f"load-{name}"}):
        figure, axes = _axes(5.4, 3.3)
        for arm, points in curves.items():
            loads, medians, tails = (np.array(column) for column in zip(*points, strict=True))
            style: dict[str, Any] = {"color": ARM_COLOUR[arm], "ls": DASHES[arm], "marker": "o", "ms": 3.5}
            axes.plot(loads, tails, lw=1.8, label=f"{labels[arm]}, p95", **style)
            axes.plot(loads, medians, lw=1.0, alpha=0.6, label=f"{labels[arm]}, p50", **style)
        if limit is not None:
            axes.axhline(limit, color=INK, lw=1.0, ls=(0, (1, 1.5)), label=f"limit {limit:g} ms")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("requests a second (offered)")
        axes.set_ylabel(f"{title} (ms)")
        axes.grid(visible=True)
        _legend(figure, axes)
        caption = f"{title} against the load, a point a probe; both axes are logarithmic. Further right is more load."
        return Chart(_svg(figure, f"load-{name}", f"{title} against the load", caption), caption)


def _axes(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0)
    axes.tick_params(length=0)
    return figure, axes


def _legend(figure: Figure, axes: Axes) -> None:
    """Two columns where they fit the figure, else one whose entries are broken into lines."""
    handles, labels = axes.get_legend_handles_labels()
    if not handles:
        return
    layout: dict[str, Any] = {"loc": "outside upper left", "handlelength": 1.8, "borderpad": 0, "columnspacing": 1.5}
    legend = figure.legend(handles, labels, ncols=2, **layout)
    if legend.get_window_extent().width > figure.bbox.width:
        legend.remove()
        figure.legend(handles, [textwrap.fill(label, LEGEND_LINE) for label in labels], ncols=1, **layout)


def _steps(ordered: Floats) -> tuple[Floats, Floats]:
    """Points of the empirical distribution: values `[m]` and the share of samples at or below, m at most MAX_POINTS."""
    ranks = np.arange(1, ordered.size + 1)
    if ordered.size > MAX_POINTS:
        ranks = np.unique(np.linspace(1, ordered.size, MAX_POINTS).round().astype(np.int64))
    values = ordered[ranks - 1]
    return np.concatenate([values[:1], values]), np.concatenate([[0.0], ranks / ordered.size])


def _seconds(rows: pd.DataFrame, origin: float) -> Floats:
    """Dispatch, first and last token of each row, in seconds since `origin`: `[n, 3]`."""
    stamps = [rows[name].to_numpy(dtype=np.float64) for name in ("dispatched_ns", "first_token_ns", "last_token_ns")]
    return (np.stack(stamps, axis=1) - origin) / 1e9


def _lanes(spans: Floats) -> list[int]:
    """The first free lane for each span, in order of start, so that what overlaps in time lies side by side."""
    free: list[float] = []
    lanes = []
    for start, _, end in spans:
        lane = next((lane for lane, until in enumerate(free) if until <= start), len(free))
        free[lane : lane + 1] = [end]
        lanes.append(lane)
    return lanes


def _box(left: float, right: float, y: float) -> list[tuple[float, float]]:
    return [(left, y - 0.4), (right, y - 0.4), (right, y + 0.4), (left, y + 0.4)]


def _gap_per_token(measured: Measured, arm: str) -> tuple[Ints, Floats]:
    """Index (from 0 for the first token of the output) and gap in ms of each token that came after the first chunk."""
    mine = measured.of_arm(arm)
    position, counts, gap_ms = (measured.gaps[name].to_numpy()[mine] for name in ("position", "n_tokens", "gap_ms"))
    if bool(np.all(counts == 1)):
        return position, gap_ms
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts, dtype=np.int64) - counts, counts)
    return np.repeat(position, counts) + within, np.repeat(gap_ms / counts, counts)


def _svg(figure: Figure, name: str, title: str, description: str) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<style[^>]*>.*?</style>", "", text, flags=re.DOTALL)  # its selector would style the whole page
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    for placeholder, variable in COLOURS.items():
        text = text.replace(placeholder, variable)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", text)
    text = re.sub(r'xlink:href="#([^"]+)"', rf'href="#{name}-\1"', text)
    text = re.sub(r"font-family: [^;\"]*; ?", "", text)  # the page's own typeface
    text = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), text)  # 1/100 pt is enough
    text = re.sub(r' (?:width|height)="[\d.]+pt"', "", text, count=2)  # the page decides, the viewBox keeps the shape
    head, body = text.split(">", 1)
    head += f' role="img" aria-labelledby="{name}-title {name}-desc"'
    return (
        f'{head}><title id="{name}-title">{escape(title)}</title>'
        f'<desc id="{name}-desc">{escape(description)}</desc>{body.strip()}'
    )
