"""Rules of other packages: loaded by a class path, checked where what they return enters."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lm_eval_moecache import Event, Eviction, Fetch, Miss, Prefetch, Resolution, Routing, Selection
from lm_eval_moecache.algorithms.eviction.rankings import FIFO, LRU
from lm_eval_moecache.algorithms.policy import Choice, load_policy
from lm_eval_moecache.records.errors import AlgorithmError
from lm_eval_moecache.records.event import DECODE, DROPPED
from lm_eval_moecache.testing import CONTRACTS, run_contract
from lm_eval_moecache.testing.streams import make_geometry, policy_of, run

# --- a class of another file ---


class Mine(FIFO):
    """Evicts in the order of loading."""


def test_a_class_path_is_a_rule(tmp_path: Path) -> None:
    file, geometry = tmp_path / "mine.yaml", make_geometry()
    rules = "routing: standard\nprefetch: none\nmiss: fetch\n"
    file.write_text(f"{rules}eviction: {{class_path: {__name__}.Mine}}\n")
    fifo = run(policy_of({"eviction": "fifo"}), geometry).figures
    assert run(policy_of({}, str(file)), geometry).figures == fifo


HEAD = "from lm_eval_moecache.algorithms.eviction.base import EvictionAlgorithm\n"
WHOLE = """
    source = "test"
    def on_insert(self, key, prefetched): pass
    def on_evict(self, key): pass
    def victim(self, pinned, layer): return None
