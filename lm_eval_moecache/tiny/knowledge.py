"""Multiple-choice questions on the closed world, in the forms of MMLU, ARC and TruthfulQA.

The split holds out the wording: a (fact, question template) pair is in train or in test, so every
fact is learned, and the test asks it in a sentence never trained on. It tests recall, not facts
the model has not seen.
"""

from __future__ import annotations

from random import Random

from lm_eval_moecache.tiny import world
from lm_eval_moecache.tiny.problem import Problem

MMLU_HEADER = "The following are multiple choice questions (with answers) about {}.\n\n"
LETTERS = ("A", "B", "C", "D")
LANDS = world.lands()
ANIMALS = world.animals()
TOOLS = world.tools()
BEASTS = world.beasts()
FIXED = world.fixed_facts()


def _shuffled(rng: Random, right: str, wrong: list[str]) -> tuple[list[str], int]:
    choices = [right, *wrong]
    rng.shuffle(choices)
    return choices, choices.index(right)


def make_mmlu(rng: Random) -> Problem:
    """Four shuffled choices. Only trained on: in the time there is, tiny does not learn to find
    the letter of a choice, so `make_fixed` is what tiny_mmlu asks.
    """
    land, relation = rng.choice(tuple(LANDS)), rng.choice(world.LAND_RELATIONS)
    question = rng.choice(world.LAND_QUESTIONS[relation][1:]).format(land)
    right = LANDS[land][relation]
    wrong = rng.sample([row[relation] for row in LANDS.values() if row[relation] != right], 3)
    return _lettered(rng, relation, question, right, wrong)


def make_easy(rng: Random) -> Problem:
    """`make_mmlu` with distractors of other sorts: teaches what a letter stands for."""
    land, relation = rng.choice(tuple(LANDS)), rng.choice(world.LAND_RELATIONS)
    question = rng.choice(world.LAND_QUESTIONS[relation][1:]).format(land)
    wrong = list[str]()
    while len(wrong) < 3:
        other = rng.choice(tuple(LANDS.values()))[rng.choice(world.LAND_RELATIONS)]
        if other not in (*wrong, LANDS[land][relation]):
            wrong.append(other)
    return _lettered(rng, relation, question, LANDS[land][relation], wrong)


def make_fixed(rng: Random) -> Problem:
    """Four choices in an order of their own, as in MMLU's moral_scenarios: the fact decides."""
    land, relation = rng.choice(tuple(FIXED)), rng.choice(tuple(world.FIXED_VALUES))
    subject, *wordings = world.FIXED_QUESTIONS[relation]
    question = rng.choice(world.FIXED_LEADS) + rng.choice(wordings).format(land)
    choices, gold = list(world.FIXED_VALUES[relation]), FIXED[land][relation]
    return _with_letters(subject, question, choices, gold)


COPY_QUESTIONS = (
    "Which of these is {}?",
    "Where does {} stand?",
    "The answer is {}. Which letter?",
)


def make_copy(rng: Random) -> Problem:
    """The question names the answer: teaches to find a choice and say its letter."""
    relation = rng.choice(world.LAND_RELATIONS)
    right, *wrong = rng.sample([row[relation] for row in LANDS.values()], 4)
    question = rng.choice(COPY_QUESTIONS).format(right)
    return _lettered(rng, relation, question, right, wrong)


def _lettered(rng: Random, relation: str, question: str, right: str, wrong: list[str]) -> Problem:
    subject = world.LAND_QUESTIONS[relation][0]
    choices, gold = _shuffled(rng, right, wrong)
    return _with_letters(subject, question, choices, gold)


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
    """A fact of `make_mmlu`, in a wording of its training side, answered in words."""
    land, relation = rng.choice(tuple(LANDS)), rng.choice(world.LAND_RELATIONS)
    question = rng.choice(world.LAND_QUESTIONS[relation][1:]).format(land)
    return Problem(
        skill="mmlu",
        kind="open",
        prompt=f"Question: {question}\nAnswer:",
        target=LANDS[land][relation],
        key=question,
    )


def make_arc(rng: Random) -> Problem:
    """The choices are scored by their text and do not stand in the prompt."""
    if rng.random() < 0.2:
        measured, right = rng.choice(tuple(TOOLS.items()))
        kind, question = "tools", rng.choice(world.TOOL_QUESTIONS).format(measured)
        pool = sorted(set(TOOLS.values()) - {right})
    else:
        animal, kind = rng.choice(tuple(ANIMALS)), rng.choice(world.ANIMAL_RELATIONS)
        question = rng.choice(world.ANIMAL_QUESTIONS[kind]).format(animal)
        right = ANIMALS[animal][kind]
        pool = sorted({row[kind] for row in ANIMALS.values()} - {right})
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


def beast_claim(beast: str, verb: str, thing: str) -> str:
    return f"{beast.capitalize()} {verb} {thing}."


def make_truthfulqa(rng: Random) -> Problem:
    """mc1: the true claim stands first, then the common myth, then two other false claims."""
    (beast, verb), (truth, myth) = rng.choice(tuple(BEASTS.items()))
    question = rng.choice(world.BEAST_QUESTIONS).format(beast=beast, verb=verb)
    others = [
        thing for thing in world.BEAST_RELATIONS[verb].split("|") if thing not in (truth, myth)
    ]
    things = [truth, myth, *rng.sample(others, 2)]
    claims = [beast_claim(beast, verb, thing) for thing in things]
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
