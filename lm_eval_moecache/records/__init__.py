"""The vocabulary of the package: plain records that every other folder uses (numpy only)."""

from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.selection import Selection

__all__ = ["Event", "Geometry", "Selection"]
