"""BBH-style navigation: does a walk end where it began?

The length is drawn first and half the No are a Yes with one instruction changed, so only the walk
tells.
"""

from __future__ import annotations

from random import Random

Asked = tuple[str, str]

FACING = {"forward": (0, 1), "backward": (0, -1), "left": (-1, 0), "right": (1, 0)}
TURNS = {"Turn right.": 1, "Turn around.": 2, "Turn left.": 3}
HEADINGS = ((0, 1), (1, 0), (0, -1), (-1, 0))
# By grade; the benchmark's walks are of the first two.
NUM_INSTRUCTIONS = {1: (2, 3, 4), 2: (5, 6, 7, 8), 3: (9, 10, 11)}
RETURN_QUESTION = "If you follow these instructions, do you return to the starting point?"


def _steps(number: int) -> str:
    return f"Take {number} step{'' if number == 1 else 's'}"


def _is_home(walk: list[str]) -> bool:
    x, y, heading = 0, 0, 0
    for part in walk:
        if part in TURNS:
            heading = (heading + TURNS[part]) % 4
            continue
        number = int(part.split()[1])
        way = part.rstrip(".").split()[-1]
        dx, dy = FACING.get(way, HEADINGS[heading])
        x, y = x + dx * number, y + dy * number
    return (x, y) == (0, 0)


def _instruction(rng: Random, facing: bool) -> str:
    if facing:
        return f"{_steps(rng.randint(1, 10))} {rng.choice(tuple(FACING))}."
    if rng.random() < 0.45:
        return rng.choice(tuple(TURNS))
    return f"{_steps(rng.randint(1, 10))}."


def _homeward(rng: Random, size: int, facing: bool) -> list[str]:
    """A walk of `size` instructions that may be home after replacing one of its numbers."""
    walk = [_instruction(rng, facing) for _ in range(size)]
    steps = [index for index, part in enumerate(walk) if part not in TURNS]
    for index in rng.sample(steps, len(steps)):
        tail = walk[index].rstrip(".").split()[3:]
        for number in range(1, 11):
            changed = walk[:]
            changed[index] = f"{' '.join([_steps(number), *tail])}."
            if _is_home(changed):
                return changed
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
    told = " ".join(["Always face forward.", *walk] if facing else walk)
    return f"{RETURN_QUESTION} {told}\nOptions:\n- Yes\n- No", "Yes" if home else "No"
