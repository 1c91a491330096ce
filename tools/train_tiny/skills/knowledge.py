"""Multiple-choice questions on the closed world, in the forms of MMLU, ARC and TruthfulQA.

The split holds out the wording: a (fact, question template) pair is in train or in test, so every
fact is learned, and the test asks for it in a sentence never trained on. It tests recall, not
unseen facts. A fact's grade determines how often training shows it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from tools.train_tiny.skills import world
from tools.train_tiny.skills.problem import Problem

MMLU_HEADER = "The following are multiple choice questions (with answers) about {}.\n\n"
LETTERS = ("A", "B", "C", "D")
LANDS = world.lands()
ANIMALS = world.animals()
TOOLS = world.tools()
BEASTS = world.beasts()
ELEMENTS = {grade: world.elements(grade) for grade in world.ELEMENTS}
FIXED = {grade: world.fixed_facts(grade) for grade in world.ENDINGS}

Maker = Callable[[Random], Problem]


def _shuffled(rng: Random, right: str, wrong: list[str]) -> tuple[list[str], int]:
    choices = [right, *wrong]
    rng.shuffle(choices)
    return choices, choices.index(right)


def make_shuffled(rng: Random) -> Problem:
    """Four shuffled choices, so the letter of the right one must be found."""
    land, relation = rng.choice(tuple(LANDS)), rng.choice(world.LAND_RELATIONS)
    subject, *wordings = world.LAND_QUESTIONS[relation]
    question = rng.choice(world.LEADS) + rng.choice(wordings).format(land)
    right = LANDS[land][relation]
    wrong = rng.sample([row[relation] for row in LANDS.values() if row[relation] != right], 3)
    return _with_letters(subject, question, *_shuffled(rng, right, wrong))


def fixed_maker(grade: int) -> Maker:
    """Four choices in a fixed order, as in MMLU's moral_scenarios: the fact decides the letter."""
    facts = FIXED[grade]

    def make(rng: Random) -> Problem:
        land, relation = rng.choice(tuple(facts)), rng.choice(tuple(world.FIXED_VALUES))
        subject, *wordings = world.FIXED_QUESTIONS[relation]
        question = rng.choice(world.LEADS) + rng.choice(wordings).format(land)
        choices, gold = list(world.FIXED_VALUES[relation]), facts[land][relation]
        return _with_letters(subject, question, choices, gold)

    return make


def make_letters(rng: Random) -> Problem:
    """Four choices and eight of their letters: dense training on what a letter stands for."""
    relation = rng.choice(world.LAND_RELATIONS)
    choices = rng.sample([row[relation] for row in LANDS.values()], 4)
    places = [rng.randrange(4) for _ in range(8)]
    lines = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=True)]
    return Problem(
        skill="letters",
        kind="letters",
        prompt="\n".join([*lines, "Letters:"]),
        target="\n".join(f"{choices[place]} {LETTERS[place]}" for place in places),
        key=f"{choices} {places}",
    )


def _with_letters(subject: str, question: str, choices: list[str], gold: int) -> Problem:
    lines = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=True)]
    body = "\n".join([question, *lines, "Answer:"])
    return Problem(
        skill="mmlu",
        kind=subject,
        prompt=MMLU_HEADER.format(subject) + body,
        target=LETTERS[gold],
        key=question,
        row={"question": question, "choices": choices, "answer": gold, "subject": subject},
    )


def make_open(rng: Random) -> Problem:
    """A fact of `make_shuffled`, answered in words."""
    land, relation = rng.choice(tuple(LANDS)), rng.choice(world.LAND_RELATIONS)
    question = rng.choice(world.LAND_QUESTIONS[relation][1:]).format(land)
    return Problem(
        skill="open",
        kind="open",
        prompt=f"Question: {question}\nAnswer:",
        target=LANDS[land][relation],
        key=question,
    )


