"""Every file in the four folders keeps its axis' contract; a new file is found by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Container
from pathlib import Path
from typing import Any, ClassVar

import pytest

from lm_eval_moecache.algorithms.eviction.base import EvictionAlgorithm
from lm_eval_moecache.algorithms.eviction.fifo import FIFO
from lm_eval_moecache.algorithms.eviction.lru import LRU
from lm_eval_moecache.algorithms.features import A_USE
from lm_eval_moecache.algorithms.miss.drop import Drop
from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.algorithms.registry import AXES, _modules_of, algorithm_names, find_algorithm
from lm_eval_moecache.cli.policies import collect
from lm_eval_moecache.records.errors import AlgorithmError
from lm_eval_moecache.records.event import DECODE, Event
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.testing import CONTRACTS, Contract, EvictionContract, run_contract
from lm_eval_moecache.testing.streams import make_geometry, policy_of, run
from tests.algorithms.scripts import SCRIPTS, UNSCRIPTED, USE_DOES_NOT_COUNT


def contract_cases() -> dict[str, type[Contract]]:
    """One test class for each file in each axis' folder."""
    cases = {}
    for axis in AXES:
        for name in algorithm_names(axis):
            title = f"Test_{axis}_{name}"
            algorithm = find_algorithm(axis, name)
            own: dict[str, Any] = {"algorithm": algorithm}
            if axis == "eviction":
                own["scripts"] = SCRIPTS.get(name, ())
                if name in USE_DOES_NOT_COUNT:
                    own["looks_at_use"] = False
            cases[title] = type(title, (CONTRACTS[axis],), own)
    return cases


globals().update(contract_cases())

NEWCOMER = '''
"""Evicts the largest key: a file that nobody lists."""

from __future__ import annotations

from collections.abc import Container
from typing import ClassVar

from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.algorithms.eviction.base import EvictionAlgorithm


class Newcomer(EvictionAlgorithm):
    """Evicts the largest key that is `step` below the top."""

    source: ClassVar[str] = "a test"

    def __init__(self, geometry: Geometry, *, seed: int = 0, step: int = 1) -> None:
        super().__init__(geometry, seed=seed)
        self.step = step
        self.keys: set[int] = set()

    def on_insert(self, key: int, prefetched: bool) -> None:
        self.keys.add(key)

    def on_evict(self, key: int) -> None:
        self.keys.remove(key)

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        free = sorted(key for key in self.keys if key not in pinned)
        return free[-min(self.step, len(free))] if free else None
'''


def test_a_new_file_in_a_folder_is_tested_listed_and_usable_with_no_other_edit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lm_eval_moecache.algorithms.eviction as folder

    (tmp_path / "newcomer.py").write_text(NEWCOMER)
    monkeypatch.setattr(folder, "__path__", [*folder.__path__, str(tmp_path)])
    _modules_of.cache_clear()  # a process lists each folder once
    try:
        assert run_contract(contract_cases()["Test_eviction_newcomer"]) > 5
        listed = {a["name"]: a for a in collect()["algorithms"]["eviction"]}
        assert listed["newcomer"]["parameters"] == {"step": 1}
        assert listed["newcomer"]["source"] == "a test"
        policy = policy_of({"eviction": "newcomer", "eviction.step": 2})
        assert run(policy, make_geometry()).engine.ledger.passes
    finally:
        _modules_of.cache_clear()
        sys.modules.pop("lm_eval_moecache.algorithms.eviction.newcomer", None)
        if hasattr(folder, "newcomer"):
            delattr(folder, "newcomer")


def test_every_eviction_has_a_script_or_a_reason() -> None:
    assert SCRIPTS.keys() | UNSCRIPTED.keys() == set(algorithm_names("eviction"))
    assert not SCRIPTS.keys() & UNSCRIPTED.keys()


class Forgetful(FIFO):
    """Evicts what was least recently used, it says."""


class NoisyLRU(LRU):
    """Evicts the least recently used, and takes a question for an answer."""

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        found = super().victim(pinned, layer)
        if found is not None:
            self._log.extend((A_USE, found, 0))
        return found


def test_the_contract_finds_a_rule_that_forgets_use_and_one_that_changes_when_asked() -> None:
    def case(algorithm: type[Any], **own: Any) -> Any:
        return type("Case", (CONTRACTS["eviction"],), {"algorithm": algorithm, **own})()

    with pytest.raises(AssertionError, match="give `scripts`"):
        case(Forgetful).test_what_its_docstring_says_of_use_is_seen()
    script = ("load 1 2, use 1, leave 2 1",)
    with pytest.raises(AssertionError, match="load 1 2, use 1"):
        case(Forgetful, scripts=script).test_who_leaves_is_as_scripted()
    case(LRU, scripts=script).test_who_leaves_is_as_scripted()
    with pytest.raises(AssertionError):
        case(NoisyLRU).test_asking_changes_nothing_before_somebody_leaves()
    case(LRU).test_asking_changes_nothing_before_somebody_leaves()


