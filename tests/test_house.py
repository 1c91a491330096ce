"""The picture of the house in CONTRIBUTING.md is that of the code, and a stranger finds his way."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lm_eval_moecache.cli.main import command_names, main
from tests.house import floors, picture

ROOT = Path(__file__).resolve().parents[1]
SUBCOMMAND = '''"""Count up to a number."""

from jsonargparse import ArgumentParser, Namespace


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--to", type=int, default=3, help="the last number")


def run(arguments: Namespace) -> int:
    print(" ".join(str(number) for number in range(1, arguments.to + 1)))
    return 0
'''


def test_the_picture_in_the_guide_is_the_codes_own() -> None:
    assert picture() in (ROOT / "CONTRIBUTING.md").read_text(), "run: python -m tests.house"


def test_the_house_has_few_boxes_on_few_floors() -> None:
    assert sum(len(floor) for floor in floors()) <= 20
    assert len(floors()) <= 10


def test_a_new_subcommand_is_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import lm_eval_moecache.cli as folder

    (tmp_path / "count.py").write_text(SUBCOMMAND)
    monkeypatch.setattr(folder, "__path__", [*folder.__path__, str(tmp_path)])
    try:
        assert "count" in command_names()
        assert main(["--help"]) == 0
        assert "Count up to a number." in capsys.readouterr().out
        assert main(["count", "--to", "4"]) == 0
        assert capsys.readouterr().out == "1 2 3 4\n"
    finally:
        sys.modules.pop("lm_eval_moecache.cli.count", None)
        if hasattr(folder, "count"):
            delattr(folder, "count")