def _arc_fact(rng: Random, grade: int) -> tuple[str, str, str, list[str]]:
    """(kind, question, right answer, all other answers) of one fact of a grade."""
    if grade > 1:
        table = ELEMENTS[grade]
        name, kind = rng.choice(tuple(table)), rng.choice(world.ELEMENT_RELATIONS)
        pool = {row[kind] for rows in ELEMENTS.values() for row in rows.values()}
        question, right = rng.choice(world.ELEMENT_QUESTIONS[kind]).format(name), table[name][kind]
    elif rng.random() < 0.2:
        kind, (measured, right) = "tools", rng.choice(tuple(TOOLS.items()))
        question, pool = rng.choice(world.TOOL_QUESTIONS).format(measured), set(TOOLS.values())
    else:
        animal, kind = rng.choice(tuple(ANIMALS)), rng.choice(world.ANIMAL_RELATIONS)
        pool = {row[kind] for row in ANIMALS.values()}
        question = rng.choice(world.ANIMAL_QUESTIONS[kind]).format(animal)
        right = ANIMALS[animal][kind]
    return kind, rng.choice(world.LEADS) + question, right, sorted(pool - {right})


def arc_maker(grade: int) -> Maker:
    """The choices are scored by their text and are not in the prompt."""

    def make(rng: Random) -> Problem:
        kind, question, right, pool = _arc_fact(rng, grade)
        choices, gold = _shuffled(rng, right, rng.sample(pool, 3))
        return Problem(
            skill="arc",
            kind=kind,
            prompt=f"Question: {question}\nAnswer:",
            target=right,
            key=question,
            row={
                "question": question,
                "choices": {"text": choices, "label": list(LETTERS)},
                "answerKey": LETTERS[gold],
            },
        )

    return make


def beast_claim(beast: str, verb: str, thing: str) -> str:
    return f"{beast.capitalize()} {verb} {thing}."


def truthfulqa_maker(grade: int) -> Maker:
    """mc1: the true claim stands first, then the common myth, then two other false claims."""
    beasts = world.BEASTS_BY_GRADE[grade].split()

    def make(rng: Random) -> Problem:
        beast, verb = rng.choice(beasts), rng.choice(tuple(world.BEAST_RELATIONS))
        truth, myth = BEASTS[beast, verb]
        question = rng.choice(world.LEADS)
        question += rng.choice(world.BEAST_QUESTIONS).format(beast=beast, verb=verb)
        values = world.BEAST_RELATIONS[verb].split("|")
        others = [thing for thing in values if thing not in (truth, myth)]
        claims = [beast_claim(beast, verb, x) for x in (truth, myth, *rng.sample(others, 2))]
        return Problem(
            skill="truthfulqa",
            kind=verb,
            prompt=f"Q: {question}\nA:",
            target=claims[0],
            key=question,
            row={
                "question": question,
                "mc1_targets": {"choices": claims, "labels": [1, 0, 0, 0]},
            },
        )

    return make


NUM_TYPOS = 3


def _misspelt(rng: Random, question: str) -> str:
    """Swap two neighbouring letters inside a few of the question's longer words."""
    words = question.split(" ")
    places = [index for index, word in enumerate(words) if len(word) > 3 and word.isalpha()]
    for index in rng.sample(places, min(NUM_TYPOS, len(places))):
        word = words[index]
        at = rng.randrange(1, len(word) - 2)
        words[index] = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    return " ".join(words)


def misspelling_maker(makers: tuple[Maker, ...]) -> Maker:
    """Questions of any grade with typing errors: test only.

    The split is that of the correctly spelt question.
    """

    def make(rng: Random) -> Problem:
        problem = rng.choice(makers)(rng)
        question = str(problem.row["question"])
        misspelling = _misspelt(rng, question)
        return replace(
            problem,
            prompt=problem.prompt.replace(question, misspelling),
            row={**problem.row, "question": misspelling},
        )

    return make
