"""Draws the pictures of the concepts page, one per term: `python docs/pictures.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HIT, LATE, MISS, IDLE = "#31a354", "#fdae6b", "#de2d26", "#deebf7"
LINK, COMPUTE = "#756bb1", "#3182bd"


def draw_all(folder: Path) -> list[Path]:
    """Write every picture as SVG into the folder and return the paths."""
    import matplotlib as mpl

    mpl.use("Agg")
    # The same picture, the same bytes; text as text is a fifth of the size.
    mpl.rcParams.update({"svg.hashsalt": "lm-eval-moecache", "svg.fonttype": "none"})
    folder.mkdir(parents=True, exist_ok=True)
    return [draw(folder) for draw in (event, late, collision, timeline)]


def event(folder: Path) -> Path:
    """Three tokens, two layers: the set of experts each layer needs, each looked up once."""
    figure, axes = _sheet(9, 3.4)
    experts_by_token = {"t1": ((0, 3), (2, 5)), "t2": ((3, 4), (2, 6)), "t3": ((0, 4), (1, 5))}
    for layer in range(2):
        left = 1.5 + 4.2 * layer
        axes.text(left + 1.6, 3.15, f"MoE layer {layer}", ha="center", weight="bold")
        for row, (token, chosen) in enumerate(experts_by_token.items()):
            if not layer:
                axes.text(0.9, 2.55 - 0.5 * row, f"token {token[1]}", ha="right", va="center")
            for expert in range(8):
                is_chosen = expert in chosen[layer]
                color = COMPUTE if is_chosen else "#f0f0f0"
                _box(axes, left + 0.4 * expert, 2.35 - 0.5 * row, 0.36, 0.36, color)
        needed = sorted(
            {expert for chosen in experts_by_token.values() for expert in chosen[layer]}
        )
        for expert in needed:
            _box(axes, left + 0.4 * expert, 0.5, 0.36, 0.36, HIT if expert % 2 else MISS)
            axes.text(left + 0.4 * expert + 0.18, 0.68, str(expert), ha="center", va="center")
        axes.text(left + 1.6, 0.15, f"one event: {len(needed)} requests", ha="center")
    axes.text(0.9, 0.68, "looked up", ha="right", va="center")
    axes.text(4.8, -0.25, "green: resident (hit)    red: to be loaded (miss)", ha="center", size=9)
    return _save(figure, folder / "event.svg")


def late(folder: Path) -> Path:
    """A prefetch that is issued in time and arrives after its event has begun."""
    figure, axes = _sheet(9, 2.6)
    _row(axes, 1.6, "compute", [(0, 2.2, "layer 3", COMPUTE), (2.2, 1.0, "router 4", COMPUTE)])
    _box(axes, 3.2, 1.6, 1.6, 0.5, IDLE, "stall")
    _box(axes, 4.8, 1.6, 1.8, 0.5, COMPUTE, "layer 4's experts")
    _row(axes, 0.7, "link", [(0, 1.4, "demand", LINK), (1.4, 3.4, "prefetch for layer 4", LATE)])
    arrow = {"arrowstyle": "->"}
    axes.annotate("its event begins: late", (3.2, 1.6), (3.2, 0.15), arrowprops=arrow)
    axes.annotate("it arrives", (4.8, 1.2), (5.4, 0.15), arrowprops=arrow)
    return _save(figure, folder / "late.svg")


def collision(folder: Path) -> Path:
    """A later layer's expert is evicted for an earlier layer in the same pass."""
    figure, axes = _sheet(9, 2.8)
    steps = (
        ("before the pass", ("0:5", "1:2", "2:7"), None),
        ("layer 0 needs 0:1", ("0:5", "1:2", "0:1"), "2:7 is evicted"),
        ("layer 1 needs 1:2", ("0:5", "1:2", "0:1"), "hit"),
        ("layer 2 needs 2:7", ("0:5", "1:2", "0:1"), "collision miss"),
    )
    for column, (title, residents, note) in enumerate(steps):
        left = 0.3 + 2.3 * column
        axes.text(left + 0.9, 2.3, title, ha="center", weight="bold", size=9)
        for place, key in enumerate(residents):
            _box(axes, left + 0.62 * place, 1.3, 0.56, 0.56, IDLE, key)
        color = {"hit": HIT, "collision miss": MISS}.get(note or "", "black")
        axes.text(left + 0.9, 0.8, note or "", ha="center", color=color)
    axes.text(
        4.6, 0.2, "layer:expert, a cache of three experts for all layers", ha="center", size=9
    )
    return _save(figure, folder / "collision.svg")


def timeline(folder: Path) -> Path:
    """Compute, link and host during one token: a decode pass of a replay's timeline."""
    from matplotlib.figure import Figure

    from lm_eval_moecache.cli.replay import replay
    from lm_eval_moecache.records.files import traces_dir

    file = folder / "timeline.json"
    how = {"miss": "host", "bound": False, "hardware": "rtx-4090-24gb"}
    replay(traces_dir() / "olmoe-1b-7b.parquet", **how, timeline=str(file))
    events = [e for e in json.loads(file.read_text())["traceEvents"] if e["ph"] == "X"]
    file.unlink()
    token = [e for e in events if e["cat"] == "passes"][20]
    colors = {"dense": IDLE, "experts": COMPUTE, "stall": MISS, "wait": LATE, "wake": LATE}
    figure = Figure(figsize=(9, 2.4), layout="constrained")
    axes = figure.subplots()
    for row, track in enumerate(("host", "link", "compute")):
        for event in events:
            start = event["ts"] - token["ts"]
            if event["cat"] == track and 0 <= start < token["dur"]:
                color = LINK if track == "link" else colors[event["name"]]
                axes.barh(row, event["dur"] / 1e3, left=start / 1e3, color=color, height=0.6)
    axes.set_yticks(range(3), ["host", "link", "compute"])
    axes.set_xlabel("ms since the token began (light: dense part, blue: experts, purple: loads)")
    return _save(figure, folder / "timeline.svg")


def _sheet(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.set_xlim(-0.6, width + 0.6)
    axes.set_ylim(-0.5, height)
    axes.set_axis_off()
    return figure, axes


def _row(axes: Any, y: float, name: str, parts: list[tuple[float, float, str, str]]) -> None:
    axes.text(-0.1, y + 0.25, name, ha="right", va="center")
    for start, length, text, color in parts:
        _box(axes, start, y, length, 0.5, color, text)


def _box(
    axes: Any, x: float, y: float, width: float, height: float, color: str, text: str = ""
) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x, y), width, height, facecolor=color, edgecolor="white"))
    is_dark = color in (COMPUTE, LINK, HIT, MISS)
    axes.text(
        x + width / 2,
        y + height / 2,
        text,
        ha="center",
        va="center",
        size=8,
        color="white" if is_dark else "black",
    )


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    return path


if __name__ == "__main__":
    draw_all(Path(__file__).resolve().parent / "pictures")
