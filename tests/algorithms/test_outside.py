"""Rules of other packages: loaded by a class path, checked where what they return enters."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Container
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lm_eval_moecache import Event, Eviction, Miss, Prefetch, Routing, Selection
from lm_eval_moecache.algorithms.eviction.rankings import FIFO
from lm_eval_moecache.algorithms.eviction.textbook import Clock
from lm_eval_moecache.algorithms.policy import Choice, load_policy
from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.engine.rules import Rules
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.records.batch import Batch
from lm_eval_moecache.records.errors import AlgorithmError
from lm_eval_moecache.records.event import DECODE, DROPPED
from lm_eval_moecache.records.sizes import parse_capacity
from lm_eval_moecache.testing import CONTRACTS, run_contract
from lm_eval_moecache.testing.streams import make_geometry, make_hardware, policy_of, run

# --- a class of another file ---


class Mine(FIFO):
    """Evicts in the order of loading."""


def test_a_class_path_is_a_rule(tmp_path: Path) -> None:
    file, geometry = tmp_path / "mine.yaml", make_geometry()
    rules = "routing: standard\nprefetch: none\nmiss: fetch\n"
    file.write_text(f"{rules}eviction: {{class_path: {__name__}.Mine}}\n")
    fifo = run(policy_of({"eviction": "fifo"}), geometry).figures
    assert run(policy_of({}, str(file)), geometry).figures == fifo


HEAD = "from lm_eval_moecache import Eviction\n"
WHOLE = """
    source = "test"
    def on_insert(self, key, prefetched): pass
    def on_evict(self, key): pass
    def victim(self, pinned, layer): return None
"""


def mine(init: str) -> str:
    return f"{HEAD}class Mine(Eviction):{WHOLE}    def __init__(self, geometry{init}\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1 / 0\n", ["cannot be imported: ZeroDivisionError", "mine.py, line 1"]),
        ("def broken(:\n", ["cannot be imported: SyntaxError"]),
        ("x = 1\n", ["cannot be imported: AttributeError"]),
        ("class Mine: pass\n", ["is not a subclass of"]),
        (f"{HEAD}class Mine(Eviction): pass\n", ["is abstract", "victim", "mine.py"]),
        (mine("): pass"), ["must take (geometry, *, seed, ...)", "seed", "mine.py"]),
        (mine(", *, seed=0, a: 'Not' = 1): pass"), ["must be importable", "Not", "mine.py"]),
        (
            mine(", *, seed=0): raise KeyError('w')"),
            ["constructor raised KeyError", "mine.py"],
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
        load_policy("on_demand", {"eviction": f"{name}.Mine"}).eviction.build(make_geometry(), 0)
    for word in words:
        assert word.replace("mine.py", f"{name}.py") in str(caught.value)


# --- what it returns or raises ---

GEOMETRY = make_geometry(num_layers=2, num_experts=8, top_k=2)
RESIDENT = np.array([[False, True, *[False] * 6]])
ROUTED = Event(1, DECODE, [0], 8, np.array([[5, 1], [3, 2]]), resident=RESIDENT, absent=~RESIDENT)
EXPERTS = np.array([[5, 1], [3, DROPPED]])
EVENT = ROUTED._replace(experts=EXPERTS)


def rules_with(axis: str, base: type[Any], method: str, returned: Any) -> tuple[Rules, Any]:
    """Return a run's rules with one from outside whose method returns so, and that rule."""
    methods: dict[str, Any] = {"source": "test", "__module__": __name__}
    for name in {*base.__abstractmethods__, method}:
        value = returned if name == method else None
        methods[name] = lambda self, *_, value=value: value
    mine = type("Mine", (base,), methods)
    choice = Choice(axis=axis, name=f"{__name__}.Mine", algorithm=mine, parameters={})
    rules = Rules(GEOMETRY, replace(load_policy("on_demand"), **{axis: choice}), 0)
    return rules, getattr(rules, axis, None)


def route(returned: Any) -> Any:
    rules, rule = rules_with("routing", Routing, "choose", returned)
    return rules.choose("routing", rule, ROUTED)


def resolve(returned: Any) -> Any:
    rules, rule = rules_with("miss", Miss, "choose", returned)
    return rules.choose("miss", rule, EVENT)


def levels(returned: Any) -> Any:
    return rules_with("miss", Miss, "levels", returned)[0].required_levels(EVENT, EVENT)


def prefetch_levels(returned: Any) -> Any:
    rules, _ = rules_with("miss", Miss, "prefetch_levels", returned)
    return rules.levels_of(EVENT, np.array([8, 9]))


def propose(returned: Any) -> Any:
    rules, rule = rules_with("prefetch", Prefetch, "propose", returned)
    return rules.propose(rule, EVENT)


def victim(returned: Any) -> Any:
    """Return who leaves a cache of two experts, 8 and 9, of which 9 is in use."""
    methods = {name: lambda self, *_: None for name in ("on_insert", "on_evict")}
    methods["victim"] = lambda self, *_: returned
    mine = type("Mine", (Eviction,), {"source": "test", "__module__": __name__, **methods})
    choice = Choice(axis="eviction", name=f"{__name__}.Mine", algorithm=mine, parameters={})
    policy, capacity = replace(load_policy("on_demand"), eviction=choice), "2experts"
    given = {"capacity": parse_capacity(capacity, GEOMETRY), "hardware": make_hardware()}
    engine = Engine(GEOMETRY, Setting(policy=policy, **given))
    for experts in ([[0, 1]], [[1, 2]]):
        engine.begin_pass(DECODE, 1)
        engine.alone.choose(Batch(DECODE, 1, np.array(experts), first_layer=1))
        engine.end_pass()
    return next(key for key in (8, 9) if key not in engine.pools[0].resident)


