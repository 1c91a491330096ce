"""What the regression gate lets pass: error rate, floor and tolerances."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lm_eval_moecache.records.errors import unknown
from lm_eval_moecache.report.columns import METRICS, metric_column
from lm_eval_moecache.report.machine import same_machine
from lm_eval_moecache.report.results import Run

SPEED_METRICS = ("ttft_ms", "tpot_ms", "tok_per_s", "miss_rate")
# Over a hundred reruns on other CPUs nobody should see more than a false alarm or two.
DEFAULT_ALPHA = 0.01
# Half a point of accuracy, or half a percent of a perplexity.
DEFAULT_FLOOR = 0.005
# On one machine the virtual clock repeats itself to the last digit. Another CPU rounds
# differently, and a near tie of a router falls the other way; a wall clock measures.
TOLERANCE = {"virtual": 0.02, "wall": 0.1}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """How much worse a figure may get. `tolerances` hold a metric's own, relative to baseline.

    `floor` and `tolerance` None: 0 for two runs of one machine under the virtual clock, else
    `DEFAULT_FLOOR` and `TOLERANCE`. `same_machine` None: as the records say.
    """

    alpha: float = DEFAULT_ALPHA
    floor: float | None = None
    tolerance: float | None = None
    tolerances: Mapping[str, float] = field(default_factory=dict)
    metrics: tuple[str, ...] = SPEED_METRICS
    ignore: tuple[str, ...] = ()
    same_machine: bool | None = None

    def __post_init__(self) -> None:
        if not 0 < self.alpha < 1:
            raise ValueError(f"alpha={self.alpha} must lie between 0 and 1: 0.05, or 5%.")
        for name in (*self.metrics, *self.tolerances):
            if ":" in name:
                raise ValueError(
                    f"metric={name!r} is a score, and every score of every task is compared as it "
                    f"is, within `--floor`. Allowed here: figures of speed, as {SPEED_METRICS}."
                )
            if metric_column(name) is None:
                raise unknown("metric", name, METRICS)

    def is_exact(self, old: Run, new: Run) -> bool:
        """Whether a rerun has to repeat the figures to the digit."""
        if any(run.moecache["clock"] != "virtual" for run in (old, new)):
            return False
        return same_machine(old, new) if self.same_machine is None else self.same_machine

    def floor_of(self, exact: bool) -> float:
        usual = 0.0 if exact else DEFAULT_FLOOR
        return usual if self.floor is None else self.floor

    def tolerance_of(self, metric: str, clock: str, exact: bool) -> float:
        usual = 0.0 if exact else TOLERANCE.get(clock, 0.0)
        whole = usual if self.tolerance is None else self.tolerance
        return self.tolerances.get(metric, whole)
