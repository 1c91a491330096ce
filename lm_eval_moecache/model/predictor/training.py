"""Trains predictors: CommitMoE's of each layer's next router, and SiDA's, which reads whole texts.

CommitMoE's follows its sections 4.2 and 5.1: record, train layer by layer, judge. The working
folder holds recordings and trained layers under a digest of what they depend on, so that an
interrupted run resumes and another loss uses the same recordings.

Shapes: N samples (in SiDA's, truncated experts), D hidden size, E experts, B texts of a batch,
T tokens, L layers.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save
from torch import Tensor, nn
from tqdm import tqdm

from lm_eval_moecache.model.checkpoint import load_model
from lm_eval_moecache.model.device import best_device
from lm_eval_moecache.model.moe_layers import MoELayer, describe, find_moe_layers, router_digest
from lm_eval_moecache.model.predictor.network import DataAwareNetwork, PredictorNetwork
from lm_eval_moecache.model.predictor.samples import (
    HELD_OUT_SHARE,
    Halves,
    Pairs,
    Samples,
    certainty_rows,
    generate,
    judge,
    layer_rows,
    record,
    top_k,
)
from lm_eval_moecache.records.artifact import PREDICTOR, Artifact, artifact_of
from lm_eval_moecache.records.files import write_whole
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.predictor import HIDDEN_FACTOR, array_name, num_stages


class Best(NamedTuple):
    """The epoch with the lowest held-out loss, of all `epochs` run."""

    epochs: int
    epoch: int
    held_out_loss: float


def fit(
    network: nn.Module,
    train_epoch: Callable[[], object],
    held_out_loss: Callable[[], float],
    epochs: Iterable[object],
    patience: int,
) -> Best:
    """Train until `patience` epochs bring no improvement; restore the best epoch's weights."""
    best_state: dict[str, Any] = copy.deepcopy(network.state_dict())
    best = Best(0, 0, float("inf"))
    for epoch, _ in enumerate(epochs, start=1):
        train_epoch()
        loss = held_out_loss()
        best = best._replace(epochs=epoch)
        if loss < best.held_out_loss:
            best = Best(epoch, epoch, loss)
            best_state = copy.deepcopy(network.state_dict())
        elif epoch - best.epoch >= patience:
            break
    network.load_state_dict(best_state)
    return best


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Training settings. The paper gives no batch size, patience or maximum number of epochs."""

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
    trust_remote_code: bool = False,
) -> Artifact:
    """Make the predictor of a model; the same arguments give the same bytes, resumed or not.

    `data` names the source of the prompts. The results on the held-out ones are in the artifact's
    `made_from`, as the tables `layers` and `certainty`.
    """
    model, tokenizer = load_model(pretrained, trust_remote_code=trust_remote_code)
    model = model.to(best_device())
    layers = find_moe_layers(model)
    geometry, routers = describe(model, layers, pretrained), router_digest(layers)
    num_layers, top = geometry.num_layers, geometry.top_k
    prompts_hash = hashlib.sha256()
    for prompt in prompts:
        prompts_hash.update(f"{len(prompt)} {prompt}".encode())
    settings = {
        "routers": routers,
        "prompts": prompts_hash.hexdigest(),
        "tokens": num_tokens,
        "prompts_per_batch": prompts_per_batch,
    }
    recordings = work / f"recorded-{_digest(settings)}"
    sizes = {"num_tokens": num_tokens, "batch_size": prompts_per_batch}
    samples = Samples(record(model, tokenizer, layers, prompts, recordings, **sizes))
    known, held_out = samples.split(recipe.seed)
    folder = work / f"trained-{_digest(settings | asdict(recipe))}"
    arrays: dict[str, Any] = {}
    trainings: list[dict[str, Any]] = []
    for layer in tqdm(range(num_layers), desc="training", unit="layer"):
        file = folder / f"{layer:03d}.safetensors"
        if not file.is_file():
            pairs = samples.pairs(layer, num_layers)
            parts = [pairs.where(np.isin(pairs.prompts_N, ids)) for ids in (known, held_out)]
            for name, part in zip(("training", "held-out"), parts, strict=True):
                if not len(part.prompts_N):
                    raise ValueError(
                        f"prompts: none of the {name} ones gives a sample for layer {layer}. Give "
                        "more prompts, or such as are answered at length."
                    )
            stages = num_stages(layer, num_layers)
            weights, best = train(*parts, stages=stages, num_chosen=top, recipe=recipe, layer=layer)
            row = {"epochs": best.epochs, "best_epoch": best.epoch, "loss": best.held_out_loss}
            write_whole(file, save(weights, metadata={"row": json.dumps(row)}))
        with safe_open(file, "numpy") as tensors:
            arrays |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
            trainings.append(json.loads(tensors.metadata()["row"]))
    made_from: dict[str, Any] = {
        **data,
        **asdict(recipe),
        "tokens": num_tokens,
        "prompts": len(prompts),
        "held_out_prompts": len(held_out),
        "samples": len(samples.prompts),
    }
    artifact = artifact_of(PREDICTOR, geometry, routers, made_from, arrays)
    network = PredictorNetwork(artifact)
    judgements = judge(samples, network, layers, num_chosen=top, known=known, held_out=held_out)
    rows = zip(layer_rows(judgements, top), trainings, strict=True)
    made_from["layers"] = [{**row, **training} for row, training in rows]
    made_from["certainty"] = certainty_rows(judgements, top)
    return artifact


def _digest(settings: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


_CHUNK = 65536


def train(
    pairs: Pairs, held_out: Pairs, *, stages: int, num_chosen: int, recipe: Recipe, layer: int
) -> tuple[dict[str, Halves], Best]:
    """Train one layer's predictor; the same samples, recipe and layer give the same arrays.

    Adam, with its learning rate halved every `halve_every` epochs. Returns the arrays by their name
    in the artifact, and the best epoch.
    """
    torch.manual_seed(recipe.seed * 1009 + layer)
    order = torch.Generator().manual_seed(recipe.seed * 1009 + layer)
    hidden, num_experts = pairs.inputs_ND.shape[1], pairs.targets_NE.shape[1]
    widths = [hidden, *[HIDDEN_FACTOR * hidden] * (stages - 1), num_experts]
    linears = [nn.Linear(*sizes) for sizes in pairwise(widths)]
    network = nn.Sequential(*[m for linear in linears for m in (nn.ReLU(), linear)][1:])
    inputs, targets = _tensors(pairs, recipe.loss, num_chosen)
    eval_set = _tensors(held_out, recipe.loss, num_chosen)
    adam = torch.optim.Adam(network.parameters(), lr=recipe.learning_rate)
    halving = torch.optim.lr_scheduler.StepLR(adam, step_size=recipe.halve_every, gamma=0.5)

    def epoch() -> None:
        for rows in torch.split(torch.randperm(len(inputs), generator=order), recipe.batch_size):
            loss = _loss(network(inputs[rows].float()), targets[rows], recipe.loss)
            adam.zero_grad()
            torch.autograd.backward(loss)
            adam.step()
        halving.step()

    def held_out_loss() -> float:
        with torch.no_grad():
            parts = [
                float(_loss(network(x.float()), y, recipe.loss)) * len(x)
                for x, y in zip(*(torch.split(values, _CHUNK) for values in eval_set), strict=True)
            ]
        return sum(parts) / len(eval_set[0])

    best = fit(network, epoch, held_out_loss, range(recipe.max_epochs), recipe.patience)
    arrays: dict[str, Halves] = {}
    for stage, linear in enumerate(linears):
        for part, values in (("weight", linear.weight), ("bias", linear.bias)):
            arrays[array_name(layer, stage, part)] = values.detach().half().numpy()
    return arrays, best


def _tensors(pairs: Pairs, loss: str, num_chosen: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets: the router's distribution (`kl`) or its chosen set (`bce`)."""
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


