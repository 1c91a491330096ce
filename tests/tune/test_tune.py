"""The search on a real, very small model, the spaces it takes, and the policy that it names."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
import yaml
from safetensors.torch import load_file, save_file

from lm_eval_moecache.algorithms.policy import Policy, load_policy
from lm_eval_moecache.cli.main import main
from lm_eval_moecache.records.files import task_configs_dir
from lm_eval_moecache.report.runs.files import load_runs, read_tables
from lm_eval_moecache.sweep import evaluation, worker
from lm_eval_moecache.sweep.identity import ResolvedCell
from lm_eval_moecache.sweep.worker import BY_MODEL, BY_REPLAY
from lm_eval_moecache.testing.streams import make_geometry
from lm_eval_moecache.tune import search
from lm_eval_moecache.tune.measure import CandidateRunner, Measured, Objective
from lm_eval_moecache.tune.outcome import (
    NO_TURN,
    SEARCHED,
    SHIPPED,
    front_table,
    outcome_of,
    policy_yaml,
    read_outcome,
)
from lm_eval_moecache.tune.search import REFERENCE, STUDY, open_study
from lm_eval_moecache.tune.space import DEFAULT_SPACE, Space, read_space
from tests.conftest import Checkpoint, Moecache
from tests.soak.kinds import OBJECTIVE
from tests.sweep.toy import write_tasks

SPACE = {
    "routing": {"standard": {}, "cache_prior": {"lambda": {"low": 0.2, "high": 1.0}}},
    "prefetch": {"none": {}, "next_gate": {"depth": [1]}},
    "eviction": {"lru": {}, "lfu": {}},
    "miss": {"fetch": {}, "drop": {"h": [1]}},
}
COMPOSITIONS = ["on_demand", "mixtral_offloading", "mixture_cache"]


@pytest.fixture(autouse=True)
def toy_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put toy tasks in place of the package's own, and offer only three compositions."""
    folder = write_tasks(tmp_path / "tasks")
    evaluation._task_manager.cache_clear()
    monkeypatch.setattr(evaluation, "task_configs_dir", lambda: folder)
    monkeypatch.setattr(search, "policy_names", lambda: COMPOSITIONS)
    yield
    evaluation._task_manager.cache_clear()
    worker._loaded.clear()


@pytest.fixture
def command(tmp_path: Path, checkpoint: Checkpoint) -> list[str]:
    (tmp_path / "space.yaml").write_text(yaml.safe_dump(SPACE))
    places = [f"--out={tmp_path / 'found'}", f"--space={tmp_path / 'space.yaml'}"]
    model = [f"--pretrained={checkpoint('olmoe')}", "--model_args=device=cpu"]
    return ["tune", *places, *model, "--tasks=generated"]


def asked(checkpoint: Checkpoint) -> Objective:
    model = {"pretrained": str(checkpoint("olmoe")), "model_args": {"device": "cpu"}}
    task = {"tasks": ("generated",), "limit": None, "hardware": "a100-5GBps"}
    return dataclasses.replace(OBJECTIVE, **model, **task, metric="e2el_ms")


def test_a_search_measures_shipped_and_drawn_policies_and_writes_the_best(
    tmp_path: Path, command: list[str], moecache: Moecache
) -> None:
    report = moecache.json(*command, "--trials=20")
    by_name = {e["name"]: e for e in report["shipped"]}
    assert sorted(by_name) == sorted(COMPOSITIONS)
    assert by_name["on_demand"]["measured_by"] == BY_REPLAY
    assert by_name["mixture_cache"]["measured_by"] == BY_MODEL
    assert sum(report["trials"].values()) == 20
    assert report["trials"]["pruned"] > 0
    folder = tmp_path / "found"
    best = load_policy(str(folder / "best.yaml")).as_dict()
    assert best["routing"] == report["best"]["policy"]["routing"]
    assert best["miss"] == report["best"]["policy"]["miss"]
    assert report["best"]["speed"] == min(e["speed"] for e in report["front"] if e["within_budget"])
    # The run behind every measured figure is in the folder, ready for tables.
    speeds = {run.moecache["totals"]["e2el_ms"]["mean"] for run in load_runs(folder)}
    assert {e["speed"] for e in report["front"] if e["measured_by"] == BY_MODEL} <= speeds
    assert report["verdict"] in (folder / "front.md").read_text()


