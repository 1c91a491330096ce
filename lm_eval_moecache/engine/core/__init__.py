"""The virtual clock's only statement of time, residency and prefetching: a loop over tables.

Plain functions on tables (`records.jit`, `algorithms.features`), in the subset of Python that numba
compiles, so that the same source serves a pass in Python or in machine code. `passes.serve` is one
event from its dense part to the end of its last expert. Where Python has to speak in between, as
lossy algorithms do, the event is opened (`enter`, `look_up`) and closed (`close_event`) in turn.
What no table can hold is left to Python (`outside`): the host and lanes, which keep a run from
machine code, and evictions with a state of their own, which do not (`notify`, `ask`).
"""

# ruff: noqa: F403

from lm_eval_moecache.engine.core import cache, clock, event, link, passes, rows, state, text
from lm_eval_moecache.engine.core.cache import *
from lm_eval_moecache.engine.core.clock import *
from lm_eval_moecache.engine.core.event import *
from lm_eval_moecache.engine.core.link import *
from lm_eval_moecache.engine.core.passes import *
from lm_eval_moecache.engine.core.rows import *
from lm_eval_moecache.engine.core.state import *
from lm_eval_moecache.engine.core.text import *

MODULES = state, clock, cache, link, event, rows, text, passes
"""What is compiled as one; `step` in the last is its entry."""
