"""Trains predictors: CommitMoE's of each layer's next router, and SiDA's, which reads whole texts.

Both learn by one loop from what a model wrote to prompts; a fifth of the prompts is held out, and
CommitMoE's are judged by them. The same prompts, recipe and seed give the same arrays.

Shapes: N recorded tokens (in SiDA's, truncated experts), D hidden size, E experts, K chosen per
token, B texts of a batch, T tokens of a text, L layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from tqdm import tqdm

from lm_eval_moecache.algorithms.learned.predictor import HIDDEN_FACTOR, array_name, num_stages
from lm_eval_moecache.model.device import device_of
from lm_eval_moecache.model.moe_layers import MoELayer
from lm_eval_moecache.model.predictor.network import DataAwareNetwork, Embed, PredictorNetwork
from lm_eval_moecache.model.reading import watched
from lm_eval_moecache.records.arrays import BoolArray, FloatArray, IntArray, softmax
from lm_eval_moecache.records.geometry import Geometry

HELD_OUT_SHARE = 0.2
MAX_PROMPT_TOKENS = 2048
Halves = npt.NDArray[np.float16]


class Answer(NamedTuple):
    """A prompt and what the model wrote after it, up to its end token, as its routers read it."""

    tokens: Tensor
    """[T]"""
    begin: int
    """The index of the first token that the model wrote."""
    hidden: list[Tensor]
    """Each router's inputs [T, D]."""
    logits: list[Tensor]
    """Each router's logits [T, E]."""


@torch.no_grad()
def answers(
    model: Any,
    tokenizer: Any,
    layers: Sequence[MoELayer],
    prompts: Sequence[str],
    *,
    num_tokens: int,
    batch_size: int,
) -> Iterator[Answer]:
    """Generate greedily from the prompts, and read each text once more; one by one, to be cut."""
    hidden, logits = list[Tensor](), list[Tensor]()

    def note(layer: int, args: Any, output: Any) -> None:
        for captured, values in (
            (hidden, args[0]),
            (logits, layers[layer].gate.read(output).logits),
        ):
            captured.append(values.detach().reshape(-1, values.shape[-1]).float().cpu())

    for start in tqdm(range(0, len(prompts), batch_size), desc="recording", unit="batch"):
        batch = prompts[start : start + batch_size]
        for tokens, begin in generate(model, tokenizer, batch, num_tokens):
            hidden.clear()
            logits.clear()
            with watched([layer.router for layer in layers], note):
                model(tokens[None])
            yield Answer(tokens.cpu(), begin, [*hidden], [*logits])


def generate(
    model: Any, tokenizer: Any, prompts: Sequence[str], num_tokens: int
) -> Iterator[tuple[Tensor, int]]:
    """Generate greedily; yield each prompt with its answer up to the end token, and its length."""
    # The question stands at the end of a prompt, so the beginning is cut.
    tokenizer.padding_side = tokenizer.truncation_side = "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    encoded = tokenizer(
        list(prompts),
        return_tensors="pt",
        padding=True,
        truncation=True,
        max_length=MAX_PROMPT_TOKENS,
        return_token_type_ids=False,
    ).to(device_of(model))
    rows = model.generate(
        **encoded,
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
    )
    begin = encoded.input_ids.shape[1]
    ends = model.generation_config.eos_token_id
    ends = torch.tensor(ends if isinstance(ends, list) else [ends], device=rows.device)
    alive = torch.isin(rows[:, begin:], ends).int().cumsum(1).eq(0)
    prompt_mask = encoded.attention_mask.bool()
    is_real = torch.cat([prompt_mask, alive], dim=1)
    for row, real, mask in zip(rows, is_real, prompt_mask, strict=True):
        yield row[real], int(mask.sum())


def check_routers(layers: Sequence[MoELayer]) -> None:
    """Raise ValueError for a router that no predictor of its inputs can follow."""
    for gate in (layer.gate for layer in layers if layer.gate.by_token):
        raise ValueError(
            f"predictor: the router {gate.name} chooses by token ids, which a predictor that reads "
            "hidden states does not see. Allowed: moecache profile data_aware."
        )


