"""What comparisons show, and which verdicts on claims follow: on records whose answer is known."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from lm_eval_moecache.cli.main import main
from lm_eval_moecache.report.claims import (
    FAILS,
    HOLDS,
    IN_PART,
    OPEN,
    Samples,
    Verdict,
    answer,
    estimate,
    page,
    read_claims,
)
from tests.report.runs import record

DOCS = 40


def _samples(kind: Any, new: list[float], old: list[float], **more: Any) -> Samples:
    sides = {"new": np.asarray(new), "old": np.asarray(old)}
    return Samples(kind=kind, **sides, unit="documents", **more)


def test_a_ratio_of_times_has_an_interval_around_it_and_a_test_on_either_side() -> None:
    random = np.random.default_rng(1)
    old = random.uniform(50, 150, DOCS)
    shown = estimate(
        _samples("figures", list(old * 0.9 + random.normal(0, 1, DOCS)), list(old)), "ratio"
    )
    assert shown.low < 0.9 < shown.high and shown.high - shown.low < 0.02
    assert shown.p_below(1) < 0.001 < 0.99 < shown.p_above(1)
    assert 0.02 < shown.p_below(0.9) < 0.98


def test_perplexities_are_told_by_token_from_log_likelihoods() -> None:
    tokens = np.full(10, 100.0)
    old = -np.linspace(400, 500, 10)
    lost = np.log(1.02) * tokens
    shown = estimate(_samples("texts", list(old - lost), list(old), tokens=tokens), "ratio")
    assert shown.figure == pytest.approx(1.02) and shown.low == pytest.approx(1.02)
    assert shown.p_above(1.01) == pytest.approx(0.5**10)
    assert shown.p_above(1.03) == 1.0


def test_runs_that_are_equal_in_every_document_differ_in_nothing(tmp_path: Path) -> None:
    _folder(tmp_path / "a")
    same = {**FASTER, "versus": {"run": "new"}, "what": "x"}
    [found] = answer(read_claims(_claims(tmp_path, {**same, "expect": {"below": 1}})), tmp_path)
    assert found.verdict == FAILS and "equal in all 40" in found.answers[0].estimate.by


def test_traces_are_too_few_for_a_test_and_have_to_agree() -> None:
    shown = estimate(_samples("traces", [1.0, 2.0, 3.0], [2.0, 3.0, 2.9]), "ratio")
    assert (shown.low, shown.high) == pytest.approx((0.5, 3 / 2.9))
    assert (shown.p_below(1), shown.p_below(1.1), shown.p_above(0.4)) == (1.0, 0.0, 0.0)


def _folder(place: Path) -> Path:
    """Two runs over the same documents: `new` is a tenth faster and loses 1 answer of 40."""
    for name, factor in (("base", 1.0), ("new", 0.9)):
        run = record(name, policy="on_demand")
        times = {str(d): (100 + d) * factor for d in range(DOCS)}
        answers = {str(d): 0.0 if name == "new" and d == 3 else 1.0 for d in range(DOCS)}
        run["label"] = name
        run["scores"] = {"quiz": {"acc,none": answers, "ttft_ms,speed": times}}
        path = place / "runs" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(run))
    return place


def _claims(place: Path, *parts: dict[str, Any], **more: Any) -> Path:
    claim = {"id": "X1", "claim": "faster", "where": "paper", "regime": "toy", "why": "it is"}
    data = {"title": "t", "about": "a", "claims": [{**claim, **more, "parts": list(parts)}]}
    path = place / "claims.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


FASTER = {
    "runs": "a",
    "metric": "ttft_ms",
    "task": "quiz",
    "where": {"run": "new"},
    "versus": {"run": "base"},
}
ANSWERS = {**FASTER, "metric": "quiz", "form": "difference"}


@pytest.mark.parametrize(
    ("parts", "verdict"),
    [
        ([{**FASTER, "what": "x", "expect": {"below": 1}}], HOLDS),
        ([{**FASTER, "what": "x", "expect": {"above": 1}}], FAILS),
        ([{**FASTER, "what": "x", "expect": {"above": 0.95, "below": 1.05}}], FAILS),
        # One answer of forty: neither shown to be lost nor to be kept.
        ([{**ANSWERS, "what": "x", "expect": {"below": 0}}], OPEN),
        ([{**ANSWERS, "what": "x", "expect": {"above": -0.01}}], OPEN),
        ([{**ANSWERS, "what": "x", "expect": {"above": -0.05}}], OPEN),
        ([{**ANSWERS, "what": "x", "expect": {"above": -0.2}}], HOLDS),
        (
            [
                {**FASTER, "what": "x", "expect": {"below": 1}},
                {**FASTER, "what": "y", "expect": {"below": 0.8}},
            ],
            IN_PART,
        ),
        (
            [
                {**FASTER, "what": "x", "expect": {"below": 1}},
                {**FASTER, "what": "y", "expect": {"below": 0.8}, "aside": True},
            ],
            HOLDS,
        ),
    ],
)
def test_verdicts_follow_from_interval_and_test(
    tmp_path: Path, parts: list[dict[str, Any]], verdict: str
) -> None:
    _folder(tmp_path / "a")
    path = _claims(tmp_path, *parts)
    [found] = answer(read_claims(path), tmp_path)
    assert found.verdict == verdict
    assert (verdict == IN_PART) == bool(found.told)


def test_a_claim_without_runs_says_why(tmp_path: Path) -> None:
    claims = read_claims(_claims(tmp_path, untestable="no such machine"))
    [found] = answer(claims, tmp_path)
    assert (found.verdict, found.told) == (OPEN, "no such machine")
    assert "No figures: no such machine." in page(claims, [found])
    with pytest.raises(ValueError, match="say why it is `untestable`"):
        read_claims(_claims(tmp_path))


def test_holm_corrects_over_the_parts_of_a_claim(tmp_path: Path) -> None:
    _folder(tmp_path / "a")
    part = {**ANSWERS, "what": "x", "expect": {"below": 0}}
    [alone] = answer(read_claims(_claims(tmp_path, part)), tmp_path)
    [both] = answer(read_claims(_claims(tmp_path, part, {**part, "what": "y"})), tmp_path)
    assert both.answers[0].p == min(1.0, 2 * alone.answers[0].p)


def test_every_answer_is_corrected_over_all_parts_of_all_claims_as_well(tmp_path: Path) -> None:
    _folder(tmp_path / "a")
    surely = {**FASTER, "what": "x", "expect": {"below": 1}}
    hardly = {**ANSWERS, "what": "y", "expect": {"above": -0.15}}
    path = _claims(tmp_path, hardly)
    data = yaml.safe_load(path.read_text())
    [one] = data["claims"]
    many = [{**one, "id": f"Y{n}", "parts": [surely, {**surely, "aside": True}]} for n in range(5)]
    path.write_text(yaml.safe_dump({**data, "claims": [one, *many]}))
    claims = read_claims(path)
    found, *others = answer(claims, tmp_path)
    [told] = found.answers
    # One answer lost of forty, at most 15% claimed: alone it holds, and among six it is the last.
    lost = 0.85**40 + 40 * 0.15 * 0.85**39
    assert (told.verdict, told.p) == (HOLDS, pytest.approx(lost))
    assert (told.p_of_all, told.least_p) == (pytest.approx(lost), pytest.approx(0.85**40))
    for other in others:
        counted, beside = other.answers
        assert counted.p_of_all == pytest.approx(6 * counted.p) and beside.p_of_all is None
        assert counted.least_p == pytest.approx(1 / 20_001)
    text = page(claims, [found, *others])
    assert "Tests answer 6 of 6 parts; 6 of these answers stand" in text


def test_what_half_of_the_documents_showed_is_tested_on_the_other(tmp_path: Path) -> None:
    _folder(tmp_path / "a")
    part = {**FASTER, "what": "x", "expect": {"below": 1}}
    halves = [{**part, "documents": half} for half in ("even", "odd")]
    [found] = answer(read_claims(_claims(tmp_path, part, *halves)), tmp_path)
    whole, even, odd = (each.estimate.samples for each in found.answers)
    assert list(even.new) == list(whole.new[::2]) and list(odd.old) == list(whole.old[1::2])
    assert found.answers[2].estimate.by == "sign flips over 20 odd documents"


def test_the_first_screen_tells_the_papers_figure_and_ours_in_words(tmp_path: Path) -> None:
    _folder(tmp_path / "a")
    part = {**FASTER, "what": "first token", "expect": {"below": 1}}
    said = {"paper": "12% less", "ours": "{0:loss} less, {0:inverse} times, {0}"}
    claims = read_claims(_claims(tmp_path, part, **said))
    row = "| 12% less | 10% (10 to 10) less, 1.11 (1.11 to 1.11) times, 0.9 (0.9 to 0.9) |"
    assert row in page(claims, answer(claims, tmp_path))
    assert "first token: 0.9 (" in page(claims, _answers(tmp_path, part))
    for wrong, why in (("{1}", "allowed: {0} to {0}"), ("{0:lost}", "Did you mean '{:loss}'")):
        with pytest.raises(ValueError, match=re.escape(why)):
            page(claims, _answers(tmp_path, part, ours=wrong))


def _answers(place: Path, *parts: dict[str, Any], **more: Any) -> list[Verdict]:
    return answer(read_claims(_claims(place, *parts, **more)), place)


def test_the_command_writes_the_page_and_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _folder(tmp_path / "a")
    cells = [
        {"cell": {"trace": name, "eviction": rule}, "miss_rate": rate}
        for name, rates in (("one", (0.2, 0.4)), ("two", (0.3, 0.5)))
        for rule, rate in zip(("good", "lru"), rates, strict=True)
    ]
    (tmp_path / "cells.json.gz").write_bytes(gzip.compress(json.dumps(cells).encode()))
    traces = {
        **{"what": "on traces", "cells": "cells.json.gz", "where": {"eviction": "good"}},
        **{"versus": {"eviction": "lru"}, "expect": {"below": 1}, "aside": True},
    }
    path = _claims(tmp_path, {**FASTER, "what": "first token", "expect": {"below": 1}}, traces)
    assert main(["claims", str(path), "--write"]) == 0
    text = (tmp_path / "CLAIMS.md").read_text()
    assert "**holds**" in text and "| first token | 0.9000 | 0.9000 to 0.9000 |" in text
    assert "| *on traces* | 0.5500 | 0.5000 to 0.6000 |" in text
    capsys.readouterr()
    assert main(["claims", str(path), "--json"]) == 0
    [told] = json.loads(capsys.readouterr().out)["claims"]
    assert told["verdict"] == HOLDS and told["parts"][0]["figure"] == pytest.approx(0.9)
    wrong = _claims(
        tmp_path, {**FASTER, "what": "x", "expect": {"below": 1}, "where": {"run": "?"}}
    )
    assert main(["claims", str(wrong)]) == 2
    assert "claim X1, 'x': {'run': '?'} picks 0 runs: none." in capsys.readouterr().err
    _claims(tmp_path, {"what": "x", "expect": {"below": 1}})
    assert main(["claims", str(path)]) == 2
    assert "one of `runs`, `rows` and `cells`" in capsys.readouterr().err
