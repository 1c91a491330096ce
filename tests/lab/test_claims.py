"""Claims: what comparisons show, which verdicts follow, and what cannot be answered."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from lm_eval_moecache.report.statistics import documents_needed
from moecache_lab.claims.__main__ import main
from moecache_lab.claims.estimates import Answers, Estimate, Texts, Traces, _runs
from moecache_lab.claims.page import page
from moecache_lab.claims.statistics import margin_test
from moecache_lab.claims.verdicts import (
    DEPENDS,
    FAILS,
    GATED,
    HOLDS,
    OPEN,
    SIZE,
    TOO_FEW,
    Verdict,
    answer,
    read_claims,
)
from tests.conftest import Moecache
from tests.report.runs import leaderboard_of_four, record

DOCS = 40


@pytest.fixture
def claims(capsys: pytest.CaptureFixture[str]) -> Moecache:
    return Moecache(capsys, main)


# --- estimates from samples with a known answer ---


def means(new: Any, old: Any, form: Any = "ratio") -> Estimate:
    return Estimate(np.asarray(new), np.asarray(old), "documents", form)


def answers(new: Any, old: Any) -> Estimate:
    return Answers(np.asarray(new), np.asarray(old), "documents", "difference")


def test_a_ratio_of_times_has_an_interval_around_it_and_a_test_on_either_side() -> None:
    random = np.random.default_rng(1)
    old = random.uniform(50, 150, DOCS)
    speedup = means(old * 0.9 + random.normal(0, 1, DOCS), old)
    assert speedup.low < 0.9 < speedup.high and speedup.high - speedup.low < 0.02
    assert speedup.p_below(1) < 0.001 < 0.99 < speedup.p_above(1)
    assert 0.02 < speedup.p_below(0.9) < 0.98


def test_perplexities_are_told_by_token_from_log_likelihoods() -> None:
    tokens = np.full(10, 100.0)
    old = -np.linspace(400, 500, 10)
    increase = Texts(old - np.log(1.02) * tokens, old, "documents", "ratio", tokens)
    assert increase.figure == pytest.approx(1.02) and increase.low == pytest.approx(1.02)
    assert increase.p_above(1.01) < 1e-9 and not increase.is_small(1.01)
    assert increase.p_above(1.03) == 1.0


def test_few_samples_are_told_unless_all_lie_on_one_side() -> None:
    def ratio(count: int) -> Estimate:
        old = np.linspace(50, 150, count)
        return means(old * np.linspace(0.8, 1.1, count), old)

    assert ratio(31).is_small(1) and not ratio(31).is_small(1.2) and not ratio(32).is_small(1)
    for count, few in ((49, True), (50, False)):
        assert answers(np.ones(count), np.zeros(count)).is_small(0) == few


def test_documents_for_a_power_of_80_percent_are_worked_by_hand() -> None:
    # 40 differences of mean 1 and standard deviation 2: (2.4865 x 2 / 1)^2 = 24.7.
    mean = means(1 + np.tile([-1.0, 1.0], 20) * 2 * np.sqrt(39 / 40), np.zeros(40), "difference")
    assert mean.documents_needed([0.0]) == 25
    # The nearest of two bounds tells: half as far, four times as many.
    assert mean.documents_needed([0.0, 1.5]) == 99
    assert mean.documents_needed([1.0]) is None
    # 10 lost and 4 won of 100, against -1 point: 5 points with 14% changed.
    old = np.repeat([1.0, 0.0], 50)
    new = old.copy()
    new[:10], new[50:54] = 0.0, 1.0
    assert answers(new, old).documents_needed([-0.01]) == documents_needed(0.05, 0.14)


def test_traces_are_too_few_for_a_test_and_have_to_agree() -> None:
    new, old = np.array([1.0, 2.0, 3.0]), np.array([2.0, 3.0, 2.9])
    ratio = Traces(new, old, "traces", "ratio")
    assert (ratio.low, ratio.high) == pytest.approx((0.5, 3 / 2.9))
    assert (ratio.p_below(1), ratio.p_below(1.1), ratio.p_above(0.4)) == (1.0, 0.0, 0.0)
    assert ratio.documents_needed([1.0]) is None


# --- verdicts on two runs over the same documents ---


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder `a` with two runs: `new` is a tenth faster and loses 1 answer of 40."""
    (tmp_path / "a/runs").mkdir(parents=True)
    for name, factor in (("base", 1.0), ("new", 0.9)):
        run = record(name, policy="on_demand")
        times = {str(d): (100 + d) * factor for d in range(DOCS)}
        answers = {str(d): 0.0 if name == "new" and d == 3 else 1.0 for d in range(DOCS)}
        run["label"] = name
        run["scores"] = {"quiz": {"acc,none": answers, "ttft_ms,speed": times}}
        means = {key: sum(v.values()) / DOCS for key, v in run["scores"]["quiz"].items()}
        run["results"]["quiz"] |= means
        (tmp_path / f"a/runs/{name}.json").write_text(json.dumps(run))
    return tmp_path