def test_the_best_is_confirmed_on_documents_that_the_search_has_not_seen(
    tmp_path: Path, command: list[str], moecache: Moecache
) -> None:
    report = moecache.json(*command, "--trials=3", "--limit=1")
    confirmation = report["confirmation"]
    assert confirmation["documents"] == {"generated": 1}
    assert confirmation["points_lost"] == 100 * (
        confirmation["reference_accuracy"] - confirmation["accuracy"]
    )
    runs = load_runs(tmp_path / "found")
    confirming_runs = {run.label: run for run in runs if str(run.label).endswith("other documents")}
    assert len(confirming_runs) == 2
    for run in confirming_runs.values():
        # The search saw document 0.
        assert list(run.samples["generated"]["exact_match,strict"]) == ["1"]
    assert "On 1 other documents" in (tmp_path / "found" / "front.md").read_text()
    assert (
        moecache.json(*command, "--trials=1", f"--out={tmp_path / 'all'}")["confirmation"] is None
    )
    assert "Not confirmed" in (tmp_path / "all" / "front.md").read_text()


def test_shipped_compositions_take_turns_with_drawn_ones_and_a_search_goes_on_where_it_was(
    tmp_path: Path, command: list[str], checkpoint: Checkpoint, moecache: Moecache
) -> None:
    """With 36 of them first, six trials of twenty documents took four minutes and drew nothing."""
    report = moecache.json(*command, "--trials=4")
    assert sum(report["trials"].values()) == 4
    assert [e["name"] for e in report["shipped"]] == COMPOSITIONS[:2]
    again = moecache.json(*command, "--trials=0")
    assert report["left_out"] == again["left_out"] == {"mixture_cache": NO_TURN}
    folder = tmp_path / "found"
    before = read_tables(folder)
    # A trial that was killed half way: the third composition's, which is next.
    killed_trial = open_study(folder, asked(checkpoint), 0).ask()
    assert killed_trial.user_attrs["composition"] == COMPOSITIONS[2]
    report = moecache.json(*command, "--trials=4")
    assert [e["name"] for e in report["shipped"]] == COMPOSITIONS
    assert sum(report["trials"].values()) == 4 + 1 + 4
    assert report["trials"]["fail"] == 1
    assert before and all(record in read_tables(folder) for record in before)
    drawn = [t.params for t in open_study(folder, asked(checkpoint), 0).get_trials() if t.params]
    assert len(drawn) == 5 and drawn[0] not in drawn[1:]


@pytest.mark.slow
def test_several_processes_share_one_search(
    command: list[str], moecache: Moecache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "task_configs_dir", task_configs_dir)
    evaluation._task_manager.cache_clear()
    command = [item for item in command if not item.startswith("--tasks")]
    report = moecache.json(
        *command, "--trials=3", "--jobs=2", "--tasks=tiny_arc", "--metric=ttft_ms", "--limit=2"
    )
    assert sum(report["trials"].values()) == 3
    assert report["shipped"][0]["name"] == REFERENCE


def test_a_study_that_is_a_link_leaves_its_target_alone(tmp_path: Path) -> None:
    target = tmp_path / "kept.txt"
    target.write_text("kept")
    (tmp_path / STUDY).symlink_to(target)
    with pytest.raises(OSError, match="symbolic link"):
        open_study(tmp_path, OBJECTIVE, 0)
    assert target.read_text() == "kept"