def split(prompts: IntArray, seed: int) -> tuple[IntArray, IntArray]:
    """Divide prompts 80/20, so that no token of a held-out one is trained on."""
    prompts = np.random.default_rng(seed).permutation(prompts)
    held_out = max(1, round(HELD_OUT_SHARE * len(prompts)))
    if held_out >= len(prompts):
        raise ValueError(f"prompts: {len(prompts)} cannot be divided into train and held-out.")
    return np.sort(prompts[held_out:]), np.sort(prompts[:held_out])


@dataclass(frozen=True, slots=True)
class Pairs:
    """The training pairs of one layer's predictor: its inputs and its target logits."""

    inputs_ND: Halves
    targets_NE: Halves
    prompts_N: IntArray

    def where(self, rows: BoolArray) -> Pairs:
        """Return the pairs marked in `rows` [N]."""
        return Pairs(self.inputs_ND[rows], self.targets_NE[rows], self.prompts_N[rows])


@dataclass(frozen=True, slots=True)
class Samples:
    """The recorded tokens of all answers, prompt after prompt, by layer."""

    hidden: Sequence[Halves]
    logits: Sequence[Halves]
    prompts: IntArray
    """Which prompt each token answers [N]."""

    @classmethod
    def of(cls, recorded: Iterable[Answer]) -> Samples:
        """Keep the passes over the tokens that a model wrote, in half precision."""
        kept = [
            [[part[answer.begin :].half().numpy() for part in parts] for parts in answer[2:]]
            for answer in recorded
        ]
        lengths = [len(hidden[0]) for hidden, _ in kept]
        if not sum(lengths):
            raise ValueError("every answer ended at once: there is nothing to learn from.")
        hidden, logits = (
            [np.concatenate(parts) for parts in zip(*by_prompt, strict=True)]
            for by_prompt in zip(*kept, strict=True)
        )
        return cls(hidden, logits, np.repeat(np.arange(len(kept)), lengths))

    def pairs(self, layer: int) -> Pairs:
        """Return a layer's pairs; the target is the next layer, or layer 0 of the next token."""
        target = (layer + 1) % len(self.hidden)
        inputs, logits = self.hidden[layer], self.logits[target]
        if target > 0:
            return Pairs(inputs, logits, self.prompts)
        follows = self.prompts[1:] == self.prompts[:-1]
        return Pairs(inputs[:-1][follows], logits[1:][follows], self.prompts[:-1][follows])


# --- the loop ---

Trained = tuple[dict[str, Any], dict[str, Any]]
"""A predictor's arrays, and what an artifact says of its training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """CommitMoE's training. The paper gives no batch size, patience or maximum number of epochs."""

    loss: str = "kl"
    learning_rate: float = 5e-5
    halve_every: int = 5
    batch_size: int = 32
    max_epochs: int = 30
    patience: int = 5
    seed: int = 42


@dataclass(frozen=True, kw_only=True, slots=True)
class TextRecipe:
    """SiDA's training. Each router's `truncate` experts with the largest logits are distilled."""

    width: int = 128
    truncate: int = 30
    hard_weight: float = 0.1
    """Weight of the chosen experts' cross-entropy, added to the distillation loss."""
    learning_rate: float = 1e-3
    batch_size: int = 16
    max_epochs: int = 60
    patience: int = 5
    seed: int = 42


class Best(NamedTuple):
    """The epoch with the lowest held-out loss, of all `epochs` run."""

    epochs: int
    epoch: int
    held_out_loss: float


Loss = Callable[[Any, Tensor], tuple[Tensor, int]]
"""(examples, numbers of some) -> their mean loss, and how many it is the mean of."""
_JUDGED_AT_ONCE = 65536


def fit(
    network: nn.Module,
    loss_of: Loss,
    known: Sized,
    held_out: Sized,
    recipe: Recipe | TextRecipe,
    seed: int,
) -> Best:
    """Train by Adam until `patience` epochs bring no improvement; restore the best epoch's weights.

    The learning rate is halved every `halve_every` epochs of a recipe that says so.
    """
    order = torch.Generator().manual_seed(seed)
    adam = torch.optim.Adam(network.parameters(), lr=recipe.learning_rate)
    every = recipe.halve_every if isinstance(recipe, Recipe) else recipe.max_epochs
    halving = torch.optim.lr_scheduler.StepLR(adam, step_size=every, gamma=0.5)
    best, best_state = Best(0, 0, float("inf")), copy.deepcopy(network.state_dict())
    at_once = _JUDGED_AT_ONCE if isinstance(recipe, Recipe) else recipe.batch_size
    for epoch in range(1, recipe.max_epochs + 1):
        for rows in torch.split(torch.randperm(len(known), generator=order), recipe.batch_size):
            adam.zero_grad()
            torch.autograd.backward(loss_of(known, rows)[0])
            adam.step()
        halving.step()
        with torch.no_grad():
            judged = torch.split(torch.arange(len(held_out)), at_once)
            parts = [loss_of(held_out, rows) for rows in judged]
        loss = sum(float(part) * num for part, num in parts) / sum(num for _, num in parts)
        best = best._replace(epochs=epoch)
        if loss < best.held_out_loss:
            best, best_state = Best(epoch, epoch, loss), copy.deepcopy(network.state_dict())
        elif epoch - best.epoch >= recipe.patience:
            break
    network.load_state_dict(best_state)
    return best


