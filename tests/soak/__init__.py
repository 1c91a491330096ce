"""The long-running tests, a command of their own."""

import os

# Set before the hub's library is imported: the bad inputs contain names of models that do not
# exist, and without a network it would retry each for minutes.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
