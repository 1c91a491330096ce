"""Options of `moecache replay` from files: the same as on the command line, which goes first."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lm_eval_moecache.cli.main import command_names, main
from lm_eval_moecache.cli.policies import meaning_of
from tests.engine import traces

Captured = pytest.CaptureFixture[str]
NAMED = "eviction: least_stale\neviction.order: fifo\n"
MAPPED = "eviction: {name: least_stale, order: fifo}\n"


def run(folder: Path, capsys: Captured, text: str, *arguments: str) -> dict[str, Any]:
    path, _ = traces.record(folder)
    file = folder / "options.yaml"
    file.write_text(text)
    code = main(["replay", str(path), "--config", str(file), "--json", *arguments])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    found: dict[str, Any] = json.loads(shown.out)["runs"][0]
    return found


@pytest.mark.parametrize("text", [NAMED, MAPPED])
def test_a_file_may_give_an_algorithm_its_parameters(
    tmp_path: Path, capsys: Captured, text: str
) -> None:
    found = run(tmp_path, capsys, text)
    assert (
        found["composition"]["eviction"].items() >= {"name": "least_stale", "order": "fifo"}.items()
    )


def test_parameters_alone_go_to_the_algorithm_of_the_policy(
    tmp_path: Path, capsys: Captured
) -> None:
    for text in ("prefetch.percentile: 0.001\n", "prefetch: {percentile: 0.001}\n"):
        found = run(tmp_path, capsys, f"policy: specmd\n{text}")
        assert found["composition"]["prefetch"]["percentile"] == 0.001


@pytest.mark.parametrize(
    ("arguments", "eviction"),
    [
        (["--eviction.order=last_use"], {"name": "least_stale", "order": "last_use"}),
        (["--eviction", "lru"], {"name": "lru"}),
        (["--eviction=least_stale"], {"name": "least_stale", "order": "last_use"}),
    ],
)
def test_the_command_line_goes_before_a_file(
    tmp_path: Path, capsys: Captured, arguments: list[str], eviction: dict[str, str]
) -> None:
    found = run(tmp_path, capsys, NAMED + "capacity: 25%\n", *arguments, "--capacity=50%")
    assert found["composition"]["eviction"].items() >= eviction.items()
    assert found["capacity"] == "50%"


def test_values_of_a_file_need_no_quotes(tmp_path: Path, capsys: Captured) -> None:
    found = run(tmp_path, capsys, "capacity: [5, 50%]\nseed: 1\nbound: false\nplot: null\n")
    assert found["capacity"] == "5" and found["bound_miss_rate"] is None


def test_a_file_may_name_the_traces(tmp_path: Path, capsys: Captured) -> None:
    path, _ = traces.record(tmp_path)
    file = tmp_path / "options.yaml"
    file.write_text(f"traces: [{path}]\njson: true\n")
    assert main(["replay", f"--config={file}"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["trace"] == str(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("evictoin: lru\n", "option='evictoin' is not known. Did you mean 'eviction'?"),
        ("evictoin.order: fifo\n", "option='evictoin.order' is not known"),
        (MAPPED.replace("order", "ordr"), "Did you mean 'order'"),
        ("eviction: least_stal\n", "Did you mean 'least_stale'"),
        ("[lru]\n", "must hold a mapping"),
        ("{", "is not readable YAML"),
    ],
)
def test_what_a_file_gets_wrong_is_said_in_its_first_line(
    tmp_path: Path, capsys: Captured, text: str, message: str
) -> None:
    path, _ = traces.record(tmp_path)
    file = tmp_path / "options.yaml"
    file.write_text(text)
    assert main(["replay", str(path), "--config", str(file)]) == 2
    assert message in capsys.readouterr().err.split("\n")[0]


def test_help_says_what_the_default_policy_is_and_why(capsys: Captured) -> None:
    with pytest.raises(SystemExit):
        main(["replay", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "The policy is `on_demand` unless another is chosen" in text
    assert "needs predictions" in text


def replay(path: Path, capsys: Captured, *arguments: str) -> list[dict[str, Any]]:
    code = main(["replay", str(path), "--json", *arguments])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    found: list[dict[str, Any]] = json.loads(shown.out)["runs"]
    return found


def test_lists_are_every_combination_in_the_order_given(tmp_path: Path, capsys: Captured) -> None:
    path, _ = traces.record(tmp_path)
    several = replay(
        *(path, capsys, "--eviction", "lfu,belady", "--capacity=50%,25%"),
        *("--bandwidth", "1GB/s,5GB/s"),
    )
    shown = [(r["eviction"], r["link_bytes_per_s"], r["capacity"]) for r in several]
    assert shown == [
        (eviction, link, capacity)
        for eviction in ("lfu", "belady")
        for link in (1e9, 5e9)
        for capacity in ("50%", "25%")
    ]
    alone = replay(path, capsys, "--eviction=lfu", "--capacity=25%", "--bandwidth=5GB/s")
    assert alone == [several[3]]
    assert all(r["metrics"]["miss_rate"] >= r["bound_miss_rate"] for r in several)


def test_an_order_of_execution_moves_time_and_not_what_is_missed(
    tmp_path: Path, capsys: Captured
) -> None:
    path, _ = traces.record(tmp_path)
    usual, arriving = (
        replay(
            path, capsys, "--hardware=oneplus-15r", "--bound=false", "--reads_per_expert=2", each
        )[0]
        for each in ("--execute=together", "--execute=as_they_arrive")
    )
    same, times = ("miss_rate", "bytes_moved"), ("tok_per_s", "stall_ms_per_token")
    assert [usual["metrics"][k] for k in same] == [arriving["metrics"][k] for k in same]
    assert all(usual["metrics"][k] != arriving["metrics"][k] for k in times)
    assert main(["replay", str(path), "--reads_per_expert=65"]) == 2
    assert "at most 64" in capsys.readouterr().err


def test_lists_go_with_any_axis_and_with_a_class_of_the_current_folder(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    Path("of_this_folder.py").write_text(
        "from lm_eval_moecache.algorithms.eviction.lru import LRU\nclass Mine(LRU): pass\n"
    )
    mine = "of_this_folder.Mine"
    found = replay(
        *(traces.record(tmp_path)[0], capsys, "--policy", "on_demand,specmd"),
        *("--prefetch=none,oracle", "--eviction", f"lru,{mine}"),
    )
    assert {r["policy"] for r in found} == {
        "on_demand",
        f"on_demand + eviction={mine}",
        "on_demand + prefetch=oracle",
        f"on_demand + prefetch=oracle + eviction={mine}",
        *(
            f"specmd + prefetch={p} + eviction={e}"
            for p in ("none", "oracle")
            for e in ("lru", mine)
        ),
    }
    rates = {r["policy"]: r["metrics"]["miss_rate"] for r in found}
    assert rates["on_demand"] == rates[f"on_demand + eviction={mine}"]


def test_the_table_shows_what_varies_and_fits_a_terminal(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    path, _ = traces.record(tmp_path)
    assert main(["replay", str(path), "--eviction=lru,lfu"]) == 0
    text = capsys.readouterr().out
    assert "on_demand + eviction=lfu" in text and "Policy" in text
    assert "hardware: a100-5" in text.partition("|")[0] and "tok/s" in text
    assert max(map(len, text.splitlines())) <= 80
    assert main(["replay", str(path), "--bandwidth=1GB/s,2GB/s", "--bound=false"]) == 0
    title, _, table = capsys.readouterr().out.partition("|")
    assert "on_demand: standard + none + lru + fetch" in title and "Hardware" in table
    assert main(["replay", str(path), "--all"]) == 0
    heads = capsys.readouterr().out.partition("|")[2].split("\n")[0].split("|")
    assert len(set(heads)) == len(heads) > 18


@pytest.mark.parametrize("command", [["policies"], ["policies", "specmd"], ["policies", "--all"]])
def test_what_policies_prints_fits_a_terminal(
    command: list[str], capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines if "--include_path" not in line) <= 80
    assert command != ["policies"] or len(lines) < 50


def test_what_a_parameter_means_is_not_cut_at_an_abbreviation() -> None:
    doc = "Zhu et al. 2025 take a `percentile` of the scores. More follows."
    assert meaning_of("percentile", doc) == "Zhu et al. 2025 take a `percentile` of the scores."


@pytest.mark.parametrize(
    "name", [n for n in command_names() if n not in ("eval", "profile", "trace")]
)
def test_help_pages_are_plain(name: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([name, "--help"])
    text = capsys.readouterr().out
    assert "%%" not in text and "type: " not in text and "print_config" not in text
    assert "null" not in text and max(map(len, text.splitlines())) <= 80


def test_bounds_stand_beside_the_rate_they_bound(tmp_path: Path, capsys: Captured) -> None:
    found = run(tmp_path, capsys, "capacity: 25%\nprefetch: none\n")
    for phase in ("", "decode_"):
        rate = found["metrics"][f"{phase}miss_rate"]
        assert found[f"bound_{phase}miss_rate"] <= found[f"lru_{phase}miss_rate"] == rate
    path, _ = traces.record(tmp_path)
    assert main(["replay", str(path), "--capacity=25%", "--all"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    heads, cells = ([c.strip() for c in row.strip("|").split("|")] for row in (rows[0], rows[2]))
    place = heads.index("Decode miss")
    assert heads[place : place + 3] == ["Decode miss", "LRU decode", "Fewest decode"]
    assert float(cells[place + 2]) == pytest.approx(found["bound_decode_miss_rate"], abs=1e-4)


def test_a_prefetcher_that_proposes_nothing_is_named(tmp_path: Path, capsys: Captured) -> None:
    steps = [[[0, 1], [1, 2]], [[2, 1], [0, 2]]]
    trace = tmp_path / "one.jsonl"
    trace.write_text(
        "".join(json.dumps({"tok": i, "layers": step}) + "\n" for i, step in enumerate(steps))
    )
    assert main(["replay", str(trace), "--prefetch=history", "--capacity=2"]) == 0
    assert "Warning: prefetch=history did nothing: it learns from earlier requests, and" in (
        capsys.readouterr().out
    )
    found = run(tmp_path, capsys, "prefetch: history\n")
    assert found["warnings"] == [] and found["metrics"]["prefetch_precision"] is not None


def test_processes_replay_as_one_does(tmp_path: Path, capsys: Captured) -> None:
    path, _ = traces.record(tmp_path)
    words = ["replay", str(path), "--eviction=lru,hazard,arc", "--hardware=rtx-4090-24gb"]
    shown = []
    for jobs in ("1", "2"):
        arguments = [*words, "--bandwidth=1GB/s,9GB/s", "--capacity=3,50%", f"--jobs={jobs}"]
        assert main([*arguments, "--json"]) == 0
        shown.append(json.loads(capsys.readouterr().out))
    assert len(shown[0]["runs"]) == 12
    assert shown[0] == shown[1]
