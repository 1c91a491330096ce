"""Word problems of one to five steps with answers in GSM8K's form: steps, then `#### n`.

Three grades: small numbers in one to three steps; numbers three times as large and chains of three
events; numbers eight times as large and chains of four and five.

The split holds out whole problems (one story with its names and numbers).
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from tools.train_tiny.skills.problem import Problem
from tools.train_tiny.skills.words import GOODS, PEOPLE

Story = tuple[str, list[str], int]


def step(left: int, operator: str, right: int) -> tuple[str, int]:
    """One GSM8K calculation and its value."""
    value = {"+": left + right, "-": left - right, "*": left * right}[operator]
    return f"{left}{operator}{right}=<<{left}{operator}{right}={value}>>{value}", value


def _buy(rng: Random, scale: int) -> Story:
    name, goods = rng.choice(PEOPLE), rng.choice(GOODS)
    start, gain = rng.randint(2, 20 * scale), rng.randint(2, 15 * scale)
    text, value = step(start, "+", gain)
    verb = rng.choice(("buys", "finds", "gets"))
    question = f"{name} has {start} {goods}. {name} {verb} {gain} more {goods}."
    question += f" How many {goods} does {name} have now?"
    return question, [f"{name} has {text} {goods}."], value


def _give(rng: Random, scale: int) -> Story:
    name, friend = rng.sample(PEOPLE, 2)
    goods = rng.choice(GOODS)
    start = rng.randint(6, 24 * scale)
    loss = rng.randint(2, start - 2)
    text, value = step(start, "-", loss)
    verb = rng.choice(("gives", "sells", "lends"))
    question = f"{name} has {start} {goods} and {verb} {loss} of them to {friend}."
    question += f" How many {goods} does {name} have left?"
    return question, [f"{name} has {text} {goods} left."], value


def _boxes(rng: Random, scale: int) -> Story:
    name, goods = rng.choice(PEOPLE), rng.choice(GOODS)
    boxes, per_box = rng.randint(2, 6), rng.randint(2, 9 * scale)
    text, value = step(boxes, "*", per_box)
    question = f"{name} has {boxes} boxes with {per_box} {goods} in each box."
    question += f" How many {goods} does {name} have in total?"
    return question, [f"There are {text} {goods}."], value


def _buy_then_give(rng: Random, scale: int) -> Story:
    name, friend = rng.sample(PEOPLE, 2)
    goods = rng.choice(GOODS)
    start, gain = rng.randint(2, 15 * scale), rng.randint(2, 10 * scale)
    first, total = step(start, "+", gain)
    loss = rng.randint(2, total - 1)
    second, value = step(total, "-", loss)
    question = f"{name} has {start} {goods}. {name} buys {gain} more {goods} and gives {loss}"
    question += f" to {friend}. How many {goods} does {name} have now?"
    return question, [f"{name} has {first} {goods}.", f"Then {name} has {second} {goods}."], value


def _boxes_plus_loose(rng: Random, scale: int) -> Story:
    name, goods = rng.choice(PEOPLE), rng.choice(GOODS)
    boxes, per_box = rng.randint(2, 5), rng.randint(2, 8 * scale)
    loose = rng.randint(2, 9 * scale)
    first, total = step(boxes, "*", per_box)
    second, value = step(total, "+", loose)
    question = f"{name} has {boxes} boxes of {per_box} {goods} and {loose} loose {goods}."
    question += f" How many {goods} does {name} have in total?"
    return question, [f"The boxes hold {first} {goods}.", f"In total {second} {goods}."], value


def _double_and_sum(rng: Random, scale: int) -> Story:
    name, friend = rng.sample(PEOPLE, 2)
    goods = rng.choice(GOODS)
    start = rng.randint(2, 12 * scale)
    factor, word = rng.choice(((2, "twice"), (3, "three times")))
    first, other = step(start, "*", factor)
    second, value = step(start, "+", other)
    question = f"{name} has {start} {goods}. {friend} has {word} as many {goods} as {name}."
    question += f" How many {goods} do they have together?"
    return question, [f"{friend} has {first} {goods}.", f"Together {second} {goods}."], value


def _boxes_give_buy(rng: Random, scale: int) -> Story:
    name, friend = rng.sample(PEOPLE, 2)
    goods = rng.choice(GOODS)
    boxes, per_box = rng.randint(2, 5), rng.randint(2, 6 * scale)
    gain = rng.randint(2, 9 * scale)
    first, total = step(boxes, "*", per_box)
    loss = rng.randint(1, total - 1)
    second, rest = step(total, "-", loss)
    third, value = step(rest, "+", gain)
    question = (
        f"{name} fills {boxes} boxes with {per_box} {goods} each. {name} gives {loss} {goods}"
    )
    question += f" to {friend} and then buys {gain} more. How many {goods} does {name} have?"
    lines = [f"The boxes hold {first} {goods}.", f"Then {second} {goods} are left."]
    return question, [*lines, f"Now {name} has {third} {goods}."], value


def _chain(rng: Random, scale: int, events: int) -> Story:
    """A running total through `events` gains and losses."""
    name, friend = rng.sample(PEOPLE, 2)
    goods = rng.choice(GOODS)
    value = rng.randint(5, 12 * scale)
    sentences, lines = [f"{name} has {value} {goods}."], list[str]()
    for _ in range(events):
        if value > 3 and rng.random() < 0.5:
            number = rng.randint(1, min(value - 1, 10 * scale))
            verb = rng.choice((f"gives {number} to {friend}", f"loses {number}", f"sells {number}"))
            text, value = step(value, "-", number)
        else:
            number = rng.randint(2, 10 * scale)
            verb = rng.choice((f"buys {number} more", f"finds {number}", f"makes {number}"))
            text, value = step(value, "+", number)
        sentences.append(f"{name} {verb}.")
        lines.append(f"Then {name} has {text}.")
    sentences.append(f"How many {goods} does {name} have at the end?")
    return " ".join(sentences), lines, value


STORIES: tuple[Callable[[Random, int], Story], ...] = (
    _buy,
    _give,
    _boxes,
    _buy_then_give,
    _boxes_plus_loose,
    _double_and_sum,
    _boxes_give_buy,
)
SCALES = {1: 1, 2: 3, 3: 8}
EVENTS = {1: (), 2: (3,), 3: (4, 5)}


def maker(grade: int) -> Callable[[Random], Problem]:
    """Return a maker of one grade's stories; a third are chains if the grade has any."""

    def make(rng: Random) -> Problem:
        if EVENTS[grade] and rng.random() < 1 / 3:
            story = _chain(rng, SCALES[grade], rng.choice(EVENTS[grade]))
        else:
            story = rng.choice(STORIES)(rng, SCALES[grade])
        return _problem(*story)

    return make


def _problem(question: str, lines: list[str], value: int) -> Problem:
    answer = "\n".join([*lines, f"#### {value}"])
    return Problem(
        skill="gsm8k",
        kind="word_problem",
        prompt=f"Question: {question}\nAnswer:",
        target=answer,
        key=question,
        row={"question": question, "answer": answer},
    )