KEEP = np.array([[False, True], [True, True]])
GOOD = [
    (route, None),
    (route, Selection(np.array([[1, 5], [0, 7]]))),
    (route, Selection(np.array([[1, 1], [0, 7]]), KEEP)),
    (resolve, None),
    (resolve, Selection(EXPERTS, keep=KEEP)),
    (resolve, Selection(np.array([[1, 1], [3, DROPPED]]), weigh_as=EXPERTS)),
    (levels, np.zeros((2, 2), np.int64)),
    (prefetch_levels, np.array([0, 0])),
    (propose, []),
    (propose, (np.int64(3), 4)),
    (propose, np.array([9, 1])),
    (victim, np.int64(8)),
]
BAD = [
    (route, np.array([[5, 1], [3, 2]]), r"numpy.ndarray \[2, 2\] of int64. Expected: a Selection"),
    (route, Selection([[5, 1], [3, 2]]), r"experts=the list .* array of integers .*\[2, 2\]"),  # type: ignore[arg-type]
    (route, Selection(np.array([[5, 1]])), r"experts=a numpy.ndarray \[1, 2\]"),
    (route, Selection(np.array([[5.0, 1], [3, 2]])), "float64. Expected: an array of integers"),
    (route, Selection(np.array([[13, 9], [11, 10]])), r"experts=13\. .*0\.\.7, not keys"),
    (route, Selection(np.array([[5, DROPPED], [3, 2]])), "experts=-1"),
    (route, Selection(np.array([[5, 5], [3, 2]])), "no expert twice"),
    (route, Selection(ROUTED.experts, KEEP * 1), "keep=.* array of booleans"),
    (route, Selection(ROUTED.experts, weights=KEEP), "weights=.* array of floats"),
    (route, Selection(ROUTED.experts, weigh_as=ROUTED.experts + 8), "weigh_as=13"),
    (resolve, [13], "the list .* Expected: a Selection"),
    (resolve, Selection(np.array([[5, 1], [3, 1]])), "revives an expert"),
    (levels, [0], r"integers \[tokens, top_k\]"),
    (levels, np.array([[1, 0], [0, 0]]), r"the level 1. Expected: each in 0\.\.0"),
    (prefetch_levels, [0], "2 levels"),
    (prefetch_levels, [0, 1], r"each in 0\.\.0"),
    (propose, None, "None. Expected: keys"),
    (propose, 3, r"the int 3. Expected: keys in 0\.\.15"),
    (propose, [16], r"the key 16\. Expected"),
    (propose, [3.0], r"the list \[3\.0\]\. Expected"),
    (propose, [3, 4, 3], "a key twice"),
    (victim, 9, "the pinned key 9"),
    (victim, 16, r"the int 16\. Expected: a resident key"),
    (victim, [4], "the list"),
    (victim, 6, "the key 6, which is not resident"),
]


@pytest.mark.parametrize(("ask", "returned"), GOOD)
def test_what_fits_is_handed_on_as_it_is(ask: Callable[[Any], Any], returned: Any) -> None:
    found = ask(returned)
    assert found is returned or np.array_equal(found, returned)


@pytest.mark.parametrize(("ask", "returned", "words"), BAD)
def test_what_does_not_fit_is_refused_by_name(
    ask: Callable[[Any], Any], returned: Any, words: str
) -> None:
    method = "choose" if ask in (route, resolve) else ask.__name__
    name = rf"={__name__}\.Mine \(.*\): Mine\.{method}( at layer 1)? returned "
    with pytest.raises(AlgorithmError, match=name + ".*" + words):
        ask(returned)


class NoVictim(Clock):
    def victim(self, pinned: Container[int], layer: int) -> int | None:
        raise ValueError("operands could not be broadcast")


class NoEvent(Clock):
    def on_event(self, event: Event) -> None:
        raise KeyError(3)


def test_an_error_inside_a_rule_names_it_and_its_layer() -> None:
    prefix = rf"eviction={__name__}\.\w+ \(.*test_outside\.py\): "
    for name, words in (
        ("NoVictim", r"NoVictim\.victim at layer \d raised ValueError: operands"),
        ("NoEvent", r"NoEvent\.on_event at layer \d raised KeyError: 3"),
    ):
        with pytest.raises(AlgorithmError, match=prefix + words):
            run(policy_of({"eviction": f"{__name__}.{name}"}), make_geometry())


@pytest.mark.parametrize(
    ("axis", "module", "name"),
    [("routing", "my_routing", "SpareLightest"), ("miss", "my_miss", "DropLight")],
)
def test_the_examples_keep_their_contract(
    axis: str, module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    rule = getattr(importlib.import_module(module), name)
    run_contract(type("Case", (CONTRACTS[axis],), {"algorithm": rule}))
