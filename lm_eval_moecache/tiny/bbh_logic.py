"""BBH-style logic problems: boolean expressions, webs of lies, counting objects.

Sentences follow the public task descriptions; no row of the benchmark is used. Three grades run
from the smallest problems past the benchmark's own. The split holds
out whole problems by hash. Boolean expressions are so few that an expression of the real set can
also be drawn here by chance.
"""

from __future__ import annotations

from random import Random

from lm_eval_moecache.tiny.words import (
    ANIMALS,
    FRUITS,
    INSTRUMENTS,
    LIAR_NAMES,
    NUMBER_WORDS,
    OBJECTS,
    VEGETABLES,
)

Asked = tuple[str, str]

VEGETABLE_NAMES = [*VEGETABLES.split("|")[0].split(), *VEGETABLES.split("|")[1:]]
CATEGORIES = {
    "fruits": FRUITS,
    "vegetables": VEGETABLE_NAMES,
    "musical instruments": INSTRUMENTS,
    "animals": ANIMALS,
    "objects": OBJECTS,
}
UNCOUNTED = {"head": "heads", "stalk": "stalks"}
IRREGULAR = {"fish": "fish", "mouse": "mice"}


# By grade; the benchmark's own sizes lie in the first two.
EXPRESSION_SIZES = {1: (3, 4, 5, 6), 2: (7, 7, 8, 9), 3: (10, 11, 12, 13)}
NUM_PEOPLE = {1: (2, 3, 4), 2: (5, 5, 6), 3: (7, 8, 9)}
NUM_KINDS = {1: (2, 3, 4, 5), 2: (6, 7, 8), 3: (9, 10, 11)}


def _expression(rng: Random, size: int) -> str:
    if size <= 1:
        return rng.choice(("True", "False"))
    shape = rng.choice(("not", "not", "paren", "binary", "binary", "binary"))
    if shape == "not" or size == 2:
        return f"not {_expression(rng, size - 1)}"
    if shape == "paren":
        return f"( {_expression(rng, size - 1)} )"
    left = rng.randint(1, size - 2)
    operator = rng.choice(("and", "or"))
    return f"{_expression(rng, left)} {operator} {_expression(rng, size - 1 - left)}"


def evaluate(tokens: list[str]) -> bool:
    """Value of a boolean expression in Python's precedence; consumes the tokens."""
    value = _conjunction(tokens)
    while tokens and tokens[0] == "or":
        tokens.pop(0)
        value = _conjunction(tokens) or value
    return value


def _conjunction(tokens: list[str]) -> bool:
    value = _negation(tokens)
    while tokens and tokens[0] == "and":
        tokens.pop(0)
        value = _negation(tokens) and value
    return value


def _negation(tokens: list[str]) -> bool:
    head = tokens.pop(0)
    if head == "not":
        return not _negation(tokens)
    if head == "(":
        value = evaluate(tokens)
        tokens.pop(0)
        return value
    return head == "True"


def boolean_expressions(rng: Random, grade: int) -> Asked:
    text = _expression(rng, rng.choice(EXPRESSION_SIZES[grade]))
    return f"{text} is", str(evaluate(text.split()))


def web_of_lies(rng: Random, grade: int) -> Asked:
    names = rng.sample(LIAR_NAMES, rng.choice(NUM_PEOPLE[grade]))
    truthful = rng.random() < 0.5
    parts = [f"{names[0]} {'tells the truth' if truthful else 'lies'}."]
    for speaker, subject in zip(names[1:], names[:-1], strict=True):
        says_truth = rng.random() < 0.5
        parts.append(f"{speaker} says {subject} {'tells the truth' if says_truth else 'lies'}.")
        truthful = truthful == says_truth
    question = f"Question: {' '.join(parts)} Does {names[-1]} tell the truth?"
    return question, "Yes" if truthful else "No"


def _plural(noun: str) -> str:
    head, _, tail = noun.partition(" of ")
    if tail:
        return f"{UNCOUNTED[head]} of {tail}"
    if noun in IRREGULAR:
        return IRREGULAR[noun]
    if noun.endswith("y"):
        return noun[:-1] + "ies"
    return noun + ("es" if noun.endswith(("ch", "x", "o")) else "s")


def _counted(rng: Random, noun: str, most: int) -> tuple[str, int]:
    if most == 1 or rng.random() < 0.6:
        article = "an" if noun[0] in "aeiou" else "a"
        return f"{article} {noun}", 1
    number = rng.randint(2, most)
    return f"{NUMBER_WORDS[number]} {_plural(noun)}", number


def object_counting(rng: Random, grade: int) -> Asked:
    category = rng.choice(tuple(CATEGORIES))
    size = rng.choice(NUM_KINDS[grade])
    most = rng.choice((1, 2, 3, 5) if grade < 3 else (3, 5))
    wanted = rng.sample(CATEGORIES[category], min(size, len(CATEGORIES[category])))
    others: list[str] = []
    if category != "objects" and rng.random() < 0.3:
        pool = OBJECTS if rng.random() < 0.6 else CATEGORIES[rng.choice(("animals", "fruits"))]
        spare = [noun for noun in pool if noun not in CATEGORIES[category]]
        others = rng.sample(spare, min(len(spare), rng.randint(1, 2)))
        wanted = wanted[: max(1, size - len(others))]
    named = [(noun, True) for noun in wanted] + [(noun, False) for noun in others]
    rng.shuffle(named)
    total, parts = 0, []
    for noun, counts in named:
        text, number = _counted(rng, noun, most)
        parts.append(text)
        total += number if counts else 0
    listed = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])}, and {parts[-1]}"
    listed = " and ".join(parts) if len(parts) == 2 else listed
    return f"I have {listed}. How many {category} do I have?", str(total)
