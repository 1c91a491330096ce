"""What the README says is what the repository does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from docs.hooks import keys_table
from lm_eval_moecache.cli.main import command_names, main
from lm_eval_moecache.tiny import MODEL_DIR

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_the_readmes_table_is_the_one_of_the_first_run() -> None:
    report = json.loads((ROOT / "results/first_run/results.json").read_text())["config"]["moecache"]
    rows = dict(re.findall(r"^\|(tiny_\w+)\s*\|\s*(.*)\|$", README, re.MULTILINE))
    assert set(rows) == set(report["tasks"])
    for task, row in rows.items():
        cells = [cell.strip() for cell in row.split("|")]
        assert cells[0] == str(report["tasks"][task]["requests"])
        assert float(cells[1]) == round(report["tasks"][task]["ttft_ms"]["mean"], 3)
        assert float(cells[4]) == round(report["tasks"][task]["hit_rate"], 4)


def test_the_readmes_first_table_is_that_of_the_demo() -> None:
    rows = re.findall(r"^\|.*\|$", (ROOT / "results/demo/table.md").read_text(), re.MULTILINE)
    assert len(rows) > 5
    assert "\n".join(rows) in README


def test_the_docs_list_every_key_as_the_code_has_it_and_every_command() -> None:
    page = (ROOT / "docs/keys.md").read_text()
    assert keys_table() in page
    for command in command_names():
        assert f"`moecache {command}" in page, command


def test_the_readme_counts_the_model_types_that_run() -> None:
    families = (ROOT / "docs/families.md").read_text()
    runs, refused = re.findall(r"(\d+) runs, (\d+) refused", families)[0]
    types = f"Of the {int(runs) + int(refused)} model types of transformers with routed experts"
    assert f"{types} {runs} run" in " ".join(README.split())


def test_what_the_readme_shows_of_plan_is_what_it_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    (command,) = re.findall(r"^moecache (plan .*)$", README, re.MULTILINE)
    assert main(command.split()) == 0
    shown = README.split("```text\n")[1].partition("\n```")[0]
    assert capsys.readouterr().out.startswith(shown)


def test_the_readmes_first_commands_are_targets_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    commands = re.findall(r"(?:`|^)make (\w+)(?:`|$)", README, re.MULTILINE)
    assert commands[:2] == ["demo", "test"]
    for target in commands:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_readmes_parameter_count_is_that_of_the_shipped_model() -> None:
    trained = json.loads((MODEL_DIR / "training.json").read_text())
    assert f"{trained['num_parameters'] / 1e6:.1f} million parameters" in " ".join(README.split())
