"""Prints how much the shipped model is like real ones: routing, redundancy, swaps, skills, text.

Usage: python benchmarks/specimen.py --model new=tiny --model old=FOLDER --draft new=tiny-draft

Cluster c of E / C experts is c * E / C and those after it, as tools/train_tiny/clusters.py orders
them. Shapes: T tokens, L layers, E experts, K top-k, D hidden.
"""

from __future__ import annotations

import argparse
import heapq
import json
import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

import numpy as np
import torch
from grid import text_table
from scipy.cluster.vq import kmeans2
from sklearn.metrics import adjusted_rand_score
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from lm_eval_moecache.tiny import DRAFT_DIR, MODEL_DIR, documents
from tools.train_tiny.skills.generator import ASKED, held_out
from tools.train_tiny.skills.problem import Problem

NUM_TEXTS, NUM_TOKENS = 16, 299
NUM_SWAPPED = 100
NUM_PROMPTS, NUM_DRAFTED, MOST_DRAFTED_TOKENS = 10, 30, 48
CYCLES = (0.8, 2.0, 4.0)
EVICTIONS = ("LRU", "LFU", "Belady")
NUM_CLUSTERS, RESTARTS = 8, 10
WINDOW = 1024
SHIPPED = {"tiny": MODEL_DIR, "tiny-draft": DRAFT_DIR}
Column = dict[str, str]
Swap = Callable[[int, Tensor, Tensor], Tensor]
"""(layer, index_TK, weights_TK) -> the experts that tokens go to instead."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """One decoded text, best expert first."""

    num_experts: int
    chosen_TLK: np.ndarray
    weights_TLK: np.ndarray

    @property
    def cycle(self) -> int:
        """Experts that one token asks for."""
        return int(np.prod(self.chosen_TLK.shape[1:]))

    def events(self) -> list[list[int]]:
        """Expert keys by token and layer."""
        offset = np.arange(self.chosen_TLK.shape[1])[:, None] * self.num_experts
        return (self.chosen_TLK + offset).reshape(-1, self.chosen_TLK.shape[2]).tolist()

    def uses(self) -> list[Counter[int]]:
        """How often each expert is chosen, by layer."""
        return [Counter(layer.ravel().tolist()) for layer in self.chosen_TLK.swapaxes(0, 1)]


def hits(events: list[list[int]], capacity: int, eviction: str) -> tuple[int, int]:
    """(hits, requests). An event is atomic: what it asks for is not evicted for itself.

    LFU's counts outlive eviction; Belady evicts what is needed last.
    """
    cache, counts, clock = dict[int, int](), Counter[int](), count()
    following, seen = list[list[int]](), dict[int, int]()
    for place in range(len(events) - 1, -1, -1):
        following.append([seen.get(key, len(events)) for key in events[place]])
        seen.update((key, place) for key in events[place])
    found = 0
    for event, nexts in zip(events, reversed(following), strict=True):
        found += sum(key in cache for key in event)
        for key, after in zip(event, nexts, strict=True):
            counts[key] += 1
            ranks = {"LRU": next(clock), "LFU": counts[key], "Belady": -after}
            cache[key] = ranks[eviction]
        others = [(rank, key) for key, rank in cache.items() if key not in event]
        for _, key in heapq.nsmallest(len(cache) - capacity, others):
            del cache[key]
    return found, sum(map(len, events))


def stream_rate(routings: list[Routing], cycles: float, eviction: str) -> float:
    """Percent of requests that hit over texts one after another, the cache kept between them."""
    events = [event for one in routings for event in one.events()]
    found, requests = hits(events, int(cycles * routings[0].cycle), eviction)
    return 100 * found / requests


def hit_rates(routings: list[Routing]) -> dict[str, float]:
    """Percent of requests that hit, each text from an empty cache, at capacities in cycles."""
    rates = dict[str, float]()
    for name in EVICTIONS:
        for cycles in CYCLES:
            pairs = [hits(one.events(), int(cycles * one.cycle), name) for one in routings]
            found, requests = map(sum, zip(*pairs, strict=True))
            rates[f"{name} hits at {cycles:g} cycles, %"] = 100 * found / requests
    return rates


def entropy(routing: Routing) -> float:
    """Of the use of experts, mean of the layers; 1 is even."""
    shares = [[n / sum(layer.values()) for n in layer.values()] for layer in routing.uses()]
    layers = [-sum(p * math.log(p) for p in layer) for layer in shares]
    return mean(layers) / math.log(routing.num_experts)


def use_of_experts(routings: list[Routing]) -> dict[str, float]:
    """Entropy over one text, experts that no text used, weight of the best of the chosen."""
    used = [set().union(*layer) for layer in zip(*(one.uses() for one in routings), strict=True)]
    weights = [one.weights_TLK for one in routings]
    tops = np.concatenate([(one.max(-1) / one.sum(-1)).ravel() for one in weights])
    return {
        "entropy of expert use in a text (of 1)": mean(map(entropy, routings)),
        "experts never used": float(sum(routings[0].num_experts - len(one) for one in used)),
        "best expert's share of the weight, %": 100 * float(tops.mean()),
    }


def moe_blocks(model: PreTrainedModel) -> list[nn.Module]:
    """The blocks with a router `gate` and stacked `experts`, in layer order."""
    return [one for one in model.modules() if hasattr(one, "gate") and hasattr(one, "experts")]


@contextmanager
def hooked(handles: list[Any]) -> Iterator[None]:
    """Remove the hooks in the end."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def observe(model: PreTrainedModel, ids: list[int]) -> list[tuple[Tensor, Tensor]]:
    """(router input, router logits) of each layer over one text."""
    calls = list[tuple[Tensor, Tensor]]()

    def watch(_: nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        calls.append((inputs[0].detach().reshape(-1, inputs[0].shape[-1]), output[0].detach()))

    with hooked([block.gate.register_forward_hook(watch) for block in moe_blocks(model)]):
        model(input_ids=torch.tensor([ids]))
    return calls


def routing_of(model: PreTrainedModel, calls: list[tuple[Tensor, Tensor]]) -> Routing:
    """The same, as a trace of one token after another."""
    top_k = int(model.config.num_experts_per_tok)
    best = torch.stack([logits for _, logits in calls], 1).softmax(-1).topk(top_k)
    return Routing(
        num_experts=int(model.config.num_experts),
        chosen_TLK=best.indices.numpy(),
        weights_TLK=best.values.numpy(),
    )


def next_gate_recall(model: PreTrainedModel, calls: list[tuple[Tensor, Tensor]]) -> list[float]:
    """Share of a layer's experts that its router finds in the input of the layer before, in %."""
    top_k, recalls = int(model.config.num_experts_per_tok), list[float]()
    for layer, block in enumerate(moe_blocks(model)[1:], start=1):
        guessed = (calls[layer - 1][0] @ block.gate.weight.t()).topk(top_k).indices
        real = calls[layer][1].topk(top_k).indices
        found = (guessed[:, :, None] == real[:, None, :]).any(1).float().mean()
        recalls.append(100 * float(found))
    return recalls


@torch.no_grad()
def chosen_cosine(model: PreTrainedModel, calls: list[tuple[Tensor, Tensor]]) -> list[float]:
    """Mean cosine of the outputs of experts chosen together for a token, by layer."""
    top_k, means = int(model.config.num_experts_per_tok), list[float]()
    for block, (x_TD, logits_TE) in zip(moe_blocks(model), calls, strict=True):
        gate_up, down = block.experts.gate_up_proj.float(), block.experts.down_proj.float()
        gate, up = torch.einsum("td,eid->tei", x_TD.float(), gate_up).chunk(2, -1)
        out = torch.einsum("tei,edi->ted", nn.functional.silu(gate) * up, down)
        unit = nn.functional.normalize(out, dim=-1)
        chosen = logits_TE.topk(top_k).indices[..., None].expand(-1, -1, unit.shape[-1])
        unit = unit.gather(1, chosen)
        pairs = unit @ unit.mT
        means.append(float((pairs.sum((1, 2)) - top_k).mean() / (top_k * (top_k - 1))))
    return means


def swapped(model: PreTrainedModel, swap: Swap) -> Any:
    """Within this, tokens go to the experts that `swap` says."""

    def hook_of(layer: int) -> Callable[..., Any]:
        def hook(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            hidden, index, weights = inputs
            return hidden, swap(layer, index, weights), weights

        return hook

    blocks = enumerate(moe_blocks(model))
    return hooked([b.experts.register_forward_pre_hook(hook_of(layer)) for layer, b in blocks])


def random_resident(model: PreTrainedModel, share: float, seed: int) -> Swap:
    """Each layer's LRU cache holds a share of its experts; a miss takes a random resident.

    The missing expert is loaded after the token, as if fetched in the background.
    """
    num_experts = int(model.config.num_experts)
    rng, size = Random(seed), int(share * num_experts)
    caches = [OrderedDict.fromkeys(rng.sample(range(num_experts), size)) for _ in moe_blocks(model)]

    def swap(layer: int, index: Tensor, _: Tensor) -> Tensor:
        cache, rows = caches[layer], index.tolist()
        for row, experts in enumerate(index.tolist()):
            spare = [one for one in cache if one not in experts]
            rng.shuffle(spare)
            for slot, expert in enumerate(experts):
                if expert not in cache:
                    rows[row][slot] = spare.pop() if spare else expert
            for expert in experts:
                cache[expert] = None
                cache.move_to_end(expert)
            while len(cache) > size:
                cache.popitem(last=False)
        return torch.tensor(rows, dtype=index.dtype)

    return swap


def last_rank(model: PreTrainedModel, seed: int) -> Swap:
    """The expert of the smallest weight gives way to a random one that was not chosen."""
    num_experts, rng = int(model.config.num_experts), Random(seed)

    def swap(_: int, index: Tensor, weights: Tensor) -> Tensor:
        rows = index.tolist()
        for row, last in zip(rows, weights.argmin(-1).tolist(), strict=True):
            row[last] = rng.choice([one for one in range(num_experts) if one not in row])
        return torch.tensor(rows, dtype=index.dtype)

    return swap


def held_out_pages() -> list[str]:
    return list(documents.wikitext()["test"]["page"])


def read_pages(file: Path) -> list[str]:
    return [json.loads(line)["page"] for line in file.read_text(encoding="utf-8").splitlines()]


def options(problem: Problem) -> tuple[list[str], int] | None:
    """What is offered as the harness scores it, and which is right; None if it is written."""
    row: Any = problem.row
    if "mc1_targets" in row:
        return row["mc1_targets"]["choices"], 0
    if "answerKey" in row:
        return row["choices"]["text"], "ABCD".index(row["answerKey"])
    if "choices" in row:
        return list("ABCD"), row["answer"]
    return None


class Scorer:
    """A model and its answers, one problem at a time, so that a cache sees them in order."""

    tasks = tuple(ASKED)

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
        self.model, self.tokenizer = model, tokenizer

    @torch.no_grad()
    def _log_likelihoods(self, prompt: str, answers: list[str]) -> list[tuple[float, bool]]:
        """Of each answer after the prompt, and whether it is what greedy decoding writes."""
        before = self.tokenizer(prompt).input_ids
        rows = [self.tokenizer(f" {answer}").input_ids for answer in answers]
        longest = max(map(len, rows))
        ids = torch.tensor([[*before, *row, *[0] * (longest - len(row))] for row in rows])
        logits = self.model(input_ids=ids).logits[:, len(before) - 1 : -1]
        found = list[tuple[float, bool]]()
        for row, row_logits in zip(rows, logits, strict=True):
            asked, ours = torch.tensor(row), row_logits[: len(row)]
            scores = ours.log_softmax(-1).gather(1, asked[:, None])
            found.append((float(scores.sum()), bool((ours.argmax(-1) == asked).all())))
        return found

    def is_right(self, problem: Problem) -> bool:
        offered = options(problem)
        if offered is None:
            return self._log_likelihoods(problem.prompt, [problem.target])[0][1]
        texts, right = offered
        scores = [score for score, _ in self._log_likelihoods(problem.prompt, texts)]
        return max(range(len(scores)), key=scores.__getitem__) == right

    def accuracy(self, task: str, num_documents: int) -> float:
        chosen = held_out(ASKED[task], num_documents, seed=0)
        return sum(map(self.is_right, chosen)) / len(chosen)

    def bits_per_byte(self, pages: list[str] | None = None) -> float:
        """Each page in windows, of which only the tokens not seen before count."""
        total, pages = 0.0, pages or held_out_pages()
        for page in pages:
            ids = [self.tokenizer.eos_token_id, *self.tokenizer(page).input_ids]
            for start in range(0, len(ids) - 1, WINDOW):
                part = torch.tensor([ids[start : start + WINDOW + 1]])
                with torch.no_grad():
                    logits = self.model(input_ids=part[:, :-1]).logits[0]
                total -= float(logits.log_softmax(-1).gather(1, part[0, 1:, None]).sum())
        return total / math.log(2) / sum(len(page.encode()) for page in pages)


def co_activation(logits: list[Tensor], top_k: int) -> np.ndarray:
    """How often two experts of a layer are chosen for one token (E, E), over texts' logits."""
    total = torch.zeros(())
    for logits_TE in logits:
        used = torch.zeros_like(logits_TE).scatter_(1, logits_TE.topk(top_k).indices, 1.0)
        total = total + (used.t() @ used)
    counts = np.array(total, dtype=float)
    np.fill_diagonal(counts, 0)
    return counts


def spectral(counts: np.ndarray, num_clusters: int) -> np.ndarray:
    """Labels from the leading eigenvectors of the normalised co-activation (Ng et al. 2002)."""
    size = np.sqrt(np.maximum(counts.sum(1), 1))
    _, vectors = np.linalg.eigh(counts / np.outer(size, size))
    rows = vectors[:, -num_clusters:]
    rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    fits = [kmeans2(rows, num_clusters, minit="++", seed=seed) for seed in range(RESTARTS)]
    return min(fits, key=lambda fit: ((rows - fit[0][fit[1]]) ** 2).sum())[1]


def clusters_found(model: PreTrainedModel, texts: list[list[int]]) -> list[float]:
    """Adjusted Rand index of the co-activation's clusters against the true ones, by layer."""
    top_k, num_experts = int(model.config.num_experts_per_tok), int(model.config.num_experts)
    seen = [[logits for _, logits in observe(model, ids)] for ids in texts]
    truth = np.arange(num_experts) // (num_experts // NUM_CLUSTERS)
    return [
        adjusted_rand_score(truth, spectral(co_activation(list(layer), top_k), NUM_CLUSTERS))
        for layer in zip(*seen, strict=True)
    ]


def cluster_swap(model: PreTrainedModel, share: float, seed: int, *, inside: bool) -> Swap:
    """A share of the chosen experts gives way to one not chosen, of its cluster or of another.

    Only experts whose cluster has one to spare are swapped, in both directions, so that the two
    swaps change the same assignments.
    """
    num_experts = int(model.config.num_experts)
    size, rng = num_experts // NUM_CLUSTERS, Random(seed)

    def swap(_: int, index: Tensor, __: Tensor) -> Tensor:
        rows = index.tolist()
        for row in rows:
            for slot, expert in enumerate(list(row)):
                start = expert - expert % size
                near = [one for one in range(start, start + size) if one not in row]
                if not near or rng.random() >= share:
                    continue
                far = [
                    one
                    for one in range(num_experts)
                    if one not in row and not start <= one < start + size
                ]
                row[slot] = rng.choice(near if inside else far)
        return torch.tensor(rows, dtype=index.dtype)

    return swap


@torch.no_grad()
def text_loss(model: PreTrainedModel, texts: list[list[int]]) -> float:
    losses = [
        model(input_ids=ids, labels=ids).loss for ids in map(torch.tensor, ([t] for t in texts))
    ]
    return mean(float(loss) for loss in losses)


def cost_without_experts(model: PreTrainedModel, texts: list[list[int]]) -> float:
    """Nats a token of text loses without the routed experts' outputs: they help if above 0."""
    plain = text_loss(model, texts)
    blocks = moe_blocks(model)
    with hooked([b.experts.register_forward_hook(lambda *given: 0 * given[2]) for b in blocks]):
        return text_loss(model, texts) - plain


def swap_costs(model: PreTrainedModel, texts: list[list[int]], share: float) -> tuple[float, float]:
    """What the two swaps add to the loss of a token of text, in nats: inside and across."""
    plain, added = text_loss(model, texts), list[float]()
    for inside in (True, False):
        with swapped(model, cluster_swap(model, share, 0, inside=inside)):
            added.append(text_loss(model, texts) - plain)
    return added[0], added[1]


def swapped_clusters(
    scorer: Scorer, task: str, num_documents: int = 40
) -> tuple[float, float, float]:
    """Accuracy of a task as it is, and with all experts swapped inside and across clusters."""
    found = [scorer.accuracy(task, num_documents)]
    for inside in (True, False):
        with swapped(scorer.model, cluster_swap(scorer.model, 1.0, 0, inside=inside)):
            found.append(scorer.accuracy(task, num_documents))
    return found[0], found[1], found[2]


@torch.no_grad()
def hidden_cosine(
    model: PreTrainedModel, draft: PreTrainedModel, texts: list[list[int]]
) -> list[float]:
    """Mean cosine of the two hidden states of a token after each layer; layers one to one."""
    by_text = list[list[float]]()
    for ids in texts:
        ours, theirs = (
            one(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states[1:]
            for one in (model, draft)
        )
        pairs = zip(ours, theirs, strict=True)
        by_text.append([float(nn.functional.cosine_similarity(a, b, -1).mean()) for a, b in pairs])
    return [mean(layer) for layer in zip(*by_text, strict=True)]


@torch.no_grad()
def acceptance(
    model: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    task: str,
    num_prompts: int,
) -> float:
    """Share of the model's greedy tokens that the draft, given the same text, says as well.

    Up to MOST_DRAFTED_TOKENS after each of so many prompts of the task, its end token included.
    """
    same = total = 0
    for problem in held_out(ASKED[task], num_prompts, seed=0):
        prompt = torch.tensor([tokenizer(problem.prompt).input_ids])
        written = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=MOST_DRAFTED_TOKENS,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
        )
        said = draft(input_ids=written).logits[0, :-1].argmax(-1)[prompt.shape[1] - 1 :]
        same += int((said == written[0, prompt.shape[1] :]).sum())
        total += len(said)
    return same / total


def shown(value: float) -> str:
    return f"{value:.0f}" if value == int(value) else f"{value:.2f}"


def spread(values: list[float]) -> str:
    return f"{mean(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def of_routing(routings: list[Routing]) -> Column:
    facts = hit_rates(routings) | use_of_experts(routings)
    facts["tokens replayed"] = float(sum(len(one.chosen_TLK) for one in routings))
    return {name: shown(value) for name, value in facts.items()}


def loaded(folder: str) -> PreTrainedModel:
    path = SHIPPED.get(folder, folder)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def of_model(folder: str, draft: str | None, pages: Path | None, num_documents: int) -> Column:
    model = loaded(folder)
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED.get(folder, folder))
    texts = [tokenizer(page).input_ids[:NUM_TOKENS] for page in held_out_pages()[:NUM_TEXTS]]
    calls = [observe(model, ids) for ids in texts]
    column = of_routing([routing_of(model, one) for one in calls])
    recalls = [next_gate_recall(model, one) for one in calls]
    column["next-gate recall by layer, %"] = spread([mean(x) for x in zip(*recalls, strict=True)])
    cosines = [chosen_cosine(model, one) for one in calls[:4]]
    by_layer = [mean(x) for x in zip(*cosines, strict=True)]
    column["cosine of co-chosen experts by layer"] = spread(by_layer)
    column["layers with a cosine of at least 0.2"] = str(sum(one >= 0.2 for one in by_layer))
    column |= of_prompts(model, tokenizer)
    pages_read = [tokenizer(page).input_ids[:NUM_TOKENS] for page in held_out_pages()]
    lost = cost_without_experts(model, pages_read)
    column["nats of text lost without the routed experts"] = f"{lost:.3f}"
    logger.info("%s routing: %s", folder, column)
    if hasattr(model.config, "shared_expert_intermediate_size"):
        column |= of_clusters(model, tokenizer, texts)
        logger.info("%s clusters: %s", folder, column)
    if draft:
        column |= of_draft(model, loaded(draft), tokenizer, texts)
        logger.info("%s draft: %s", folder, column)
    scorer = Scorer(model, tokenizer)
    column["held-out text, bits per byte"] = f"{scorer.bits_per_byte():.3f}"
    if pages:
        column[f"{pages.name}, bits per byte"] = f"{scorer.bits_per_byte(read_pages(pages)):.3f}"
    return column | of_skills(scorer, num_documents)


def of_prompts(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> Column:
    """Hits at two cycles on prompts read token by token, one after another."""
    column = Column()
    for task, makers in ASKED.items():
        prompts = [one.prompt for one in held_out(makers, NUM_PROMPTS, seed=0)]
        read = [routing_of(model, observe(model, tokenizer(one).input_ids)) for one in prompts]
        rates = [stream_rate(read, 2.0, eviction) for eviction in ("LRU", "LFU")]
        name = f"tiny_{task} prompts, hits at 2 cycles, %: LRU, LFU"
        column[name] = ", ".join(f"{rate:.1f}" for rate in rates)
    return column


def of_clusters(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, texts: list[list[int]]
) -> Column:
    """Whether co-activation finds the clusters, and what swaps inside and across them cost."""
    column = {"co-activation's clusters, adjusted Rand": spread(clusters_found(model, texts))}
    scorer = Scorer(model, tokenizer)
    for share in (0.5, 1.0):
        inside, across = swap_costs(model, texts, share)
        cells = f"{inside:.3f}, {across:.3f} (ratio {inside / across:.2f})"
        column[f"nats of text lost, {share:.0%} swapped: inside, across"] = cells
    plain, *swaps = (
        mean(accuracy)
        for accuracy in zip(*(swapped_clusters(scorer, task) for task in ASKED), strict=True)
    )
    lost = [100 * (plain - one) for one in swaps]
    column["points of answers lost, all swapped: inside, across"] = (
        f"{lost[0]:.1f}, {lost[1]:.1f} (ratio {lost[0] / lost[1]:.2f})"
    )
    return column


def of_draft(
    model: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    texts: list[list[int]],
) -> Column:
    column = Column()
    if draft.config.num_hidden_layers == model.config.num_hidden_layers:
        column["draft's hidden states, cosine by layer"] = spread(
            hidden_cosine(model, draft, texts)
        )
    for task in ASKED:
        share = acceptance(model, draft, tokenizer, task, NUM_DRAFTED)
        column[f"tiny_{task}, draft's tokens accepted"] = f"{share:.2f}"
    return column


def of_skills(scorer: Scorer, num_documents: int) -> Column:
    """Accuracy of each task, and what the two swaps take from it, in points."""
    column = Column()
    for task in scorer.tasks:
        accuracy = 100 * scorer.accuracy(task, num_documents)
        column[f"tiny_{task}, %"] = f"{accuracy:.1f}"
        logger.info("tiny_%s: %.1f%%", task, accuracy)
    for task in scorer.tasks:
        plain = scorer.accuracy(task, NUM_SWAPPED)
        lost = list[str]()
        for swap in (random_resident(scorer.model, 0.25, 0), last_rank(scorer.model, 0)):
            with swapped(scorer.model, swap):
                lost.append(f"{100 * (plain - scorer.accuracy(task, NUM_SWAPPED)):.0f}")
        column[f"tiny_{task}, points lost: random at 25%, last rank"] = ", ".join(lost)
        logger.info("tiny_%s lost %s", task, lost)
    return column


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", default=[], help="NAME=FOLDER; tiny is known")
    parser.add_argument("--draft", action="append", default=[], help="NAME=FOLDER of its draft")
    parser.add_argument("--pages", type=Path, help="more held-out pages, one JSON line each")
    parser.add_argument("--documents", type=int, default=500)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    columns, drafts = dict[str, Column](), dict(one.split("=", 1) for one in arguments.draft)
    for item in arguments.model or ["new=tiny"]:
        name, _, folder = item.partition("=")
        columns[name] = of_model(folder, drafts.get(name), arguments.pages, arguments.documents)
    measures = dict.fromkeys(name for column in columns.values() for name in column)
    rows = ([name, *(own.get(name, "-") for own in columns.values())] for name in measures)
    print(text_table(["measure", *columns], rows))


if __name__ == "__main__":
    main()
