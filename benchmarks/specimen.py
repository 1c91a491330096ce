"""Prints how closely a model resembles real ones: routing, redundancy, swaps, skills, text.

Usage: python benchmarks/specimen.py --model new=tiny --model old=FOLDER --draft new=tiny-draft

`--pages FILE` are more held-out pages, one line of JSON each.

Shapes: T tokens, L layers, E experts, K top-k, D hidden.
"""

from __future__ import annotations

import json
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
import scipy.stats
import torch
from grid import arguments, decode_trace, setting_of, text_table
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.model.checkpoint import model_path
from lm_eval_moecache.model.reading import watched
from lm_eval_moecache.records.ledger import total
from lm_eval_moecache.tiny import documents
from lm_eval_moecache.trace.future import Future
from tools.train_tiny.skills.generator import ASKED, held_out
from tools.train_tiny.skills.problem import Problem

NUM_TEXTS, NUM_TOKENS = 16, 299
NUM_SWAPPED = 100
NUM_PROMPTS, NUM_DRAFTED, MOST_DRAFTED_TOKENS = 10, 30, 48
CYCLES = (0.8, 2.0, 4.0)
EVICTIONS = {"LRU": "lru", "LFU": "lfu", "Belady": "belady"}
WINDOW = 1024
REPLACED_BY_SCORE = "absent experts replaced by score"
"""The demo's run in which a resident expert of a near score stands in for each absent one."""
Rows = Iterator[tuple[str, str]]
"""(measure, value) pairs."""
Change = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(layer, experts [T, K], their weights) -> what is executed instead."""


class Routing(NamedTuple):
    """The routing of one text, each token's best expert first."""

    inputs_LTD: list[Tensor]
    """Inputs of the routers."""
    logits_LTE: list[Tensor]
    chosen_TLK: np.ndarray
    weights_TLK: np.ndarray


