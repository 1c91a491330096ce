"""The long forms of the tests: soak and kills, each a command of its own."""

import os

# Before the hub's library is imported: names of models that do not exist are among the bad inputs,
# and without a network it would try each of them for minutes.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