def change(place: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    for path in (place / "a/runs").iterdir():
        run = json.loads(path.read_text())
        edit(run)
        path.write_text(json.dumps(run))
    _runs.cache_clear()


def write(place: Path, *parts: dict[str, Any], **more: Any) -> Path:
    text = dict.fromkeys(("claim", "where", "regime", "why"), "told")
    claim = {"id": "X1", **text, **more, "parts": list(parts)}
    path = place / "claims.yaml"
    path.write_text(yaml.safe_dump({"title": "t", "about": "a", "claims": [claim]}))
    return path


def answered(place: Path, *parts: dict[str, Any], **more: Any) -> Verdict:
    [verdict] = answer(read_claims(write(place, *parts, **more)), place)
    return verdict


FASTER = {
    **{"what": "x", "runs": "a", "metric": "ttft_ms", "task": "quiz"},
    **{"where": {"run": "new"}, "versus": {"run": "base"}, "expect": {"below": 1}},
}
TOO_FAST = {**FASTER, "what": "y", "expect": {"below": 0.8}}
ANSWERS = {**FASTER, "what": "z", "metric": "quiz", "form": "difference"}
LOSS, SHOWN = {"expect": {"below": 0}}, {"expect": {"above": -0.2}}
OPEN_PART = {**ANSWERS, "expect": {"above": -0.01}}
PREMISE = {"what": "cosine", "file": "alike.json", "column": "cosine", "why": "not alike"}
CLOSED, MET = ({**FASTER, "premise": {**PREMISE, "least": least}} for least in (0.5, 0.3))
WHY = "cosine is 0.4: not alike"
# 1.5 points from the bound, 2.5% changed (Connor's equation 1):
# ((1.6449 sqrt(0.025) + 0.8416 sqrt(0.025 - 0.015^2)) / 0.015)^2 = 684.8.
ASKED = "z: -0.025; the largest asks for 685 documents"


def of(regime: str, part: dict[str, Any]) -> dict[str, Any]:
    return {**part, "regime": regime}


@pytest.mark.parametrize(
    ("parts", "verdict", "told"),
    [
        ([FASTER], HOLDS, ""),
        ([{**FASTER, "expect": {"above": 1}}], FAILS, "x"),
        ([{**FASTER, "expect": {"above": 0.95, "below": 1.05}}], FAILS, "x"),
        # One answer lost of forty: too few to show either a loss or none.
        ([{**ANSWERS, **LOSS}], TOO_FEW, "z: -0.025; the largest asks for 246 documents"),
        ([OPEN_PART], TOO_FEW, ASKED),
        ([{**ANSWERS, **SHOWN}], HOLDS, ""),
        # One part that fails is enough, unless it is on how large, or in another setting.
        ([FASTER, TOO_FAST], FAILS, "y"),
        ([FASTER, {**TOO_FAST, "size": True}], SIZE, "y: 0.9"),
        ([of("a", FASTER), of("b", TOO_FAST)], DEPENDS, "holds: a; does not hold: b"),
        ([of("a", TOO_FAST), of("b", TOO_FAST)], FAILS, "y, y"),
        # What is undecided speaks neither for nor against, if its figure is the claim's.
        ([FASTER, {**ANSWERS, **LOSS}], HOLDS, "undecided: z"),
        ([FASTER, OPEN_PART], TOO_FEW, ASKED),
        ([FASTER, {**OPEN_PART, "size": True}], HOLDS, "undecided: z"),
        ([FASTER, {**TOO_FAST, "aside": True}], HOLDS, ""),
        # Half of a claim that is not shown is named with the other.
        (
            [of("a", FASTER), of("a", {**TOO_FAST, "size": True}), of("b", OPEN_PART)],
            *(DEPENDS, "holds: a; undecided: b; size differs: y: 0.9"),
        ),
        ([of("a", TOO_FAST), of("b", OPEN_PART)], FAILS, "y"),
        # In one setting a closed gate stays closed, however many documents another part gets.
        ([CLOSED], OPEN, WHY),
        ([CLOSED, OPEN_PART], OPEN, WHY),
        ([CLOSED, FASTER], OPEN, WHY),
        ([of("a", CLOSED), of("b", OPEN_PART)], TOO_FEW, f"{ASKED}; {WHY}"),
        (
            [of("a", CLOSED), of("b", OPEN_PART), of("c", FASTER)],
            *(DEPENDS, f"holds: c; undecided: b; not testable: a; {WHY}"),
        ),
        ([MET], HOLDS, ""),
        # Runs that are equal in every document differ in nothing.
        ([{**FASTER, "versus": {"run": "new"}}], FAILS, "x"),
    ],
)
def test_verdicts_follow_from_interval_and_test(
    place: Path, parts: list[dict[str, Any]], verdict: str, told: str
) -> None:
    rows = [{"layer": 0, "cosine": 0.3}, {"layer": 1, "cosine": 0.5}]
    (place / "alike.json").write_text(json.dumps({"rows": rows}))
    found = answered(place, *parts)
    assert (found.verdict, found.told) == (verdict, told)


def test_a_figure_at_its_bound_asks_for_no_number_of_documents(place: Path) -> None:
    def win_one(run: dict[str, Any]) -> None:
        run["scores"]["quiz"]["acc,none"]["5"] = float(run["label"] == "new")
        run["results"]["quiz"]["acc,none"] = 39 / 40

    change(place, win_one)
    level = {**ANSWERS, "what": "y", **LOSS}
    # One lost and one won: at 0 the figure is the bound; 5% changed, a point from the other:
    # ((1.6449 sqrt(0.05) + 0.8416 sqrt(0.05 - 0.01^2)) / 0.01)^2 = 3089.3.
    told = "y: 0, z: 0; the largest asks for 3,090 documents, no number decides 1 of 2"
    assert answered(place, level, OPEN_PART).told == told
    assert answered(place, level).told == "y: 0; no number decides 1 of 1"


@pytest.mark.parametrize(
    ("gate", "closed"),
    [
        (0.3, ""),
        (0.5, "random experts cost quiz 0.4 of the answers, and the paper's loss"),
    ],
)
def test_a_claim_on_quality_passes_a_gate_first(place: Path, gate: float, closed: str) -> None:
    """A task that random experts do little harm to says nothing of a rule that loses little."""
    losses = {"version 4": {"right": {"quiz": {"unmodified": 80.0, "100% random": 40.0}}}}
    (place / "losses.json").write_text(json.dumps(losses))
    part = {**ANSWERS, "expect": {"above": -0.2}, "gate": gate}
    path = write(place, part, {**FASTER, "aside": True})
    path.write_text(path.read_text() + "sensitivity: losses.json\n")
    claims = read_claims(path)
    [verdict] = answer(claims, place)
    gated, speed = verdict.answers
    assert gated.gate.startswith(closed) and bool(gated.gate) == bool(closed)
    assert speed.verdict == HOLDS, "speed has no gate"
    assert (gated.verdict, verdict.verdict) == ((GATED, OPEN) if closed else (HOLDS, HOLDS))
    text = page(claims, [verdict])
    assert closed in text and "| tiny version 4 |" in text
    assert "The models are `tiny`, by version" in text


def test_a_claim_without_runs_says_why(place: Path) -> None:
    claims = read_claims(write(place, untestable="no such machine"))
    [verdict] = answer(claims, place)
    assert (verdict.verdict, verdict.told) == (OPEN, "no such machine")
    assert "No figures: no such machine." in page(claims, [verdict])
    with pytest.raises(ValueError, match="say why it is `untestable`"):
        read_claims(write(place))


def test_holm_corrects_over_the_parts_of_a_claim(place: Path) -> None:
    part = {**ANSWERS, **LOSS}
    alone, both = answered(place, part), answered(place, part, {**part, "what": "y"})
    assert both.answers[0].p == min(1.0, 2 * alone.answers[0].p)


def test_every_answer_is_corrected_over_all_parts_of_all_claims_as_well(place: Path) -> None:
    path = write(place, {**ANSWERS, "what": "y", "expect": {"above": -0.15}})
    data = yaml.safe_load(path.read_text())
    [claim] = data["claims"]
    repeated = [
        {**claim, "id": f"Y{n}", "parts": [FASTER, {**FASTER, "aside": True}]} for n in range(5)
    ]
    path.write_text(yaml.safe_dump({**data, "claims": [claim, *repeated]}))
    claims = read_claims(path)
    verdict, *others = answer(claims, place)
    [verdict_answer] = verdict.answers
    # One answer lost of forty, at most 15% claimed: it holds alone, and ranks last among six.
    lost = margin_test(0, 1, 40, -0.15, 1)
    assert (verdict_answer.verdict, verdict_answer.p) == (HOLDS, lost) and 0.01 < lost < 0.05
    assert verdict_answer.p_of_all == lost
    for other in others:
        counted, aside_answer = other.answers
        assert counted.p_of_all == pytest.approx(6 * counted.p) and aside_answer.p_of_all is None
    text = page(claims, [verdict, *others])
    assert "Tests answer 6 of 6 parts; 6 of these answers survive correction" in text


def test_documents_of_one_batch_are_one_sample(place: Path) -> None:
    assert answered(place, FASTER).answers[0].estimate.new.size == DOCS
    batches = {str(d): d // 4 for d in range(DOCS)}
    change(place, lambda run: run["scores"]["quiz"].update({"batch,speed": batches}))
    [batched] = answered(place, FASTER).answers
    assert batched.estimate.new.size == DOCS // 4
    assert batched.estimate.figure == pytest.approx(0.9)
    # Answers are the documents' own.
    assert answered(place, ANSWERS).answers[0].estimate.new.size == DOCS


def test_what_half_of_the_documents_showed_is_tested_on_the_other(place: Path) -> None:
    halves = [{**FASTER, "documents": half} for half in ("even", "odd")]
    verdict = answered(place, FASTER, *halves)
    whole, even, odd = (part_answer.estimate for part_answer in verdict.answers)
    assert list(even.new) == list(whole.new[::2]) and list(odd.old) == list(whole.old[1::2])
    assert verdict.answers[2].estimate.by == "mean of 20 odd documents"


def test_the_first_screen_tells_the_papers_figure_and_ours_in_words(place: Path) -> None:
    texts = {"paper": "12% less", "ours": "{0:loss} less, {0:inverse} times, {0}"}
    claims = read_claims(write(place, FASTER, **texts))
    row = "| 12% less | 10% (10 to 10) less, 1.11 (1.11 to 1.11) times, 0.9 (0.9 to 0.9) |"
    assert row in page(claims, answer(claims, place))
    assert "| x: 0.9 (" in page(claims, [answered(place, FASTER)])
    for template, message in (
        ("{1}", "allowed: {0} to {0}"),
        ("{0:lost}", "Did you mean '{:loss}'"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            page(claims, [answered(place, FASTER, ours=template)])


def test_the_command_writes_the_page_and_says_what_is_wrong(place: Path, claims: Moecache) -> None:
    cells = [
        {"cell": {"trace": name, "eviction": rule}, "miss_rate": rate}
        for name, rates in (("one", (0.2, 0.4)), ("two", (0.3, 0.5)))
        for rule, rate in zip(("good", "lru"), rates, strict=True)
    ]
    (place / "cells.json.gz").write_bytes(gzip.compress(json.dumps(cells).encode()))
    traces = {
        **{"what": "on traces", "cells": "cells.json.gz", "where": {"eviction": "good"}},
        **{"versus": {"eviction": "lru"}, "expect": {"below": 1}, "aside": True},
    }
    path = write(place, {**FASTER, "what": "first token"}, traces)
    claims(path, "--write")
    text = (place / "CLAIMS.md").read_text()
    assert "**holds**" in text and "| first token | 0.9000 | 0.9000 to 0.9000 |" in text
    assert "| *on traces* | 0.5500 | 0.5000 to 0.6000 |" in text
    [claim] = json.loads(claims(path, "--json"))["claims"]
    assert claim["verdict"] == HOLDS and claim["parts"][0]["figure"] == pytest.approx(0.9)
    for part, message in (
        ({**FASTER, "where": {"run": "?"}}, "claim X1, 'x': {'run': '?'} picks 0 runs: none."),
        ({"what": "x", "expect": {"below": 1}}, "one of `runs`, `rows` and `cells`"),
    ):
        assert message in claims(write(place, part), code=2)


# --- claims over runs, rows and cells, and those that cannot be answered ---

ROWS: list[dict[str, Any]] = [{"layer": n, "a": 1.0 + n, "b": 2.0 + n, "none": 0} for n in range(8)]
CELLS = [
    {"cell": {"trace": trace, "eviction": name}, "miss_rate": rate, "zero": 0.0, "open_loop": False}
    for trace in ("a", "b", "c")
    for name, rate in (("lru", 0.4), ("lfu", 0.5))
]
RUN = {"runs": ".", "where": {"capacity": "5%", "policy": "on_demand"}, "form": "value"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    leaderboard_of_four(tmp_path)
    (tmp_path / "rows.json").write_text(json.dumps({"rows": ROWS}))
    (tmp_path / "cells.json.gz").write_bytes(gzip.compress(json.dumps(CELLS).encode()))
    (tmp_path / "broken.json.gz").write_bytes(b"\x1f\x8b\x08 not")
    (tmp_path / "other.json.gz").write_bytes(gzip.compress(b'[{"cell": 7}]'))
    (tmp_path / "rows.txt").write_text("{}")
    return tmp_path


def asked(folder: Path, part: dict[str, Any]) -> str:
    return str(write(folder, {"what": "told", "expect": {"below": 1}, **part}))


def of_rows(**given: Any) -> dict[str, Any]:
    rows = {"file": "rows.json", "new": "a", "old": "b", "unit": "layers", "model": "m"}
    return {"rows": rows | given}


def of_cells(**given: Any) -> dict[str, Any]:
    sides = {"where": {"eviction": "lru"}, "versus": {"eviction": "lfu"}}
    return {"cells": "cells.json.gz", **sides, **given}


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (of_rows(file="gone.json"), "gone.json: there is no such file"),
        (of_rows(file="rows.txt"), "rows.txt lacks 'rows'"),
        (of_rows(new="aa"), "rows.json: the column='aa' is not known. Did you mean 'a'?"),
        (of_rows(old="none"), "is 0, to which there is no ratio"),
        (of_rows(old=None), "there is no other side to compare with"),
        (of_cells(cells="gone.json.gz"), "gone.json.gz: there is no such file"),
        (of_cells(cells="broken.json.gz"), "broken.json.gz is not readable: "),
        (of_cells(cells="other.json.gz"), "0.cell=7 must be a mapping"),
        (of_cells(metric="mis_rate"), "metric='mis_rate' is not known. Did you mean 'miss_rate'?"),
        (of_cells(metric="open_loop"), "metric='open_loop' is not known"),
        (of_cells(metric="zero"), "is 0, to which there is no ratio"),
        (of_cells(where={"eviction": "fifo"}, versus={}), "0 traces have the figure"),
        ({**RUN, "runs": "gone"}, "gone': there is no such file or folder"),
        ({**RUN, "where": {"policy": "nobody"}}, "picks 0 runs: none"),
        ({**RUN, "where": {}}, "picks 4 runs"),
        ({**RUN, "whole": True, "aside": True, "metric": "hit_rat"}, "metric='hit_rat' is not"),
        ({**RUN, "metric": "quizz"}, "metric='quizz' is not known. Did you mean 'quiz'?"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_answered_is_refused(
    folder: Path, part: dict[str, Any], said: str, claims: Moecache
) -> None:
    [line] = claims(asked(folder, part), code=2).splitlines()
    assert line.startswith("claims: claim X1, 'told': ")
    assert said in line


def test_whole_runs_are_told_and_never_tested(folder: Path, claims: Moecache) -> None:
    part = {**RUN, "whole": True, "aside": True, "metric": "hit_rate", "expect": {"above": 0}}
    [part_answer] = json.loads(claims(asked(folder, part), "--json"))["claims"][0]["parts"]
    assert (
        part_answer["low"] == part_answer["figure"] == part_answer["high"]
        and part_answer["p"] is None
    )
    message = claims(asked(folder, {**part, "aside": False}), code=2)
    assert "of `whole` runs must have `runs` and be `aside`" in message


def test_json_of_a_figure_without_end_is_json(folder: Path, claims: Moecache) -> None:
    """A bootstrap may draw only zeros as baseline: in JSON an infinite bound is null."""
    rows = [{**row, "b": float(row["layer"] == 0)} for row in ROWS]
    (folder / "rows.json").write_text(json.dumps({"rows": rows}))
    text = claims(asked(folder, of_rows()), "--json")
    assert "Infinity" not in text and "NaN" not in text
