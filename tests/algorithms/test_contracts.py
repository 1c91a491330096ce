"""Every file in the four folders keeps its axis' contract; new files are discovered."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Container
from pathlib import Path
from typing import Any

import pytest

from lm_eval_moecache.algorithms.eviction.rankings import FIFO, LRU
from lm_eval_moecache.algorithms.eviction.textbook import Clock
from lm_eval_moecache.algorithms.miss.drops import Drop
from lm_eval_moecache.algorithms.registry import (
    AXES,
    algorithm_names,
    find_algorithm,
    modules_of,
    source_digest,
)
from lm_eval_moecache.cli.policies import collect
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.testing import CONTRACTS, Contract, run_contract
from lm_eval_moecache.testing.streams import make_geometry, policy_of, run
from tests.algorithms.test_by_hand import CASES

SPEAKS_OF_USE = re.compile(r"\b(recent|use[ds]?|unused|frequen)", re.IGNORECASE)
USE_DOES_NOT_COUNT = {"fifo", "static"}
"""Rules that ignore use, though their docstrings mention it."""


def contract_cases() -> dict[str, type[Contract]]:
    """One test class for each file in each axis' folder."""
    cases = {}
    for axis in AXES:
        for name in algorithm_names(axis):
            title = f"Test_{axis}_{name}"
            algorithm = find_algorithm(axis, name)
            attributes: dict[str, Any] = {"algorithm": algorithm}
            if axis == "eviction":
                worked = CASES["eviction"].get(name, ())
                attributes["scripts"] = [script for script in worked if isinstance(script, str)]
                # What our rules say of themselves is held against their scripts, by_hand.yaml.
                speaks_of_use = SPEAKS_OF_USE.search(algorithm.__doc__ or "") is not None
                attributes["looks_at_use"] = speaks_of_use and name not in USE_DOES_NOT_COUNT
            cases[title] = type(title, (CONTRACTS[axis],), attributes)
    return cases


globals().update(contract_cases())

NEWCOMER = '''
from typing import ClassVar

from lm_eval_moecache.algorithms.eviction.rankings import FIFO
from lm_eval_moecache.records.geometry import Geometry


class Newcomer(FIFO):
    """Evicts in the order of loading, as a file that nobody lists."""

    name: ClassVar[str] = "newcomer"
    source: ClassVar[str] = "a test"

    def __init__(self, geometry: Geometry, *, seed: int = 0, step: int = 1) -> None:
        super().__init__(geometry, seed=seed)


class Neighbour(Newcomer):
    """Shares the file."""

    name = "neighbour"
'''


def test_a_new_file_in_a_folder_is_tested_listed_and_usable_with_no_other_edit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lm_eval_moecache.algorithms.eviction as folder

    (tmp_path / "newcomer.py").write_text(NEWCOMER)
    monkeypatch.setattr(folder, "__path__", [*folder.__path__, str(tmp_path)])
    modules_of.cache_clear()  # a process lists each folder once
    try:
        assert run_contract(contract_cases()["Test_eviction_newcomer"]) > 5
        listed = {a["name"]: a for a in collect()["algorithms"]["eviction"]}
        assert listed["newcomer"]["parameters"] == {"step": 1}
        assert listed["newcomer"]["source"] == "a test"
        policy = policy_of({"eviction": "newcomer", "eviction.step": 2})
        assert run(policy, make_geometry()).engine.ledger.passes
        neighbour = find_algorithm("eviction", "neighbour")
        assert (neighbour.__name__, listed["neighbour"]["parameters"]) == ("Neighbour", {"step": 1})
        assert source_digest(neighbour) != source_digest(policy.eviction.algorithm)
        (tmp_path / "twice.py").write_text(NEWCOMER)
        modules_of.cache_clear()
        with pytest.raises(ValueError, match=r"twice\.py .* both define eviction='newcomer'"):
            algorithm_names("eviction")
    finally:
        modules_of.cache_clear()
        sys.modules.pop("lm_eval_moecache.algorithms.eviction.newcomer", None)
        if hasattr(folder, "newcomer"):
            delattr(folder, "newcomer")


class Forgetful(FIFO):
    """Evicts the least recently used, or so it claims."""


class Noisy(Clock):
    """Evicts as CLOCK does, and counts being asked as a hit."""

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        key = super().victim(pinned, layer)
        if key is not None:
            self.hit(key)
        return key


def test_the_contract_finds_a_rule_that_forgets_use_and_one_that_changes_when_asked() -> None:
    def case(algorithm: type[Any], **own: Any) -> Any:
        return type("Case", (CONTRACTS["eviction"],), {"algorithm": algorithm, **own})()

    with pytest.raises(AssertionError, match="give `scripts`"):
        case(Forgetful, looks_at_use=True).test_a_use_decides_where_the_rule_looks_at_use()
    # No word of a docstring asks for scripts.
    case(Forgetful).test_a_use_decides_where_the_rule_looks_at_use()
    script = ("load 1 2, use 1, leave 2 1",)
    with pytest.raises(AssertionError, match="load 1 2, use 1"):
        case(Forgetful, scripts=script).test_who_leaves_is_as_scripted()
    case(LRU, scripts=script).test_who_leaves_is_as_scripted()
    with pytest.raises(AssertionError):
        case(Noisy).test_asking_changes_nothing_before_somebody_leaves()
    case(LRU).test_asking_changes_nothing_before_somebody_leaves()


def test_no_result_depends_on_the_hash_seed_or_on_machine_code() -> None:
    """The second run is in plain Python."""
    script = (
        "from lm_eval_moecache.algorithms.registry import AXES, algorithm_names, find_algorithm\n"
        "from lm_eval_moecache.testing.streams import make_geometry, policy_of, run\n"
        "for axis in AXES:\n"
        "    for name in algorithm_names(axis):\n"
        "        pairs = find_algorithm(axis, name).pairs_with\n"
        "        policy = policy_of({axis: name} | {a: n[-1] for a, n in pairs.items()})\n"
        "        print(axis, name, run(policy, make_geometry()).figures)\n"
    )
    root = Path(__file__).resolve().parents[2]
    printed = set()
    for hash_seed, is_plain in (("1", "0"), ("2", "1")):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(root)}
        environment["NUMBA_DISABLE_JIT"] = is_plain
        command, options = [sys.executable, "-c", script], {"capture_output": True, "check": True}
        printed.add(subprocess.run(command, env=environment, cwd=root, **options).stdout)
    assert len(printed) == 1


class Peeking(Drop):
    """Drops by logits that it has not declared."""

    def choose(self, event: Event) -> Any:
        assert event.logits[0] is not None
        return super().choose(event)


def test_the_contract_finds_a_rule_that_reads_what_it_has_not_declared() -> None:
    case = type("Case", (CONTRACTS["miss"],), {"algorithm": Peeking})
    with pytest.raises(IndexError):
        case().test_its_selections_fit_whatever_is_resident()
