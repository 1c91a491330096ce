"""Contract tests that any package can run on its own algorithm, in three lines:

from lm_eval_moecache.testing import EvictionContract

class TestMine(EvictionContract):
    algorithm = MyEviction
"""

from lm_eval_moecache.testing.contracts import (
    CONTRACTS,
    Contract,
    EvictionContract,
    MissContract,
    PrefetchContract,
    RoutingContract,
    run_contract,
)

__all__ = [
    "CONTRACTS",
    "Contract",
    "EvictionContract",
    "MissContract",
    "PrefetchContract",
    "RoutingContract",
    "run_contract",
]
