"""BBH-style navigation: does a walk end where it began?

`navigate` draws most of its Yes from short walks, which is easy to begin with and lets length give
the answer away. `navigate_long` draws the length first and makes half its No from a Yes, with one
instruction changed: there only the walk tells.
"""

from __future__ import annotations

from random import Random

Asked = tuple[str, str]

FACING = {"forward": (0, 1), "backward": (0, -1), "left": (-1, 0), "right": (1, 0)}
TURNS = {"Turn right.": 1, "Turn around.": 2, "Turn left.": 3}
HEADINGS = ((0, 1), (1, 0), (0, -1), (-1, 0))
RETURN_QUESTION = "If you follow these instructions, do you return to the starting point?"


def _steps(number: int) -> str:
    return f"Take {number} step{'' if number == 1 else 's'}"


def _facing_walk(rng: Random, size: int) -> tuple[str, tuple[int, int]]:
    here, parts = (0, 0), ["Always face forward."]
    closing = rng.random() < 0.6
    for index in range(size):
        way, number = rng.choice(tuple(FACING)), rng.randint(1, 10)
        if closing and index >= size - 2:
            way, number = _way_home(rng, here)
        here = (here[0] + FACING[way][0] * number, here[1] + FACING[way][1] * number)
        parts.append(f"{_steps(number)} {way}.")
    return " ".join(parts), here


def _way_home(rng: Random, here: tuple[int, int]) -> tuple[str, int]:
    for way, (dx, dy) in FACING.items():
        for number in range(1, 11):
            if (here[0] * (dx != 0), here[1] * (dy != 0)) == (-dx * number, -dy * number):
                return way, number
    return rng.choice(tuple(FACING)), rng.randint(1, 10)


def _turning_walk(rng: Random, size: int) -> tuple[str, tuple[int, int]]:
    here, heading, parts = (0, 0), 0, list[str]()
    most = rng.choice((3, 10))
    for index in range(size):
        home = rng.random() < 0.5 and index == size - 1
        distance = -(here[0] * HEADINGS[heading][0] + here[1] * HEADINGS[heading][1])
        if rng.random() < 0.45 and not home:
            turn = rng.choice(("Turn right.", "Turn around.", "Turn around.", "Turn left."))
            heading = (heading + TURNS[turn]) % 4
            parts.append(turn)
            continue
        number = distance if home and 1 <= distance <= 10 else rng.randint(1, most)
        dx, dy = HEADINGS[heading]
        here = (here[0] + dx * number, here[1] + dy * number)
        parts.append(f"{_steps(number)}.")
    return " ".join(parts), here


def navigate(rng: Random) -> Asked:
    wanted = rng.random() < 0.5
    while True:
        size = rng.choice((2, 3, 4, 5, 6, 7))
        walk, here = (_facing_walk if rng.random() < 0.6 else _turning_walk)(rng, size)
        if (here == (0, 0)) == wanted and "Take" in walk:
            break
    return f"{RETURN_QUESTION} {walk}\nOptions:\n- Yes\n- No", "Yes" if wanted else "No"


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


def navigate_long(rng: Random) -> Asked:
    facing, home = rng.random() < 0.55, rng.random() < 0.5
    size = rng.randint(2 if facing else 3, 8)
    walk = _walk(rng, size, facing, home)
    told = " ".join(["Always face forward.", *walk] if facing else walk)
    return f"{RETURN_QUESTION} {told}\nOptions:\n- Yes\n- No", "Yes" if home else "No"
