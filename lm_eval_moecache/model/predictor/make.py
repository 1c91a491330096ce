"""Makes a predictor as CommitMoE's sections 4.2 and 5.1 say: records, trains each layer, judges.

The working folder holds recordings and trained layers under a digest of what they depend on, so
that an interrupted run goes on and another loss uses the same recordings. Shapes: N samples,
D hidden size, E experts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from safetensors import safe_open
from safetensors.numpy import save
from torch import Tensor, nn
from tqdm import tqdm

from lm_eval_moecache.model.checkpoint import model_path
from lm_eval_moecache.model.device import best_device
from lm_eval_moecache.model.moe_layers import describe, find_moe_layers, router_digest
from lm_eval_moecache.model.predictor.accuracy import certainty_rows, judge, layer_rows
from lm_eval_moecache.model.predictor.network import PredictorNetwork, new_network
from lm_eval_moecache.model.predictor.samples import (
    Halves,
    Pairs,
    Samples,
    digest_prompts,
    record,
    top_k,
)
from lm_eval_moecache.model.predictor.training import Best, fit
from lm_eval_moecache.records.artifact import PREDICTOR, Artifact
from lm_eval_moecache.records.files import write_whole
from lm_eval_moecache.records.predictor import array_name, num_stages

Rows = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How to train. The paper gives no batch size, no patience and no most number of epochs."""

    loss: str = "kl"
    learning_rate: float = 5e-5
    halve_every: int = 5
    batch_size: int = 32
    max_epochs: int = 30
    patience: int = 5
    seed: int = 42


def make(
    pretrained: str,
    prompts: Sequence[str],
    work: Path,
    data: Mapping[str, Any],
    *,
    num_tokens: int,
    prompts_per_batch: int,
    recipe: Recipe,
) -> Artifact:
    """Make the predictor of a model; the same arguments give the same bytes, resumed or not.

    `data` says where the prompts come from. What was found on the held-out ones stands in the
    artifact's `made_from`, as the tables `layers` and `certainty`.
    """
    path = model_path(pretrained)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path).eval().to(best_device())
    layers = find_moe_layers(model)
    geometry, routers = describe(model, layers, pretrained), router_digest(layers)
    num_layers, top = geometry.num_layers, geometry.top_k
    settings = {
        "routers": routers,
        "prompts": digest_prompts(prompts),
        "tokens": num_tokens,
        "prompts_per_batch": prompts_per_batch,
    }
    recorded = work / f"recorded-{_digest(settings)}"
    sizes = {"num_tokens": num_tokens, "batch_size": prompts_per_batch}
    samples = Samples(record(model, tokenizer, layers, prompts, recorded, **sizes))
    known, held_out = samples.split(recipe.seed)
    folder = work / f"trained-{_digest(settings | asdict(recipe))}"
    arrays: dict[str, Any] = {}
    trainings: Rows = []
    for layer in tqdm(range(num_layers), desc="training", unit="layer"):
        file = folder / f"{layer:03d}.safetensors"
        if not file.is_file():
            pairs = samples.pairs(layer, num_layers)
            parts = [pairs.where(np.isin(pairs.prompts_N, own)) for own in (known, held_out)]
            for name, part in zip(("training", "held-out"), parts, strict=True):
                if not len(part.prompts_N):
                    raise ValueError(
                        f"prompts: none of the {name} ones gives a sample for layer {layer}. Give "
                        "more prompts, or such as are answered at length."
                    )
            stages = num_stages(layer, num_layers)
            found = train(*parts, stages=stages, num_chosen=top, recipe=recipe, layer=layer)
            write_whole(file, _as_file(found, layer))
        with safe_open(file, "numpy") as trained:
            arrays |= {name: trained.get_tensor(name) for name in trained.keys()}  # noqa: SIM118
            trainings.append(json.loads(trained.metadata()["row"]))
    made_from: dict[str, Any] = {
        **data,
        **asdict(recipe),
        "tokens": num_tokens,
        "prompts": len(prompts),
        "held_out_prompts": len(held_out),
        "samples": len(samples.prompts),
    }
    artifact = Artifact(
        kind=PREDICTOR,
        model=geometry.model,
        num_layers=num_layers,
        num_experts=geometry.num_experts,
        top_k=top,
        router_digest=routers,
        made_from=made_from,
        arrays=arrays,
    )
    network = PredictorNetwork(artifact)
    judged = judge(samples, network, layers, num_chosen=top, known=known, held_out=held_out)
    rows = zip(layer_rows(judged, top), trainings, strict=True)
    made_from["layers"] = [{**row, **training} for row, training in rows]
    made_from["certainty"] = certainty_rows(judged, top)
    return artifact


