"""The search on a real, very small model: what it measures how, keeps, resumes and refuses."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from lm_eval_moecache.algorithms.policy import Policy, load_policy
from lm_eval_moecache.cli.main import main
from lm_eval_moecache.report.results import load_runs
from lm_eval_moecache.sweep import evaluation, worker
from lm_eval_moecache.sweep.worker import BY_MODEL, BY_REPLAY
from lm_eval_moecache.tune import search
from lm_eval_moecache.tune.measure import CandidateRunner, Objective
from lm_eval_moecache.tune.study import JOURNAL, open_study
from tests.conftest import Checkpoint
from tests.soak.judge import OBJECTIVE
from tests.sweep.toy import write_tasks

SPACE = {
    "routing": {"standard": {}, "cache_prior": {"lambda": {"low": 0.2, "high": 1.0}}},
    "prefetch": {"none": {}, "next_gate": {"depth": [1]}},
    "eviction": {"lru": {}, "lfu": {}},
    "miss": {"fetch": {}, "drop": {"h": [1]}},
}
SHIPPED = ["on_demand", "mixtral_offloading", "mixture_cache"]


@pytest.fixture(autouse=True)
def toy_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The toy tasks stand where the package's own do; three compositions are enough."""
    folder = write_tasks(tmp_path / "tasks")
    evaluation._task_manager.cache_clear()
    monkeypatch.setattr(evaluation, "task_configs_dir", lambda: folder)
    monkeypatch.setattr(search, "policy_names", lambda: SHIPPED)
    yield
    evaluation._task_manager.cache_clear()
    worker._holder.cache_clear()


@pytest.fixture
def command(tmp_path: Path, checkpoint: Checkpoint) -> list[str]:
    space = tmp_path / "space.yaml"
    space.write_text(yaml.safe_dump(SPACE))
    return [
        "tune",
        f"--out={tmp_path / 'found'}",
        f"--pretrained={checkpoint('olmoe')}",
        f"--space={space}",
        "--tasks=toy_answer",
        "--model_args=device=cpu",
        "--json",
    ]


def asked(checkpoint: Checkpoint) -> Objective:
    return Objective(
        pretrained=str(checkpoint("olmoe")),
        tasks=("toy_answer",),
        limit=None,
        capacity="25%",
        hardware="a100-5GBps",
        bandwidth=None,
        metric="tok_per_s",
        budget=1.0,
        model_args={"device": "cpu"},
    )