class TwoQueues(EvictionAlgorithm):
    """Evicts from the newcomers while they hold more than a quarter of the slots (2Q, simplified).

    A newcomer that is used moves to the others, of which the least recently used leaves.
    """

    source: ClassVar[str] = "Johnson & Shasha 1994, simplified"

    def __init__(self, geometry: Geometry, *, seed: int = 0) -> None:
        super().__init__(geometry, seed=seed)
        self._new: dict[int, None] = {}
        self._used: dict[int, None] = {}

    def on_insert(self, key: int, prefetched: bool) -> None:
        self._new[key] = None

    def on_event(self, event: Event) -> None:
        for key in event.keys:
            if key in self._new or key in self._used:
                self._new.pop(key, None)
                self._used.pop(key, None)
                self._used[key] = None

    def on_evict(self, key: int) -> None:
        (self._new if key in self._new else self._used).pop(key)

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        crowded = len(self._new) > self.num_slots // 4
        queues = (self._new, self._used) if crowded else (self._used, self._new)
        return next((key for queue in queues for key in queue if key not in pinned), None)


class TestTwoQueues(EvictionContract):
    algorithm = TwoQueues
    scripts = ("load 1 2 3, use 1, leave 1 2 3", "load 1 2 3 4, use 1, leave 2 1 3 4")


class Outside(LRU):
    """An algorithm that lives in somebody else's package."""

    def on_event(self, event: Event) -> None:
        super().on_event(event)


def test_an_outside_algorithm_runs_by_its_class_path(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "routing: standard\nprefetch: none\nmiss: fetch\n"
        f"eviction: {{class_path: {Outside.__module__}.Outside}}\n"
    )
    geometry = make_geometry()
    assert run(policy_of({}, str(file)), geometry).figures == run(policy_of({}), geometry).figures


class Failing(LRU):
    def victim(self, pinned: Container[int], layer: int) -> int | None:
        raise ValueError("operands could not be broadcast")

    def on_event(self, event: Event) -> None:
        raise KeyError(3)


def test_an_error_inside_an_outside_algorithm_names_it_and_its_layer(tmp_path: Path) -> None:
    geometry = make_geometry()
    policy = load_policy("on_demand", {"eviction": f"{__name__}.Failing"})
    made = policy.eviction.build(geometry, 0)
    where = rf"eviction={__name__}\.Failing \(.*test_contracts\.py\): "
    with pytest.raises(AlgorithmError, match=where + r"Failing\.victim at layer 1 raised"):
        made.victim(set(), 1)
    with pytest.raises(AlgorithmError, match=r"Failing\.on_event at layer 2 raised KeyError: 3"):
        made.on_event(Event(0, 2, DECODE, 1, []))


def test_no_result_depends_on_the_hash_seed() -> None:
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
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(root)}
        done = subprocess.run(
            [sys.executable, "-c", script],
            env=environment,
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        )
        printed.add(done.stdout)
    assert len(printed) == 1


class Peeking(Drop):
    """Drops by logits that it has not asked for."""

    def resolve(self, event: Event, absent: Any, resident: Any) -> Any:
        assert event.logits[0] is not None
        return super().resolve(event, absent, resident)


def test_the_contract_finds_a_rule_that_reads_what_it_has_not_declared() -> None:
    case = type("Case", (CONTRACTS["miss"],), {"algorithm": Peeking})
    with pytest.raises(IndexError):
        case().test_what_is_executed_is_near_or_loaded()


# --- classes that cannot be used ---


HEAD = "from lm_eval_moecache.algorithms.eviction.base import EvictionAlgorithm\n"
WHOLE = """
    source = "test"
    def on_insert(self, key, prefetched): pass
    def on_evict(self, key): pass
    def victim(self, pinned, layer): return None
"""
SMALL = Geometry(
    model="x", num_layers=1, num_experts=2, top_k=1, expert_bytes=((1,),), dense_bytes=(0,)
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1 / 0\n", ["cannot be imported: ZeroDivisionError", "mine.py, line 1"]),
        ("def broken(:\n", ["cannot be imported: SyntaxError"]),
        ("import nothing_of_that_name\n", ["cannot be imported: ModuleNotFoundError"]),
        ("raise RuntimeError('no device')\n", ["RuntimeError: no device", "mine.py, line 1"]),
        ("x = 1\n", ["cannot be imported: AttributeError"]),
        ("class Mine: pass\n", ["is not a subclass of"]),
        (f"{HEAD}class Mine(EvictionAlgorithm): pass\n", ["is abstract", "victim", "mine.py"]),
        (
            f"{HEAD}class Mine(EvictionAlgorithm):{WHOLE}    def __init__(self, geometry): pass\n",
            ["must take (geometry, *, seed, ...)", "seed", "mine.py"],
        ),
        (
            f"{HEAD}class Mine(EvictionAlgorithm):{WHOLE}"
            "    def __init__(self, geometry, *, seed=0, a: 'Nothing' = 1): pass\n",
            ["must be importable", "Nothing", "mine.py"],
        ),
        (
            f"{HEAD}class Mine(EvictionAlgorithm):{WHOLE}"
            "    def __init__(self, geometry, *, seed=0): raise KeyError('weights')\n",
            ["its constructor raised KeyError: 'weights'", "mine.py"],
        ),
    ],
)
def test_a_class_that_cannot_be_used_is_named_with_file_and_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: list[str]
) -> None:
    name = f"mine_{abs(hash(text))}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"eviction") as caught:
        load_policy("on_demand", {"eviction": f"{name}.Mine"}).eviction.build(SMALL, 0)
    for word in words:
        assert word.replace("mine.py", f"{name}.py") in str(caught.value)
