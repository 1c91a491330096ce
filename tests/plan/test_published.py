"""`moecache validate --speeds`: what is read of published rows, and the shipped figures."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lm_eval_moecache.records.runtimes import (
    MECHANISMS,
    MECHANISMS_FILE,
    RUNTIME_DIR,
    load_runtime,
)
from moecache_plan.mechanisms import CONSTANTS, mechanisms
from moecache_plan.published import (
    COLUMNS,
    SpeedRow,
    find_hardware,
    find_model,
    read_row,
    read_rows,
    speed,
    tokens,
)
from tests.conftest import Moecache

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "results" / "runtimes" / "rows.csv"


def write(path: Path, *rows: dict[str, object]) -> Path:
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        table.writerows(rows)
    return path


@cache
def shipped() -> tuple[list[SpeedRow], list[dict[str, Any]]]:
    return read_rows(ROWS)


ROW: dict[str, object] = {
    "runtime": "llama.cpp",
    "model": "gpt-oss-120b",
    "precision": "MXFP4",
    "hardware": "RTX 3090",
    "placement": "host_layers=25",
    "decode_tok_s": 33,
}


def test_a_row_is_forecast_with_its_range_and_left_out_ones_say_why(
    tmp_path: Path, moecache: Moecache
) -> None:
    left_out = [
        ("model", "a model", "model='a model'"),
        ("note", "with MTP", "speculative"),
        ("decode_tok_s", "", "no speed"),
        ("note", "left out: a thing", "a thing"),
        ("note", "batch 8", "8 requests"),
        ("placement", "somewhere", "placement="),
        ("note", "top-k 200", "top-k 200 of 128 experts"),
        ("note", "hit rate 120%", "of 120%"),
        ("hardware", "RTX 3090 + RTX 3060", "cards of several kinds"),
    ]
    first = {**ROW, "host_memory_GBps": "2x5600", "prompt": 4096, "prefill_tok_s": 400}
    first["note"] = "MTP=0, DRAFT = off"
    others = [{**ROW, column: text} for column, text, _ in left_out]
    path = write(tmp_path / "rows.csv", first, *others)
    result = moecache.json("validate", "--speeds", path)
    (row,) = result["rows"]
    assert row["low"] < row["predicted_tok_s"] < row["high"]
    assert row["factor"] == pytest.approx(
        max(row["predicted_tok_s"] / 33, 33 / row["predicted_tok_s"])
    )
    assert result["median_factor"] == row["factor"]
    assert set(result["within"]) == {"1.25", "1.5", "1.6", "2.5"}
    assert (row["stated"], row["mechanism"]) == (True, "host")
    assert row["prefill_factor"] >= 1
    for each, (*_, reason) in zip(result["left_out"], left_out, strict=True):
        assert reason in each["reason"]


def test_a_file_without_its_columns_and_options_that_do_not_go_together_are_refused(
    tmp_path: Path, moecache: Moecache
) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("a,b\n1,2\n")
    assert "lacks the columns runtime, model" in moecache("validate", "--speeds", path, code=2)
    text = moecache("validate", "--speeds", ROWS, "--hardware", "m4-pro", code=2)
    assert "cannot be combined with --speeds" in text
    assert "is missing" in moecache("validate", ROWS, code=2)


def test_every_shipped_runtime_loads_and_says_where_it_comes_from(tmp_path: Path) -> None:
    for file in sorted(RUNTIME_DIR.glob("*.yaml")):
        if file != MECHANISMS_FILE:
            runtime = load_runtime(file.stem)
            assert runtime.name == file.stem and runtime.source and runtime.absent in MECHANISMS
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\nabsent: nowhere\n")
    with pytest.raises(ValueError, match=r"absent='nowhere' is not known"):
        load_runtime(str(path))


def test_a_card_with_more_memory_is_the_card_and_words_after_a_models_name_say_nothing() -> None:
    assert find_hardware("RTX 4090 48GB")[0].memory_bytes == 48e9
    assert find_model("gpt-oss:20b", "").name == "gpt-oss-20b"
    assert find_model("Kimi K2.6 1T-A32B", "").name == "Kimi-K2.6"
    assert find_hardware("RTX 4090 Laptop")[0].memory_bytes_per_s == 576e9
    for other in ("RTX 2250", "GPU 9000"):
        with pytest.raises(ValueError, match="is not known"):
            find_hardware(other)
    cached = {**ROW, "hardware": "none", "placement": "slots=4"}
    with pytest.raises(ValueError, match="has no cache of experts on a processor"):
        read_row({name: str(cached.get(name, "")) for name in (*COLUMNS, "machine")})


def test_models_speeds_and_tokens_are_read_as_typed() -> None:
    assert find_model("gpt-oss-120b (thinking)", "MXFP4 (F16 gguf)").stored.expert_bits == 4.25
    assert find_model("Qwen/Qwen3-30B-A3B", "Q4").stored.expert_bits == pytest.approx(4.9)
    assert speed("~45") == 45
    assert speed("36.7 (33.72 incl. prompt)") == 36.7
    assert speed("29-32") == pytest.approx((29 * 32) ** 0.5)
    assert speed("") is None
    assert tokens("8k") == 8192
    assert tokens("969 in/300 out") == 969
    assert tokens("1M") == 2**20


def test_what_a_note_says_of_the_cache_and_the_launches_is_read(tmp_path: Path) -> None:
    path = write(
        tmp_path / "rows.csv",
        {**ROW, "context": 4096},
        {**ROW, "context": 4096, "note": "KV cache q8_0"},
        {**ROW, "note": "--enforce-eager"},
        {**ROW, "model": "DeepSeek-V3", "precision": "Q8_0", "placement": "host_layers=all"},
    )
    rows, left_out = read_rows(path)
    assert not left_out
    whole, half = (row.model.kv_bytes(4096) for row in rows[:2])
    assert half == pytest.approx(whole * 8.5 / 16)
    assert [row.runtime.eager for row in rows] == [False, False, True, False]
    rates = [row.machine.host_rate(row.runtime) for row in rows[2:]]
    assert rates == pytest.approx([89.6e9, 307.2e9])


def test_gguf_files_of_mxfp4_have_the_rest_in_eight_bits_but_where_f16_is_said(
    tmp_path: Path,
) -> None:
    path = write(
        tmp_path / "rows.csv",
        ROW,
        {**ROW, "note": "F16 gguf"},
        {**ROW, "runtime": "transformers", "placement": "resident"},
        {**ROW, "runtime": "ollama"},
    )
    rows, _ = read_rows(path)
    assert [row.model.stored.dense_bits for row in rows] == [8.5, 16, 16, 16]


def test_a_program_without_a_profile_is_named(tmp_path: Path, moecache: Moecache) -> None:
    file = tmp_path / "rows.csv"
    head = "runtime,model,precision,hardware,placement,decode_tok_s"
    one, other = (f"{name},gpt-oss-20b,,RTX 3090,resident,100" for name in ("tinygrad", "vllm"))
    file.write_text("\n".join([head, one, other]) + "\n")
    assert "tinygrad: no profile; forecast by" in moecache("validate", "--speeds", file)
    file.write_text("\n".join([head, other]) + "\n")
    assert "no profile" not in moecache("validate", "--speeds", file)


def test_rows_whose_placement_nobody_stated_are_not_stated(tmp_path: Path) -> None:
    resident = {**ROW, "placement": "resident"}
    path = write(
        tmp_path / "rows.csv",
        {**resident, "note": "prompt length unstated"},
        {**resident, "note": "placement and host unstated"},
    )
    rows, _ = read_rows(path)
    assert [row.is_stated(row.placed()) for row in rows] == [True, False]


def test_the_constants_file_is_whole() -> None:
    known = mechanisms()
    assert set(known.constants) == set(CONSTANTS)
    for spread in known.spreads.values():
        assert spread.reach >= 1
