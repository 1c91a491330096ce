"""The words of the package: plain records that every other folder speaks in (numpy only)."""

from lm_eval_moecache.records.arrays import BoolArray, FloatArray, IntArray, softmax
from lm_eval_moecache.records.event import (
    DECODE,
    DROPPED,
    PHASES,
    PREFILL,
    VERIFY,
    Event,
    Fetch,
    near_mask,
    num_assignments,
    spell_out,
    token_miss_count,
    unique_in_order,
)
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.selection import Selection

__all__ = [
    "DECODE",
    "DROPPED",
    "PHASES",
    "PREFILL",
    "VERIFY",
    "BoolArray",
    "Event",
    "Fetch",
    "FloatArray",
    "Geometry",
    "IntArray",
    "Selection",
    "near_mask",
    "num_assignments",
    "softmax",
    "spell_out",
    "token_miss_count",
    "unique_in_order",
]
