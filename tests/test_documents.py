"""Every command line in a document works as printed, and what is quoted of the code is true.

Commands run without CUDA or a network: options at their end shorten long ones
(`documents.SHORTER`), and the shipped model and tasks replace those of the hub. A new command in a
document is picked up by itself.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
import yaml
from nbclient import NotebookClient

from docs.hooks import keys_table
from docs.wall_table import wall_table
from lm_eval_moecache import api
from lm_eval_moecache.algorithms.policy import policy_names
from lm_eval_moecache.algorithms.registry import AXES, algorithm_names
from lm_eval_moecache.cli.main import main
from lm_eval_moecache.model.precision.ladder import codec_names
from lm_eval_moecache.records.schemas.keys import CHOICES, KEYS
from lm_eval_moecache.report.runs.files import read_tables, write_tables
from lm_eval_moecache.tiny import MODEL_DIR
from tests.conftest import Checkpoint, Moecache
from tests.documents import INSTALLERS, Runner, commands_of, shortened
from tests.plan.test_counts import IMP
from tests.sweep.toy import write_sweep

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "task_configs/README.md",
    *sorted((ROOT / "examples").glob("*.*")),
    *sorted((ROOT / "docs").glob("*.md")),
]
COMMANDS = {path: commands_of(path) for path in DOCUMENTS}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the files that commands name; its sweep runs one document per task."""
    for name in ("examples", "results", "task_configs", "traces"):
        shutil.copytree(ROOT / name, tmp_path / name)
    # What pages call a model folder of one's own, and responses of vLLM.
    shutil.copytree(MODEL_DIR, tmp_path / "my_model")
    (tmp_path / "responses").mkdir()
    shutil.copy(ROOT / "tests/trace/formats/vllm.json", tmp_path / "responses")
    (tmp_path / "imp.log").write_text(IMP)
    # As if a user had written rules here.
    for rule in ("eviction", "routing", "miss"):
        shutil.copy(ROOT / f"examples/my_{rule}.py", tmp_path)
    path = tmp_path / "examples/sweep.yaml"
    sweep = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**sweep, "limit": 1, "tasks": ["tiny_arc", "tiny_bbh"]}))
    return tmp_path


def of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.slow
@pytest.mark.parametrize("document", [p for p in DOCUMENTS if COMMANDS[p]], ids=of)
def test_every_command_of_a_document_works(document: Path, folder: Path) -> None:
    failures, runner = [], Runner()
    assert len(COMMANDS[ROOT / "README.md"]) >= 10, "the finder finds commands"
    earlier = DOCUMENTS[: DOCUMENTS.index(document)]
    already_run = {command for path in earlier for command in COMMANDS[path]}
    for command in COMMANDS[document]:
        if command.split()[0] in INSTALLERS or command in already_run:
            continue
        code, log = runner.run(shortened(command), folder)
        if code:
            failures.append(f"{command}\n  exit code {code}: {log.strip()[-600:]}")
    assert failures == []


README = (ROOT / "README.md").read_text()


def test_the_docs_list_every_key_as_the_code_has_it_and_every_command() -> None:
    page = (ROOT / "docs/keys.md").read_text()
    assert keys_table() in page
    for command in api.command_names():
        assert f"`moecache {command}" in page, command


def test_what_the_readme_shows_of_plan_is_what_it_prints(
    moecache: Moecache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    (command,) = re.findall(r"^moecache (plan .*)$", README, re.MULTILINE)
    page = README.split("```text\n")[1].partition("\n```")[0]
    assert moecache(*command.split()).startswith(page)


WORKFLOW = yaml.safe_load((ROOT / "examples/github-workflow.yml").read_text())
STEPS: list[dict[str, Any]] = WORKFLOW["jobs"]["compare"]["steps"]


def test_the_workflows_actions_are_pinned_by_hash() -> None:
    actions = [step["uses"] for step in STEPS if "uses" in step]
    assert actions and all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action) for action in actions)


@pytest.mark.slow
def test_the_workflows_commands_pass_on_a_rerun_and_fail_on_a_lost_run(
    tmp_path: Path, checkpoint: Checkpoint
) -> None:
    base = {"pretrained": str(checkpoint("olmoe")), "device": "cpu"}
    grid = {"capacity": ["25%", "50%"]}
    path = write_sweep(tmp_path / "results/baseline", base=base, grid=grid)
    assert main(["sweep", str(path)]) == 0
    summary = tmp_path / "summary.md"
    # `moecache` as pip would install it.
    tool = tmp_path / "bin/moecache"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m lm_eval_moecache "$@"\n')
    tool.chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GITHUB_STEP_SUMMARY": str(summary)}
    environment["PATH"] = f"{tool.parent}:{os.environ['PATH']}"
    scripts = [step.get("run", "") for step in STEPS]
    (rerun,) = (script for script in scripts if "moecache sweep" in script)
    (compare,) = (script for script in scripts if "moecache compare" in script)

    def bash(script: str) -> int:
        command = ["bash", "-e", "-c", script]
        return subprocess.run(command, cwd=tmp_path, env=environment).returncode

    assert bash(rerun) == bash(compare) == 0
    assert summary.read_text().startswith("### moecache: pass")
    write_tables(tmp_path / "output/new", read_tables(tmp_path / "output/new")[1:])
    assert bash(compare) == 1
    assert "REGRESSION" in summary.read_text()