# --- CommitMoE's predictors, sections 4.2 and 5.1: one for each layer ---


def train_layers(
    recorded: Iterable[Answer],
    model: Any,
    layers: Sequence[MoELayer],
    geometry: Geometry,
    recipe: Recipe,
) -> Trained:
    """Train and judge the predictor of every layer."""
    check_routers(layers)
    samples = Samples.of(recorded)
    known, held_out = split(np.unique(samples.prompts), recipe.seed)
    top, num_layers = geometry.top_k, geometry.num_layers
    arrays: dict[str, Any] = {}
    trainings = []
    for layer in tqdm(range(num_layers), desc="training", unit="layer"):
        pairs = samples.pairs(layer)
        parts = [pairs.where(np.isin(pairs.prompts_N, ids)) for ids in (known, held_out)]
        for name, part in zip(("training", "held-out"), parts, strict=True):
            if not len(part.prompts_N):
                raise ValueError(
                    f"prompts: none of the {name} ones gives a sample for layer {layer}. Give more "
                    "prompts, or such as are answered at length."
                )
        stages = num_stages(layer, num_layers)
        weights, best = train(*parts, stages=stages, num_chosen=top, recipe=recipe, layer=layer)
        arrays |= weights
        row = {"epochs": best.epochs, "best_epoch": best.epoch, "loss": best.held_out_loss}
        trainings.append(row)
    network = PredictorNetwork(arrays, num_layers)
    judgements = judge(samples, network, layers, num_chosen=top, known=known, held_out=held_out)
    rows = zip(layer_rows(judgements, top), trainings, strict=True)
    return arrays, {
        "held_out_prompts": len(held_out),
        "samples": len(samples.prompts),
        "layers": [{**row, **training} for row, training in rows],
        "certainty": certainty_rows(judgements, top),
    }


def train(
    pairs: Pairs, held_out: Pairs, *, stages: int, num_chosen: int, recipe: Recipe, layer: int
) -> tuple[dict[str, Halves], Best]:
    """Train one layer's predictor; return its arrays by their name in the artifact."""
    seed = recipe.seed * 1009 + layer
    torch.manual_seed(seed)
    hidden, num_experts = pairs.inputs_ND.shape[1], pairs.targets_NE.shape[1]
    widths = [hidden, *[HIDDEN_FACTOR * hidden] * (stages - 1), num_experts]
    linears = [nn.Linear(*sizes) for sizes in pairwise(widths)]
    network = nn.Sequential(*[m for linear in linears for m in (nn.ReLU(), linear)][1:])

    def loss_of(some: TensorDataset, rows: Tensor) -> tuple[Tensor, int]:
        inputs, targets = some[rows]
        return _loss(network(inputs.float()), targets, recipe.loss), len(rows)

    known, tested = (_examples(some, recipe.loss, num_chosen) for some in (pairs, held_out))
    best = fit(network, loss_of, known, tested, recipe, seed)
    arrays: dict[str, Halves] = {}
    for stage, linear in enumerate(linears):
        for part, values in (("weight", linear.weight), ("bias", linear.bias)):
            arrays[array_name(layer, stage, part)] = values.detach().half().numpy()
    return arrays, best


