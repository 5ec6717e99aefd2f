"""The report as pictures: PNGs for people who were not there.

Contract: each picture that the report has numbers for is written, named after what it shows, and
nothing else; matplotlib is needed here alone, and drawn with in memory, so no display is. Pictures
are read without the report: title, units and sources are in them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import Any

from sglang_bcg_dsa.report import Report, ReportError

_INK, _FAINT, _GRID = "#222222", "#6b6b6b", "#e4e4e4"
_COLOURS = ("#2f6db5", "#e08a1e", "#3c9d6a", "#b8475f", "#7a5fb0", "#8a6d3b", "#4fb3bf", "#c678a8", "#7f7f7f", "#b0b94a")
_REAL, _PADDED = "#2f6db5", "#c9d8ea"
_NEAR = 2
"""Percentage points by which a rank's coverage may differ and still not get a line: ranks that vote replay together."""
_REASONS = 9
"""Reasons with a colour of their own; rarer ones are drawn as one."""


def check(folder: Path) -> None:
    """Raise ReportError when no picture could be written, before anything is read."""
    if find_spec("matplotlib") is None:
        raise ReportError("--plots needs matplotlib: pip install 'sglang-bcg-dsa[plots]'")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReportError(f"--plots {folder} cannot be created: {error.strerror}") from None


def draw(report: Report, folder: Path) -> list[Path]:
    """Write the pictures and return their paths. Adds a note to the report for each that is missing.

    Raises ReportError for a picture that cannot be written.
    """
    drawn = []
    for name, make, missing in (
        ("coverage.png", _coverage, "coverage over time needs two samples: --watch, several documents, or a log"),
        ("reasons.png", _reasons, "no prefill ran eagerly: there are no reasons to draw"),
        ("tokens.png", _tokens, "nothing is known of replays by bucket: there are no tokens to draw"),
        ("capture.png", _capture, "nothing is known of captures: there are none to draw"),
    ):
        if (figure := make(report)) is None:
            report.notes.append(f"{name}: {missing}")
            continue
        sources = [s if "://" in s else Path(s).name for s in (report.sources[0], report.sources[-1])]
        text = sources[0] if len(report.sources) == 1 else f"{len(report.sources)} samples, {sources[0]} .. {sources[1]}"
        figure.text(0.01, 0.01, text, color=_FAINT, fontsize=8, va="bottom")
        try:
            figure.savefig(folder / name, dpi=150)
        except OSError as error:
            raise ReportError(f"--plots: {folder / name} cannot be written: {error.strerror}") from None
        drawn.append(folder / name)
    return drawn


def _figure(title: str, under: str, height: float = 4.5, panels: int = 1) -> tuple[Any, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, height), facecolor="white")
    FigureCanvasAgg(figure)
    found = figure.subplots(1, panels, squeeze=False)[0]
    inch = 1 / height
    figure.subplots_adjust(left=0.09, right=0.97, top=1 - 0.95 * inch, bottom=0.85 * inch, wspace=0.25)
    figure.text(0.01, 1 - 0.1 * inch, title, color=_INK, fontsize=14, fontweight="bold", va="top")
    figure.text(0.01, 1 - 0.42 * inch, under, color=_FAINT, fontsize=10, va="top")
    for axes in found:
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(_FAINT)
        axes.tick_params(colors=_FAINT, labelsize=9, length=0)
        axes.grid(axis="y", color=_GRID, linewidth=0.8)
        axes.set_axisbelow(True)
    return figure, list(found)


