"""Plots are written for the figures that runs have, and are reproducible to the byte."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from lm_eval_moecache.report import plots
from lm_eval_moecache.report.plots import COLOURS
from lm_eval_moecache.report.runs.columns import find_column
from lm_eval_moecache.report.runs.files import load_runs
from lm_eval_moecache.report.runs.run import Run
from lm_eval_moecache.report.tables.front import pareto_front
from lm_eval_moecache.report.tables.schema import Figure
from tests.conftest import Moecache
from tests.report.runs import leaderboard_of_four, record, write

pytest.importorskip("matplotlib")
NAMES = (
    "accuracy_memory accuracy_miss_rate accuracy_tok_per_s "
    "capacity_accuracy capacity_miss_rate capacity_tok_per_s capacity_ttft_ms"
).split()


def test_every_plot_and_a_sweep_files_own_are_written_twice_the_same(
    tmp_path: Path, moecache: Moecache
) -> None:
    folder = leaderboard_of_four(tmp_path / "four")
    panels = [{"x": "capacity", "y": "miss_rate"}, {"x": "tok_per_s", "y": "quiz"}]
    figure = {"name": "mine", "group": "policy", "line": True, "panels": panels}
    for names, figures in ((NAMES, None), (["mine"], [figure])):
        if figures:
            (folder / "sweep.yaml").write_text(json.dumps({"tasks": "quiz", "figures": figures}))
        first, second = tmp_path / names[0] / "one", tmp_path / names[0] / "two"
        for output in (first, second):
            moecache("plot", folder, f"--output={output}")
        written = sorted(path.name for path in first.iterdir())
        assert written == sorted(f"{name}.{form}" for name in names for form in ("png", "svg"))
        assert all((first / name).read_bytes() == (second / name).read_bytes() for name in written)
    text = (first / "mine.svg").read_text()
    assert "on demand" in text and "(less is better)" in text


def test_what_cannot_be_drawn_is_refused_and_runs_are_chosen_by_settings(
    tmp_path: Path, moecache: Moecache
) -> None:
    folder = leaderboard_of_four(tmp_path / "four")
    for option, message in (
        ("--task=quizz", "Allowed: quiz"),
        ("--where=policy=other", "no run has these settings"),
        ("--group=hardware", "group='hardware' has no effect: all runs have 'a100-5GBps'"),
    ):
        assert message in moecache("plot", folder, option, code=2)
    moecache("plot", folder, f"--output={tmp_path}", "--where=policy=specmd")
    panels = "[{x: capacity, y: miss_rate}]"
    (folder / "sweep.yaml").write_text(f"tasks: quiz\nfigures: [{{name: x, panels: {panels}}}]\n")
    refusal = moecache("plot", folder, "--group=policy", code=2)
    assert "--group='policy' has no effect on the `figures`" in refusal
    moecache("plot", write(tmp_path / "one", record("a")), code=2)


def grid(folder: Path, prefetches: tuple[str, ...] = ("next_gate", "none", "score")) -> Path:
    """Seven evictions under each prefetcher at two capacities, like the eviction experiment."""
    runs = []
    for prefetch, i, (j, capacity) in product(prefetches, range(7), enumerate(("5%", "25%"))):
        settings = {"prefetch": prefetch, "eviction": f"rule{i}"}
        run = record(f"{prefetch}{i}{j}", capacity=capacity, tok_per_s=100.0 * i + j, **settings)
        run["config"]["moecache"]["policy"] |= {k: {"name": v} for k, v in settings.items()}
        runs.append(run)
    return write(folder, *runs)


def drawn(runs: list[Run], x: str, y: str, *, line: bool = False) -> Any:
    """Draw the usual trade-off of two columns."""
    group = plots._grouping(runs, "policy", is_curve=line)
    figure = Figure.model_validate(
        {"name": "x", "panels": [{"x": x, "y": y}], "group": group, "line": line}
    )
    return plots.draw_figure(runs, figure, front=not line)


def test_what_varies_becomes_series_and_nothing_is_averaged(tmp_path: Path) -> None:
    runs = load_runs(grid(tmp_path, ("next_gate", "none")))
    figure = drawn(runs, "capacity_bytes", "tok_per_s", line=True)
    [axes] = figure.axes
    lines = axes.lines
    assert sorted(y for line in lines for y in line.get_ydata()) == sorted(
        100.0 * i + j for i in range(7) for j in range(2) for _ in range(2)
    )
    looks = [(line.get_color(), line.get_marker()) for line in lines]
    assert len(set(looks)) == len(looks) == 14
    assert {color for color, _ in looks} <= set(COLOURS)
    assert {line.get_linestyle() for line in lines} == {"None"}, "two points: no course"
    assert axes.get_xlabel().startswith("capacity of the cache [MB]")
    assert axes.get_ylabel().startswith("output tokens per second")
    assert figure._suptitle.get_text() == "Output tokens per second against capacity of the cache"


def test_too_many_curves_and_two_runs_in_one_place_are_refused(tmp_path: Path) -> None:
    many = load_runs(grid(tmp_path / "many"))
    with pytest.raises(ValueError, match=r"21 curves \(.*vary\) are more than 20"):
        drawn(many, "capacity", "tok_per_s", line=True)
    # Points share a colour then.
    points = drawn(many, "miss_rate", "tok_per_s").axes[0].lines
    assert sum(len(line.get_xdata()) for line in points if line.get_label() != "Pareto front") >= 42
    twins = write(tmp_path / "twins", record("a"), record("b"), record("c", capacity="50%"))
    with pytest.raises(ValueError, match="several runs at capacity"):
        plots.write_plots(load_runs(twins), tmp_path)


def test_axes_of_accuracy_fit_the_bars_and_the_front_is_ringed(tmp_path: Path) -> None:
    runs = load_runs(leaderboard_of_four(tmp_path))
    [axes] = drawn(runs, "tok_per_s", "accuracy").axes
    low, high = axes.get_ylim()
    points = [plots.axis_of(runs, runs, "accuracy").at(run) for run in runs]
    ends = [v + side * half for v, half in filter(None, points) for side in (-1, 1)]
    assert low <= max(0, min(ends)) and min(1, max(ends)) <= high <= 1
    # Not more than a tenth of the axis beyond the bars on either side.
    room = 0.1 * (high - low)
    assert max(0, min(ends)) - low <= room and high - min(1, max(ends)) <= room
    assert axes.containers and all(bars.has_yerr for bars in axes.containers)
    [front] = [line for line in axes.lines if line.get_label() == "Pareto front"]
    # No test over four documents separates their answers, so only the fastest is on the front.
    assert list(front.get_xdata()) == [200.0]


def test_no_point_that_another_beats_in_both_axes_is_ringed(tmp_path: Path) -> None:
    """A lossless row stays on the front of a table where a test shows no lossy one as good."""
    fields = [((1, 0, 0, 1), 100.0, 1.0), ((1, 1, 0, 1), 200.0, 0.9)]
    runs = load_runs(
        write(
            tmp_path,
            *(
                record(f"p{i}", policy=f"p{i}", answers=answers, tok_per_s=speed, totals=totals)
                for i, (answers, speed, fidelity) in enumerate(fields)
                for totals in [{"routing_fidelity": fidelity, "low_precision_share": 0.0}]
            ),
        )
    )
    axes = [find_column(runs, name) for name in ("tok_per_s", "accuracy")]
    assert pareto_front(runs, [0, 1], axes) == {0, 1}
    [place] = drawn(runs, "tok_per_s", "accuracy").axes
    [front] = [line for line in place.lines if line.get_label() == "Pareto front"]
    assert list(front.get_xdata()) == [200.0]


def test_a_perplexity_of_words_is_drawn_against_the_lowest(tmp_path: Path) -> None:
    records = []
    for name, value in (("a", 16_000.0), ("b", 16_160.0)):
        results = record(name, policy=name)
        results["results"]["quiz"] = {"word_perplexity,none": value}
        results["higher_is_better"] = {"quiz": {"word_perplexity": False}}
        records.append(results)
    runs = load_runs(write(tmp_path, *records))
    axis = plots.axis_of(runs, runs, "quiz")
    assert [axis.at(run) for run in runs] == [(1.0, 0.0), (pytest.approx(1.01), 0.0)]
    assert "of the lowest, 16000" in axis.label and not axis.log


def test_axes_have_plain_numbers_and_units_and_series_one_look_and_a_name(tmp_path: Path) -> None:
    """No `10^0`, no `1e10`, no two panels of one name, no series that looks like another."""
    records = [
        record(f"r{i}", policy="on_demand + eviction=lfu", capacity=capacity, **{"draft_tokens": i})
        for i, capacity in enumerate(("5%", "50%"), 1)
    ]
    for i, made in enumerate(records, 1):
        made["config"]["moecache"]["hardware"]["link_bytes_per_s"] = 16e9 * i
        made["results"]["quiz"] = {"word_perplexity,none": 150.0 * 5**i}
        made["higher_is_better"] = {"quiz": {"word_perplexity": False}}
    runs = load_runs(write(tmp_path, *records))
    panels = [
        {"x": "link_bytes_per_s", "y": y, "title": "one", "where": {"capacity": capacity}}
        for y, capacity in (("quiz", "50%"), ("miss_rate", "5%"))
    ]
    panels.append({"x": "link_bytes_per_s", "y": "quiz"})
    figure = Figure.model_validate(
        {"name": "x", "panels": panels, "group": ["policy", "draft_tokens"]}
    )
    picture = plots.draw_figure(runs, figure)
    plots.save(picture, tmp_path / "x.svg")
    first, second, third, hidden = picture.axes
    assert first.get_xlabel() == "link [GB/s]" and not hidden.get_visible()
    assert [place.get_title() for place in (first, second)] == [
        *("one: quiz word perplexity", "one: miss rate")
    ]
    assert [line.get_xdata()[0] for line in (first.lines[0], second.lines[0])] == [32.0, 16.0]
    assert first.lines[0].get_color() != second.lines[0].get_color()
    ticks = [text.get_text() for text in third.get_yticklabels()]
    assert "2" in ticks and not any("^" in text for text in ticks)
    [names] = [[text.get_text() for text in each.texts] for each in picture.legends]
    assert names == [f"on demand, eviction lfu, draft tokens {i}" for i in (2, 1)]


def test_a_line_joins_runs_of_one_identity_only(tmp_path: Path) -> None:
    batch_of_1, batch_of_4 = record("a"), record("b", capacity="50%")
    batch_of_4["config"]["moecache"]["streams"] = 4
    runs = load_runs(write(tmp_path, batch_of_1, batch_of_4))
    panels = [{"x": "capacity", "y": "tok_per_s"}]
    figure = Figure.model_validate({"name": "x", "line": True, "panels": panels})
    with pytest.raises(ValueError, match="would join runs that differ in streams"):
        plots.draw_figure(runs, figure)
    plots.draw_figure(runs, figure.model_copy(update={"group": ["streams"]}))


def test_no_legend_or_title_is_cut_off(tmp_path: Path) -> None:
    names = [f"a composition with a rather long name, number {i}" for i in range(6)]
    runs = load_runs(write(tmp_path, *(record(f"r{i}", policy=n) for i, n in enumerate(names))))
    title = "Accuracy on a task against misses per token while generating, half resident"
    figure = {"name": "x", "title": title, "panels": [{"x": "miss_rate", "y": "quiz"}]}
    picture = plots.draw_figure(runs, Figure.model_validate(figure))
    picture.canvas.draw()
    for part in (picture._suptitle, *picture.legends):
        box = part.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= picture.bbox.x1 and box.y0 >= 0
    assert picture.axes[0].get_ylim()[1] == 1


@pytest.mark.parametrize("label", ["$", "$x^$", r"\frac{1}{", "_hidden", "a$b_c$d"])
def test_a_label_never_breaks_a_plot_and_is_never_hidden(tmp_path: Path, label: str) -> None:
    from lm_eval_moecache.report.plots import new_figure, plain, save

    figure, [axes] = new_figure()
    axes.plot([0, 1], [0, 1], label=plain(label))
    axes.set_title(plain(label))
    axes.legend()
    _, labels = axes.get_legend_handles_labels()
    save(figure, tmp_path / "label.svg")
    assert len(labels) == 1
    assert label.strip("_") in (tmp_path / "label.svg").read_text().replace("\\$", "$")
