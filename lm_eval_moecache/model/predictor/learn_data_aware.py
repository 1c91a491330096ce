"""Trains the data-aware network on what routers chose along whole texts.

Shapes: B texts of a batch, T tokens, L layers, E experts, N truncated experts.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from lm_eval_moecache.model.moe_layers import MoELayer
from lm_eval_moecache.model.predictor.data_aware import DataAwareNetwork
from lm_eval_moecache.model.predictor.samples import HELD_OUT_SHARE, MAX_PROMPT_TOKENS
from lm_eval_moecache.records.geometry import Geometry

_IGNORED = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How to train. `truncate` experts of each router are distilled, those with most logit."""

    width: int = 128
    truncate: int = 30
    hard_weight: float = 0.1
    """Of the cross-entropy of the chosen experts, beside the distillation."""
    learning_rate: float = 1e-3
    batch_size: int = 16
    max_epochs: int = 60
    patience: int = 5
    seed: int = 42


@dataclass(frozen=True, slots=True)
class Text:
    """One text: its tokens [T], and of each router the best experts and their logits [T, L, N]."""

    ids: Tensor
    best: Tensor
    logits: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """The network with the least held-out loss, and how often it names what is chosen."""

    network: DataAwareNetwork
    epochs: int
    held_out_loss: float
    recall: list[float]
    """Of each layer: share of the router's top-k among the network's, held-out texts."""
    frequency: list[float]
    """The same for the most used experts of the texts trained on."""

    def told(self) -> dict[str, Any]:
        """Return what an artifact says of the training, with one row a layer."""
        shares = enumerate(zip(self.recall, self.frequency, strict=True))
        rows = [{"layer": n, "data_aware": own, "frequency": most} for n, (own, most) in shares]
        return {"epochs": self.epochs, "held_out_loss": self.held_out_loss, "layers": rows}


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
    """Let the model answer the prompts greedily and note its routers' logits along each text."""
    found = []
    truncate = min(truncate, layers[0].num_experts)
    for start in tqdm(range(0, len(prompts), batch_size), desc="recording", unit="batch"):
        batch = prompts[start : start + batch_size]
        for ids in _answered(model, tokenizer, batch, num_tokens):
            seen: list[Tensor] = []
            handles = [layer.router.register_forward_hook(_keep(layer, seen)) for layer in layers]
            model(ids[None])
            for handle in handles:
                handle.remove()
            values, best = torch.stack(seen, dim=1).topk(truncate)
            found.append(Text(ids.cpu(), best.cpu(), values.cpu()))
    return found


def _keep(layer: MoELayer, seen: list[Tensor]) -> Any:
    def hook(router: nn.Module, args: Any, output: Any) -> None:
        logits = layer.gate.read(output).logits
        seen.append(logits.reshape(-1, logits.shape[-1]).float())

    return hook


def _answered(model: Any, tokenizer: Any, prompts: Sequence[str], num_tokens: int) -> list[Tensor]:
    """Return each prompt's tokens with those of its answer, up to the end token."""
    # The end of a prompt is what it asks.
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
    ).to(model.device)
    output = model.generate(
        **encoded,
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
    )
    ends = model.generation_config.eos_token_id
    ends = torch.tensor(ends if isinstance(ends, list) else [ends], device=output.device)
    answers = output[:, encoded.input_ids.shape[1] :]
    alive = torch.isin(answers, ends).int().cumsum(1).eq(0)
    real = torch.cat([encoded.attention_mask.bool(), alive], dim=1)
    return [row[own] for row, own in zip(output, real, strict=True)]


def train(
    texts: Sequence[Text], embedding: nn.Module, geometry: Geometry, recipe: Recipe
) -> Trained:
    """Train until the loss of held-out texts has stopped to fall; the same texts, the same bits.

    Distilled is the router's distribution over its `truncate` best experts (SiDA's truncated
    knowledge distillation; how many, and the weight of the hard labels, are our reading).
    """
    torch.manual_seed(recipe.seed)
    texts = [texts[i] for i in np.random.default_rng(recipe.seed).permutation(len(texts))]
    held_out, known = _split(texts)
    hidden = next(embedding.parameters()).shape[-1]
    sizes = (hidden, recipe.width, geometry.num_layers, geometry.num_experts)
    network = DataAwareNetwork(*sizes)
    return _fit(network, known, held_out, embedding, geometry.top_k, recipe)


