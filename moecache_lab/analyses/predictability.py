"""How well experts can be predicted, and where it matters (CommitMoE section 3).

Figure 2: the certainty of a router, as the KL divergence of its softmax from uniform, against how
many of the token's experts a trained predictor names. Beyond the paper: how both correlate in each
layer and in each document, and with the heaviest expert alone and the gap after the last chosen
one. Table 1: accuracy when tokens of which no expert was predicted rightly run the predicted ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from lm_eval_moecache.algorithms.learned.predictor import load_predictor
from lm_eval_moecache.harness.arguments import read_config
from lm_eval_moecache.harness.lm import MoECacheLM
from lm_eval_moecache.harness.preflight import geometry_of
from lm_eval_moecache.model.moe_layers import MoELayer, cache_of, find_moe_layers
from lm_eval_moecache.model.predictor.network import PredictorNetwork
from lm_eval_moecache.model.predictor.training import (
    PREDICTOR,
    Samples,
    certainty_rows,
    check_routers,
    judge,
    layer_rows,
)
from lm_eval_moecache.model.reading import watched
from lm_eval_moecache.records.files import TINY
from lm_eval_moecache.records.ledger import GENERATE
from lm_eval_moecache.report.plots import new_figure
from lm_eval_moecache.report.runs.run import scores_of
from lm_eval_moecache.sweep.evaluation import answers_of, evaluate, leaf_tasks, quiet
from lm_eval_moecache.sweep.spec import Cell
from moecache_lab.analyzed_model import Analysis, Rows

TITLE = "Router certainty against the number of experts predicted rightly"
TINY_TASKS = ("tiny_gsm8k", "tiny_bbh")
_REPLACED = {"routing": "commit", "routing.tokens": "mispredicted", "phases": "decode"}
DECILES = 10
_NOTHING = "so there is nothing to predict. Allowed: tasks "


def predictability(
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
        plain, judged = _watched(lm, cell, PredictorNetwork(artifact.arrays, artifact.num_layers))
        lm.install(replacement)
        replaced = evaluate(cell, lm)
    top_k = lm.geometry.top_k
    tables = {
        "certainty": certainty_rows(judged, top_k),
        "deciles": _deciles(judged, top_k),
        "layers": layer_rows(judged, top_k),
        "correlations": _by_layer(judged),
        "documents": _by_document(judged),
        "replacement": _compare(plain, replaced),
    }
    return Analysis(tables, partial(draw, tables["certainty"]), TITLE)


def draw(rows: Rows) -> Any:
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
    return figure


def _watched(lm: MoECacheLM, cell: Cell, network: PredictorNetwork) -> tuple[Any, pd.DataFrame]:
    """Evaluate, and judge the predictor on the decode steps captured meanwhile."""
    layers = find_moe_layers(lm.model)
    with RouterCapture(lm.model, layers) as capture:
        results = evaluate(cell, lm)
    if not capture.prompts:
        raise ValueError(
            f"tasks={','.join(cell.tasks)!r}: nothing was generated, {_NOTHING}that generate text, "
            "such as gsm8k."
        )
    samples, prompts = capture.samples, np.unique(capture.prompts)
    top_k = lm.geometry.top_k
    judged = judge(samples, network, layers, num_chosen=top_k, known=prompts, held_out=prompts)
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


class RouterCapture(ExitStack):
    """Captures each router's inputs and logits of the decode steps while its context is open.

    For batches of one; `prompts` holds the prompt of each step, counted by prefills.
    """

    def __init__(self, model: Any, layers: Sequence[MoELayer]) -> None:
        super().__init__()
        check_routers(layers)
        self._decoding, self._prompt = False, -1
        self.prompts: list[int] = []
        self.hidden: list[list[Tensor]] = [[] for _ in layers]
        self.logits: list[list[Tensor]] = [[] for _ in layers]
        self.callback(model.register_forward_pre_hook(self._begin, with_kwargs=True).remove)
        self._layers = layers
        self.enter_context(watched([layer.router for layer in layers], self._keep))

    def _begin(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        past = cache_of(kwargs)
        self._decoding = past is not None and past.get_seq_length() > 0
        if self._decoding:
            self.prompts.append(self._prompt)
        else:
            self._prompt += 1

    def _keep(self, layer: int, args: Any, output: Any) -> None:
        if self._decoding:
            logits = self._layers[layer].gate.read(output).logits
            for captured, values in ((self.hidden, args[0]), (self.logits, logits)):
                flat = values.detach().reshape(-1, values.shape[-1])
                captured[layer].append(flat.to(torch.float16).cpu())

    @property
    def samples(self) -> Samples:
        """All decode steps."""
        hidden, logits = (
            [torch.cat(layer).numpy() for layer in captured]
            for captured in (self.hidden, self.logits)
        )
        return Samples(hidden, logits, np.asarray(self.prompts))


def _deciles(judged: pd.DataFrame, num_chosen: int) -> Rows:
    """Return one row per decile of the predictions, from the least certain router up."""
    right, kld = (judged[name].to_numpy() for name in (PREDICTOR, "certainty"))
    parts = np.array_split(np.argsort(kld, kind="stable"), DECILES)
    return [
        {
            "decile": number,
            "tokens": len(indices),
            "certainty": float(kld[indices].mean()),
            "accuracy": float(right[indices].mean()) / num_chosen,
            "half_or_less": float((right[indices] <= num_chosen // 2).mean()),
            "all_right": float((right[indices] == num_chosen).mean()),
        }
        for number, indices in enumerate(parts, 1)
        if len(indices)
    ]


def _by_layer(judged: pd.DataFrame) -> Rows:
    """Return one row per layer: correlates of how many experts of a token are predicted rightly."""
    return [
        {
            "layer": layer,
            "target": target,
            "set_by_certainty": _correlation(tokens, PREDICTOR, "certainty"),
            "first_by_certainty": _correlation(tokens, "first", "certainty"),
            "set_by_gap": _correlation(tokens, PREDICTOR, "gap"),
        }
        for (layer, target), tokens in judged.groupby(["layer", "target"])
    ]


def _by_document(judged: pd.DataFrame) -> Rows:
    """Return one row per prompt: correlates of its tokens' accuracy over all layers (Figure 2).

    `within_layers` first subtracts each layer's means from both sides: layers that are more certain
    than others, and predicted better or worse, then make no trend of their own.
    """
    sides = judged[[PREDICTOR, "certainty"]]
    means = sides.groupby(judged["layer"]).transform(lambda side: side.to_numpy().mean())
    within = dict(list((sides - means).groupby(judged["prompt"])))
    return [
        {
            "prompt": prompt,
            "tokens": len(tokens),
            "set_by_certainty": _correlation(tokens, PREDICTOR, "certainty"),
            "within_layers": _correlation(within[prompt], PREDICTOR, "certainty"),
            "set_by_gap": _correlation(tokens, PREDICTOR, "gap"),
        }
        for prompt, tokens in judged.groupby("prompt")
    ]


def _correlation(tokens: pd.DataFrame, one: str, other: str) -> float | None:
    """Return Pearson's coefficient of two columns, or None where one does not vary."""
    sides = tokens[one].to_numpy(), tokens[other].to_numpy()
    if len(tokens) < 2 or any(np.ptp(side) == 0 for side in sides):
        return None
    return float(np.corrcoef(*sides)[0, 1])
