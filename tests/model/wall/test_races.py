"""Under injected races every way of the wall clock computes what a model without a cache does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from lm_eval_moecache.engine.wall.engine import WallEngine
from lm_eval_moecache.model.wall.pools import DeviceMover
from lm_eval_moecache.model.wall.store import SlotStore
from tests.model.wall import races
from tests.model.wall.races import Family, compare, missing, share_of, ways
from tests.models import FAMILIES, family_case

SHARES = [(family, way.name) for family in FAMILIES for way in share_of(family)]


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Family]]:
    root, loaded = tmp_path_factory.mktemp("races"), dict[str, Family]()
    threads_before = set(threading.enumerate())

    def family(name: str) -> Family:
        if name not in loaded:
            loaded[name] = Family(name, root)
        return loaded[name]

    yield family
    for member in loaded.values():
        member.close()
    begun = set(threading.enumerate()) - threads_before
    assert "moecache-link" not in {thread.name for thread in begun}


@pytest.mark.parametrize(("family", "way"), [family_case(*share) for share in SHARES])
def test_every_pass_is_a_plain_models_twenty_times_over(
    family: str, way: str, families: Callable[[str], Family]
) -> None:
    (setting,) = (candidate for candidate in ways() if candidate.name == way)
    wrong, counts = compare(families(family), setting)
    assert not wrong
    assert not missing(setting, counts)


def test_each_family_has_a_part_and_all_that_meets_is_in_one() -> None:
    assert {family for family, _ in SHARES} == set(FAMILIES)
    assert {way for _, way in SHARES} >= races.TOGETHER.keys() | races.DRAFTING.keys()


# Mutations: each takes away a wait or a pin that all of the above relies on.


def at_once(self: WallEngine, pending: Any) -> Iterator[Any]:
    cache, link = self.cache_of(pending.keys[0]), self.link
    held = [key for key in pending.remaining if key in cache.slots]
    pending.remaining = [key for key in pending.remaining if key not in cache.slots]
    yield {key: cache.slots[key] for key in held}, False
    while flying := {key for key in held if link.is_flying(key)}:
        self._wait(flying)


def unpinned(self: WallEngine, pending: Any, demand: Any = WallEngine._demand) -> Any:
    # No key carries a new mark.
    self.memory.run.mark += 1
    return demand(self, pending)


def soon(mover: DeviceMover, transfer: Any, begin: Any = DeviceMover.begin) -> None:
    threading.Timer(0.0005, begin, (mover, transfer)).start()


def unawaited(*args: Any, run: Any = SlotStore.on_host) -> Any:
    return SimpleNamespace(future=run(*args), result=lambda: 0.0)


MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    "executed before it has arrived": (WallEngine, "_wave", at_once),
    "slots given away while their event needs them": (WallEngine, "_demand", unpinned),
    "arrived before it is copied": (DeviceMover, "begin", soon),
    "without the wait for the host": (SlotStore, "on_host", unawaited),
}


@pytest.mark.parametrize(
    ("mutation", "way"),
    [
        ("executed before it has arrived", "policy=on_demand"),
        ("executed before it has arrived", "miss=fetch_priority"),
        ("slots given away while their event needs them", "policy=on_demand"),
        ("arrived before it is copied", "prefetch=next_gate"),
        ("without the wait for the host", "host, prefetches"),
    ],
)
def test_a_race_that_is_there_is_found(
    mutation: str, way: str, families: Callable[[str], Family], monkeypatch: pytest.MonkeyPatch
) -> None:
    (setting,) = (candidate for candidate in ways() if candidate.name == way)
    monkeypatch.setattr(*MUTATIONS[mutation])
    try:
        wrong = bool(compare(families("olmoe"), setting, 8)[0])
    except (AssertionError, KeyError):
        # An integrity check failed first, or an expert has no slot.
        wrong = True
    finally:
        # The race may have damaged the models.
        families("olmoe").forget()
    assert wrong
