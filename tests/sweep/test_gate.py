"""The regression gate on sweeps of the shipped model: what passes, and what fails by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lm_eval_moecache.cli.main import main
from lm_eval_moecache.sweep import worker

Captured = pytest.CaptureFixture[str]
PLAIN = {"routing": "standard", "prefetch": "next_gate", "eviction": "lru", "miss": "fetch"}


def sweep(folder: Path, *tasks: str, limit: int = 8, **policy: Any) -> Path:
    """Run `PLAIN` with these changes, always under the same file name: a policy that was edited."""
    file = folder.parent / "mine.yaml"
    file.write_text(yaml.safe_dump({**PLAIN, **policy}))
    folder.mkdir()
    base = {"pretrained": "tiny", "device": "cpu", "policy": str(file), "capacity": "25%"}
    given = {"tasks": list(tasks), "limit": limit, "base": base}
    (folder / "sweep.yaml").write_text(yaml.safe_dump(given))
    assert main(["sweep", str(folder / "sweep.yaml")]) == 0
    return folder


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One baseline, one loaded model for all sweeps of this file, and none left to other files."""
    yield sweep(tmp_path_factory.mktemp("gate") / "baseline", "tiny_mmlu", "tiny_arc")
    worker._holder.cache_clear()


def compare(baseline: Path, new: Path, capsys: Captured, *options: str) -> tuple[int, list[str]]:
    capsys.readouterr()
    code = main(["compare", str(baseline), str(new), *options])
    return code, capsys.readouterr().out.splitlines()


@pytest.mark.slow
def test_a_rerun_passes_with_every_figure_the_same(baseline: Path, capsys: Captured) -> None:
    rerun = sweep(baseline.parent / "rerun", "tiny_mmlu", "tiny_arc")
    code, lines = compare(baseline, rerun, capsys)
    assert code == 0
    assert re.fullmatch(r"pass: (\d+) figures: \1 same", lines[-1])


@pytest.mark.slow
def test_a_policy_that_turns_lossy_fails_by_its_accuracy(baseline: Path, capsys: Captured) -> None:
    folder, documents = baseline.parent, 30
    plain = sweep(folder / "plain", "tiny_mmlu", limit=documents)
    only_one = {"name": "pruning", "h": 1}
    lossy = sweep(folder / "lossy", "tiny_mmlu", limit=documents, routing=only_one)
    # Speed may change as it likes: accuracy alone has to fail.
    code, lines = compare(plain, lossy, capsys, "--tolerance=10")
    assert code == 1
    worse = [line for line in lines if line.startswith("worse")]
    assert any(line.startswith("worse    tiny_mmlu acc,none: ") for line in worse), lines
    assert all(line.split()[2].startswith("acc") for line in worse if "tiny_mmlu" in line)


@pytest.mark.slow
def test_a_higher_miss_rate_fails_by_name_while_accuracy_stays(
    baseline: Path, capsys: Captured
) -> None:
    more = sweep(baseline.parent / "more", "tiny_mmlu", "tiny_arc", prefetch="none")
    code, lines = compare(baseline, more, capsys, "--metrics=miss_rate")
    assert code == 1
    worse = [line.split()[1:3] for line in lines if line.startswith("worse")]
    assert sorted(worse) == [["tiny_arc", "miss_rate:"], ["tiny_mmlu", "miss_rate:"]]


def test_a_task_that_is_no_longer_run_fails_by_name(baseline: Path, capsys: Captured) -> None:
    fewer = sweep(baseline.parent / "fewer", "tiny_mmlu")
    code, lines = compare(baseline, fewer, capsys)
    assert code == 1
    missing = [line.split()[:2] for line in lines if line.startswith("missing")]
    assert missing == [["missing", "tiny_arc"]]