NOTEBOOK = ROOT / "docs" / "notebook.ipynb"


@pytest.mark.slow
def test_the_notebook_runs_and_its_replays_say_what_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The notebook's shell commands come from this environment.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    saved, run = (nbformat.read(NOTEBOOK, as_version=4) for _ in range(2))
    resources = {"metadata": {"path": str(tmp_path)}}
    # On a busy machine a command's output comes in several pieces.
    options: dict[str, Any] = {"resources": resources, "coalesce_streams": True}
    NotebookClient(run, timeout=600, kernel_name="python3", **options).execute()
    assert len(figures(run)) == len(figures(saved)) >= 7
    of_traces = [text for text in figures(run) if "qwen3-30b" in text or "hazard " in text]
    assert len(of_traces) >= 2
    # On another CPU a near tie in the router may change the live run's outputs.
    assert set(of_traces) <= set(figures(saved))


def figures(notebook: Any) -> list[str]:
    """Return the cells' text outputs, stderr left out; a shell command's lines end in CR LF."""
    texts = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            text = output.get("text") or output.get("data", {}).get("text/plain", "")
            if output.get("name") != "stderr":
                texts.append(str(text).replace("\r\n", "\n"))
    return texts


def test_the_table_of_the_wall_clock_is_whole_and_its_empty_cells_have_reasons() -> None:
    cells = wall_table()
    entries = {(cell.key, cell.value) for cell in cells}
    # `capacity` is in every cell; `clock` is the table's subject.
    assert {key for key, _ in entries} == set(KEYS) - {"capacity", "clock"}
    expected = {(axis, name) for axis in AXES for name in algorithm_names(axis)}
    expected |= {("policy", name) for name in policy_names()}
    expected |= {("precision", name) for name in codec_names()}
    expected |= {(k, v) for k, values in CHOICES.items() for v in values if k != "clock"}
    assert expected <= entries and len(entries) == len(cells)
    for cell in filter(lambda cell: cell.reason, cells):
        assert cell.key in cell.reason or "clock='wall'" in cell.reason, cell
        assert "llowed" in cell.reason or "moecache replay" in cell.reason, cell


@pytest.mark.slow
def test_a_task_of_the_hub_runs_from_a_folder_laid_out_like_it(tmp_path: Path) -> None:
    """The page's command, but for the model, where `openai/gsm8k` is a folder."""
    (command,) = (c for c in COMMANDS[ROOT / "docs/how.md"] if "--tasks gsm8k" in c)
    folder = tmp_path / "openai/gsm8k"
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        rows = (MODEL_DIR.parent / f"rows/gsm8k_{split}.jsonl").read_text().splitlines()[:8]
        (folder / f"{split}.jsonl").write_text("\n".join(rows) + "\n")
    files = [{"split": split, "path": f"{split}.jsonl"} for split in ("train", "test")]
    head = yaml.safe_dump({"configs": [{"config_name": "main", "data_files": files}]})
    (folder / "README.md").write_text(f"---\n{head}---\n")
    words = shlex.split(command.replace("allenai/OLMoE-1B-7B-0924", "tiny"))
    code, log = Runner().run([*words, "--limit", "2"], tmp_path)
    assert code == 0, log
    assert re.search(r"^\|gsm8k *\|", log, re.MULTILINE), log


@pytest.mark.parametrize(
    ("page", "count", "said"),
    [
        ("docs/how.md", 1, "SpecMD"),
        pytest.param("docs/python.md", 2, "", marks=pytest.mark.slow),
        pytest.param("README.md", 1, "tiny_gsm8k", marks=pytest.mark.slow),
    ],
)
def test_the_python_of_a_page_runs(
    page: str,
    count: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(ROOT)
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)
    assert len(blocks) == count
    for block in blocks:
        exec(compile(block, page, "exec"), {})
    assert said in capsys.readouterr().out


def test_links_of_the_documents_lead_to_files_of_a_clone() -> None:
    command = ["git", "ls-files"]
    tracked = set(subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.split())
    tracked |= {str(parent) for name in tracked for parent in Path(name).parents}
    links = [
        (page, target)
        for page in tracked
        if page.endswith(".md")
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", (ROOT / page).read_text())
        if not re.match(r"[a-z]+:", target)
    ]
    assert len(links) > 100
    lost = [
        (page, target)
        for page, target in links
        if os.path.normpath(Path(page).parent / target) not in tracked
    ]
    assert lost == []
