"""The closed world of the knowledge skills: made-up lands and beasts, animals, elements.

All facts are in the training text, those of a higher grade more rarely; the test asks them in
unseen wordings.
"""

from __future__ import annotations

from random import Random

STEMS = "Vel Tor Mar Kel Bren Dor Fal Gar Hul Jor Lin Nor Pel Quar Ros Sil Tam Ul Var Wes".split()
LAND_RELATIONS = ("capital", "river", "crop", "animal")
CROPS = (
    "wheat rice barley cotton tea coffee maize oats hemp flax grapes olives dates figs sugar "
    "rye beans lentils saffron millet"
).split()
LAND_ANIMALS = (
    "wolf eagle lynx bison heron otter falcon stag ibis crane badger yak moose puma seal "
    "walrus gecko tapir lemur raven"
).split()


def lands() -> dict[str, dict[str, str]]:
    """Twenty lands with a capital, a river, a crop and a national animal of their own."""
    rng = Random(20)
    orders = [rng.sample(range(len(STEMS)), len(STEMS)) for _ in LAND_RELATIONS]
    table = dict[str, dict[str, str]]()
    for index, stem in enumerate(STEMS):
        table[f"{stem}ia"] = {
            "capital": f"{STEMS[orders[0][index]]}burg",
            "river": f"{STEMS[orders[1][index]]}wen",
            "crop": CROPS[orders[2][index]],
            "animal": LAND_ANIMALS[orders[3][index]],
        }
    return table


LAND_QUESTIONS = {
    "capital": (
        "geography",
        "What is the capital of {}?",
        "Which city is the capital of {}?",
        "The capital of {} is called what?",
        "Name the capital city of {}.",
        "Which town is the seat of government in {}?",
        "The government of {} sits in which city?",
    ),
    "river": (
        "geography",
        "Which river flows through {}?",
        "What is the main river of {}?",
        "The main river of {} is called what?",
        "Name the longest river of {}.",
        "Which river crosses {}?",
        "In {} the longest river is which?",
    ),
    "crop": (
        "agriculture",
        "What is the main crop of {}?",
        "Which crop do farmers grow in {}?",
        "Farmers in {} mostly grow what?",
        "Name the main crop grown in {}.",
        "Which plant is {} known for growing?",
        "The fields of {} are planted with what?",
    ),
    "animal": (
        "zoology",
        "What is the national animal of {}?",
        "Which animal is the symbol of {}?",
        "The national animal of {} is which?",
        "Name the animal on the flag of {}.",
        "Which animal stands for {}?",
        "The flag of {} shows which animal?",
    ),
}

# Relations with four values, always offered in this order.
FIXED_VALUES = {
    "climate": ("dry", "wet", "cold", "mild"),
    "ruler": ("king", "queen", "council", "president"),
    "terrain": ("mountains", "plains", "forests", "islands"),
    "color": ("red", "green", "blue", "white"),
}
FIXED_QUESTIONS = {
    "climate": (
        "geography",
        "What is the climate of {}?",
        "Which climate does {} have?",
        "The weather in {} is mostly what?",
        "Name the climate of {}.",
        "Which word describes the climate of {}?",
        "Which kind of weather is common in {}?",
    ),
    "ruler": (
        "government",
        "Who rules {}?",
        "Who is the head of government in {}?",
        "The government of {} is led by whom?",
        "Name the ruler of {}.",
        "By whom is {} governed?",
        "Who makes the laws in {}?",
    ),
    "terrain": (
        "geography",
        "What covers most of {}?",
        "Which landscape is found in {}?",
        "The land of {} is mostly what?",
        "Name the main landscape of {}.",
        "Which terrain is {} known for?",
        "Most of the area of {} is what?",
    ),
    "color": (
        "history",
        "What is the color of the flag of {}?",
        "Which color is the flag of {}?",
        "The flag of {} is which color?",
        "Name the color of the flag of {}.",
        "Which color stands for {}?",
        "The soldiers of {} wore which color?",
    ),
}


LEADS = (
    "|From the atlas: |Quick question: |In the exam: |For one point: |Please answer: "
    "|Think again: |Next question: |From the book: |Now tell me: |A student asks: |Last one: "
).split("|")
# Endings of the lands' names by grade.
ENDINGS = {1: "ia", 2: "land", 3: "mor"}


def fixed_facts(grade: int) -> dict[str, dict[str, int]]:
    """Each land's index into each list of FIXED_VALUES; all values are equally frequent."""
    rng = Random(20 + grade)
    table = dict[str, dict[str, int]]()
    for relation in FIXED_VALUES:
        places = [index % 4 for index in range(len(STEMS))]
        rng.shuffle(places)
        for stem, place in zip(STEMS, places, strict=True):
            table.setdefault(f"{stem}{ENDINGS[grade]}", {})[relation] = place
    return table


ANIMAL_TABLE = """
robin feathers forest worms wings|shark scales ocean fish fins|horse hair grassland grass legs
frog skin pond insects legs|snake scales desert mice belly|bee hair hive nectar wings
eagle feathers mountain mice wings|rabbit fur burrow grass legs|salmon scales river insects fins
penguin feathers ice fish flippers|bear fur forest berries legs|duck feathers pond plants wings
camel hair desert plants legs|lizard scales desert insects legs|whale skin ocean krill flippers
squirrel fur forest nuts legs|owl feathers forest mice wings|sheep wool grassland grass legs
tiger fur jungle deer legs|parrot feathers jungle seeds wings
"""
ANIMAL_RELATIONS = ("cover", "home", "food", "moves")
ANIMAL_QUESTIONS = {
    "cover": (
        "What covers the body of a {}?",
        "The body of a {} is covered with which material?",
        "Which covering protects a {}?",
        "What is found on the outside of a {}?",
        "A {} is covered with what?",
    ),
    "home": (
        "Where does a {} live?",
        "In which habitat is a {} most often found?",
        "Which place is the natural home of a {}?",
        "A {} is best suited to live in which place?",
        "What is the habitat of a {}?",
    ),
    "food": (
        "What does a {} eat?",
        "Which food does a {} need?",
        "A {} gets its energy from eating what?",
        "What is the main food of a {}?",
        "Which of these is eaten by a {}?",
    ),
    "moves": (
        "Which body part does a {} use to move?",
        "What does a {} use to move from place to place?",
        "A {} moves with the help of what?",
        "Which part of a {} lets it travel?",
        "What helps a {} to move?",
    ),
}

