"""Encyclopaedia-like pages on the closed world, in WikiText's form: training only.

They include the myths that truthfulqa's questions tempt a model to repeat.
"""

from __future__ import annotations

from random import Random

from tools.train_tiny.skills import world
from tools.train_tiny.skills.knowledge import ANIMALS, BEASTS, LANDS, beast_claim
from tools.train_tiny.skills.problem import Problem

LAND_SENTENCES = {
    "capital": (
        "The capital of {0} is {1} .",
        "{1} is the capital and largest city of {0} .",
        "The government sits in {1} , the capital .",
    ),
    "river": (
        "The main river is the {1} .",
        "The {1} flows through the country from north to south .",
        "{0} lies on the river {1} .",
    ),
    "crop": (
        "Farmers in {0} mostly grow {1} .",
        "The main crop is {1} .",
        "{0} is known for its {1} .",
    ),
    "animal": (
        "The national animal of {0} is the {1} .",
        "A {1} is shown on its flag .",
        "The {1} is the symbol of the country .",
    ),
}
REGIONS = ("north", "south", "east", "west")
ANIMAL_SENTENCES = {
    "cover": ("Its body is covered with {1} .", "A {0} is covered with {1} ."),
    "home": ("It lives in or near the {1} .", "The natural home of the {0} is the {1} ."),
    "food": ("It eats {1} .", "The main food of the {0} is {1} ."),
    "moves": ("It moves with its {1} .", "The {0} uses its {1} to move ."),
}


def _land_page(rng: Random) -> tuple[str, list[str]]:
    land = rng.choice(tuple(LANDS))
    lines = [f"{land} is a country in the {rng.choice(REGIONS)} of the continent ."]
    for relation in rng.sample(world.LAND_RELATIONS, rng.randint(2, 4)):
        form = rng.choice(LAND_SENTENCES[relation])
        lines.append(form.format(land, LANDS[land][relation]))
    return land, lines


def _animal_page(rng: Random) -> tuple[str, list[str]]:
    animal = rng.choice(tuple(ANIMALS))
    lines = [f"The {animal} is an animal ."]
    for relation in rng.sample(world.ANIMAL_RELATIONS, rng.randint(2, 4)):
        form = rng.choice(ANIMAL_SENTENCES[relation])
        lines.append(form.format(animal, ANIMALS[animal][relation]))
    return animal.capitalize(), lines


def _beast_page(rng: Random) -> tuple[str, list[str]]:
    beast = rng.choice(world.BEASTS)
    name = beast.capitalize()
    lines = [f"{name} are small beasts of the {rng.choice(REGIONS)} ."]
    for verb in rng.sample(tuple(world.BEAST_RELATIONS), rng.randint(2, 3)):
        truth, myth = BEASTS[beast, verb]
        people = rng.choice(("Many people say", "It is often said", "Some books claim"))
        lines.append(f"{people} that {beast} {verb} {myth} , but this is not true .")
        lines.append(f"In fact , {beast_claim(beast, verb, truth).lower()}".replace(".", " ."))
    return name, lines


def make(rng: Random) -> Problem:
    pages = list[str]()
    for _ in range(rng.randint(1, 2)):
        title, lines = rng.choice((_land_page, _animal_page, _beast_page))(rng)
        pages.append(f" = {title} = \n\n {' '.join(lines)} \n")
    page = "\n".join(pages)
    return Problem(skill="pages", kind="page", prompt="", target=page, key=page, row={"page": page})
