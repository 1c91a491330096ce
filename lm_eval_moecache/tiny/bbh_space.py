"""BBH-style problems about positions: shuffled objects and the order of adjectives.

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

LETTERS = "ABC"
ORDER_QUESTION = "Which sentence has the correct adjective order:"

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