def _digest(settings: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def _as_file(found: Trained, layer: int) -> bytes:
    """Return a safetensors file of one layer's trained stages, and of how the training went."""
    arrays = {
        array_name(layer, stage, what): array
        for stage, linear in enumerate(found.stages)
        for what, array in zip(("weight", "bias"), linear, strict=True)
    }
    best = found.best
    row = {"epochs": best.epochs, "best_epoch": best.epoch, "loss": best.held_out_loss}
    data: bytes = save(arrays, metadata={"row": json.dumps(row)})
    return data


_CHUNK = 65536


class Trained(NamedTuple):
    """The arrays of one layer's stages, (weight, bias) each, and how the training went."""

    stages: list[tuple[Halves, Halves]]
    best: Best


def train(
    pairs: Pairs, held_out: Pairs, *, stages: int, num_chosen: int, recipe: Recipe, layer: int
) -> Trained:
    """Train one layer's predictor; the same samples, recipe and layer give the same arrays.

    Adam with its learning rate halved every few epochs.
    """
    torch.manual_seed(recipe.seed * 1009 + layer)
    order = torch.Generator().manual_seed(recipe.seed * 1009 + layer)
    network = new_network(pairs.inputs_ND.shape[1], pairs.targets_NE.shape[1], stages)
    inputs, targets = _tensors(pairs, recipe.loss, num_chosen)
    judged = _tensors(held_out, recipe.loss, num_chosen)
    adam = torch.optim.Adam(network.parameters(), lr=recipe.learning_rate)
    halving = torch.optim.lr_scheduler.StepLR(adam, step_size=recipe.halve_every, gamma=0.5)

    def epoch() -> float:
        total = 0.0
        for rows in torch.split(torch.randperm(len(inputs), generator=order), recipe.batch_size):
            loss = _loss(network(inputs[rows].float()), targets[rows], recipe.loss)
            adam.zero_grad()
            torch.autograd.backward(loss)
            adam.step()
            total += float(loss.detach()) * len(rows)
        halving.step()
        return total / len(inputs)

    def held_out_loss() -> float:
        with torch.no_grad():
            parts = [
                float(_loss(network(x.float()), y, recipe.loss)) * len(x)
                for x, y in zip(*(torch.split(values, _CHUNK) for values in judged), strict=True)
            ]
        return sum(parts) / len(judged[0])

    best = fit(network, epoch, held_out_loss, range(recipe.max_epochs), recipe.patience)
    linears = [module for module in network if isinstance(module, nn.Linear)]
    arrays = [
        (linear.weight.detach().half().numpy(), linear.bias.detach().half().numpy())
        for linear in linears
    ]
    return Trained(arrays, best)


def _tensors(pairs: Pairs, loss: str, num_chosen: int) -> tuple[Tensor, Tensor]:
    """Return inputs, and as targets the distribution (`kl`) or the set (`bce`) of the router."""
    inputs = torch.from_numpy(pairs.inputs_ND)
    if loss == "kl":
        return inputs, torch.from_numpy(pairs.targets_NE).float().softmax(-1)
    chosen = np.zeros(pairs.targets_NE.shape, dtype=np.float32)
    np.put_along_axis(chosen, top_k(pairs.targets_NE, num_chosen), 1.0, axis=-1)
    return inputs, torch.from_numpy(chosen)


def _loss(predicted: Tensor, targets: Tensor, loss: str) -> Tensor:
    """Return eq. 4, or the binary cross-entropy of the chosen experts."""
    if loss == "kl":
        return nn.functional.kl_div(predicted.log_softmax(-1), targets, reduction="batchmean")
    return nn.functional.binary_cross_entropy_with_logits(predicted, targets)
