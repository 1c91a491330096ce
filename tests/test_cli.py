"""The `moecache` command: its lists, its options, and its answers to typing errors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import lm_eval.__main__
import lm_eval.tasks
import pytest
from lm_eval.tasks import TaskManager

from lm_eval_moecache import api
from lm_eval_moecache.algorithms.policy import policy_names
from lm_eval_moecache.algorithms.registry import AXES, algorithm_names
from lm_eval_moecache.cli.eval import completed, eval_
from lm_eval_moecache.cli.policies import meaning_of
from lm_eval_moecache.records.files import task_configs_dir
from lm_eval_moecache.records.schemas.keys import KEYS
from tests.conftest import Moecache

COMMANDS = api.command_names()
NAMES = (*policy_names(), *(name for axis in AXES for name in algorithm_names(axis)))


@pytest.mark.parametrize("axes", [AXES, ("eviction",)])
def test_policies_as_json_has_the_form_of_the_design(
    axes: tuple[str, ...], moecache: Moecache, tmp_path: Path
) -> None:
    listing = moecache.json("policies", *([] if axes == AXES else ["--axis", *axes]))
    assert Path(listing["task_configs"]).is_dir()
    assert [c["name"] for c in listing["compositions"]] == policy_names()
    for composition in listing["compositions"]:
        assert all(composition[axis]["name"] in algorithm_names(axis) for axis in AXES)
    assert tuple(listing["algorithms"]) == axes
    for axis, algorithms in listing["algorithms"].items():
        assert [algorithm["name"] for algorithm in algorithms] == algorithm_names(axis)
        assert all("parameters" in entry and entry["source"] for entry in algorithms)
    (tmp_path / "options.yaml").write_text("axis: eviction\n" if axes != AXES else "{}\n")
    assert moecache.json("policies", "--config", tmp_path / "options.yaml") == listing


def test_policies_as_text_names_everything_with_defaults_and_sources(moecache: Moecache) -> None:
    text = moecache("policies")
    assert "--include_path" in text and all(name in text for name in NAMES)
    assert "a100-5GBps" in text and "a100-5gbps" not in text
    text = " ".join(moecache("policies", "--all").split())
    assert all(name in text for name in (*NAMES, "overfetch=1.0", "SpecMD section 4.2"))


@pytest.mark.parametrize("axis", AXES)
def test_every_parameter_of_every_algorithm_is_explained(axis: str, moecache: Moecache) -> None:
    for name in algorithm_names(axis):
        listing = moecache.json("policies", name, "--axis", axis)
        for parameter in listing["algorithms"][0]["parameters"]:
            assert len(parameter["meaning"].split()) > 2, (name, parameter["name"])
            assert parameter["type"]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("hobbit", ("policy=hobbit: HOBBIT", "miss=cascade", "`upgrade` an important expert")),
        ("specmd", ("prefetch.percentile=80.0",)),
        ("score", ("prefetch=score", "eviction=score")),
    ],
)
def test_a_name_is_explained_with_what_it_sets_on_every_axis(
    name: str, parts: tuple[str, ...], moecache: Moecache
) -> None:
    text = " ".join(moecache("policies", name).split())
    assert all(part in text for part in parts)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_lists_every_command_with_its_summary(
    moecache: Moecache, arguments: list[str]
) -> None:
    lines = [line.split() for line in moecache(*arguments).split("\n")]
    for name in COMMANDS:
        (words,) = [words for words in lines if words[:1] == [name]]
        assert len(words) > 1
    assert moecache("--version") == f"moecache {version('lm-eval-moecache')}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_knows_every_command_and_its_options(
    moecache: Moecache, shell: str, tmp_path: Path
) -> None:
    script = moecache("completion", shell)
    for word in (*COMMANDS, "model_args", "capacity", "buddies", "include_path", "rerun"):
        assert word in script, word
    if shell == "bash":
        (tmp_path / "complete.sh").write_text(script)
        query = 'COMP_WORDS=(moecache re); COMP_CWORD=1; _shtab_moecache; echo "${COMPREPLY[@]}"'
        command = ["bash", "-c", f"source {tmp_path / 'complete.sh'}; {query}"]
        completion = subprocess.run(command, capture_output=True, text=True, check=True)
        assert "replay" in completion.stdout.split()


def test_eval_help_names_our_keys_below_lm_evals_options(moecache: Moecache) -> None:
    text = moecache("eval", "--help")
    assert text.index("--model_args") < text.index("keys of --model_args")
    assert all(f"\n  {key} " in text for key in KEYS)


@pytest.mark.parametrize(
    ("tasks", "is_whole"),
    [("tiny_arc", False), ("tiny_arc,tiny_mmlu", False), ("tiny_arc,gsm8k", True), ("", True)],
)
def test_eval_indexes_no_task_files_of_lm_evals_unless_a_name_needs_them(
    monkeypatch: pytest.MonkeyPatch, tasks: str, is_whole: bool
) -> None:
    """Its 15,000 files take seconds to index."""
    defaults: list[bool] = []

    class Noting(TaskManager):
        def __init__(self, *args: Any, include_defaults: bool = True, **kwargs: Any) -> None:
            defaults.append(include_defaults)
            super().__init__(*args, **kwargs, include_defaults=False)

    monkeypatch.setattr(lm_eval.tasks, "TaskManager", Noting)
    monkeypatch.setattr(lm_eval.__main__, "cli_evaluate", lambda: lm_eval.tasks.TaskManager())
    monkeypatch.setattr(sys, "argv", ["moecache"])
    eval_(*(["--tasks", tasks] if tasks else []))
    assert defaults[-1] is is_whole
    assert defaults[:-1] == [False] * len(defaults[:-1])


FILES = ("--config FILE", "--config=FILE", "-C FILE", "-CFILE")


@pytest.mark.parametrize(
    ("arguments", "file", "named"),
    [
        ("--model_args pretrained=tiny policy=specmd", "", ()),
        *((words, "", ["model"]) for words in ("--model hf", "--model=hf", "-M hf", "-Mhf")),
        ("--include_path mine", "", ["include_path"]),
        ("--include_path=mine --model hf", "", ["include_path", "model"]),
        ("--config nowhere.yaml", "", ()),
        *((words, "model: hf", ["model"]) for words in FILES),
        *((words, "include_path: mine", ["include_path"]) for words in FILES),
        ("-CFILE", "model: hf\ninclude_path: mine", ["include_path", "model"]),
        *(
            ("-CFILE", text, ())
            for text in ("tasks: [x]\nmodel:", "- a\n- list", "model: [unclosed")
        ),
    ],
)
def test_eval_adds_what_neither_the_arguments_nor_their_file_name(
    tmp_path: Path, arguments: str, file: str, named: list[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(file)
    words = arguments.replace("FILE", str(path)).split()
    defaults = {"include_path": str(task_configs_dir()), "model": "moecache"}
    added = [(f"--{key}", value) for key, value in defaults.items() if key not in named]
    assert completed(words) == [*words, *(word for pair in added for word in pair)]


# --- options of `moecache replay`, also from files, which the command line overrides --------------

NAMED = "eviction: least_stale\neviction.order: fifo\n"
MAPPED = "eviction: {name: least_stale, order: fifo}\n"


Replay = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def replay(trace: Path, moecache: Moecache) -> Replay:
    """Replays a small trace with options of the command line, and of a file."""

    def runs(*words: str, file: str = "{}") -> list[dict[str, Any]]:
        path = trace.with_name("options.yaml")
        path.write_text(file)
        return list(moecache.json("replay", trace, *words, f"--config={path}")["runs"])

    return runs


@pytest.mark.parametrize(
    ("text", "words", "axis", "expected"),
    [
        (NAMED, [], "eviction", {"name": "least_stale", "order": "fifo"}),
        (MAPPED, [], "eviction", {"name": "least_stale", "order": "fifo"}),
        # Parameters alone go to the policy's own algorithm.
        ("policy: specmd\nprefetch.percentile: 1\n", [], "prefetch", {"percentile": 1}),
        ("policy: specmd\nprefetch: {percentile: 1}\n", [], "prefetch", {"percentile": 1}),
        # The command line overrides the file.
        (NAMED, ["--eviction.order=last_use"], "eviction", {"order": "last_use"}),
        (NAMED, ["--eviction", "lru"], "eviction", {"name": "lru"}),
        (NAMED, ["--eviction=least_stale"], "eviction", {"order": "last_use"}),
    ],
)
def test_a_file_may_give_an_algorithm_its_parameters(
    text: str, words: list[str], axis: str, expected: dict[str, Any], replay: Replay
) -> None:
    [run] = replay(*words, "--capacity=50%", file=f"{text}capacity: 25%\n")
    assert run["composition"][axis].items() >= expected.items()
    assert run["capacity"] == "50%"


def test_values_of_a_file_need_no_quotes_and_may_name_the_traces(
    replay: Replay, trace: Path, moecache: Moecache
) -> None:
    run = replay(file="capacity: [5experts, 50%]\nseed: 1\nbound: false\ntimeline: null\n")[0]
    assert run["capacity"] == "5experts" and run["bound_miss_rate"] is None
    file = trace.with_name("options.yaml")
    file.write_text(f"traces: [{trace}]\njson: true\n")
    [run] = json.loads(moecache("replay", f"--config={file}"))["runs"]
    assert run["trace"] == str(trace)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("evictoin: lru\n", "option='evictoin' is not known. Did you mean 'eviction'?"),
        (MAPPED.replace("order", "ordr"), "Did you mean 'order'"),
        ("[lru]\n", "must hold a mapping"),
    ],
)
def test_what_a_file_gets_wrong_is_said_in_its_first_line(
    text: str, message: str, trace: Path, moecache: Moecache
) -> None:
    file = trace.with_name("options.yaml")
    file.write_text(text)
    assert message in moecache("replay", trace, "--config", file, code=2).split("\n")[0]


def test_lists_are_every_combination_in_the_order_given_by_any_number_of_processes(
    replay: Replay,
) -> None:
    lists = ["--eviction", "lfu,belady", "--capacity=50%,25%", "--bandwidth", "1GB/s,5GB/s"]
    runs = replay(*lists)
    assert runs == replay(*lists, "--jobs=2")
    settings = [(r["eviction"], r["link_bytes_per_s"], r["capacity"]) for r in runs]
    assert settings == list(product(("lfu", "belady"), (1e9, 5e9), ("50%", "25%")))
    single_run = replay("--eviction=lfu", "--capacity=25%", "--bandwidth=5GB/s")
    assert single_run == [runs[3]]
    assert all(r["metrics"]["miss_rate"] >= r["bound_miss_rate"] for r in runs)


def test_lists_go_with_any_axis_and_with_a_class_of_the_current_folder(
    tmp_path: Path, replay: Replay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    Path("of_this_folder.py").write_text(
        "from lm_eval_moecache.algorithms.eviction.rankings import LRU\nclass Mine(LRU): pass\n"
    )
    mine = "of_this_folder.Mine"
    axes = ("--prefetch=none,oracle", "--eviction", f"lru,{mine}")
    runs = replay("--policy", "on_demand,specmd", *axes)
    specmd = product(("none", "oracle"), ("lru", mine))
    assert {r["policy"] for r in runs} == {
        "on_demand",
        f"on_demand + eviction={mine}",
        "on_demand + prefetch=oracle",
        f"on_demand + prefetch=oracle + eviction={mine}",
        *(f"specmd + prefetch={p} + eviction={e}" for p, e in specmd),
    }
    rates = {r["policy"]: r["metrics"]["miss_rate"] for r in runs}
    assert rates["on_demand"] == rates[f"on_demand + eviction={mine}"]


def test_the_table_shows_what_varies_and_fits_a_terminal(
    trace: Path, moecache: Moecache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = moecache("replay", trace, "--eviction=lru,lfu")
    assert "on_demand + eviction=lfu" in text and "Policy" in text
    # The first line says which device the times are of.
    assert text.startswith("moecache replay (hardware: a100-5GBps at 5 GB/s,") and "tok/s" in text
    assert max(map(len, text.splitlines())) <= 80
    text = moecache("replay", trace, "--bandwidth=1GB/s,2GB/s", "--bound=false")
    title, _, table = text.partition("|")
    assert "on_demand: standard + none + lru + fetch" in title and "Hardware" in table
    heads = moecache("replay", trace, "--all").partition("|")[2].split("\n")[0].split("|")
    assert len(set(heads)) == len(heads) > 18


LISTS = [["policies"], ["policies", "specmd"], ["policies", "--all"]]
PLAIN = [[*name.split(), "--help"] for name in api.command_places() if name != "eval"]


@pytest.mark.parametrize("words", [*LISTS, *PLAIN], ids=" ".join)
def test_what_is_printed_is_plain_and_fits_a_terminal(
    words: list[str], moecache: Moecache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = moecache(*words)
    lines = [
        line for line in text.splitlines() if "--include_path" not in line or "--help" in words
    ]
    assert max(map(len, lines)) <= 80
    assert words != ["policies"] or len(lines) < 50
    if "--help" in words:
        assert not any(odd in text for odd in ("%%", "type: ", "print_config", "null"))


def test_what_a_parameter_means_is_not_cut_at_an_abbreviation() -> None:
    doc = "Zhu et al. 2025 take a `percentile` of the scores. More follows."
    assert meaning_of("percentile", doc) == "Zhu et al. 2025 take a `percentile` of the scores."


def test_bounds_are_listed_with_the_rate_they_bound(
    replay: Replay, trace: Path, moecache: Moecache
) -> None:
    [run] = replay(file="capacity: 25%\nprefetch: none\n")
    for phase in ("", "decode_"):
        rate = run["metrics"][f"{phase}miss_rate"]
        assert run[f"bound_{phase}miss_rate"] <= run[f"lru_{phase}miss_rate"] == rate
    table = moecache("replay", trace, "--capacity=25%", "--all")
    rows = [line for line in table.splitlines() if line.startswith("|")]
    heads, cells = ([c.strip() for c in row.strip("|").split("|")] for row in (rows[0], rows[2]))
    column = heads.index("Decode miss")
    assert heads[column : column + 3] == ["Decode miss", "LRU decode", "Fewest decode"]
    assert float(cells[column + 2]) == pytest.approx(run["bound_decode_miss_rate"], abs=1e-4)


def test_a_header_names_the_parameters_that_are_not_the_rules_or_the_compositions_own(
    trace: Path, moecache: Moecache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run alone too: two of one rule printed alike."""
    monkeypatch.setenv("COLUMNS", "200")
    drop, edgemoe = ["--miss=drop_cold", "--capacity=50%"], ["--policy=edgemoe", "--bound=false"]
    for words, parameter in (
        ([*drop, "--miss.factor=0.3"], "(miss.factor=0.3)"),
        ([*drop, "--miss.factor=0.5"], "(miss.factor=0.5)"),
        ([*edgemoe, "--eviction.layer", "index"], "edgemoe (eviction.layer=index)"),
    ):
        assert parameter in moecache("replay", trace, *words)
    for words in (drop, edgemoe):
        header = moecache("replay", trace, *words).partition("|")[0]
        assert "factor" not in header and "eviction.layer" not in header


def test_a_replay_of_a_rule_that_changes_answers_has_its_fidelity(
    trace: Path, moecache: Moecache
) -> None:
    lossy, lossless = (
        moecache("replay", trace, "--capacity=50%", *words)
        for words in (["--miss=drop", "--miss.h=1"], [])
    )
    assert "|Fidelity|" in lossy and "Fidelity" not in lossless


def test_a_prefetcher_that_proposes_nothing_is_named(replay: Replay) -> None:
    [run] = replay("--prefetch=history")
    (warning,) = run["warnings"]
    assert warning.startswith("prefetch=history did nothing: ") and "cache_reset=never" in warning
    [run] = replay("--prefetch=history", "--cache_reset=never")
    assert run["warnings"] == [] and run["metrics"]["prefetch_precision"] is not None