def _coverage(report: Report) -> Any:
    """Coverage of each interval, all ranks together and each apart."""
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    times = sorted({point.time for point in report.points})
    if len(times) < 2:
        return None
    lines: dict[str, dict[float, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
    for point in report.points:
        for name in (point.rank, "all ranks"):
            lines[name][point.time][0] += point.replayed
            lines[name][point.time][1] += point.eager
    x, y = _shares(lines["all ranks"])
    together = dict(zip(x, y, strict=True))
    by_rank = {name: _shares(lines[name]) for name in report.ranks if name in lines}
    apart = {
        name: line for name, line in by_rank.items()
        if any(abs(share - together[at]) > _NEAR for at, share in zip(*line, strict=True))
    }
    under = "share of prefill forwards that replayed a graph, by interval"
    if 0 < len(apart) < len(report.ranks):
        under += f"; other ranks stay within {_NEAR} points of all"
    elif not apart and len(report.ranks) > 1:
        under += f"; each rank stays within {_NEAR} points of this"
    figure, (axes,) = _figure("Coverage over time", under)
    for colour, (name, (times_of, shares_of)) in zip(cycle(_COLOURS), apart.items(), strict=False):
        axes.plot(times_of, shares_of, color=colour, linewidth=1.4, marker=".", markersize=5, label=name)
    axes.plot(x, y, color=_INK, linewidth=2.2, marker="o", markersize=4, label="all ranks" if apart else None, zorder=1.5)
    axes.set_ylim(-3, 103)
    axes.set_yticks(range(0, 101, 20), [f"{n} %" for n in range(0, 101, 20)])
    locator = AutoDateLocator()
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
    if apart:
        _legend(axes)
    return figure


def _shares(line: dict[float, list[int]]) -> tuple[list[datetime], list[float]]:
    times = sorted(line)
    return [datetime.fromtimestamp(t) for t in times], [100 * line[t][0] / sum(line[t]) for t in times]


def _reasons(report: Report) -> Any:
    """Votes against by DP rank where ranks vote; eager prefills by rank where not."""
    if report.refusals:
        under = "votes against replay, by the rank that refused"
        table = report.refusals
        ranks = sorted({rank for by in table.values() for rank in by} | {s["rank"]["dp"] for s in report.states})
        bars = {reason: [by.get(rank, 0) for rank in ranks] for reason, by in table.items()}
        labels = [f"DP{rank}" for rank in ranks]
    else:
        under = "eager prefills, by rank; one prefill can have several reasons"
        labels = report.ranks
        bars = {reason: [s["reasons"].get(reason, 0) for s in report.states] for reason in report.reasons}
    if not bars:
        return None
    order = sorted(bars, key=lambda reason: -sum(bars[reason]))
    if len(order) > _REASONS:
        bars["others"] = [sum(column) for column in zip(*(bars[reason] for reason in order[_REASONS:]), strict=True)]
        order = [*order[:_REASONS], "others"]
    figure, (axes,) = _figure("Reasons by rank", under, height=2.6 + 0.32 * len(labels))
    left = [0] * len(labels)
    for colour, reason in zip(_COLOURS, order, strict=False):
        axes.barh(labels, bars[reason], left=left, color=colour, label=reason, height=0.65)
        left = [a + b for a, b in zip(left, bars[reason], strict=True)]
    for row, total in enumerate(left):
        axes.text(total, row, f" {total:,}", va="center", color=_INK, fontsize=9)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color=_GRID, linewidth=0.8)
    axes.set_xlim(0, 1.1 * max(left))
    _whole(axes.xaxis)
    axes.set_xlabel("votes" if report.refusals else "eager prefills", color=_FAINT, fontsize=9)
    _legend(axes)
    return figure


def _tokens(report: Report) -> Any:
    """Stacked bars: real tokens, padding above, its share written on top."""
    table = report.by_bucket()
    if not any(row["replays"] for row in table.values()):
        return None
    figure, (axes,) = _figure("Tokens by bucket", "tokens of all replays, all ranks; above each bar the share that is padding")
    real, padded = ([row[kind] for row in table.values()] for kind in ("real", "padded"))
    places = range(len(table))
    axes.bar(places, real, color=_REAL, label="real", width=0.75)
    axes.bar(places, padded, bottom=real, color=_PADDED, label="padding", width=0.75)
    totals = [a + b for a, b in zip(real, padded, strict=True)]
    _over(axes, totals, [f"{100 * p / t:.0f} %" if t else "" for p, t in zip(padded, totals, strict=True)])
    _buckets(axes, table)
    _whole(axes.yaxis)
    _legend(axes)
    return figure


def _capture(report: Report) -> Any:
    """Seconds and, where the device tells, memory of each bucket's capture: the rank that took most."""
    from matplotlib.ticker import NullLocator, StrMethodFormatter

    table = {size: row for size, row in report.by_bucket().items() if row["seconds"] is not None}
    if not table:
        return None
    seconds = [row["seconds"] for row in table.values()]
    megabytes = [None if row["bytes"] is None else row["bytes"] / 1e6 for row in table.values()]
    known = [n for n in megabytes if n is not None]
    under = f"the rank that took most; {sum(seconds):.1f} s" + (f" and {sum(known) / 1e3:.2f} GB in all" if known else " in all")
    figure, panels = _figure("Capture by bucket", under if known else f"{under}; this device does not tell its memory",
                             panels=1 + bool(known))  # fmt: skip
    for axes, values, unit in zip(panels, (seconds, megabytes), ("seconds", "MB"), strict=False):
        # The first capture pays for what all share: hundreds of times a later one's memory.
        drawn = [n or 0.0 for n in values]
        positive = [n for n in drawn if n > 0]
        logarithmic = len(positive) > 1 and max(positive) > 50 * min(positive)
        if logarithmic:  # a bar has no foot there
            axes.plot([i for i, n in enumerate(drawn) if n > 0], positive, "o", color=_REAL, markersize=8)
            axes.set_yscale("log")
            axes.set_ylim(0.5 * min(positive), 2.5 * max(positive))
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
            axes.yaxis.set_minor_locator(NullLocator())
        else:
            axes.bar(range(len(drawn)), drawn, color=_REAL, width=0.75)
        axes.set_title(f"{unit}{', logarithmic' if logarithmic else ''}", loc="left", fontsize=10, color=_FAINT)
        texts = ["" if n is None else f"{n:.3g}" if n < 1000 else f"{n:,.0f}" for n in values]
        _over(axes, drawn, texts, 6 if logarithmic else 2)
        _buckets(axes, table)
    return figure


def _buckets(axes: Any, table: Iterable[int]) -> None:
    sizes = list(table)
    step = max(1, round(len(sizes) / (12 if len(axes.figure.axes) > 1 else 24)))
    axes.set_xticks(range(0, len(sizes), step), [f"{size}" for size in sizes[::step]])
    axes.set_xlabel("bucket, tokens", color=_FAINT, fontsize=9)


def _over(axes: Any, heights: Sequence[float], texts: Sequence[str], gap: int = 2) -> None:
    """Text above bars, if there is room for it."""
    if len(heights) > (12 if len(axes.figure.axes) > 1 else 24):
        return
    for place, (height, text) in enumerate(zip(heights, texts, strict=True)):
        axes.annotate(text, (place, height), (0, gap), textcoords="offset points", ha="center", fontsize=8, color=_INK)


def _whole(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    axis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def _legend(axes: Any) -> None:
    """Above the axes, right of the title."""
    entries = len(axes.get_legend_handles_labels()[1])
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=min(entries, 5), frameon=False, fontsize=8,
                labelcolor=_INK, handlelength=1.2, columnspacing=1.0)  # fmt: skip
