"""Every command line that a document prints works as printed, without CUDA and without a network.

Long ones are made short by an option at their end (`documents.SHORTER`); models and tasks of the
hub are replaced by the shipped ones. A new command in a document is run without further ado.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import yaml

from tests.documents import INSTALLERS, Runner, commands_of, shortened

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "task_configs/README.md",
    *sorted((ROOT / "examples").glob("*.*")),
    *sorted((ROOT / "docs").glob("*.md")),
]
COMMANDS = {path: commands_of(path) for path in DOCUMENTS}


@pytest.fixture(scope="module")
def runner() -> Runner:
    return Runner()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of what commands name; its sweeps take one document a task."""
    for name in ("examples", "results", "task_configs", "traces"):
        shutil.copytree(ROOT / name, tmp_path / name)
    # As in a folder where somebody has written his own.
    shutil.copy(ROOT / "examples/my_eviction.py", tmp_path)
    path = tmp_path / "examples/sweep.yaml"
    sweep = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**sweep, "limit": 1, "tasks": ["tiny_arc", "tiny_bbh"]}))
    return tmp_path


def of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.slow
@pytest.mark.parametrize("document", [p for p in DOCUMENTS if COMMANDS[p]], ids=of)
def test_every_command_of_a_document_works(document: Path, runner: Runner, folder: Path) -> None:
    failed = []
    earlier = DOCUMENTS[: DOCUMENTS.index(document)]
    done = {command for path in earlier for command in COMMANDS[path]}
    for command in COMMANDS[document]:
        if command.split()[0] in INSTALLERS or command in done:
            continue
        code, said = runner.run(shortened(command), folder)
        if code:
            failed.append(f"{command}\n  exit code {code}: {said.strip()[-600:]}")
    assert failed == []


def test_the_documents_have_commands_and_the_finder_finds_them(tmp_path: Path) -> None:
    assert len(COMMANDS[ROOT / "README.md"]) >= 10
    assert len(COMMANDS[ROOT / "task_configs/README.md"]) >= 2
    assert len(COMMANDS[ROOT / "examples/sweep.yaml"]) == 3
    path = tmp_path / "x.md"
    path.write_text(
        "Type `moecache policies lru` or `moecache eval ...`; `moecache eval` is a name.\n"
        "```\nmake x\nlm_eval run \\\n  --tasks x\n```\n```text\nmoecache wrong\n```\n"
        "`pip install '.[tune]'`, `make`\n"
    )
    assert commands_of(path) == [
        *("moecache policies lru", "make x", "lm_eval run    --tasks x"),
        "pip install '.[tune]'",
    ]


def test_what_stands_for_the_hub_is_replaced() -> None:
    words = shortened("lm_eval run --model_args pretrained=a/B-1,policy=x --tasks gsm8k")
    assert words[3] == "pretrained=tiny,policy=x"
    assert words[4:6] == ["--tasks", "tiny_arc"]
    assert words[6:] == ["--include_path", "task_configs", "--limit", "1"]
    assert "tiny_bbh" in shortened("moecache eval --tasks tiny_bbh")


def test_install_lines_name_a_place_and_not_an_index_that_lacks_the_package() -> None:
    lines = [c for commands in COMMANDS.values() for c in commands if c.startswith("pip install")]
    lines += re.findall(
        r"run: (pip install .*)", (ROOT / "examples/github-workflow.yml").read_text()
    )
    assert len(lines) >= 2
    for line in lines:
        assert re.search(r" '?\.(\[\w+\]'?)?$|git\+", line), line