def _examples(pairs: Pairs, loss: str, num_chosen: int) -> TensorDataset:
    """Return inputs and targets: the router's distribution (`kl`) or its chosen set (`bce`)."""
    inputs = torch.from_numpy(pairs.inputs_ND)
    if loss == "kl":
        return TensorDataset(inputs, torch.from_numpy(pairs.targets_NE).float().softmax(-1))
    chosen = np.zeros(pairs.targets_NE.shape, dtype=np.float32)
    np.put_along_axis(chosen, top_k(pairs.targets_NE, num_chosen), 1.0, axis=-1)
    return TensorDataset(inputs, torch.from_numpy(chosen))


def _loss(predicted: Tensor, targets: Tensor, loss: str) -> Tensor:
    """Return eq. 4, or the binary cross-entropy of the chosen experts."""
    if loss == "kl":
        return nn.functional.kl_div(predicted.log_softmax(-1), targets, reduction="batchmean")
    return nn.functional.binary_cross_entropy_with_logits(predicted, targets)


# --- how well CommitMoE's do ---


def top_k(logits_NE: FloatArray | Halves, count: int) -> IntArray:
    """Return the `count` best experts of each row, best first, ties to the smaller index."""
    return np.argsort(-logits_NE.astype(np.float32), axis=-1, kind="stable")[:, :count]


PREDICTOR, NEXT_GATE, FREQUENCY = "predictor", "next_gate", "frequency"


def certainty(logits_NE: FloatArray | Halves) -> FloatArray:
    """Return the KL divergence of each row's softmax from the uniform distribution, in nats."""
    shares = softmax(logits_NE.astype(np.float32)).astype(np.float64)
    terms = np.where(shares > 0, shares * np.log(np.maximum(shares, 1e-300) * shares.shape[1]), 0.0)
    return np.asarray(terms.sum(axis=-1), dtype=np.float32)


def count_right(predicted_NK: IntArray, true_NK: IntArray) -> IntArray:
    """Return how many of each row's true experts were predicted: k times eq. 3."""
    matches = (predicted_NK[:, :, None] == true_NK[:, None, :]).any(axis=-1)
    return np.asarray(matches.sum(axis=-1), dtype=np.int64)


def judge(
    samples: Samples,
    network: PredictorNetwork,
    layers: Sequence[MoELayer],
    *,
    num_chosen: int,
    known: IntArray,
    held_out: IntArray,
) -> pd.DataFrame:
    """Judge all layers on the held-out prompts; expert frequencies come from the known ones.

    Returns a row a token and layer: `layer`, `target` and `prompt`; how many of the token's K
    experts `predictor`, `next_gate` and `frequency` named; whether the predictor's likeliest is the
    router's (`first`, 0 or 1); `certainty`, the KL divergence of the target router's softmax from
    uniform, in nats; `gap`, the logit difference between its last chosen expert and the next one.
    """
    frames = []
    for layer in range(len(layers)):
        pairs = samples.pairs(layer)
        target = (layer + 1) % len(layers)
        test = pairs.where(np.isin(pairs.prompts_N, held_out))
        train = pairs.where(np.isin(pairs.prompts_N, known))
        true, inputs = top_k(test.targets_NE, num_chosen), torch.from_numpy(test.inputs_ND)
        predicted = top_k(network(layer, inputs).numpy(), num_chosen)
        gate = layers[target].gate
        with torch.no_grad():
            gate_logits = gate.predict(inputs.to(gate.dtype)).float().cpu().numpy()
        counts = np.bincount(
            top_k(train.targets_NE, num_chosen).ravel(), minlength=pairs.targets_NE.shape[1]
        )
        frequent = np.argsort(-counts, kind="stable")[:num_chosen]
        sorted_logits = -np.sort(-test.targets_NE.astype(np.float32), axis=-1)
        runner_up = sorted_logits[:, min(num_chosen, sorted_logits.shape[1] - 1)]
        columns = {
            "layer": layer,
            "target": target,
            "prompt": test.prompts_N,
            PREDICTOR: count_right(predicted, true),
            NEXT_GATE: count_right(top_k(gate_logits, num_chosen), true),
            FREQUENCY: count_right(np.broadcast_to(frequent, true.shape), true),
            "first": (predicted[:, 0] == true[:, 0]).astype(np.int64),
            "certainty": certainty(test.targets_NE),
            "gap": sorted_logits[:, num_chosen - 1] - runner_up,
        }
        frames.append(pd.DataFrame(columns))
    return pd.concat(frames, ignore_index=True)


