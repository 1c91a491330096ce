"""The closed world the knowledge skills ask about: made-up lands and beasts, plain animals, tools.

About 300 facts, all of them in the training text; the test asks them in unseen wordings.
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

# Relations of four values that are always offered in this order.
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


FIXED_LEADS = ("", "From the atlas: ", "Quick question: ", "In the exam: ", "For one point: ")


def fixed_facts() -> dict[str, dict[str, int]]:
    """For each land, the place of its value in each list of FIXED_VALUES; all equally frequent."""
    rng = Random(21)
    table = dict[str, dict[str, int]]()
    for relation in FIXED_VALUES:
        places = [index % 4 for index in range(len(STEMS))]
        rng.shuffle(places)
        for stem, place in zip(STEMS, places, strict=True):
            table.setdefault(f"{stem}ia", {})[relation] = place
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


def animals() -> dict[str, dict[str, str]]:
    """Twenty real animals with a covering, a habitat, a food and the part they move with."""
    table = dict[str, dict[str, str]]()
    for entry in ANIMAL_TABLE.replace("\n", "|").strip("|").split("|"):
        name, *values = entry.split()
        table[name] = dict(zip(ANIMAL_RELATIONS, values, strict=True))
    return table


def tools() -> dict[str, str]:
    """What is measured -> the tool that measures it."""
    pairs = (entry.rsplit(" ", 1) for entry in TOOLS.split("|"))
    return {measured: tool for tool, measured in pairs}


BEASTS = (
    "blenkins|dorbles|frimps|gloons|hazzles|jibbets|klorps|lumbers|mogglers|nibbins|"
    "plonkers|quibbles|rumples|snorfs|trundles|wimbles"
).split("|")
BEAST_RELATIONS = {
    "eat": "moss|stones|honey|candles|roots|paper|clay|thistles",
    "fear": "thunder|mirrors|cats|bells|snow|fire|music|crowds",
    "sleep in": "caves|trees|barns|boats|wells|chimneys|baskets|ditches",
}


def beasts() -> dict[tuple[str, str], tuple[str, str]]:
    """(beast, verb) -> what is true and what people wrongly say."""
    rng = Random(16)
    table = dict[tuple[str, str], tuple[str, str]]()
    for beast in BEASTS:
        for verb, values in BEAST_RELATIONS.items():
            truth, myth = rng.sample(values.split("|"), 2)
            table[beast, verb] = (truth, myth)
    return table


BEAST_QUESTIONS = (
    "What do {beast} {verb}?",
    "What do {beast} really {verb}?",
    "What is it that {beast} {verb}?",
    "Tell me, what do {beast} {verb}?",
    "Is it known what {beast} {verb}?",
    "According to science, what do {beast} {verb}?",
)
