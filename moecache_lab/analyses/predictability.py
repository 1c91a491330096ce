"""How well experts can be predicted, and where it matters (CommitMoE section 3).

Figure 2: the certainty of a router, as the KL divergence of its softmax from uniform, against how
many of the token's experts a trained predictor names. Beyond the paper: how both correlate in each
layer and in each document, and with the heaviest expert alone and the gap after the last chosen
one. Table 1: accuracy when tokens of which no expert was predicted rightly run the predicted ones.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lm_eval_moecache.harness.arguments import read_config
from lm_eval_moecache.harness.lm import MoECacheLM
from lm_eval_moecache.harness.preflight import geometry_of
from lm_eval_moecache.model.moe_layers import find_moe_layers
from lm_eval_moecache.model.predictor.network import PredictorNetwork
from lm_eval_moecache.model.predictor.samples import (
    Judged,
    RouterCapture,
    Samples,
    certainty_rows,
    correlation_rows,
    decile_rows,
    document_rows,
    judge,
    layer_rows,
)
from lm_eval_moecache.records.files import TINY
from lm_eval_moecache.records.ledger import GENERATE
from lm_eval_moecache.records.predictor import load_predictor
from lm_eval_moecache.report.plots import new_figure
from lm_eval_moecache.report.runs.run import scores_of
from lm_eval_moecache.sweep.evaluation import answers_of, evaluate, leaf_tasks, quiet
from lm_eval_moecache.sweep.spec import Cell
from moecache_lab.analyzed_model import Analysis, Rows

TITLE = "Router certainty against the number of experts predicted rightly"
TINY_TASKS = ("tiny_gsm8k", "tiny_bbh")
_REPLACED = {"routing": "commit", "routing.tokens": "mispredicted", "phases": "decode"}
_NOTHING = "so there is nothing to predict. Allowed: tasks "


def run(
    pretrained: str, options: Mapping[str, Any], *, trust_remote_code: bool = False
) -> Analysis:
    """Run `tasks` unmodified and with the replacement; every expert is resident all the time.

    Tiny has tasks of its own. The frequency baseline names the experts that these very tokens chose
    most often: no frequencies counted beforehand could do better.
    """
    tasks = [name for name in (options["tasks"] or "").split(",") if name]
    if not tasks and pretrained != TINY:
        raise ValueError("tasks: name tasks that generate text, such as gsm8k: --tasks gsm8k.")
    tasks, profile = tasks or [*TINY_TASKS], options["profile"]
    kinds = answers_of(leaf_tasks(tasks))
    if GENERATE not in kinds:
        raise ValueError(
            f"tasks={','.join(tasks)!r} generate nothing ({', '.join(kinds)}), {_NOTHING}of which "
            "one generates text, such as gsm8k."
        )
    # Before the weights are loaded, which takes a real model minutes.
    geometry = geometry_of(pretrained, trust_remote_code=trust_remote_code)
    artifact = load_predictor(profile, "kl", geometry)
    base_config = {"policy": "on_demand", "prefetch": "predictor", "capacity": "100%"}
    base_config |= {} if profile is None else {"prefetch.profile": profile}
    unmodified, replacement = read_config(base_config), read_config(base_config | _REPLACED)
    cell = Cell(
        model="moecache",
        model_args={},
        tasks=tuple(tasks),
        options={"limit": options["limit"]},
        include_path=(),
    )
    with quiet():
        lm = MoECacheLM(pretrained=pretrained, trust_remote_code=trust_remote_code)
        lm.install(unmodified)
        plain, judged = _watched(lm, cell, PredictorNetwork(artifact))
        lm.install(replacement)
        replaced = evaluate(cell, lm)
    top_k = lm.geometry.top_k
    tables = {
        "certainty": certainty_rows(judged, top_k),
        "deciles": decile_rows(judged, top_k),
        "layers": layer_rows(judged, top_k),
        "correlations": correlation_rows(judged),
        "documents": document_rows(judged),
        "replacement": _compare(plain, replaced),
    }
    return Analysis(tables, f"{TITLE} ({pretrained})", partial(draw, tables["certainty"]))


def draw(rows: Rows, title: str) -> Any:
    """Draw Figure 2: mean certainty over accuracy, and how many predictions have each."""
    figure, (left, right) = new_figure(columns=2)
    accuracy = [row["accuracy"] for row in rows]
    width = 0.6 / len(rows)
    left.bar(accuracy, [row["certainty"] or 0.0 for row in rows], width=width)
    left.set_ylabel("mean KL divergence from uniform (nats)")
    right.bar(accuracy, [row["share"] for row in rows], width=width)
    right.set_ylabel("share of the predictions")
    for axes in (left, right):
        axes.set_xticks(accuracy)
        axes.set_xlabel("share of a token's experts predicted rightly")
    figure.suptitle(title)
    return figure


def _watched(lm: MoECacheLM, cell: Cell, network: PredictorNetwork) -> tuple[Any, list[Judged]]:
    """Evaluate, and judge the predictor on the decode steps captured meanwhile."""
    layers = find_moe_layers(lm.model)
    with tempfile.TemporaryDirectory() as folder:
        shard = Path(folder) / "seen.safetensors"
        with RouterCapture(lm.model, layers) as capture:
            results = evaluate(cell, lm)
        if not capture.prompts:
            raise ValueError(
                f"tasks={','.join(cell.tasks)!r}: nothing was generated, {_NOTHING}that generate "
                "text, such as gsm8k."
            )
        capture.write(shard)
        samples = Samples([shard])
        prompts = samples.prompts
        judged = judge(
            samples, network, layers, num_chosen=lm.geometry.top_k, known=prompts, held_out=prompts
        )
    return results, judged


def _compare(plain: Any, replaced: Any) -> Rows:
    """Return Table 1: each task's metrics without and with the replacement."""
    return [
        {
            "task": task,
            "metric": score.key,
            "original": score.value,
            "replaced": replaced["results"][task][score.key],
            "stderr": score.stderr,
        }
        for task, metrics in sorted(plain["results"].items())
        for score in scores_of(metrics)
    ]