class Specimen:
    """A model that answers one problem at a time, so that a cache sees them in order."""

    def __init__(self, folder: str) -> None:
        self.model = loaded(folder)
        self.tokenizer = AutoTokenizer.from_pretrained(model_path(folder), trust_remote_code=True)
        modules = self.model.modules()
        self.blocks = [
            module for module in modules if hasattr(module, "gate") and hasattr(module, "experts")
        ]
        self.num_experts = int(self.model.config.num_experts)
        self.top_k = int(self.model.config.num_experts_per_tok)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text).input_ids

    @torch.no_grad()
    def read(self, ids: list[int]) -> Routing:
        inputs, logits = list[Tensor](), list[Tensor]()

        def note(_: int, args: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
            inputs.append(args[0].reshape(-1, args[0].shape[-1]))
            logits.append(output[0])

        with watched([block.gate for block in self.blocks], note):
            self.model(input_ids=torch.tensor([ids]))
        best = torch.stack(logits, 1).softmax(-1).topk(self.top_k)
        return Routing(inputs, logits, best.indices.numpy(), best.values.numpy())

    @torch.no_grad()
    def text_loss(self, texts: list[list[int]]) -> float:
        rows = (torch.tensor([ids]) for ids in texts)
        return mean(float(self.model(input_ids=row, labels=row).loss) for row in rows)

    @torch.no_grad()
    def is_right(self, problem: Problem) -> bool:
        """Score a problem as lm-eval does: by its likeliest option, or by the generated text."""
        row: Any = problem.row
        texts, right = [problem.target], 0
        if "mc1_targets" in row:
            texts = row["mc1_targets"]["choices"]
        elif "answerKey" in row:
            texts, right = row["choices"]["text"], "ABCD".index(row["answerKey"])
        elif "choices" in row:
            texts, right = list("ABCD"), row["answer"]
        before, answers = self.ids(problem.prompt), [self.ids(f" {text}") for text in texts]
        longest = max(map(len, answers))
        ids = [[*before, *answer, *[0] * (longest - len(answer))] for answer in answers]
        logits = self.model(input_ids=torch.tensor(ids)).logits[:, len(before) - 1 : -1]
        if len(texts) == 1:
            return bool((logits[0].argmax(-1) == torch.tensor(answers[0])).all())
        cost = partial(nn.functional.cross_entropy, reduction="sum")
        tokens = zip(logits, map(torch.tensor, answers), strict=True)
        nats = [float(cost(scores[: len(answer)], answer)) for scores, answer in tokens]
        return nats.index(min(nats)) == right

    def accuracy(self, task: str, num_documents: int, change: Change | None = None) -> float:
        """Percentage of right answers, unmodified or with changed experts."""
        with nullcontext() if change is None else rerouted(self, change):
            return 100 * mean(map(self.is_right, held_out(ASKED[task], num_documents, seed=0)))

    @torch.no_grad()
    def bits_per_byte(self, pages: list[str]) -> float:
        """Read each page in windows that predict every token exactly once."""
        total_nats = 0.0
        for page in pages:
            ids = [self.tokenizer.eos_token_id, *self.ids(page)]
            for start in range(0, len(ids) - 1, WINDOW):
                part = torch.tensor([ids[start : start + WINDOW + 1]])
                logits = self.model(input_ids=part[:, :-1]).logits[0]
                total_nats -= float(logits.log_softmax(-1).gather(1, part[0, 1:, None]).sum())
        return total_nats / math.log(2) / sum(len(page.encode()) for page in pages)


def loaded(folder: str) -> Any:
    # A carved model's folder holds its modelling file.
    return AutoModelForCausalLM.from_pretrained(
        model_path(folder), dtype=torch.float32, trust_remote_code=True
    ).eval()


@contextmanager
def rerouted(specimen: Specimen, change: Change) -> Iterator[None]:
    """Change the experts that each layer executes."""

    def hook(layer: int, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, experts, weights = inputs
        return hidden, *change(layer, experts, weights)

    with ExitStack() as stack:
        for layer, block in enumerate(specimen.blocks):
            handle = block.experts.register_forward_pre_hook(partial(hook, layer))
            stack.callback(handle.remove)
        yield


# --- the routing of texts: hits, use, prediction ---


def hit_share(routings: list[Routing], num_experts: int, cycles: float, eviction: str) -> float:
    """Percentage of hits, each text from an empty cache of `cycles` tokens' experts."""
    hits = requests = 0
    for routing in routings:
        trace = decode_trace(routing.chosen_TLK, routing.weights_TLK, num_experts)
        capacity = f"{int(cycles * math.prod(routing.chosen_TLK.shape[1:]))}experts"
        setting = setting_of(trace.geometry, capacity, {"eviction": eviction})
        engine = replay(trace, setting, future=Future(trace), cache_reset="never")
        counts = total(engine.ledger.passes)
        hits, requests = hits + counts.hits, requests + counts.requests
    return 100 * hits / requests


def one_stream(routings: list[Routing]) -> Routing:
    """Join texts into one, so that the cache persists between them."""
    chosen, weights = (np.concatenate([routing[part] for routing in routings]) for part in (2, 3))
    return Routing([], [], chosen, weights)


def entropy(routing: Routing, num_experts: int) -> float:
    """Normalised entropy of expert use, mean over layers; 1 is uniform."""
    layers = routing.chosen_TLK.swapaxes(0, 1)
    entropies = [scipy.stats.entropy(np.bincount(layer.ravel())) for layer in layers]
    return float(np.mean(entropies)) / math.log(num_experts)


def next_gate_recall(specimen: Specimen, text: Routing) -> list[float]:
    """Percentage of a layer's experts that its router finds from the previous layer's input."""
    recalls = []
    for layer, block in enumerate(specimen.blocks[1:], start=1):
        guess_TE = text.inputs_LTD[layer - 1] @ block.gate.weight.t()
        guessed, real = (x.topk(specimen.top_k).indices for x in (guess_TE, text.logits_LTE[layer]))
        recall = (guessed[:, :, None] == real[:, None, :]).any(1).float().mean()
        recalls.append(100 * float(recall))
    return recalls


@torch.no_grad()
def chosen_cosine(specimen: Specimen, text: Routing) -> list[float]:
    """Mean cosine between the outputs of a token's chosen experts, by layer."""
    top_k, means = specimen.top_k, list[float]()
    for block, x_TD, logits_TE in zip(specimen.blocks, *text[:2], strict=True):
        gate_up, down = block.experts.gate_up_proj.float(), block.experts.down_proj.float()
        gate, up = torch.einsum("td,eid->tei", x_TD.float(), gate_up).chunk(2, -1)
        out = torch.einsum("tei,edi->ted", nn.functional.silu(gate) * up, down)
        unit = nn.functional.normalize(out, dim=-1)
        chosen = logits_TE.topk(top_k).indices[..., None].expand(-1, -1, unit.shape[-1])
        unit = unit.gather(1, chosen)
        pairs = unit @ unit.mT
        means.append(float((pairs.sum((1, 2)) - top_k).mean() / (top_k * (top_k - 1))))
    return means


def of_routing(specimen: Specimen, texts: list[list[int]]) -> Rows:
    routings, num_experts = [specimen.read(ids) for ids in texts], specimen.num_experts
    for (name, eviction), cycles in product(EVICTIONS.items(), CYCLES):
        share = hit_share(routings, num_experts, cycles, eviction)
        yield f"{name} hits at {cycles:g} cycles, %", shown(share)
    evenness = mean(entropy(one, num_experts) for one in routings)
    yield "entropy of expert use in a text (of 1)", shown(evenness)
    _, _, chosen, weights = one_stream(routings)
    unused = sum(num_experts - len(np.unique(layer)) for layer in chosen.swapaxes(0, 1))
    yield "experts never used", str(unused)
    best = 100 * float((weights.max(-1) / weights.sum(-1)).mean())
    yield "best expert's share of the weight, %", shown(best)
    yield "tokens replayed", str(len(weights))
    recalls = zip(*(next_gate_recall(specimen, one) for one in routings), strict=True)
    yield "next-gate recall by layer, %", spread(map(mean, recalls))
    cosines = zip(*(chosen_cosine(specimen, one) for one in routings[:4]), strict=True)
    by_layer = [mean(layer) for layer in cosines]
    yield "cosine of co-chosen experts by layer", spread(by_layer)
    yield "layers with a cosine of at least 0.2", str(sum(one >= 0.2 for one in by_layer))
    for task, makers in ASKED.items():
        prompts = [one.prompt for one in held_out(makers, NUM_PROMPTS, seed=0)]
        stream = [one_stream([specimen.read(specimen.ids(prompt)) for prompt in prompts])]
        rates = [hit_share(stream, num_experts, 2.0, eviction) for eviction in ("lru", "lfu")]
        text = ", ".join(f"{rate:.1f}" for rate in rates)
        yield f"tiny_{task} prompts, hits at 2 cycles, %: LRU, LFU", text


# --- swaps: the cost of replacing an expert by another ---


def by_token(swap: Callable[[int, list[int], list[float]], list[int]]) -> Change:
    """Route each token to the experts that `swap` makes of a layer, its experts and weights."""

    def change(layer: int, experts: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        tokens = zip(experts.tolist(), weights.tolist(), strict=True)
        rows = [swap(layer, *token) for token in tokens]
        return torch.tensor(rows, dtype=experts.dtype), weights

    return change


def random_resident(specimen: Specimen, share: float) -> Change:
    """Each layer's LRU cache holds a share of its experts; a random resident replaces a miss.

    The missing expert is loaded after the token, as if fetched in the background.
    """
    rng, all_experts = Random(0), range(specimen.num_experts)
    size = int(share * len(all_experts))
    caches = [OrderedDict.fromkeys(rng.sample(all_experts, size)) for _ in specimen.blocks]

    def swap(layer: int, experts: list[int], _: list[float]) -> list[int]:
        cache = caches[layer]
        spare = [resident for resident in cache if resident not in experts]
        rng.shuffle(spare)
        substitutes = [e if e in cache or not spare else spare.pop() for e in experts]
        for expert in experts:
            cache[expert] = None
            cache.move_to_end(expert)
        while len(cache) > size:
            cache.popitem(last=False)
        return substitutes

    return by_token(swap)


def last_rank(specimen: Specimen) -> Change:
    """Replace the expert of the smallest weight by a random one that was not chosen."""
    rng = Random(0)

    def swap(_: int, experts: list[int], weights: list[float]) -> list[int]:
        others = [expert for expert in range(specimen.num_experts) if expert not in experts]
        experts[weights.index(min(weights))] = rng.choice(others)
        return experts

    return by_token(swap)


# --- the draft, skills and text ---


@torch.no_grad()
def of_draft(specimen: Specimen, draft: Any, texts: list[list[int]]) -> Rows:
    """Similarity of the draft's hidden states to the model's, and the share of tokens accepted.

    Tokens are the model's greedy ones, up to MOST_DRAFTED_TOKENS after each prompt, including its
    end token; the draft reads the same text.
    """
    model, by_text = specimen.model, []
    if draft.config.num_hidden_layers == model.config.num_hidden_layers:
        for ids in texts:
            model_states, draft_states = (
                network(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states[1:]
                for network in (model, draft)
            )
            pairs = zip(model_states, draft_states, strict=True)
            by_text.append([float(torch.cosine_similarity(a, b, -1).mean()) for a, b in pairs])
        layers = map(mean, zip(*by_text, strict=True))
        yield "draft's hidden states, cosine by layer", spread(layers)
    for task, makers in ASKED.items():
        num_accepted = tokens = 0
        for problem in held_out(makers, NUM_DRAFTED, seed=0):
            prompt = torch.tensor([specimen.ids(problem.prompt)])
            written = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=MOST_DRAFTED_TOKENS,
                do_sample=False,
                pad_token_id=specimen.tokenizer.pad_token_id,
            )
            proposed = draft(input_ids=written).logits[0, :-1].argmax(-1)[prompt.shape[1] - 1 :]
            num_accepted += int((proposed == written[0, prompt.shape[1] :]).sum())
            tokens += len(proposed)
        yield f"tiny_{task}, draft's tokens accepted", f"{num_accepted / tokens:.2f}"


def of_skills(specimen: Specimen, num_documents: int) -> Rows:
    """Accuracy of each task, and its loss under the two swaps, in points."""
    for task in ASKED:
        yield f"tiny_{task}, %", f"{specimen.accuracy(task, num_documents):.1f}"
    for task in ASKED:
        swaps = random_resident(specimen, 0.25), last_rank(specimen)
        plain = specimen.accuracy(task, NUM_SWAPPED)
        differences = [plain - specimen.accuracy(task, NUM_SWAPPED, change) for change in swaps]
        losses = ", ".join(f"{points:.0f}" for points in differences)
        yield f"tiny_{task}, points lost: random at 25%, last rank", losses


def measures(folder: str, draft: str | None, more: str | None, num_documents: int) -> Rows:
    specimen, pages = Specimen(folder), list(documents.wikitext()["test"]["page"])
    starts = [specimen.ids(page)[:NUM_TOKENS] for page in pages]
    texts = starts[:NUM_TEXTS]
    yield from of_routing(specimen, texts)
    plain = specimen.text_loss(starts)
    with rerouted(specimen, lambda _, experts, weights: (experts, 0 * weights)):
        loss = specimen.text_loss(starts) - plain
    yield "nats of text lost without the routed experts", f"{loss:.3f}"
    if draft:
        yield from of_draft(specimen, loaded(draft), texts)
    yield "held-out text, bits per byte", f"{specimen.bits_per_byte(pages):.3f}"
    if more:
        lines = Path(more).read_text("utf-8").splitlines()
        more_pages = [json.loads(line)["page"] for line in lines]
        yield f"{Path(more).name}, bits per byte", f"{specimen.bits_per_byte(more_pages):.3f}"
    yield from of_skills(specimen, num_documents)


def shown(value: float) -> str:
    return f"{value:.0f}" if value == int(value) else f"{value:.2f}"


def spread(values: Any) -> str:
    values = list(values)
    return f"{mean(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def main() -> None:
    options = arguments(__doc__, model=["new=tiny"], draft=[], pages=None, documents=500)
    torch.set_num_threads(1)
    drafts, table = dict(pair.split("=", 1) for pair in options.draft), dict[str, dict[str, str]]()
    names = [item.partition("=")[::2] for item in options.model]
    for name, folder in names:
        for measure, value in measures(folder, drafts.get(name), options.pages, options.documents):
            table.setdefault(measure, {})[name] = value
            sys.stderr.write(f"{name}: {measure}: {value}\n")
    rows = ([what, *(found.get(name, "-") for name, _ in names)] for what, found in table.items())
    print(text_table(["measure", *(name for name, _ in names)], rows))


if __name__ == "__main__":
    main()