_IGNORED = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class TextRecipe:
    """Training settings. Each router's `truncate` experts with the largest logits are distilled."""

    width: int = 128
    truncate: int = 30
    hard_weight: float = 0.1
    """Weight of the chosen experts' cross-entropy, added to the distillation loss."""
    learning_rate: float = 1e-3
    batch_size: int = 16
    max_epochs: int = 60
    patience: int = 5
    seed: int = 42


@dataclass(frozen=True, slots=True)
class Text:
    """One text: its tokens [T], and each router's best experts and their logits [T, L, N]."""

    ids: Tensor
    best: Tensor
    logits: Tensor


@torch.no_grad()
def record_texts(
    model: Any,
    tokenizer: Any,
    layers: Sequence[MoELayer],
    prompts: Sequence[str],
    *,
    num_tokens: int,
    batch_size: int,
    truncate: int,
) -> list[Text]:
    """Generate greedily from the prompts, and record the routers' top logits along each text."""
    texts = []
    truncate = min(truncate, layers[0].num_experts)
    layer_logits: list[Tensor] = []

    def keep(layer: MoELayer) -> Any:
        def hook(router: nn.Module, args: Any, output: Any) -> None:
            logits = layer.gate.read(output).logits
            layer_logits.append(logits.reshape(-1, logits.shape[-1]).float())

        return hook

    for start in tqdm(range(0, len(prompts), batch_size), desc="recording", unit="batch"):
        batch = prompts[start : start + batch_size]
        tokens, valid, _ = generate(model, tokenizer, batch, num_tokens)
        handles = [layer.router.register_forward_hook(keep(layer)) for layer in layers]
        for row, is_real in zip(tokens, valid, strict=True):
            layer_logits.clear()
            model(row[is_real][None])
            values, best = torch.stack(layer_logits, dim=1).topk(truncate)
            texts.append(Text(row[is_real].cpu(), best.cpu(), values.cpu()))
        for handle in handles:
            handle.remove()
    return texts


