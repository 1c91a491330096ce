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


def _moves(walk: list[str]) -> list[tuple[int, int, int]]:
    """The steps of each instruction and the way they lead, (number, dx, dy); a turn takes none."""
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
    """A walk of `size` instructions that may be home after replacing one of its numbers."""
    walk = [_instruction(rng, facing) for _ in range(size)]
    steps = [index for index, part in enumerate(walk) if part not in TURNS]
    moves = _moves(walk)
    x, y = _end(moves)
    for index in rng.sample(steps, len(steps)):
        number, dx, dy = moves[index]
        # Where the others alone lead is `number` steps back; the way home has one length at most.
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
    told = " ".join(["Always face forward.", *walk] if facing else walk)
    return f"{RETURN_QUESTION} {told}\nOptions:\n- Yes\n- No", "Yes" if home else "No"