def layer_rows(judged: pd.DataFrame, num_chosen: int) -> list[dict[str, Any]]:
    """Return one row per layer: the share of the target's experts that each predictor names."""
    names = (PREDICTOR, NEXT_GATE, FREQUENCY)
    return [
        {"layer": layer, "target": target, "tokens": len(tokens)}
        | {name: float(tokens[name].mean()) / num_chosen for name in names}
        for (layer, target), tokens in judged.groupby(["layer", "target"])
    ]


def certainty_rows(judged: pd.DataFrame, num_chosen: int) -> list[dict[str, Any]]:
    """Return one row for each number of rightly predicted experts (Figure 2)."""
    rows = []
    for count in range(num_chosen + 1):
        certainties = judged["certainty"][judged[PREDICTOR] == count].to_numpy()
        rows.append(
            {
                "right": count,
                "accuracy": count / num_chosen,
                "tokens": len(certainties),
                "share": len(certainties) / len(judged),
                "certainty": float(certainties.mean()) if len(certainties) else None,
            }
        )
    return rows


# --- SiDA's predictor: one network for all layers ---

_IGNORED = -1


class Text(NamedTuple):
    """One text: its tokens [T], and each router's best experts and their logits [T, L, N]."""

    ids: Tensor
    best: Tensor
    logits: Tensor


def train_on_texts(
    recorded: Iterable[Answer],
    model: Any,
    layers: Sequence[MoELayer],
    geometry: Geometry,
    recipe: TextRecipe,
) -> Trained:
    """Train SiDA's network; a row per layer tells how much of the router's top-k it names.

    Beside it, how much the most used experts of the training texts do. The router's distribution
    over its `truncate` best experts is distilled (SiDA's truncated knowledge distillation; how
    many, and the weight of the hard labels, are our reading).
    """
    torch.manual_seed(recipe.seed)
    truncate, texts = min(max(recipe.truncate, geometry.top_k), geometry.num_experts), []
    for answer in recorded:
        values, best = torch.stack(answer.logits, dim=1).topk(truncate)
        texts.append(Text(answer.tokens, best, values))
    known, held_out = (
        [texts[number] for number in numbers]
        for numbers in split(np.arange(len(texts)), recipe.seed)
    )
    embedding = model.get_input_embeddings()
    table = next(embedding.parameters())

    @torch.no_grad()
    def embed(ids: Tensor) -> Tensor:
        vectors: Tensor = embedding(ids.to(table.device))
        return vectors.float().cpu()

    sizes = (table.shape[-1], recipe.width, geometry.num_layers, geometry.num_experts)
    network, top = DataAwareNetwork(*sizes), geometry.top_k

    def loss_of(some: Sequence[Text], rows: Tensor) -> tuple[Tensor, int]:
        batch = [some[row] for row in rows.tolist()]
        loss = _text_loss(network, batch, embed, top, recipe)
        return loss, sum(len(text.ids) for text in batch)

    best_epoch = fit(network, loss_of, known, held_out, recipe, recipe.seed)
    # Judged as stored, in float16.
    arrays = {name: value.half() for name, value in network.state_dict().items()}
    network.load_state_dict({name: value.float() for name, value in arrays.items()})
    rows = _recalls(network.eval(), known, held_out, embed, top)
    return {name: value.numpy() for name, value in arrays.items()}, {
        "tokens": sum(len(text.ids) for text in texts),
        "epochs": best_epoch.epochs,
        "held_out_loss": best_epoch.held_out_loss,
        "layers": rows,
    }


def _text_loss(
    network: DataAwareNetwork,
    batch: Sequence[Text],
    embed: Embed,
    top_k: int,
    recipe: TextRecipe,
) -> Tensor:
    """Return the mean over tokens and layers: truncated distillation and weighted hard labels."""

    def padded(values: list[Tensor], filler: int) -> Tensor:
        return nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=filler)

    ids = padded([text.ids for text in batch], 0)
    best = padded([text.best for text in batch], _IGNORED)
    teacher = padded([text.logits for text in batch], 0)
    # Padding follows the text, where a causal network never looks.
    logits_BTLE = network(embed(ids))[0]
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
    embed: Embed,
    top_k: int,
) -> list[dict[str, Any]]:
    """Return per layer the share of the router's choices that network and frequencies name."""
    true = torch.cat([text.best[..., :top_k] for text in held_out])
    predicted = [network(embed(text.ids[None]))[0][0].topk(top_k).indices for text in held_out]
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
