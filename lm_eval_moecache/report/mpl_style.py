"""Figures that come out the same to the byte: one style, no dates, no random ids."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval_moecache.records.files import write_whole

# Okabe and Ito's colours, which the colour-blind tell apart, but for the yellow that paper hides.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")
STYLE = {
    "svg.hashsalt": "moecache",
    "svg.fonttype": "none",
    "font.size": 10,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "axes.prop_cycle": f"cycler(color={list(COLOURS)!r})",
}
_UNDATED: dict[str, dict[str, None]] = {
    ".svg": {"Date": None, "Creator": None},
    ".png": {"Software": None},
    ".pdf": {"CreationDate": None},
}
_MARKERS = "osD^vP*X<>"
_LETTERS_PER_INCH = 15
_PANELS = {"figure.constrained_layout.use": True, "font.size": 9}


def pyplot() -> Any:
    """Import matplotlib with a backend that needs no screen, or say how to get it."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("plots need matplotlib: pip install 'lm-eval-moecache[plots]'.") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def new_figure(rows: int = 1, columns: int = 1) -> tuple[Any, Any]:
    """Return a figure and its row or column of axes."""
    plt = pyplot()
    with plt.rc_context({**STYLE, **_PANELS}):
        figure, axes = plt.subplots(
            rows, columns, figsize=(4.5 * columns + 1.5, 2.6 * rows + 1.2), squeeze=False
        )
    return figure, list(axes.flat)


def look(index: int) -> dict[str, Any]:
    """Seven colours times ten markers: no two of seventy series share both."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "markersize": 5,
    }


def end_at_one(axes: Any, values: Sequence[float]) -> None:
    """Let a vertical axis of shares end at 1, which no share exceeds."""
    if values and min(values) >= 0 and max(values) <= 1:
        room = max(1 - min(values), 0.05)
        axes.set_ylim(max(0.0, 1 - 1.1 * room), 1)
        for line in axes.lines:
            line.set_clip_on(False)


def plain(text: object) -> str:
    """Return a label as it is to be read: no formula, and never hidden from the legend."""
    told = str(text).replace("$", r"\$")
    # matplotlib leaves out of a legend what begins with an underscore.
    return f"\u200b{told}" if told.startswith("_") else told


def legend(figure: Any, series: Mapping[str, Any], title: str | None = None) -> None:
    """Put one legend below all panels, in as many columns as its longest name leaves room for."""
    if not series:
        return
    letters = max(map(len, series)) + 6
    columns = max(1, min(4, int(figure.get_figwidth() * _LETTERS_PER_INCH / letters)))
    figure.legend(
        series.values(),
        series.keys(),
        loc="outside lower center",
        ncols=columns,
        fontsize=8,
        title=title,
    )


def save_as(figure: Any, stem: Path) -> list[Path]:
    """Write a figure as `<stem>.svg` and `.png`; return the files."""
    paths = [stem.with_name(f"{stem.name}.{suffix}") for suffix in ("svg", "png")]
    save(figure, *paths)
    return paths


def save(figure: Any, *paths: str | Path) -> None:
    """Write a figure as SVG, PNG or PDF, by the endings of the names, and close it."""
    plt = pyplot()
    for target in map(Path, paths):
        drawn = io.BytesIO()
        with plt.rc_context(STYLE):
            kind = target.suffix.removeprefix(".")
            figure.savefig(drawn, format=kind, dpi=150, metadata=_UNDATED[target.suffix])
        write_whole(target, drawn.getvalue())
    plt.close(figure)
