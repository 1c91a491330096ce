"""Runs in the form of Every Eval Ever, checked by the validator of its own package."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from lm_eval_moecache.report.every_eval_ever import SCHEMA
from tests.conftest import Moecache
from tests.report.runs import record, write

DATE = "2026-11-27T08-58-46.000000"
FORMAT = "--format=every_eval_ever"
RESULTS = Path(__file__).parents[2] / "results"


def check(*paths: Path) -> None:
    """Assert that the schema's own validator finds nothing in these files of a datastore."""
    validator = pytest.importorskip("every_eval_ever.validator", reason="needs every-eval-ever")
    root = Path(paths[0].as_posix().partition("every_eval_ever/")[0], "every_eval_ever")
    names = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    for path in paths:
        found = validator.validate_file(
            path,
            repo_path=path.relative_to(root).as_posix(),
            available_files=names,
            read_repo_file=lambda name: (root / name).read_text(),
            run_semantic_checks=True,
        )
        assert found.valid and not found.errors, (path, found.errors[:3])


def documents(moecache: Moecache, folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in moecache("table", folder, FORMAT).splitlines()]


def made(name: str = "a", **others: Any) -> dict[str, Any]:
    made_record = record(
        name,
        pretrained="allenai/OLMoE-1B-7B-0924",
        environment={
            "date": "2026-11-27T08:58:46+00:00",
            "versions": {"lm-eval": "0.4.13", "lm-eval-moecache": "1.0.0"},
        },
        **others,
    )
    made_record["results"]["quiz"] |= {"sample_len": 4, "word_perplexity,none": 12.5}
    made_record["higher_is_better"]["quiz"]["word_perplexity"] = False
    return made_record | {"versions": {"quiz": 2.0}}


def lm_eval_file() -> dict[str, Any]:
    """Return a run as lm-eval itself writes it."""
    data = made()
    for key in ("configuration", "scores", "run_id", "experiment", "label", "environment"):
        del data[key]
    data["config"] |= {"model": "moecache", "model_args": "trace=traces/x.parquet,capacity=5%"}
    return data | {"date": 1795769926.75, "lm_eval_version": "0.4.12"}


@pytest.mark.parametrize("name", ["demo", "baseline", "real_lm", "sp_moe"])
def test_the_runs_of_this_repository_have_the_form_of_the_schema(
    name: str, tmp_path: Path, moecache: Moecache
) -> None:
    folder = tmp_path / name
    shutil.copytree(RESULTS / name, folder)
    paths = [Path(path) for path in moecache("table", folder, FORMAT, "--write").split()]
    check(*paths)
    made_of = [json.loads(path.read_text()) for path in paths]
    for document in made_of:
        assert document["schema_version"] == SCHEMA == "0.3.0"
        assert document["evaluation_results"]
        deployment = document["model_info"]["additional_details"]["deployment_type"]
        assert deployment == "self_deployed"
    assert len({document["evaluation_id"] for document in made_of}) == len(made_of)


def test_a_thousand_samples_of_lm_eval_keep_text_score_and_times(
    tmp_path: Path, moecache: Moecache
) -> None:
    data = lm_eval_file()
    (tmp_path / f"results_{DATE}.json").write_text(json.dumps(data))
    rows = [
        {
            "doc_id": number,
            "target": "7",
            "arguments": {"gen_args_0": {"arg_0": f"What is {number}?", "arg_1": {}}},
            "resps": [[f" It is {number % 10}.\u2028"]],
            "filtered_resps": [str(number % 10)],
            "filter": "none",
            "metrics": ["acc"],
            "acc": float(number % 10 == 7),
            "speed": {"ttft_ms": 20.0, "e2el_ms": 100.0 + number, "tpot_ms": None},
        }
        for number in range(1000)
    ]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (tmp_path / f"samples_quiz_{DATE}.jsonl").write_text(text)
    aggregate, samples = map(Path, moecache("table", tmp_path, FORMAT, "--write").split())
    check(aggregate, samples)
    lines = [json.loads(line) for line in samples.open()]
    assert len(lines) == 1000 and sum(line["evaluation"]["is_correct"] for line in lines) == 100
    document = json.loads(aggregate.read_text())
    assert document["detailed_evaluation_results"]["total_rows"] == 1000
    assert lines[17]["input"] == {"raw": "What is 17?", "reference": ["7"]}
    assert lines[17]["output"] == {"raw": [" It is 7.\u2028"]}
    times = {"latency_ms": 117.0, "time_to_first_token_ms": 20.0, "generation_time_ms": 97.0}
    assert times.items() <= lines[17]["performance"].items()
    assert lines[17]["performance"]["additional_details"]["clock"] == "virtual"
    named = {result["evaluation_result_id"] for result in document["evaluation_results"]}
    assert lines[17]["evaluation_result_id"] in named


