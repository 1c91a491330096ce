"""A package of one's own: `examples/plugin`, installed, and used by its short names."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import yaml

from lm_eval_moecache import MoECacheError, load_trace, replay
from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.algorithms.registry import algorithm_names, find_algorithm
from lm_eval_moecache.cli.main import main
from lm_eval_moecache.engine.replay import replay as run
from lm_eval_moecache.records import plugins
from lm_eval_moecache.records.hardware import load_hardware
from lm_eval_moecache.report.runs.files import load_runs
from lm_eval_moecache.testing import EvictionContract, PrefetchContract, run_contract
from lm_eval_moecache.trace.importers import trace_formats
from tests.conftest import Moecache
from tests.engine.traces import setting_for

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed the example."""
    folder = tmp_path_factory.mktemp("site")
    how = ("--no-deps", "--no-build-isolation", "--no-index", "--target", str(folder))
    command = [sys.executable, "-m", "pip", "install", "-q", *how, str(ROOT / "examples/plugin")]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """This process as if it had started with the example installed."""
    monkeypatch.syspath_prepend(str(site))
    forget()
    yield site
    monkeypatch.undo()
    forget()
    for name in [name for name in sys.modules if name.startswith("moecache_example")]:
        del sys.modules[name]


def forget() -> None:
    plugins.forget()
    trace_formats.cache_clear()


LINES = "".join(f"{n % 2}> {n % 4} {(n + 1) % 4} | {n % 3} 3\n" for n in range(24))


@pytest.fixture
def arrows(tmp_path: Path, installed: Path) -> Path:
    """A trace in the example's format: two requests of twelve tokens, 2 layers of 4 experts."""
    path = tmp_path / "mine.arrows"
    path.write_text(LINES)
    return path


def test_a_fresh_process_lists_and_explains_what_is_installed(site: Path) -> None:
    def moecache(*words: str) -> str:
        command = [sys.executable, "-m", "lm_eval_moecache", *words]
        paths = os.pathsep.join([str(site), str(ROOT)])
        environment = {**os.environ, "PYTHONPATH": paths}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    listing = moecache("policies")
    assert all(name in listing for name in ("repeat", "aged_lfu", "repeating", "example-board"))
    assert "prefetch.turns=1" in moecache("policies", "repeat")
    assert "arrows" in moecache("trace", "formats")


def test_without_it_its_names_are_unknown() -> None:
    assert "aged_lfu" not in algorithm_names("eviction")
    with pytest.raises(ValueError, match="policy='repeating' is not known"):
        load_policy("repeating")


def test_its_format_rules_composition_and_device_replay_by_their_names(
    arrows: Path, moecache: Moecache
) -> None:
    trace = load_trace(arrows, expert_bytes=1000)
    assert trace.geometry.num_layers == 2 and trace.num_passes == 24 and len(trace.requests) == 2
    settings = {
        "capacity": "4experts",
        "hardware": "example-board",
        "expert_bytes": 1000,
        "bound": False,
    }
    (row,) = replay(arrows, policy="repeating", **settings).as_dict()["runs"]
    assert row["hardware"] == "example-board" and row["link_bytes_per_s"] == 4e9
    assert row["metrics"]["prefetch_hits"] > 0
    assert row["composition"]["prefetch"] == {"name": "repeat", "turns": 2}
    words = (
        "--expert_bytes=1000",
        "--bound=false",
        "--capacity=4experts",
        "--hardware=example-board",
    )
    text = moecache("replay", arrows, *words, "--eviction=lru,aged_lfu")
    assert "on_demand + eviction=aged_lfu" in text
    with pytest.raises(ValueError, match="Did you mean 'aged_lfu'"):
        replay(arrows, eviction="aged_lfuu", **settings)
    with pytest.raises(ValueError, match=r"prefetch.turns=0 must be 1 or more"):
        replay(arrows, prefetch={"name": "repeat", "turns": 0}, **settings)
    assert load_hardware("Example Board").name == "example-board"


def test_its_rules_keep_the_contracts(installed: Path) -> None:
    prefetch = find_algorithm("prefetch", "repeat")
    eviction = find_algorithm("eviction", "aged_lfu")
    own_prefetch = type("Own", (PrefetchContract,), {"algorithm": prefetch})
    # 1 is used twice, 2 and 3 once each: of these two the one used first is older.
    script = "load 1 2 3, use 1 2 3, use 1, leave 2 3 1"
    own_eviction = type("Own", (EvictionContract,), {"algorithm": eviction, "scripts": (script,)})
    assert run_contract(own_prefetch) > 2 and run_contract(own_eviction) > 5


def test_its_ranking_is_compiled_and_another_is_asked_in_python_with_equal_figures(
    installed: Path, monkeypatch: pytest.MonkeyPatch, trace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorded = load_trace(trace)
    setting = setting_for(recorded, "30%", {"eviction": "aged_lfu"})
    caplog.set_level("INFO")
    compiled = run(recorded, setting)
    assert "in plain Python" not in caplog.text
    kind = type(compiled.eviction)
    words = {1: "dictionaries of a module are nothing that numba reads"}

    def by_words(expert, home, now):  # type: ignore[no-untyped-def]
        return expert.uses / (len(words) + now.turns - expert.turn), float(expert.last_use)

    monkeypatch.setattr(kind, "rank", staticmethod(by_words))
    assert run(recorded, setting).ledger.passes == compiled.ledger.passes
    assert "by_words runs in plain Python" in caplog.text


def test_it_is_swept_by_its_names(arrows: Path, tmp_path: Path) -> None:
    sweep = {
        "traces": [str(arrows)],
        "base": {"policy": "repeating", "expert_bytes": 1000, "capacity": "4experts"},
        "grid": {"eviction": ["lru", "aged_lfu"]},
    }
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    assert main(["sweep", str(tmp_path / "sweep.yaml")]) == 0
    assert len(load_runs(tmp_path)) == 2


def changed(point: EntryPoint, **fields: str) -> EntryPoint:
    """The same package's entry point with another name or value."""
    values = {"name": point.name, "value": point.value, "group": point.group, **fields}
    return EntryPoint(**values)._for(point.dist)  # type: ignore[attr-defined, no-any-return]


def test_a_taken_name_and_a_broken_package_are_named(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (point,) = plugins._of_kind("eviction")
    for wrong, message in (
        (changed(point, name="lru"), "the name 'lru' is taken"),
        (changed(point, name="my.rule"), "a name has no dots"),
    ):
        monkeypatch.setattr(plugins, "_of_kind", lambda kind, wrong=wrong: (wrong,))
        with pytest.raises(MoECacheError, match=f"of moecache-example .*{message}"):
            algorithm_names("eviction")
    for value, message in (
        ("moecache_example.nothing:X", "cannot be imported: ModuleNotFoundError"),
        ("moecache_example.prefetch:Repeat", "is not a subclass of"),
    ):
        wrong = changed(point, value=value)
        monkeypatch.setattr(plugins, "_of_kind", lambda kind, wrong=wrong: (wrong,))
        with pytest.raises(ValueError, match=message):
            find_algorithm("eviction", "aged_lfu")
    wrong = changed(point, value="moecache_example.prefetch")
    monkeypatch.setattr(plugins, "_of_kind", lambda kind: (wrong,))
    with pytest.raises(MoECacheError, match="must name a folder of YAMLs"):
        load_policy("on_demand")
