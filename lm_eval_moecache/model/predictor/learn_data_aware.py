"""Trains the data-aware network on what routers chose along whole texts.

Shapes: B texts of a batch, T tokens, L layers, E experts, N truncated experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from lm_eval_moecache.model.moe_layers import MoELayer
from lm_eval_moecache.model.predictor.network import DataAwareNetwork
from lm_eval_moecache.model.predictor.samples import HELD_OUT_SHARE, generate
from lm_eval_moecache.model.predictor.training import fit
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
    seen: list[Tensor] = []

    def keep(layer: MoELayer) -> Any:
        def hook(router: nn.Module, args: Any, output: Any) -> None:
            logits = layer.gate.read(output).logits
            seen.append(logits.reshape(-1, logits.shape[-1]).float())

        return hook

    for start in tqdm(range(0, len(prompts), batch_size), desc="recording", unit="batch"):
        batch = prompts[start : start + batch_size]
        answered, real, _ = generate(model, tokenizer, batch, num_tokens)
        handles = [layer.router.register_forward_hook(keep(layer)) for layer in layers]
        for row, own in zip(answered, real, strict=True):
            seen.clear()
            model(row[own][None])
            values, best = torch.stack(seen, dim=1).topk(truncate)
            found.append(Text(row[own].cpu(), best.cpu(), values.cpu()))
        for handle in handles:
            handle.remove()
    return found


def train(
    texts: Sequence[Text], embedding: nn.Module, geometry: Geometry, recipe: Recipe
) -> Trained:
    """Train until the loss of held-out texts has stopped to fall; the same texts, the same bits.

    Distilled is the router's distribution over its `truncate` best experts (SiDA's truncated
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

    def epoch() -> float:
        shuffled, losses = [known[i] for i in order.permutation(len(known))], []
        for start in range(0, len(shuffled), recipe.batch_size):
            batch = shuffled[start : start + recipe.batch_size]
            adam.zero_grad()
            loss = _loss(network, batch, embedding, top_k, recipe)
            torch.autograd.backward(loss)
            adam.step()
            losses.append(float(loss.detach()))
        return float(np.mean(losses))

    @torch.no_grad()
    def held_out_loss() -> float:
        starts = range(0, len(held_out), recipe.batch_size)
        parts = [held_out[start : start + recipe.batch_size] for start in starts]
        tokens = [sum(len(text.ids) for text in part) for part in parts]
        losses = [float(_loss(network, part, embedding, top_k, recipe)) for part in parts]
        return float(np.average(losses, weights=tokens))

    epochs = tqdm(range(recipe.max_epochs), desc="training", unit="epoch")
    best = fit(network, epoch, held_out_loss, epochs, recipe.patience)
    # What is judged is what is stored: halves.
    network.load_state_dict({k: value.half().float() for k, value in network.state_dict().items()})
    return Trained(
        network=network.eval(),
        epochs=best.epochs,
        held_out_loss=best.held_out_loss,
        **_recalls(network, known, held_out, embedding, top_k),
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
def _recalls(
    network: DataAwareNetwork,
    known: Sequence[Text],
    held_out: Sequence[Text],
    embedding: nn.Module,
    top_k: int,
) -> dict[str, list[float]]:
    """Return which share of the routers' choices both name, layer by layer."""
    true = torch.cat([text.best[..., :top_k] for text in held_out])
    named = [network(embedding(text.ids[None]))[0][0].topk(top_k).indices for text in held_out]
    chosen = torch.cat([text.best[..., :top_k] for text in known])
    num_experts = network.per_layer[1]
    counts = torch.stack(
        [torch.bincount(own.flatten(), minlength=num_experts) for own in chosen.unbind(1)]
    )
    most = counts.argsort(dim=-1, descending=True, stable=True)[None, :, :top_k]
    found = {}
    for name, told in (("recall", torch.cat(named)), ("frequency", most.expand_as(true))):
        right_TLK = (told[..., :, None] == true[..., None, :]).any(-2).float()
        found[name] = right_TLK.mean(-1).mean(0).tolist()
    return found