def test_a_run_keeps_its_scores_settings_and_speed(tmp_path: Path, moecache: Moecache) -> None:
    [document] = documents(moecache, write(tmp_path, made()))
    assert document["evaluation_id"] == "made-up.a/allenai/OLMoE-1B-7B-0924/1795769926"
    assert document["eval_library"] == {"name": "lm_eval", "version": "0.4.13"}
    model = document["model_info"]
    assert (model["id"], model["developer"]) == ("allenai/OLMoE-1B-7B-0924", "allenai")
    assert model["inference_engine"] == {"name": "lm-eval-moecache", "version": "1.0.0"}
    settings = {"policy": "specmd", "capacity": "25%", "clock": "virtual"}
    assert settings.items() <= model["additional_details"].items()
    acc, perplexity = document["evaluation_results"]
    assert acc["evaluation_name"] == "quiz" and acc["source_data"]["source_version"] == "2"
    of = {"metric_parameters": {"filter": "none"}}
    ends = {"score_type": "continuous", "min_score": 0.0, "max_score": 1.0}
    assert acc["metric_config"] == {"metric_name": "acc", "lower_is_better": False, **of, **ends}
    score = acc["score_details"]
    assert score["score"] == 0.75
    assert score["uncertainty"] == {"num_samples": 4, "standard_error": {"value": 0.25}}
    speed = {"ttft_ms.p99": "4.0", "tok_per_s": "100.0", "miss_rate": "0.25"}
    assert speed.items() <= score["details"].items()
    # A perplexity has no highest value, which a continuous score would need.
    assert perplexity["score_details"]["score"] == 12.5
    unbounded = {"additional_details": {"bounds_status": "unknown"}}
    named = {"metric_name": "word_perplexity", "lower_is_better": True}
    assert perplexity["metric_config"] == {**named, **of, **unbounded}


def test_a_score_outside_of_its_metrics_range_has_no_range(
    tmp_path: Path, moecache: Moecache
) -> None:
    [document] = documents(moecache, write(tmp_path, made(answers=(100, 100, 0, 100))))
    assert "score_type" not in document["evaluation_results"][0]["metric_config"]


def test_a_file_of_lm_eval_itself_gives_its_date_and_version(
    tmp_path: Path, moecache: Moecache
) -> None:
    data = lm_eval_file()
    (tmp_path / "results_2026.json").write_text(json.dumps(data))
    [document] = documents(moecache, tmp_path)
    assert document["evaluation_timestamp"] == "1795769926"
    assert document["eval_library"]["version"] == "0.4.12"
    assert document["model_info"]["id"] == "traces/x.parquet"
    assert "developer" not in document["model_info"], "a trace's folder made no model"


def test_files_of_one_run_each_are_written_anew_in_the_same_place(
    tmp_path: Path, moecache: Moecache
) -> None:
    folder = write(tmp_path, made("a"), made("b"))
    first = moecache("table", folder, FORMAT, "--write").split()
    place = folder / "every_eval_ever/data/lm-eval-moecache/allenai/OLMoE-1B-7B-0924"
    assert [Path(path).parent for path in first] == [place] * 2
    assert [UUID(Path(path).stem).version for path in first] == [4, 4]
    texts = [Path(path).read_text() for path in first]
    assert "".join(texts) == moecache("table", folder, FORMAT), "written files are no runs"
    # A copy of a run is the same evaluation.
    write(tmp_path / "copy", made("a"))
    assert moecache("table", folder, FORMAT, "--write").split() == first


@pytest.mark.parametrize("option", ["--columns=policy", "--sort=policy", "--title=x", "--each"])
def test_what_shapes_a_table_is_refused(option: str, tmp_path: Path, moecache: Moecache) -> None:
    folder = write(tmp_path, made())
    assert option.partition("=")[0] in moecache("table", folder, FORMAT, option, code=2)
    assert not (folder / "every_eval_ever").exists()