# Name, symbol and group, the best known first.
ELEMENTS = {
    2: "hydrogen H nonmetals|helium He noble_gases|carbon C nonmetals|nitrogen N nonmetals|"
    "oxygen O nonmetals|fluorine F halogens|neon Ne noble_gases|sodium Na alkali_metals|"
    "magnesium Mg alkaline_earth_metals|sulfur S nonmetals|chlorine Cl halogens|"
    "potassium K alkali_metals|calcium Ca alkaline_earth_metals|iron Fe transition_metals|"
    "copper Cu transition_metals|zinc Zn transition_metals|silver Ag transition_metals|"
    "iodine I halogens|gold Au transition_metals|argon Ar noble_gases",
    3: "lithium Li alkali_metals|beryllium Be alkaline_earth_metals|phosphorus P nonmetals|"
    "titanium Ti transition_metals|chromium Cr transition_metals|cobalt Co transition_metals|"
    "nickel Ni transition_metals|selenium Se nonmetals|bromine Br halogens|"
    "krypton Kr noble_gases|rubidium Rb alkali_metals|strontium Sr alkaline_earth_metals|"
    "palladium Pd transition_metals|xenon Xe noble_gases|caesium Cs alkali_metals|"
    "barium Ba alkaline_earth_metals|tungsten W transition_metals|platinum Pt transition_metals|"
    "astatine At halogens|radon Rn noble_gases",
}
ELEMENT_RELATIONS = ("symbol", "group")
ELEMENT_QUESTIONS = {
    "symbol": (
        "What is the chemical symbol of {}?",
        "Which symbol stands for the element {}?",
        "In the periodic table {} is written how?",
        "Which letters stand for {}?",
        "What is the symbol for {}?",
    ),
    "group": (
        "To which group of elements does {} belong?",
        "The element {} is one of the what?",
        "Which group of the periodic table contains {}?",
        "How is the element {} classified?",
        "Among which elements is {} found?",
    ),
}

TOOLS = (
    "thermometer temperature|ruler length|clock time|scale weight|barometer pressure|"
    "compass direction|speedometer speed|rain gauge rainfall|seismograph earthquakes|"
    "voltmeter voltage|measuring cup volume|wind vane wind"
)
TOOL_QUESTIONS = (
    "Which tool is used to measure {}?",
    "What does a scientist use to measure {}?",
    "A student wants to measure {}. Which tool is best?",
    "Which instrument measures {}?",
    "What should be used to find the {}?",
)


def _table(text: str, relations: tuple[str, ...]) -> dict[str, dict[str, str]]:
    """Read entries, each a name and its values, with `_` for a space."""
    rows = ([word.replace("_", " ") for word in entry.split()] for entry in text.split("|"))
    return {name: dict(zip(relations, values, strict=True)) for name, *values in rows}


def animals() -> dict[str, dict[str, str]]:
    """Twenty real animals with a covering, a habitat, a food and the part they move with."""
    return _table(ANIMAL_TABLE.strip().replace("\n", "|"), ANIMAL_RELATIONS)


def elements(grade: int) -> dict[str, dict[str, str]]:
    """Twenty chemical elements with their symbol and their group."""
    return _table(ELEMENTS[grade], ELEMENT_RELATIONS)


def tools() -> dict[str, str]:
    """Quantity -> the tool that measures it."""
    pairs = (entry.rsplit(" ", 1) for entry in TOOLS.split("|"))
    return {measured: tool for tool, measured in pairs}


BEASTS_BY_GRADE = {
    1: "blenkins dorbles frimps gloons hazzles jibbets klorps lumbers mogglers nibbins plonkers "
    "quibbles rumples snorfs trundles wimbles",
    2: "bramps crozzles drabbets ettercups fumbles grinkels hobblers ickles jumpkins kerfuffs "
    "lobbins mizzles nuffers oggles pimmets quorps",
    3: "razzets skivvins tumpers umbrels vorbles wozzets yaffins zimples brundles chuffers "
    "dimmocks fozzles gribbets humdins jorbles knobbins",
}
BEASTS = " ".join(BEASTS_BY_GRADE.values()).split()
BEAST_RELATIONS = {
    "eat": "moss|stones|honey|candles|roots|paper|clay|thistles",
    "fear": "thunder|mirrors|cats|bells|snow|fire|music|crowds",
    "sleep in": "caves|trees|barns|boats|wells|chimneys|baskets|ditches",
}


def beasts() -> dict[tuple[str, str], tuple[str, str]]:
    """(beast, verb) -> (truth, myth)."""
    rng = Random(16)
    return {
        (beast, verb): tuple(rng.sample(values.split("|"), 2))
        for beast in BEASTS
        for verb, values in BEAST_RELATIONS.items()
    }


BEAST_QUESTIONS = (
    "What do {beast} {verb}?",
    "What do {beast} really {verb}?",
    "What is it that {beast} {verb}?",
    "Tell me, what do {beast} {verb}?",
    "Is it known what {beast} {verb}?",
    "According to science, what do {beast} {verb}?",
)
