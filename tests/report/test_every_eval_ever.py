"""Runs in the form of Every Eval Ever, against the rules of its schema 0.2.2, written out here."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from lm_eval_moecache.report.every_eval_ever import SCHEMA
from tests.conftest import Moecache
from tests.report.runs import record, write

FORMAT = "--format=every_eval_ever"
RESULTS = Path(__file__).parents[2] / "results"


NUMBERS = ("score", "min_score", "max_score", "value", "num_samples")
REQUIRED = {
    "": "schema_version evaluation_id retrieved_timestamp source_metadata model_info eval_library"
    " evaluation_results",
    "source_metadata": "source_type source_organization_name evaluator_relationship",
    "eval_library": "name version",
    "model_info": "name id",
    "evaluation_results": "evaluation_name source_data metric_config score_details",
    "source_data": "dataset_name source_type",
    "metric_config": "lower_is_better",
    "score_details": "score",
}
"""Object -> the fields that the schema requires of it."""


def check_types(value: Any, name: str = "") -> None:
    """Assert that all in a document are texts, but for the schema's numbers and one boolean."""
    if isinstance(value, dict):
        assert set(REQUIRED.get(name, "").split()) <= set(value), name
        for key, each in value.items():
            check_types(each, key)
    elif isinstance(value, list):
        for each in value:
            check_types(each, name)
    elif name in NUMBERS:
        assert isinstance(value, (int, float)) and not isinstance(value, bool), name
        assert math.isfinite(value), name
    else:
        assert isinstance(value, bool if name == "lower_is_better" else str), name


def check(document: Mapping[str, Any]) -> None:
    """Assert what the schema requires of a document, and the types of all that is in it."""
    check_types(document)
    # It allows these two besides, and nothing else.
    optional = {"evaluation_timestamp", "detailed_evaluation_results"}
    assert set(document) <= {*REQUIRED[""].split()} | optional
    float(document["retrieved_timestamp"])
    source = document["source_metadata"]
    assert source["source_type"] in ("documentation", "evaluation_run")
    relations = ("first_party", "third_party", "collaborative", "other")
    assert source["evaluator_relationship"] in relations
    for result in document["evaluation_results"]:
        assert result["source_data"]["source_type"] == "other"  # the one that needs no address
        metric, details = result["metric_config"], result["score_details"]
        if "score_type" in metric:
            assert metric["score_type"] == "continuous"
            assert metric["min_score"] <= details["score"] <= metric["max_score"]
        assert set(details["uncertainty"]) <= {"standard_error", "num_samples"}


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


@pytest.mark.parametrize("name", ["demo", "baseline", "real_lm", "sp_moe"])
def test_the_runs_of_this_repository_have_the_form_of_the_schema(
    name: str, moecache: Moecache
) -> None:
    made_of = documents(moecache, RESULTS / name)
    for document in made_of:
        check(document)
        assert document["schema_version"] == SCHEMA == "0.2.2"
        assert document["evaluation_results"]
    assert len({document["evaluation_id"] for document in made_of}) == len(made_of)


def test_a_run_keeps_its_scores_settings_and_speed(tmp_path: Path, moecache: Moecache) -> None:
    [document] = documents(moecache, write(tmp_path, made()))
    check(document)
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
    data = made()
    for key in ("configuration", "scores", "run_id", "experiment", "label", "environment"):
        del data[key]
    data["config"] |= {"model": "moecache", "model_args": "trace=traces/x.parquet,capacity=5%"}
    data |= {"date": 1795769926.75, "lm_eval_version": "0.4.12"}
    (tmp_path / "results_2026.json").write_text(json.dumps(data))
    [document] = documents(moecache, tmp_path)
    check(document)
    assert document["evaluation_timestamp"] == "1795769926"
    assert document["eval_library"]["version"] == "0.4.12"
    assert document["model_info"]["id"] == "traces/x.parquet"
    assert "developer" not in document["model_info"], "a trace's folder made no model"


def test_files_of_one_run_each_are_written_anew_in_the_same_place(
    tmp_path: Path, moecache: Moecache
) -> None:
    folder = write(tmp_path, made("a"), made("b"))
    first = moecache("table", folder, FORMAT, "--write").split()
    assert [Path(path).parent for path in first] == [folder / "every_eval_ever"] * 2
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
