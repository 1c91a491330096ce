"""Splits runs into panels and series by what varies among them, so that no plot averages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lm_eval_moecache.records.errors import unknown
from lm_eval_moecache.report.columns import AXES, setting
from lm_eval_moecache.report.results import Run

MAX_SERIES, MAX_PANELS = 20, 6
# Of these the first that varies stands for the others: an experiment's labels say what it asks.
_INSTEAD_OF_ALL = "run"


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes: its title, and its runs by the name of their series."""

    title: str
    series: dict[str, list[Run]]


def varying(runs: Sequence[Run], *, besides: Sequence[str]) -> list[str]:
    """Return the settings that tell the runs apart, without those of `besides`."""
    given = {key for run in runs for key in (*run.model_args, *run.options)}
    if all(run.label is not None for run in runs):
        names = [_INSTEAD_OF_ALL]
    else:
        names = ["policy", *AXES, *sorted(given - {*AXES, "policy", "label"})]
        names = ["experiment", "model", *names]
    # An axis that follows from the policy tells nothing more, nor one parameter from another.
    kept: list[str] = []
    seen = {tuple(_text(run, name) for name in besides) for run in runs}
    for name in names:
        if name in besides:
            continue
        places = {tuple(_text(run, n) for n in (*besides, *kept, name)) for run in runs}
        if len(places) > len(seen):
            kept.append(name)
            seen = places
    return kept


def check_group(runs: Sequence[Run], group: str) -> None:
    """Raise ValueError where no run has this setting: all would have one colour, and no name."""
    if any(setting(run, group).raw is not None for run in runs):
        return
    given = {key for run in runs for key in (*run.model_args, *run.options)}
    raise unknown("group", group, {*AXES, *given, "policy", "model", "experiment", "hardware"})


def panels_of(runs: Sequence[Run], group: str, x: str) -> list[Panel]:
    """Split runs into panels of at most 20 series; `x` is the setting of the abscissa.

    The group gives the series their names, and whatever else varies is told beside it; where the
    series are too many for one picture, the setting with the fewest values heads panels. Raises
    ValueError where that is not enough, naming what varies.
    """
    others = varying(runs, besides=[group, x])
    if len({_text(run, group) for run in runs}) == 1 and others:
        group, others = others[0], others[1:]
    names = [group, *others]
    if len(_series(runs, names)) <= MAX_SERIES:
        return [Panel("", _series(runs, names))]
    fits = []
    for head in names:
        values = sorted({_text(run, head) for run in runs})
        rest = [name for name in names if name != head]
        split = [
            Panel(f"{head}: {value}", _series([r for r in runs if _text(r, head) == value], rest))
            for value in values
        ]
        if len(split) <= MAX_PANELS and all(len(p.series) <= MAX_SERIES for p in split):
            fits.append(split)
    if fits:
        return min(fits, key=len)
    raise ValueError(
        f"no plot: {len(_series(runs, names))} series ({', '.join(names)} vary) are too many for "
        f"{MAX_PANELS} panels of {MAX_SERIES}. Choose --group, or some of the runs by "
        "--where SETTING=VALUE,..., or name `figures` in the sweep's file."
    )


def check_one_run_a_place(panel: Panel, x: Callable[[Run], float | None], name: str) -> None:
    """Raise ValueError where two runs of a series have one place: which would be drawn?"""
    for label, runs in panel.series.items():
        places = [x(run) for run in runs]
        for place in places:
            if place is not None and places.count(place) > 1:
                twins = [run.run_id for run in runs if x(run) == place]
                raise ValueError(
                    f"no plot: {label!r} has several runs at {name} {place:g}: {', '.join(twins)}."
                )


def _series(runs: Sequence[Run], names: Sequence[str]) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {}
    for run in runs:
        told = [_text(run, name) for name in names]
        parts = [
            text if i == 0 or not _is_plain(text) else f"{names[i]}={text}"
            for i, text in enumerate(told)
            if text
        ]
        found.setdefault(", ".join(parts), []).append(run)
    return dict(sorted(found.items()))


def _is_plain(text: str) -> bool:
    """A number alone does not say what it is the number of."""
    return not text[:1].isalpha()


def _text(run: Run, name: str) -> str:
    raw = setting(run, name).raw
    return "" if raw is None else str(raw)
