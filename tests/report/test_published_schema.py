"""Every committed record is what the published schema of `config.moecache` says."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from lm_eval_moecache.records.schemas.published import MoecacheRecord, published_schema

RESULTS = Path(__file__).resolve().parent.parent.parent / "results"


def records(path: Path) -> Iterator[dict[str, Any]]:
    data = path.read_bytes()
    packed = path.suffix == ".gz"
    for line in gzip.decompress(data).splitlines() if packed else [data]:
        yield json.loads(line)["config"]["moecache"]


FILES = [*sorted(RESULTS.rglob("runs.jsonl.gz")), RESULTS / "first_run/results.json"]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.parent.relative_to(RESULTS)))
def test_every_committed_record_fits(path: Path) -> None:
    for record in records(path):
        MoecacheRecord.model_validate_json(json.dumps(record), strict=True)


def test_the_schema_is_versioned_and_names_what_a_record_has() -> None:
    schema = published_schema()
    assert schema["version"] >= 1 and schema["$schema"].startswith("https://json-schema.org")
    (record,) = records(FILES[-1])
    assert set(record) <= set(schema["properties"])
    with pytest.raises(ValidationError):
        MoecacheRecord.model_validate({**record, "clock": "sundial"})
