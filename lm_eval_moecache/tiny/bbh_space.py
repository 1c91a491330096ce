"""BBH-style problems about positions: navigation, shuffled objects, deduced order, adjectives.

Sentences follow the public task descriptions; no row of the benchmark is used.
"""

from __future__ import annotations

from random import Random

from lm_eval_moecache.tiny.words import (
    ADJECTIVES,
    BOOKS,
    COLORS,
    DANCERS,
    NOUNS,
    POSITIONS,
)

Asked = tuple[str, str]

FACING = {"forward": (0, 1), "backward": (0, -1), "left": (-1, 0), "right": (1, 0)}
TURNS = {"Turn right.": 1, "Turn around.": 2, "Turn left.": 3}
HEADINGS = ((0, 1), (1, 0), (0, -1), (-1, 0))
LETTERS = "ABC"
RETURN_QUESTION = "If you follow these instructions, do you return to the starting point?"
ORDER_QUESTION = "Which sentence has the correct adjective order:"


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


# Opening, how one holds a thing, what follows, one swap, and the end.
SCENES = (
    (
        "are friends and avid readers who occasionally trade books. At the start of the semester, "
        "they each buy one new book:",
        "gets ",
        "As the semester proceeds, they start trading around the new books.",
        "swap books.",
        "At the end of the semester, {} has",
    ),
    (
        "are dancers at a square dance. At the start of a song, they each have a partner:",
        "is dancing with ",
        "Throughout the song, the dancers often trade partners.",
        "switch partners.",
        "At the end of the dance, {} is dancing with",
    ),
    (
        "are holding a white elephant gift exchange. At the start of the event, they are each "
        "holding a present of a different color:",
        "has a ",
        "As the event progresses, pairs of people swap gifts.",
        "swap their gifts.",
        "At the end of the event, {} has the",
    ),
    (
        "are playing a game. At the start of the game, they are each holding a ball:",
        "has a ",
        "As the game progresses, pairs of players trade balls.",
        "swap balls.",
        "At the end of the game, {} has the",
    ),
    (
        "are on the same team in a soccer match. At the start of the match, they are each "
        "assigned to a position:",
        "is playing ",
        "As the game progresses, pairs of players occasionally swap positions.",
        "trade positions.",
        "At the end of the match, {} is playing",
    ),
)


def _things(rng: Random, scene: int) -> list[str]:
    colors = rng.sample(COLORS, 3)
    presents = [f"{color} {rng.choice(('present', 'ball'))}" for color in colors]
    balls = [f"{color} ball" for color in colors]
    named = (rng.sample(BOOKS, 3), rng.sample(DANCERS, 3), presents, balls)
    return (*named, rng.sample(POSITIONS, 3))[scene]


def _options(texts: list[str]) -> str:
    lines = [f"({letter}) {text}" for letter, text in zip(LETTERS, texts, strict=True)]
    return "\n".join(["Options:", *lines])


def tracking_shuffled_objects(rng: Random) -> Asked:
    names = ["Alice", "Bob", "Claire"]
    scene = rng.randrange(len(SCENES))
    opening, holds, follows, swap, end = SCENES[scene]
    things = _things(rng, scene)
    held = [0, 1, 2]
    swaps = list[str]()
    for word in ("First,", "Then,", "Finally,")[: rng.choice((1, 2, 3, 3))]:
        one, two = rng.sample(range(3), 2)
        held[one], held[two] = held[two], held[one]
        swaps.append(f"{word} {names[one]} and {names[two]} {swap}")
    has = [f"{name} {holds}{thing}" for name, thing in zip(names, things, strict=True)]
    asked = rng.randrange(3)
    question = f"Alice, Bob, and Claire {opening} {has[0]}, {has[1]}, and {has[2]}.\n{follows} "
    question += f"{' '.join(swaps)} {end.format(names[asked])}\n{_options(things)}"
    return question, f"({LETTERS[held[asked]]})"


def hyperbaton(rng: Random) -> Asked:
    number = rng.randint(2, 5)
    places = sorted(rng.sample(range(len(ADJECTIVES)), number))
    right = [rng.choice(ADJECTIVES[place].split("|")) for place in places]
    wrong = right[:]
    while wrong == right:
        rng.shuffle(wrong)
    noun, first = rng.choice(NOUNS), rng.random() < 0.5
    lines = [" ".join([*words, noun]) for words in ((right, wrong) if first else (wrong, right))]
    return f"{ORDER_QUESTION}\nOptions:\n(A) {lines[0]}\n(B) {lines[1]}", "(A)" if first else "(B)"