"""


def mine(init: str) -> str:
    return f"{HEAD}class Mine(EvictionAlgorithm):{WHOLE}    def __init__(self, geometry{init}\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1 / 0\n", ["cannot be imported: ZeroDivisionError", "mine.py, line 1"]),
        ("def broken(:\n", ["cannot be imported: SyntaxError"]),
        ("x = 1\n", ["cannot be imported: AttributeError"]),
        ("class Mine: pass\n", ["is not a subclass of"]),
        (f"{HEAD}class Mine(EvictionAlgorithm): pass\n", ["is abstract", "victim", "mine.py"]),
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
EXPERTS = np.array([[5, 1], [3, DROPPED]])
ROUTED = Event(0, 1, DECODE, 2, [13, 9, 11], np.array([[5, 1], [3, 2]]))
EVENT = Event(0, 1, DECODE, 2, [13, 9, 11], EXPERTS)


def outside(axis: str, base: type[Any], method: str, returned: Any) -> Any:
    """Return a rule from outside, built as a run builds it, whose method returns so."""
    methods: dict[str, Any] = {"source": "test", "__module__": __name__}
    for name in {*base.__abstractmethods__, method}:
        value = returned if name == method else None
        methods[name] = lambda self, *_, value=value: value
        methods[name].__name__ = name
    mine = type("Mine", (base,), methods)
    choice = Choice(axis=axis, name=f"{__name__}.Mine", algorithm=mine, parameters={})
    return choice.build(GEOMETRY, 0)


def select(returned: Any) -> Any:
    return outside("routing", Routing, "select", returned).select(ROUTED, {9: 0})


def resolve(returned: Any) -> Any:
    return outside("miss", Miss, "resolve", returned).resolve(EVENT, [13, 11], {9: 0})


def prefetch_levels(returned: Any) -> Any:
    return outside("miss", Miss, "prefetch_levels", returned).prefetch_levels(EVENT, 1, [8, 9])


def propose(returned: Any) -> Any:
    return outside("prefetch", Prefetch, "propose", returned).propose(EVENT)


def propose_arrays(returned: Any) -> Any:
    rule = outside("prefetch", Prefetch, "propose_arrays", returned)
    return rule.propose_arrays([0, 1], np.zeros((2, 8)))


def victim(returned: Any) -> Any:
    rule = outside("eviction", Eviction, "victim", returned)
    for key in (3, 4, 5):
        rule.on_insert(key, False)
    rule.on_evict(5)
    return rule.victim({3}, 1)


def resolution(fetched: list[int], experts: Any = EXPERTS, **fields: Any) -> Resolution:
    return Resolution([Fetch(key) for key in fetched], Selection(np.array(experts), **fields))


KEEP = np.array([[False, True], [True, True]])
GOOD = [
    (select, None),
    (select, Selection(np.array([[1, 5], [0, 7]]))),
    (select, Selection(np.array([[1, 1], [0, 7]]), KEEP)),
    (resolve, None),
    (resolve, Resolution([Fetch(13), Fetch(11)])),
    (resolve, resolution([11], EXPERTS, keep=KEEP)),
    (resolve, resolution([11], [[1, 1], [3, DROPPED]], weigh_as=EXPERTS)),
    (prefetch_levels, [0, 0]),
    (propose, []),
    (propose, (np.int64(3), 4)),
    (propose_arrays, None),
    (propose_arrays, (np.array([1, 9, 8]), np.array([1, 2]))),
    (victim, None),
    (victim, np.int64(4)),
]
BAD = [
    (select, np.array([[5, 1], [3, 2]]), r"numpy.ndarray \[2, 2\] of int64. Expected: a Selection"),
    (select, Selection([[5, 1], [3, 2]]), r"experts=the list .* array of integers .*\[2, 2\]"),
    (select, Selection(np.array([[5, 1]])), r"experts=a numpy.ndarray \[1, 2\]"),
    (select, Selection(np.array([[5.0, 1], [3, 2]])), "float64. Expected: an array of integers"),
    (select, Selection(np.array([[13, 9], [11, 10]])), r"experts=13\. .*0\.\.7, not keys"),
    (select, Selection(np.array([[5, DROPPED], [3, 2]])), "experts=-1"),
    (select, Selection(np.array([[5, 5], [3, 2]])), "no expert twice"),
    (select, Selection(ROUTED.experts, KEEP * 1), "keep=.* array of booleans"),
    (select, Selection(ROUTED.experts, weights=KEEP), "weights=.* array of floats"),
    (select, Selection(ROUTED.experts, weigh_as=ROUTED.experts + 8), "weigh_as=13"),
    (resolve, Selection(EXPERTS), "a Selection. Expected: a Resolution"),
    (resolve, [Fetch(13)], "the list .* Expected: a Resolution"),
    (resolve, Resolution([13, 11]), r"fetch=the list \[13, 11\]. Expected: a list of Fetch"),
    (resolve, Resolution([Fetch(5), Fetch(3)]), r"key 5. Expected: a key of this layer, 8\.\.15"),
    (resolve, Resolution([Fetch(13), Fetch(11, 1)]), r"level 1. Expected: 0\.\.0"),
    (resolve, Resolution([Fetch(13)]), "key 11, which is neither resident nor loaded"),
    (resolve, Resolution([], EXPERTS), "selection=a numpy.ndarray .* a Selection or None"),
    (resolve, resolution([11], [[4, 1], [3, DROPPED]]), "key 12, which is neither"),
    (resolve, resolution([13, 11], [[5, 1], [3, 1]]), "revives an expert"),
    (prefetch_levels, [0], "a list of 2 levels"),
    (prefetch_levels, [0, 1], r"each in 0\.\.0"),
    (propose, None, "None. Expected: a list of keys"),
    (propose, np.array([3]), r"numpy.ndarray \[1\] of int64. Expected: a list of keys in 0\.\.15"),
    (propose, [16], r"the key 16\. Expected"),
    (propose, [3.0], r"the key 3\.0\. Expected"),
    (propose, [3, 4, 3], "a key twice"),
    (propose_arrays, [[1], [1]], "two arrays of integers"),
    (propose_arrays, (np.array([1, 9]), np.array([2])), r"each row's, here \[2\]"),
    (propose_arrays, (np.array([1, 16]), np.array([1, 1])), r"0\.\.15"),
    (victim, 3, "the pinned key 3"),
    (victim, 16, r"the int 16\. Expected: a resident key in 0\.\.15"),
    (victim, [4], "the list"),
    (victim, 6, "the key 6, which is not resident"),
    (victim, 5, "the key 5, which is not resident"),
]


@pytest.mark.parametrize(("ask", "returned"), GOOD)
def test_what_fits_is_handed_on_as_it_is(ask: Callable[[Any], Any], returned: Any) -> None:
    assert ask(returned) is returned


@pytest.mark.parametrize(("ask", "returned", "words"), BAD)
def test_what_does_not_fit_is_refused_by_name(
    ask: Callable[[Any], Any], returned: Any, words: str
) -> None:
    name = rf"={__name__}\.Mine \(.*\): Mine\.{ask.__name__}( at layer 1)? returned "
    with pytest.raises(AlgorithmError, match=name + ".*" + words):
        ask(returned)


class Failing(LRU):
    def victim(self, pinned: Container[int], layer: int) -> int | None:
        raise ValueError("operands could not be broadcast")

    def on_event(self, event: Event) -> None:
        raise KeyError(3)


def test_an_error_inside_a_rule_names_it_and_its_layer() -> None:
    eviction = load_policy("on_demand", {"eviction": f"{__name__}.Failing"}).eviction
    rule = eviction.build(GEOMETRY, 0)
    prefix = rf"eviction={__name__}\.Failing \(.*test_outside\.py\): "
    with pytest.raises(AlgorithmError, match=prefix + r"Failing\.victim at layer 1 raised"):
        rule.victim(set(), 1)
    with pytest.raises(AlgorithmError, match=r"Failing\.on_event at layer 2 raised KeyError: 3"):
        rule.on_event(Event(0, 2, DECODE, 1, []))


def test_a_method_may_name_its_arguments_otherwise() -> None:
    class Mine(Routing):
        source = "test"

        def select(self, asked: Event, there: Any) -> Any:
            return asked.experts

    choice = Choice(axis="routing", name="my.Mine", algorithm=Mine, parameters={})
    with pytest.raises(AlgorithmError, match=r"select at layer 1 returned a numpy\.ndarray"):
        choice.build(GEOMETRY, 0).select(ROUTED, {})


def test_own_rules_pay_nothing() -> None:
    """Their methods are the class's own, without a wrapper."""
    policy = load_policy("mixture_cache")
    assert "select" not in vars(policy.routing.build(make_geometry(), 0))


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