def test_a_folder_with_a_search_on_another_capacity_or_on_former_weights_is_refused(
    tmp_path: Path, command: list[str], checkpoint: Checkpoint, moecache: Moecache
) -> None:
    """Its trials' accuracies and the trace they were replayed from are of the former weights."""
    model = tmp_path / "model"
    shutil.copytree(checkpoint("olmoe"), model)
    command = [*command, f"--pretrained={model}", "--trials=0"]
    assert main(command) == main(command) == 0
    said = moecache(*command, "--capacity=50%", code=2)
    assert "holds a search with capacity='25%', not '50%'" in said
    [file] = model.glob("*.safetensors")
    weights = load_file(file)
    save_file({name: tensor * 0.5 for name, tensor in weights.items()}, file, {"format": "pt"})
    assert "holds a search on other weights" in moecache(*command, code=2)


def test_a_replay_tells_exactly_what_a_run_of_a_lossless_policy_gives(
    tmp_path: Path, checkpoint: Checkpoint
) -> None:
    runner = CandidateRunner(asked(checkpoint), tmp_path / "found")
    runner.prepare(depth=1)
    other = {"policy": "on_demand", "prefetch": "next_gate", "eviction": "least_stale"}
    for args in ({"policy": "specmd"}, other):
        candidate = runner.candidate("x", args)
        live, replayed = runner.run(candidate), runner.replay(candidate.config.policy)
        assert replayed is not None
        assert (live.accuracy, live.speed) == (replayed.accuracy, replayed.speed)
    lossy = runner.candidate("y", {"policy": "specmd", "miss": "drop", "miss.h": 1})
    assert runner.replay(lossy.config.policy) == runner.replay(load_policy("specmd"))


def test_what_cannot_be_run_or_replayed_or_fails_is_one_candidate_with_its_reason(
    command: list[str], monkeypatch: pytest.MonkeyPatch, moecache: Moecache
) -> None:
    replay, run = CandidateRunner.replay, CandidateRunner.run

    def lacking(self: CandidateRunner, policy: Policy) -> Measured | None:
        return None if policy.name == "mixtral_offloading" else replay(self, policy)

    def failing(self: CandidateRunner, planned: ResolvedCell, **how: bool) -> Measured:
        if planned.cell.label == "mixture_cache":
            raise ValueError("the disk is full")
        return run(self, planned, **how)

    monkeypatch.setattr(CandidateRunner, "replay", lacking)
    monkeypatch.setattr(CandidateRunner, "run", failing)
    monkeypatch.setattr(search, "policy_names", lambda: ["fate", *COMPOSITIONS])
    report = moecache.json(*command, "--trials=6", "--capacity=2/layer")
    left_out = report["left_out"]
    assert "chooses between layers" in left_out.pop("fate")
    assert left_out == {"mixture_cache": "the disk is full"}
    assert report["trials"]["fail"] == 1
    measured = {e["name"]: e["measured_by"] for e in report["shipped"]}
    assert measured == {"on_demand": BY_REPLAY, "mixtral_offloading": BY_MODEL}


def test_no_trial_begins_when_the_time_is_up(command: list[str], moecache: Moecache) -> None:
    report = moecache.json(*command, "--timeout=0.000001")
    assert sum(report["trials"].values()) <= 1
    assert set(report["left_out"].values()) == {NO_TURN}
    resumed = moecache.json(*command, "--trials=6")
    assert [e["name"] for e in resumed["shipped"]] == COMPOSITIONS
    assert resumed["left_out"] == {}


def test_what_a_replay_does_not_measure_is_no_objective(tmp_path: Path, moecache: Moecache) -> None:
    for metric in ("right_per_hour", "goodput", "s_mbu"):
        said = moecache("tune", f"--out={tmp_path}", f"--metric={metric}", code=2)
        assert f"metric={metric!r} is not known" in said


GEOMETRY = make_geometry(num_layers=2, num_experts=8, top_k=2)


