"""Eviction orders by hand: one script or more for each eviction rule (see `testing.play`)."""

from collections.abc import Mapping, Sequence

LOADING_IS_NO_HIT = "load 1 2 3, use 1, leave 1 2 3"
"""The use for which an expert was loaded does not protect it."""
THREE_LAYERS = "load 0 1, use 0 1, load 8 9, use 8 9, load 16 17, use 16 17"
"""A pass that uses two experts of each layer."""
SCRIPTS: Mapping[str, Sequence[str]] = {
    "arc": [
        "load 1 2 3, use 1 2 3, use 1, leave 2 3 1",
        LOADING_IS_NO_HIT,
        "load 1 2 3, leave 1, load 1 4 5, leave 2 3 4 1 5",
    ],
    "clock": ["load 1 2 3, use 1 2 3, use 1, leave 2 3 1", LOADING_IS_NO_HIT],
    "fifo": ["load 3 1 2, use 3, leave 3 1 2", "load 2 1, prefetch 0, want 2, leave 2 1 0"],
    "fld": ["load 1 2 17 9, use 1, leave 17 9 2 1"],
    "heat_lru": ["load 1 2, use 1, use 1, use 1, use 1, use 1, use 1, use 2, leave 2 1"],
    "hysteresis": [
        "load 1 2, use 1, use 2, leave 1 2",
        "load 1 2 3, use 1, use 1, use 2, leave 3 2 1",
    ],
    "lfru_colibri": ["load 1 2 3, use 1, use 1, use 2, use 3, leave 2 3 1"],
    "tail_lru": ["load 1 2 3, use 1, leave 2 3 1"],
    "pinned_lru": ["load 1 2 3 4 5 6, use 2, use 1, use 3, leave 2 1 3 4 5 6"],
    "s3_fifo": [
        "load 1 2 3, use 1 2 3, use 1, leave 2 3 1",
        LOADING_IS_NO_HIT,
        # The first three fill the main queue; 4 comes back to it from the ghosts.
        "load 1 2 3, leave 1, load 4 5, leave 4, load 4 6, leave 5 6 2 3 4",
    ],
    "sieve": ["load 1 2 3, use 1 2 3, use 1, leave 2 3 1", LOADING_IS_NO_HIT],
    "slru": ["load 1 2 3, use 1 2 3, use 1, leave 2 3 1", LOADING_IS_NO_HIT],
    "static": ["load 1 2 3, use 1 2 3, use 1, leave 1 2 3"],
    "two_q": [
        "load 1 2 3, use 1 2 3, use 1, leave 1 2 3",
        "load 1 2 3, leave 1, load 1 4, leave 2 1 3 4",
    ],
    "w_tinylfu": ["load 1 2 3, use 1 2 3, use 1, use 3, leave 2 3 1"],
    "frequency_layer": ["load 1 2, use 1, leave 2 1"],
    "hazard": ["load 1 2, use 1, leave 2 1", "load 1 2 3, use 3, use 1, want 2, leave 3 1 2"],
    "layered_lru": ["load 1 2 3 9, use 1, leave 2 3 1 9"],
    "least_stale": [
        "load 1 2 3, use 1, use 2, pass, use 1, leave 3 2 1",
        # Stale up to this layer, then stale of layers to come (furthest first), then current.
        f"{THREE_LAYERS}, pass, load 2, use 0 2, leave 1 16 17 8 9 0 2",
        # Current experts of layers to come leave last.
        f"{THREE_LAYERS}, pass, use 0 1, prefetch 10 18, want 8, leave 16 17 9 0 1 18 10 8",
        # The last layer predicts the first layer's next turn: 3 is prefetched, 1 is resident.
        f"{THREE_LAYERS}, pass, use 0 1, use 8 9, use 16 17, prefetch 3, want 1, pass, "
        "leave 0 16 17 8 9 3 1",
        # The prediction holds for that pass alone.
        f"{THREE_LAYERS}, pass, use 0, want 1, pass, pass, leave 0 1 16 17 8 9",
    ],
    "lfru": ["load 1 2, use 1, leave 2 1"],
    "lfu": ["load 1 2 3, use 1, use 1, use 2, leave 3 2 1"],
    "lhu": ["load 1 2 3, use 1, use 1, use 2, leave 3 2 1"],
    "lru": ["load 1 2 3, use 1, leave 2 3 1", "load 1 2, want 1, prefetch 3, leave 1 2 3"],
    "score": ["load 1 2, use 1 2, leave 2 1"],
    "shallow_first": ["load 1 2 17 9, use 1, leave 17 9 2 1"],
}
UNSCRIPTED = {
    "importance": "it goes by gate scores, which scripts have not",
    "random": "its choices are draws",
    "belady": "it goes by the future alone",
}
USE_DOES_NOT_COUNT = {"fifo", "static"}
"""Rules that ignore use, though their docstrings mention it."""