def _split(texts: Sequence[Text]) -> tuple[Sequence[Text], Sequence[Text]]:
    count = max(1, round(HELD_OUT_SHARE * len(texts)))
    if count >= len(texts):
        raise ValueError(f"prompts: {len(texts)} cannot be divided into train and held-out.")
    return texts[:count], texts[count:]


def _fit(
    network: DataAwareNetwork,
    known: Sequence[Text],
    held_out: Sequence[Text],
    embedding: nn.Module,
    top_k: int,
    recipe: Recipe,
) -> Trained:
    adam = torch.optim.Adam(network.parameters(), lr=recipe.learning_rate)
    order = np.random.default_rng(recipe.seed)
    best, since, epochs, kept = float("inf"), 0, 0, copy.deepcopy(network.state_dict())
    for _ in tqdm(range(recipe.max_epochs), desc="training", unit="epoch"):
        epochs += 1
        shuffled = [known[i] for i in order.permutation(len(known))]
        for start in range(0, len(shuffled), recipe.batch_size):
            batch = shuffled[start : start + recipe.batch_size]
            adam.zero_grad()
            torch.autograd.backward(_loss(network, batch, embedding, top_k, recipe))
            adam.step()
        loss = _mean_loss(network, held_out, embedding, top_k, recipe)
        if loss < best:
            best, since, kept = loss, 0, copy.deepcopy(network.state_dict())
        elif (since := since + 1) >= recipe.patience:
            break
    # What is judged is what is stored: halves.
    network.load_state_dict({name: value.half().float() for name, value in kept.items()})
    return Trained(
        network=network.eval(),
        epochs=epochs,
        held_out_loss=best,
        recall=_recall(network, held_out, embedding, top_k),
        frequency=_frequency(known, held_out, top_k, network.per_layer[1]),
    )


def _loss(
    network: DataAwareNetwork,
    batch: Sequence[Text],
    embedding: nn.Module,
    top_k: int,
    recipe: Recipe,
) -> Tensor:
    """Return the mean over tokens and layers: truncated distillation and weighted hard labels."""

    def padded(values: list[Tensor], filler: int) -> Tensor:
        return nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=filler)

    ids = padded([text.ids for text in batch], 0)
    best = padded([text.best for text in batch], _IGNORED)
    teacher = padded([text.logits for text in batch], 0)
    with torch.no_grad():
        embedded = embedding(ids)
    # Padding stands behind the text, which a causal network never looks at.
    logits_BTLE = network(embedded)[0]
    real = best[..., 0] != _IGNORED
    best, teacher, student = best[real], teacher[real], logits_BTLE[real]
    soft = nn.functional.kl_div(
        student.gather(-1, best).log_softmax(-1), teacher.softmax(-1), reduction="batchmean"
    )
    hard = -student.log_softmax(-1).gather(-1, best[:, :top_k]).mean()
    total: Tensor = soft + recipe.hard_weight * hard
    return total


@torch.no_grad()
def _mean_loss(
    network: DataAwareNetwork,
    texts: Sequence[Text],
    embedding: nn.Module,
    top_k: int,
    recipe: Recipe,
) -> float:
    starts = range(0, len(texts), recipe.batch_size)
    parts = [texts[start : start + recipe.batch_size] for start in starts]
    tokens = [sum(len(text.ids) for text in part) for part in parts]
    losses = [float(_loss(network, part, embedding, top_k, recipe)) for part in parts]
    return float(np.average(losses, weights=tokens))


@torch.no_grad()
def _recall(
    network: DataAwareNetwork, texts: Sequence[Text], embedding: nn.Module, top_k: int
) -> list[float]:
    shares = []
    for text in texts:
        named = network(embedding(text.ids[None]))[0][0].topk(top_k).indices
        shares.append(_shared(named, text.best[..., :top_k]))
    found: list[float] = torch.cat(shares).mean(0).tolist()
    return found


def _frequency(
    known: Sequence[Text], texts: Sequence[Text], top_k: int, num_experts: int
) -> list[float]:
    chosen = torch.cat([text.best[..., :top_k] for text in known])
    counts = torch.stack(
        [torch.bincount(own.flatten(), minlength=num_experts) for own in chosen.unbind(1)]
    )
    most = counts.argsort(dim=-1, descending=True, stable=True)[None, :, :top_k]
    true = torch.cat([text.best[..., :top_k] for text in texts])
    found: list[float] = _shared(most.expand_as(true), true).mean(0).tolist()
    return found


def _shared(named: Tensor, true: Tensor) -> Tensor:
    """Return which share of the true experts [T, L, K] were named: [T, L]."""
    return (named[..., :, None] == true[..., None, :]).any(-2).float().mean(-1)