def write_space(folder: Path, **axes: Any) -> Path:
    defaults = {"routing": "standard", "prefetch": "none", "eviction": "lru", "miss": "fetch"}
    plain = {axis: {name: {}} for axis, name in defaults.items()}
    path = folder / "space.yaml"
    path.write_text(yaml.safe_dump({**plain, **axes}))
    return path


def test_the_shipped_space_names_algorithms_that_exist_and_draws_policies() -> None:
    space = read_space(DEFAULT_SPACE).fit(GEOMETRY)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    pairs = set()
    for _ in range(60):
        overrides = space.suggest(study.ask())
        try:
            policy = load_policy("on_demand", overrides)
        except ValueError as error:
            assert "cannot be combined with" in str(error)
            continue
        pairs.add((policy.routing.name, policy.miss.name))
        for key, value in overrides.items():
            axis, _, parameter = key.partition(".")
            if parameter:
                assert getattr(policy, axis).as_dict()[parameter] == value
    assert len(pairs) > 6


def test_a_space_draws_whole_numbers_for_whole_ones_and_knows_sizes_and_depths(
    tmp_path: Path,
) -> None:
    ranges = {"lambda": {"low": 0.5, "high": 1}, "top_j": {"low": 0, "high": "top_k"}}
    depths = {"none": {}, "next_gate": {"depth": {"low": 1, "high": 4}}}
    path = write_space(tmp_path, routing={"cache_prior": ranges}, prefetch=depths)
    space = read_space(path).fit(GEOMETRY)
    assert space.axes["routing"]["cache_prior"]["top_j"] == {"low": 0, "high": 2}
    overrides = space.suggest(optuna.create_study().ask())
    assert isinstance(overrides["routing.top_j"], int)
    assert isinstance(overrides["routing.lambda"], float)
    assert overrides["routing"] == "cache_prior"
    assert space.max_depth == 4
    for prefetch, depth in (({}, 1), ({"next_gate": {"depth": [1, 3, 2]}}, 3)):
        assert Space({"prefetch": prefetch}).max_depth == depth


QUESTION = {**dataclasses.asdict(OBJECTIVE), "tasks": ["quiz"], "limit": None}


def entry(
    name: str,
    accuracy: float,
    speed: float,
    kind: str = SEARCHED,
    stderr: float = 0.01,
    **policy: Any,
) -> Any:
    """Return a measured policy; those that ship are lossless here."""
    return {
        "name": name,
        "kind": kind,
        "policy": load_policy("on_demand", policy).as_dict(),
        "is_lossless": kind == SHIPPED,
        "accuracy": accuracy,
        "stderr": stderr,
        "speed": speed,
        "measured_by": "model",
        "within_budget": accuracy >= 0.89,
    }


def outcome(*entries: Any, metric: str = "tok_per_s") -> dict[str, Any]:
    left_out, counts = {"commitmoe": "needs a predictor"}, {"complete": 2, "pruned": 5}
    return outcome_of({**QUESTION, "metric": metric}, 0.89, entries, left_out, counts)


SPECMD, SEVEN = entry("specmd", 0.90, 100.0, SHIPPED), entry("trial 7", 0.89, 130.0)
EIGHT = entry("trial 8", 0.70, 500.0)
EQUAL = [entry("a", 0.9, 5.0), entry("b", 0.9, 5.0, SHIPPED), entry("c", 0.9, 4.0)]
LOSSY = [entry("b", 0.5, 9.0, SHIPPED), entry("a", 0.9, 1.0)]
FEW = [entry("a", 0.95, 5.0, stderr=0.1), entry("b", 0.9, 6.0, stderr=0.1)]
EQUALLY_FAST = [entry("a", 0.89, 5.0), entry("b", 0.92, 5.0)]
LOSSLESS = [entry("a", 0.9, 5.0, SHIPPED), entry("b", 0.9, 9.0)]
FASTER = (
    "trial 7 (tok_per_s 130.0, accuracy 0.890) is faster than every shipped composition that "
    "meets the budget: specmd (100.0)."
)
SLOWER = "None was found faster than the shipped"


