"""The offline YAMLs: they load, and they print what lm-eval's own tasks print."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from lm_eval import tasks as lm_eval_tasks
from lm_eval.tasks import TaskManager

from lm_eval_moecache.tiny import documents
from tools.train_tiny.documents import KINDS, write
from tools.train_tiny.skills.generator import ASKED, BBH, held_out

CONFIGS = Path(__file__).parents[2] / "task_configs"
LM_EVAL = Path(lm_eval_tasks.__file__).parent
VERSIONS = {
    "gsm8k": (3.0, "c363baf9"),
    "mmlu": (2.0, "f4322ee4"),
    "arc": (2.0, "cc53117f"),
    "truthfulqa": (2.0, "352eb792"),
    "bbh": (2.0, "b7a7cbc8"),
    "wikitext": (2.0, "cb595aff"),
}
"""Each offline task's version and the digest of its documents."""
NAMES = tuple(VERSIONS)


class _Loader(yaml.SafeLoader):
    """Reads `!function` as its text."""


_Loader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))


def config_of(path: Path) -> dict:
    return yaml.load(path.read_text(), Loader=_Loader)


def ours(name: str) -> dict:
    return config_of(CONFIGS / "offline" / f"tiny_{name}.yaml")


@pytest.fixture(scope="module")
def loaded() -> dict:
    manager = TaskManager(include_path=str(CONFIGS), include_defaults=False)
    return manager.load([f"tiny_{name}" for name in NAMES])["tasks"]


@pytest.mark.parametrize("name", NAMES)
def test_documents_change_with_the_version_of_their_task_only(loaded: dict, name: str) -> None:
    """Records pair answers by number: one version for other documents would pair unlike ones."""
    task = loaded[f"tiny_{name}"]
    rows = list(task.test_docs())
    assert len(rows) == (150 if name == "wikitext" else 500)
    digest = hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:8]
    assert (task.VERSION, digest) == VERSIONS[name], "raise metadata.version, then this entry"


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    write(folder, seed=0, count=20, num_prompts=3)
    return folder


@pytest.mark.parametrize("name", ASKED)
def test_shipped_rows_are_those_that_the_generators_draw(drawn: Path, name: str) -> None:
    # lm-eval merges a policy's arguments into the metadata.
    shipped = getattr(documents, name)(num_documents=20, policy="on_demand", seed=7)
    regenerated = getattr(documents, name)(rows=str(drawn))
    for split in ("train", "test"):
        assert len(shipped[split]) == 20 and list(regenerated[split]) == list(shipped[split])
    with pytest.raises(ValueError, match=r"num_documents=501.*from 1 to 500"):
        getattr(documents, name)(num_documents=501)


@pytest.mark.slow
def test_a_policy_that_draws_is_evaluated_under_a_seed(tmp_path: Path) -> None:
    """lm-eval's command merges the model's arguments into the metadata of each task."""
    command = [sys.executable, "-m", "lm_eval_moecache", "eval", "--model", "moecache"]
    command += ["--model_args", "policy=on_demand,eviction=random,seed=7", "--device", "cpu"]
    command += ["--include_path", str(CONFIGS), "--tasks", "tiny_gsm8k", "--limit", "1"]
    command += ["--metadata", '{"num_documents": 3}', "--output_path", str(tmp_path)]
    done = subprocess.run(command, cwd=CONFIGS.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    [path] = tmp_path.rglob("results_*.json")
    record = json.loads(path.read_text())
    assert record["config"]["moecache"]["seed"] == 7
    assert record["n-samples"]["tiny_gsm8k"] == {"original": 3, "effective": 1}


def test_shipped_prompts_are_the_generators(drawn: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = documents.training_prompts(3)
    assert len(shipped) == 3 * len(KINDS)
    monkeypatch.setattr(documents, "PROMPTS", drawn / documents.PROMPTS.name)
    assert documents.training_prompts(3) == shipped


@pytest.mark.parametrize("name", ("gsm8k", "mmlu", "arc", "truthfulqa", "bbh"))
def test_prompt_and_target_are_those_the_model_was_trained_on(loaded: dict, name: str) -> None:
    task = loaded[f"tiny_{name}"]
    rows = task.test_docs()
    for problem, row in zip(held_out(ASKED[name], 14, seed=0), rows, strict=False):
        target = task.doc_to_target(row)
        if name in ("mmlu", "arc", "truthfulqa"):
            target = task.doc_to_choice(row)[int(target)]
        assert (task.doc_to_text(row), target) == (problem.prompt, problem.target)


@pytest.mark.parametrize(
    "name, path, keys",
    [
        ("gsm8k", "gsm8k/gsm8k.yaml", ("doc_to_text", "doc_to_target", "metric_list")),
        ("mmlu", "mmlu/default/_default_template_yaml", ("doc_to_choice", "metric_list")),
        ("arc", "arc/arc_easy.yaml", ("doc_to_text", "doc_to_choice", "metric_list")),
        ("truthfulqa", "truthfulqa/truthfulqa_mc1.yaml", ("doc_to_choice", "metric_list")),
        ("wikitext", "wikitext/wikitext.yaml", ("doc_to_text", "metric_list")),
    ],
)
def test_settings_equal_those_of_lm_eval(name: str, path: str, keys: tuple[str, ...]) -> None:
    template = config_of(LM_EVAL / path)
    assert {key: ours(name)[key] for key in keys} == {key: template[key] for key in keys}


def test_mmlu_prompt_is_lm_evals_description_and_question() -> None:
    template = config_of(LM_EVAL / "mmlu/default/_default_template_yaml")
    anatomy = config_of(LM_EVAL / "mmlu/default/mmlu_anatomy.yaml")
    head = anatomy["description"].replace("anatomy", "{{subject}}")
    assert ours("mmlu")["doc_to_text"] == head + template["doc_to_text"]


@pytest.mark.parametrize("kind", BBH)
def test_bbh_prompt_is_that_of_lm_evals_zero_shot_task(kind: str) -> None:
    template = config_of(LM_EVAL / "bbh/zeroshot" / f"{kind}.yaml")
    assert template["description"] == BBH[kind][0] + "\n\n"
    assert ours("bbh")["doc_to_text"] == "{{description}}\n\n" + template["doc_to_text"]
