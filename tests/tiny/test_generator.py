"""The generated problems: deterministic, split into train and test, in lm-eval's formats."""

from __future__ import annotations

import re
from random import Random

import pytest

from tools.train_tiny.skills.generator import (
    AUXILIARY,
    GRADES,
    MAKERS,
    MISSPELT,
    held_out,
    problems,
)
from tools.train_tiny.skills.problem import split_of

NAMES = tuple(MAKERS | AUXILIARY | MISSPELT)


def draw(name: str, split: str, count: int) -> list:
    stream = problems(name, split, Random(0))
    return [next(stream) for _ in range(count)]


@pytest.mark.parametrize("name", NAMES)
def test_no_test_problem_is_ever_drawn_for_training(name: str) -> None:
    train, test = draw(name, "train", 400), held_out((name,), 40, seed=0)
    assert not {problem.key for problem in train} & {problem.key for problem in test}
    if name != "pages":
        assert not {problem.prompt for problem in train} & {problem.prompt for problem in test}
    assert {split_of(f"{problem.skill}/{problem.key}") for problem in test} == {"test"}


@pytest.mark.parametrize("name", [f"bbh/navigate/{grade}" for grade in GRADES])
def test_walks_agree_with_a_second_reading(name: str) -> None:
    for problem in draw(name, "train", 200):
        home = second_reading_of_walk(problem.row["input"])
        assert problem.target == ("Yes" if home else "No"), problem.row["input"]


def second_reading_of_walk(text: str) -> bool:
    position, heading = 0j, 1j
    turns = {"right": -1j, "left": 1j, "around": -1}
    ways = {"forward": 1j, "backward": -1j, "right": 1, "left": -1}
    for turn, number, way in re.findall(r"Turn (\w+)\.|Take (\d+) steps?(?: (\w+))?\.", text):
        heading *= turns.get(turn, 1)
        position += int(number or 0) * (ways[way] if way else heading)
    return position == 0


@pytest.mark.parametrize("grade", GRADES)
def test_word_problem_calculations_are_right_and_lead_to_the_answer(grade: int) -> None:
    for problem in draw(f"gsm8k/{grade}", "train", 300):
        for calculation, value in re.findall(r"<<([0-9+*-]+)=(-?\d+)>>", problem.target):
            left, operator, right = re.fullmatch(r"(\d+)([+*-])(\d+)", calculation).groups()
            operation = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[operator]
            assert operation(int(left), int(right)) == int(value)
        assert problem.target.endswith(f"#### {value}")


def test_lies_agree_with_a_second_reading() -> None:
    for problem in (p for g in GRADES for p in draw(f"bbh/web_of_lies/{g}", "train", 100)):
        num_lies = len(re.findall(r" lies\.", problem.row["input"]))
        assert problem.target == ("Yes" if num_lies % 2 == 0 else "No")


def test_misspelt_questions_keep_their_letters_and_their_answer() -> None:
    for name in MISSPELT:
        for problem in draw(name, "test", 30):
            question = problem.row["question"]
            assert sorted(question) == sorted(problem.key)
            assert question in problem.prompt