@pytest.mark.parametrize(
    ("metric", "entries", "best", "front", "said"),
    [
        # The fastest within the budget, and not the fastest of all.
        ("tok_per_s", [SPECMD, SEVEN, EIGHT], "trial 7", ["trial 8", "trial 7", "specmd"], FASTER),
        # For a latency, lower is better.
        ("tpot_ms", [SPECMD, SEVEN], "specmd", ["specmd"], SLOWER),
        # Equal figures are one entry of the front, the first of them.
        ("tok_per_s", EQUAL, "a", ["a"], "meets the budget: b (5.0)."),
        # Of equally fast ones the more accurate is the best.
        ("tok_per_s", EQUALLY_FAST, "b", ["b"], "meets the budget; no shipped"),
        ("tok_per_s", [entry("a", 0.5, 1.0)], None, ["a"], "No policy met the budget."),
        ("tok_per_s", LOSSY, "a", ["b", "a"], "meets the budget; no shipped composition does."),
        # What few documents observed earns no place next to a faster one.
        ("tok_per_s", FEW, "b", ["b"], "b (tok_per_s 6.0, accuracy 0.900) meets the budget"),
        # A lossless one leaves only for one that is shown not worse by a point.
        ("tok_per_s", LOSSLESS, "b", ["b", "a"], "faster than every shipped composition"),
    ],
)
def test_the_best_the_front_and_what_is_said_of_them(
    metric: str, entries: list[Any], best: str | None, front: list[str], said: str
) -> None:
    report = outcome(*entries, metric=metric)
    assert (report["best"] and report["best"]["name"]) == best
    assert [e["name"] for e in report["front"]] == front
    assert said in report["verdict"]
    text = front_table(report)
    assert report["verdict"] in text and "Left out: commitmoe: needs a predictor" in text
    for part, shown in zip(
        text.split("## Shipped compositions"), (report["front"], report["shipped"]), strict=True
    ):
        rows = [line.split(" | ") for line in part.splitlines() if line.startswith("| ")]
        lossless = {e["name"]: "yes" if e["is_lossless"] else "no" for e in shown}
        assert {row[0].removeprefix("| "): row[2] for row in rows[2:]} == lossless


def test_a_loss_of_exactly_the_budget_meets_it_whatever_its_last_digits(tmp_path: Path) -> None:
    """0.8 less 10 points is 0.7000000000000001 to a computer, and 0.7 is within the budget."""
    accuracies, trials = {"at it": 0.7, "below": 0.6999, "above": 0.75}, []
    for name, accuracy in accuracies.items():
        attributes = {"composition": name, "entry": entry(name, accuracy, 1.0, SHIPPED)}
        state = optuna.trial.TrialState.COMPLETE
        trials.append(SimpleNamespace(user_attrs=attributes, state=state))
    runner = CandidateRunner(dataclasses.replace(OBJECTIVE, budget=10.0), tmp_path)
    runner.reference = Measured(0.8, None, 1.0, BY_REPLAY)
    study: Any = SimpleNamespace(
        get_trials=lambda deepcopy: trials, user_attrs={"question": QUESTION}
    )
    for floor in (runner.floor, 0.7):
        shipped = read_outcome(study, floor, list(accuracies), {})["shipped"]
        assert {e["name"] for e in shipped if e["within_budget"]} == {"at it", "above"}


def test_the_best_policys_file_is_that_policy(tmp_path: Path) -> None:
    best = entry("trial 7", 0.9, 130.0, **{"miss": "drop", "miss.h": 1, "prefetch": "next_gate"})
    path = tmp_path / "best.yaml"
    path.write_text(policy_yaml(best, QUESTION))
    policy = load_policy(str(path)).as_dict()
    for part in ("phases", "routing", "prefetch", "eviction", "miss"):
        assert policy[part] == best["policy"][part]
    assert yaml.safe_load(path.read_text())["name"] == "tuned"
