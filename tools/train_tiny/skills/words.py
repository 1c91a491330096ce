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
