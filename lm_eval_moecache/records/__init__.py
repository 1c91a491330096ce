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
    num_assignments,
    resident_mask,
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
    "num_assignments",
    "resident_mask",
    "softmax",
    "token_miss_count",
    "unique_in_order",
]
