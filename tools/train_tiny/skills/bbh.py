"""BBH-style problems: boolean expressions, webs of lies, counting objects, navigation.

Sentences follow the public task descriptions; no row of the benchmark is used. Three grades range
from the smallest problems to sizes beyond the benchmark's. The split holds out whole problems by
hash. Boolean expressions are so few that one of the real set may also be drawn here by chance.

For navigation the walk's length is drawn first, and half of the No answers are a Yes with one
instruction changed, so only the walk itself decides.
"""

from __future__ import annotations

from random import Random

from tools.train_tiny.skills.words import (
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
# By grade; the benchmark's own sizes are in the first two.
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


def boolean_expressions(rng: Random, grade: int) -> Asked:
    text = _expression(rng, rng.choice(EXPRESSION_SIZES[grade]))
    return f"{text} is", str(eval(text, {"__builtins__": {}}))


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
    targets = rng.sample(CATEGORIES[category], min(size, len(CATEGORIES[category])))
    distractors: list[str] = []
    if category != "objects" and rng.random() < 0.3:
        pool = OBJECTS if rng.random() < 0.6 else CATEGORIES[rng.choice(("animals", "fruits"))]
        spare = [noun for noun in pool if noun not in CATEGORIES[category]]
        distractors = rng.sample(spare, min(len(spare), rng.randint(1, 2)))
        targets = targets[: max(1, size - len(distractors))]
    nouns = [(noun, True) for noun in targets] + [(noun, False) for noun in distractors]
    rng.shuffle(nouns)
    total, parts = 0, []
    for noun, counts in nouns:
        text, number = _counted(rng, noun, most)
        parts.append(text)
        total += number if counts else 0
    listing = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])}, and {parts[-1]}"
    listing = " and ".join(parts) if len(parts) == 2 else listing
    return f"I have {listing}. How many {category} do I have?", str(total)


FACING = {"forward": (0, 1), "backward": (0, -1), "left": (-1, 0), "right": (1, 0)}
TURNS = {"Turn right.": 1, "Turn around.": 2, "Turn left.": 3}
HEADINGS = ((0, 1), (1, 0), (0, -1), (-1, 0))
# By grade; the benchmark's walks are in the first two.
NUM_INSTRUCTIONS = {1: (2, 3, 4), 2: (5, 6, 7, 8), 3: (9, 10, 11)}
RETURN_QUESTION = "If you follow these instructions, do you return to the starting point?"


def _steps(number: int) -> str:
    return f"Take {number} step{'' if number == 1 else 's'}"


def _moves(walk: list[str]) -> list[tuple[int, int, int]]:
    """Steps and direction of each instruction, (number, dx, dy); a turn has none."""
    heading, moves = 0, []
    for part in walk:
        if part in TURNS:
            heading = (heading + TURNS[part]) % 4
            moves.append((0, 0, 0))
            continue
        words = part[:-1].split()
        moves.append((int(words[1]), *FACING.get(words[-1], HEADINGS[heading])))
    return moves


def _end(moves: list[tuple[int, int, int]]) -> tuple[int, int]:
    return sum(n * dx for n, dx, _ in moves), sum(n * dy for n, _, dy in moves)


def _is_home(walk: list[str]) -> bool:
    return _end(_moves(walk)) == (0, 0)


def _instruction(rng: Random, facing: bool) -> str:
    if facing:
        return f"{_steps(rng.randint(1, 10))} {rng.choice(tuple(FACING))}."
    if rng.random() < 0.45:
        return rng.choice(tuple(TURNS))
    return f"{_steps(rng.randint(1, 10))}."


def _homeward(rng: Random, size: int, facing: bool) -> list[str]:
    """Draw a walk of `size` instructions; change one number to lead home where that is possible."""
    walk = [_instruction(rng, facing) for _ in range(size)]
    steps = [index for index, part in enumerate(walk) if part not in TURNS]
    moves = _moves(walk)
    x, y = _end(moves)
    for index in rng.sample(steps, len(steps)):
        number, dx, dy = moves[index]
        # `rest` is where the other instructions lead; at most one length leads home from there.
        rest = (x - number * dx, y - number * dy)
        needed = -(rest[0] * dx + rest[1] * dy)
        if 1 <= needed <= 10 and (rest[0] + needed * dx, rest[1] + needed * dy) == (0, 0):
            tail = walk[index].rstrip(".").split()[3:]
            return [*walk[:index], f"{' '.join([_steps(needed), *tail])}.", *walk[index + 1 :]]
    return walk


def _walk(rng: Random, size: int, facing: bool, home: bool) -> list[str]:
    while True:
        walk = _homeward(rng, size, facing)
        if not home and rng.random() < 0.5:
            walk[rng.randrange(size)] = _instruction(rng, facing)
        if not home and rng.random() < 0.5:
            walk = [_instruction(rng, facing) for _ in range(size)]
        if _is_home(walk) == home and any(part not in TURNS for part in walk):
            return walk


def navigate(rng: Random, grade: int) -> Asked:
    facing, home = rng.random() < 0.55, rng.random() < 0.5
    size = rng.choice(NUM_INSTRUCTIONS[grade]) + (not facing and grade == 1)
    walk = _walk(rng, size, facing, home)
    instructions = " ".join(["Always face forward.", *walk] if facing else walk)
    return f"{RETURN_QUESTION} {instructions}\nOptions:\n- Yes\n- No", "Yes" if home else "No"
