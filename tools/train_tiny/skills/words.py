"""Word pools shared by the generators."""

from __future__ import annotations

PEOPLE = (
    "Tom Anna Ben Clara David Emma Frank Grace Henry Iris Jack Kate Leo Mia Noah Olivia Paul "
    "Quinn Rosa Sam Tina Victor Wendy Zoe Adam Bella Carl Dora Eric Fiona George Hanna"
).split()

LIAR_NAMES = (
    "Sherrie Vernell Alexis Michaela Elanor Kristian Delbert Jerry Shalonda Vina Helene Kandi "
    "Jamey Ka Christie Leda Lorine Tamika Raymond Willian Shaunda Teressa Sal Phoebe Millie "
    "Ryan Andree Osvaldo Inga Rashida Jim Amberly Bernita Conception Fletcher Gwenn Maybelle "
    "Yoland Antwan Crista Fidel Jaye Jamar Audrie Dallas Shenna Bettie Leandro Sima Montrell"
).split()

GOODS = "apples books coins pens cards shells stamps cookies marbles pencils stickers eggs".split()

FRUITS = "apple banana strawberry peach orange plum raspberry grape nectarine blackberry".split()
VEGETABLES = (
    "yam onion potato cabbage carrot garlic cauliflower|lettuce head|head of broccoli|"
    "stalk of celery"
)
INSTRUMENTS = "flute piano trombone violin accordion clarinet drum trumpet".split()
ANIMALS = "bear dog cow cat pig donkey fish frog goat snake rabbit duck chicken mouse snail".split()
OBJECTS = "stove lamp fridge chair microwave couch oven bed toaster table car".split()

NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five")

COLORS = "red blue green yellow orange purple white black pink brown gray".split()

DANCERS = "Helga Lola Ophelia Izzi Melissa Karl Rodrigo Jamie Patrick Sam".split()
BOOKS = (
    "Ulysses|Frankenstein|Lolita|Hound of the Baskervilles|The Odyssey|Catch-22|Moby Dick|"
    "The Great Gatsby|The Pearl|The Fellowship of the Ring"
).split("|")
POSITIONS = (
    "cheerleader|benchwarmer|left winger|right winger|fullback|goalkeeper|center midfielder|"
    "left midfielder|right midfielder|striker"
).split("|")

BIRDS = "robin|crow|quail|falcon|blue jay|owl|hawk|raven|cardinal|hummingbird".split("|")
VEHICLES = (
    "motorcyle|limousine|convertible|tractor|truck|minivan|station wagon|sedan|bus|hatchback"
).split("|")
STAND_FRUITS = (
    "apples|peaches|mangoes|pears|plums|kiwis|oranges|watermelons|cantaloupes|loquats"
).split("|")
GOLFERS = "Eve Rob Mel Ada Ana Amy Dan Eli Joe Mya".split()

ADJECTIVES = (
    "lovely|nice|good|bad|awful|terrible|wonderful|silly|ridiculous|mysterious|obnoxious|repulsive",
    "big|small|little|huge|tiny|large|enormous|massive|midsize|normal-size",
    "old|new|young|ancient|archaic|brand-new|old-fashioned",
    "circular|square|round|spherical|rectangular|triangular|pyramidal|prismlike",
    "red|blue|green|yellow|orange|purple|white|black|pink|brown|grey|gray|crimson|teal|aqua",
    "Mexican|Brazilian|American|Indian|Chinese|Japanese|Thai|Turkish|Russian|German|Italian|"
    "Egyptian|Nigerian|Ethiopian|Iranian|Pakistani|Indonesian|Bangladeshi|Filipino|Congolese|"
    "Israeli|Vietnamese|Polish|Portuguese|French|Spanish|Canadian",
    "rubber|iron|cloth|glass|wool|leather|paper|plastic|wood|fiberglass|cardboard|steel|silver",
    "walking|smoking|exercise|driving|eating|drinking|hiking|snorkeling|typing|whittling",
)
NOUNS = (
    "sweater|cat|motorcycle|surfboard|knife|dog|car|ship|hat|chair|ball|eraser|monkey|match|"
    "shoe|sock|box|computer|lamp|gold|gloves|lion|tree|spoon"
).split("|")