def train_on_texts(
    texts: Sequence[Text], embedding: nn.Module, geometry: Geometry, recipe: TextRecipe
) -> tuple[DataAwareNetwork, dict[str, Any]]:
    """Train until the held-out loss stops falling; the same texts give the same bits.

    Returns the network of the lowest loss, and the training's entry in an artifact: a row per layer
    has the share of the router's top-k that is among the network's, and among the most used experts
    of the training texts.

    The router's distribution over its `truncate` best experts is distilled (SiDA's truncated
    knowledge distillation; how many, and the weight of the hard labels, are our reading).
    """
    torch.manual_seed(recipe.seed)
    texts = [texts[i] for i in np.random.default_rng(recipe.seed).permutation(len(texts))]
    count = max(1, round(HELD_OUT_SHARE * len(texts)))
    if count >= len(texts):
        raise ValueError(f"prompts: {len(texts)} cannot be divided into train and held-out.")
    held_out, known = texts[:count], texts[count:]
    hidden = next(embedding.parameters()).shape[-1]
    sizes = (hidden, recipe.width, geometry.num_layers, geometry.num_experts)
    network, top_k = DataAwareNetwork(*sizes), geometry.top_k
    adam = torch.optim.Adam(network.parameters(), lr=recipe.learning_rate)
    order = np.random.default_rng(recipe.seed)

    def epoch() -> None:
        shuffled = [known[i] for i in order.permutation(len(known))]
        for start in range(0, len(shuffled), recipe.batch_size):
            batch = shuffled[start : start + recipe.batch_size]
            adam.zero_grad()
            loss = _text_loss(network, batch, embedding, top_k, recipe)
            torch.autograd.backward(loss)
            adam.step()

    @torch.no_grad()
    def held_out_loss() -> float:
        starts = range(0, len(held_out), recipe.batch_size)
        parts = [held_out[start : start + recipe.batch_size] for start in starts]
        tokens = [sum(len(text.ids) for text in part) for part in parts]
        losses = [float(_text_loss(network, part, embedding, top_k, recipe)) for part in parts]
        return float(np.average(losses, weights=tokens))

    epochs = tqdm(range(recipe.max_epochs), desc="training", unit="epoch")
    best = fit(network, epoch, held_out_loss, epochs, recipe.patience)
    # Judged as stored, in float16.
    network.load_state_dict({k: value.half().float() for k, value in network.state_dict().items()})
    layers = _recalls(network.eval(), known, held_out, embedding, top_k)
    summary = {"epochs": best.epochs, "held_out_loss": best.held_out_loss, "layers": layers}
    return network, summary


def _text_loss(
    network: DataAwareNetwork,
    batch: Sequence[Text],
    embedding: nn.Module,
    top_k: int,
    recipe: TextRecipe,
) -> Tensor:
    """Return the mean over tokens and layers: truncated distillation and weighted hard labels."""

    def padded(values: list[Tensor], filler: int) -> Tensor:
        return nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=filler)

    ids = padded([text.ids for text in batch], 0)
    best = padded([text.best for text in batch], _IGNORED)
    teacher = padded([text.logits for text in batch], 0)
    with torch.no_grad():
        embedded = embedding(ids)
    # Padding follows the text, where a causal network never looks.
    logits_BTLE = network(embedded)[0]
    is_real = best[..., 0] != _IGNORED
    best, teacher, student = best[is_real], teacher[is_real], logits_BTLE[is_real]
    soft = nn.functional.kl_div(
        student.gather(-1, best).log_softmax(-1), teacher.softmax(-1), reduction="batchmean"
    )
    hard = -student.log_softmax(-1).gather(-1, best[:, :top_k]).mean()
    total: Tensor = soft + recipe.hard_weight * hard
    return total


@torch.no_grad()
def _recalls(
    network: DataAwareNetwork,
    known: Sequence[Text],
    held_out: Sequence[Text],
    embedding: nn.Module,
    top_k: int,
) -> list[dict[str, Any]]:
    """Return per layer the share of the router's choices that network and frequencies name."""
    true = torch.cat([text.best[..., :top_k] for text in held_out])
    predicted = [network(embedding(text.ids[None]))[0][0].topk(top_k).indices for text in held_out]
    chosen = torch.cat([text.best[..., :top_k] for text in known])
    num_experts = network.per_layer[1]
    counts = torch.stack(
        [torch.bincount(own.flatten(), minlength=num_experts) for own in chosen.unbind(1)]
    )
    most_used = counts.argsort(dim=-1, descending=True, stable=True)[None, :, :top_k]
    shares = []
    for named_experts in (torch.cat(predicted), most_used.expand_as(true)):
        right_TLK = (named_experts[..., :, None] == true[..., None, :]).any(-2).float()
        shares.append(right_TLK.mean(-1).mean(0).tolist())
    rows = enumerate(zip(*shares, strict=True))
    return [{"layer": n, "data_aware": own, "frequency": frequent} for n, (own, frequent) in rows]
