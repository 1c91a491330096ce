"""Figures that come out the same to the byte: one style, no dates, no random ids."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval_moecache.records.files import write_whole

STYLE = {
    "svg.hashsalt": "moecache",
    "svg.fonttype": "none",
    "font.size": 10,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}
_UNDATED: dict[str, dict[str, None]] = {
    ".svg": {"Date": None, "Creator": None},
    ".png": {"Software": None},
    ".pdf": {"CreationDate": None},
}
_MARKERS = "osD^vP*X<>"
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
    """Ten colours times ten markers: no two of a hundred series share both."""
    return {
        "color": f"C{index % 10}",
        "marker": _MARKERS[(index // 10 + index) % len(_MARKERS)],
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


def save(figure: Any, path: str | Path) -> None:
    """Write an SVG, PNG or PDF, by the ending of its name."""
    plt = pyplot()
    target = Path(path)
    drawn = io.BytesIO()
    with plt.rc_context(STYLE):
        kind = target.suffix.removeprefix(".")
        figure.savefig(drawn, format=kind, dpi=150, metadata=_UNDATED[target.suffix])
    plt.close(figure)
    write_whole(target, drawn.getvalue())