def test_a_search_measures_shipped_and_drawn_policies_and_writes_the_best(
    tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--trials=16", "--slack=0.05"]) == 0
    found = json.loads(capsys.readouterr().out)
    by_name = {e["name"]: e for e in found["shipped"]}
    assert sorted(by_name) == sorted(SHIPPED)
    assert by_name["on_demand"]["measured_by"] == BY_REPLAY
    assert by_name["mixture_cache"]["measured_by"] == BY_MODEL
    assert sum(found["trials"].values()) == 16
    assert found["trials"]["pruned"] > 0
    folder = tmp_path / "found"
    best = load_policy(str(folder / "best.yaml")).as_dict()
    assert best["routing"] == found["best"]["policy"]["routing"]
    assert best["miss"] == found["best"]["policy"]["miss"]
    assert found["best"]["speed"] == max(e["speed"] for e in found["front"] if e["within_budget"])
    # Every figure that a run gave is in the folder, and can be tabled.
    speeds = {run.moecache["totals"]["tok_per_s"] for run in load_runs(folder / "runs")}
    assert {e["speed"] for e in found["front"] if e["measured_by"] == BY_MODEL} <= speeds
    assert found["verdict"] in (folder / "front.md").read_text()
    assert json.loads((folder / "front.json").read_text()) == found


def test_the_best_is_confirmed_on_documents_that_the_search_has_not_seen(
    tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--trials=0", "--limit=1"]) == 0
    found = json.loads(capsys.readouterr().out)
    told = found["confirmation"]
    assert told["documents"] == {"toy_answer": 1}
    assert told["points_lost"] == 100 * (told["reference_accuracy"] - told["accuracy"])
    runs = load_runs(tmp_path / "found" / "runs")
    own = {run.label: run for run in runs if str(run.label).endswith("other documents")}
    assert len(own) == 2
    for run in own.values():
        # Document 0 was searched.
        assert list(run.samples["toy_answer"]["exact_match,none"]) == ["1"]
    assert "On 1 other documents" in (tmp_path / "found" / "front.md").read_text()
    assert main([*command, "--trials=0", f"--out={tmp_path / 'all'}"]) == 0
    assert json.loads(capsys.readouterr().out)["confirmation"] is None
    assert "Not confirmed" in (tmp_path / "all" / "front.md").read_text()


def test_a_resumed_search_repeats_no_composition_and_draws_something_else(
    tmp_path: Path, command: list[str], checkpoint: Checkpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--trials=3"]) == 0
    first = json.loads(capsys.readouterr().out)
    folder = tmp_path / "found"
    before = {p: p.stat().st_mtime_ns for p in (folder / "runs").glob("*.json")}
    # What a kill in the middle of a trial leaves behind.
    left = open_study(folder, asked(checkpoint), 0).ask()
    assert main([*command, "--trials=3"]) == 0
    second = json.loads(capsys.readouterr().out)
    assert [e["name"] for e in second["shipped"]] == [e["name"] for e in first["shipped"]]
    assert sum(second["trials"].values()) == 7
    assert second["trials"]["fail"] == 1
    assert all(p.stat().st_mtime_ns == at for p, at in before.items())
    study = open_study(folder, asked(checkpoint), 0)
    drawn = [t.params for t in study.get_trials() if t.params and t.number != left.number]
    assert drawn[:3] != drawn[3:]


@pytest.mark.parametrize("torn", ["{", '{"op_code":4,"worker_id"', '{"op_code":4}'])
def test_a_journal_whose_last_write_was_cut_short_goes_on(tmp_path: Path, torn: str) -> None:
    """By a kill, or a full disk: the next line was written behind it, and all was lost."""
    study = open_study(tmp_path, OBJECTIVE, 0)
    study.tell(study.ask(), [0.5, 1.0])
    journal = tmp_path / JOURNAL
    with journal.open("a") as file:
        file.write(torn)
    (tmp_path / f"{JOURNAL}.lock").symlink_to(journal)
    for number in (1, 2):
        again = open_study(tmp_path, OBJECTIVE, 0)
        assert len(again.get_trials()) == number
        again.tell(again.ask(), [0.25, 1.0])


def test_a_journal_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / JOURNAL).write_text('{"op_code": 2}\n')
    with pytest.raises(ValueError, match=rf"{JOURNAL} is no readable journal of a search \(KeyErr"):
        open_study(tmp_path, OBJECTIVE, 0)


def test_a_folder_that_holds_another_question_is_refused(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--trials=0"]) == 0
    assert main([*command, "--trials=0", "--capacity=50%"]) == 2
    assert "holds a search with capacity='25%', not '50%'" in capsys.readouterr().err


def test_a_replay_tells_exactly_what_a_run_of_a_lossless_policy_gives(
    tmp_path: Path, checkpoint: Checkpoint
) -> None:
    with CandidateRunner(asked(checkpoint), tmp_path / "found") as runner:
        runner.prepare(depth=1)
        for args in (
            {"policy": "specmd"},
            {"policy": "on_demand", "prefetch": "next_gate", "eviction": "least_stale"},
        ):
            candidate = runner.candidate("x", args)
            [live] = runner.run([candidate])
            assert not isinstance(live, str)
            replayed = runner.lossless(candidate.config.policy)
            assert (live.accuracy, live.speed) == (replayed.accuracy, replayed.speed)
        lossy = runner.candidate("y", {"policy": "specmd", "miss": "drop", "miss.h": 1})
        assert runner.replay(lossy.config.policy) == runner.replay(load_policy("specmd"))


def test_a_composition_that_cannot_run_here_is_listed_with_its_reason(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(search, "policy_names", lambda: ["fate", "on_demand"])
    assert main([*command, "--trials=0", "--capacity=2/layer"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "chooses between layers" in found["left_out"]["fate"]
    assert [e["name"] for e in found["shipped"]] == ["on_demand"]


def test_a_lossless_composition_that_no_replay_can_tell_of_is_run(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replay = CandidateRunner.replay

    def lacking(self: CandidateRunner, policy: Policy) -> float:
        if policy.name == "mixtral_offloading":
            raise ValueError("its predictions are of another predictor")
        return replay(self, policy)

    monkeypatch.setattr(CandidateRunner, "replay", lacking)
    assert main([*command, "--trials=0"]) == 0
    found = json.loads(capsys.readouterr().out)
    measured = {e["name"]: e["measured_by"] for e in found["shipped"]}
    assert measured["mixtral_offloading"] == BY_MODEL
    assert measured["on_demand"] == BY_REPLAY
    assert found["left_out"] == {}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tasks=toy_choice"], ["tasks=toy_choice give no tok_per_s", "multiple_choice"]),
        (["--tasks=toy_choice", "--metric=tpot_ms"], ["give no tpot_ms", "ttft_ms"]),
        (["--tasks="], ["names none"]),
    ],
    ids=str,
)
def test_a_task_without_the_metric_is_refused_before_anything_runs(
    options: list[str],
    words: list[str],
    tmp_path: Path,
    command: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*command, *options]) == 2
    told = capsys.readouterr().err
    assert all(word in told for word in words), told
    assert not (tmp_path / "found").exists()


def test_no_shipped_composition_begins_when_the_time_is_up(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--timeout=0.000001"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [e["name"] for e in found["shipped"]] == ["on_demand"]
    assert sorted(found["left_out"]) == ["mixtral_offloading", "mixture_cache"]
    assert all("--timeout=1e-06 was over" in why for why in found["left_out"].values())
    assert found["trials"] == {}
    assert main([*command, "--trials=0"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert sorted(e["name"] for e in again["shipped"]) == sorted(SHIPPED)
    assert again["left_out"] == {}


def test_a_missing_optuna_is_named(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert main(command) == 2
    assert "lm-eval-moecache[tune]" in capsys.readouterr().err
