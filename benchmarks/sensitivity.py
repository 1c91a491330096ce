"""What a model loses when its routed experts are changed, against what papers report of real ones.

Usage: python benchmarks/sensitivity.py --model NAME=FOLDER [--model ...] [--text FILE] [--write]

Text: nats a token are added to the loss on the first tokens of each page (`tiny`'s held-out ones,
or `FILE`'s, one page of plain text or of JSON (`page`) a line). Any mixture-of-experts model of
transformers whose blocks have `gate` and `experts` will do. Answers, for models that share `tiny`'s
tokenizer: the share of right answers kept when a random resident expert replaces each absent one
(`--documents 0`: none). With `--write`, both go to results/sensitivity. Shapes: T tokens, K top-k.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

import torch
from grid import RESULTS, arguments, text_table
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from lm_eval_moecache.model.checkpoint import model_path
from lm_eval_moecache.records.files import TINY
from lm_eval_moecache.report.runs.files import load_runs
from lm_eval_moecache.tiny import documents
from tools.train_tiny.skills.generator import ASKED, held_out
from tools.train_tiny.skills.problem import Problem

SHIFT = 17
LABELS = {1: "absent experts replaced by score", 4: "cache-aware routing"}
"""Anchor's number -> the demo's run that answers it."""
LEVELS = (
    *("first 4 of 8 kept, renormalised", "10% random", "first 2 of 8 kept, renormalised"),
    *("30% random", "50% random", "100% random"),
)
"""Changes under which answers are asked for, from the one that text shows least."""
RATES = (0.75, 0.5, 0.375)
TASKS = ("gsm8k", "arc")
Change = Callable[[Tensor, Tensor, int, torch.Generator], tuple[Tensor, Tensor]]
"""(experts [T, K], weights [T, K], both heaviest first, number of experts, draws) -> the same."""
Executed = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(layer, experts [T, K], their weights) -> what is executed instead."""
ANCHORS = (
    ("random expert for each absent one, rate .75 / .5 / .375", ".75 / .31 / .22", "BuddyMoE 2-4"),
    (
        "absent experts replaced by score",
        ".11 OLMoE, .07 Mixtral, .04 Phi, .02 Qwen",
        "SpecMD, configuration 2, GSM8K",
    ),
    (
        "cascade of precisions",
        ".90 OLMoE, .55 Mixtral, .86 Phi, .43 Qwen",
        "SpecMD, configuration 3, GSM8K",
    ),
    ("absent experts dropped", ".85 to .95 OLMoE, .70 to .75 Qwen", "SpecMD 5.4"),
    (
        "cache-aware routing",
        ".98 OLMoE, 1.00 Mixtral, 1.00 Phi, .58 Qwen",
        "SpecMD, configuration 4, GSM8K",
    ),
    ("only the first expert kept", "perplexity collapses at rank 2", "Cache-conditional 2"),
)
"""Share of right answers that real models kept, SpecMD's of configuration 1, which loses nothing.

Two equal configurations of its Table 1 differ by 2 points (rms): .98 and 1.00 are no
significant difference.
"""


class Specimen:
    """A model that answers one problem at a time, so that a cache sees them in order."""

    def __init__(self, folder: str) -> None:
        # A carved model's folder holds its modelling file.
        self.model = AutoModelForCausalLM.from_pretrained(
            model_path(folder), dtype=torch.float32, trust_remote_code=True
        ).eval()
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

    def accuracy(self, task: str, num_documents: int, change: Executed | None = None) -> float:
        """Percentage of right answers, unmodified or with changed experts."""
        with nullcontext() if change is None else rerouted(self, change):
            return 100 * mean(map(self.is_right, held_out(ASKED[task], num_documents, seed=0)))


@contextmanager
def rerouted(specimen: Specimen, change: Executed) -> Iterator[None]:
    """Change the experts that each layer executes."""

    def hook(layer: int, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, experts, weights = inputs
        return hidden, *change(layer, experts, weights)

    with ExitStack() as stack:
        for layer, block in enumerate(specimen.blocks):
            handle = block.experts.register_forward_pre_hook(partial(hook, layer))
            stack.callback(handle.remove)
        yield


def by_token(swap: Callable[[int, list[int], list[float]], list[int]]) -> Executed:
    """Route each token to the experts that `swap` makes of a layer, its experts and weights."""

    def change(layer: int, experts: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        tokens = zip(experts.tolist(), weights.tolist(), strict=True)
        rows = [swap(layer, *token) for token in tokens]
        return torch.tensor(rows, dtype=experts.dtype), weights

    return change


def random_resident(specimen: Specimen, share: float) -> Executed:
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


def first(num_ranks: int, *, renormalize: bool) -> Change:
    def change(experts: Tensor, weights: Tensor, _: int, __: Any) -> tuple[Tensor, Tensor]:
        kept = weights.clone()
        kept[:, num_ranks:] = 0
        if renormalize:
            kept *= weights.sum(-1, keepdim=True) / kept.sum(-1, keepdim=True)
        return experts, kept

    return change


def at_random(share: float) -> Change:
    """Replace a share of the assignments by experts drawn uniformly."""

    def change(
        experts: Tensor, weights: Tensor, num_experts: int, draws: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        others = torch.rand(len(experts), num_experts, generator=draws).argsort(-1)
        is_replaced = torch.rand(experts.shape, generator=draws) < share
        return torch.where(is_replaced, others[:, : experts.shape[1]], experts), weights

    return change


def dropped(share: float) -> Change:
    """Leave out a share of the assignments; the others keep their weights."""

    def change(
        experts: Tensor, weights: Tensor, _: int, draws: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        return experts, weights * (torch.rand(weights.shape, generator=draws) >= share)

    return change


def wrong(experts: Tensor, weights: Tensor, num_experts: int, _: Any) -> tuple[Tensor, Tensor]:
    return (experts + SHIFT) % num_experts, weights


def changes(top_k: int) -> Mapping[str, Change]:
    ranks = [top_k * part // 8 for part in (6, 4, 2, 1) if top_k * part // 8]
    found: dict[str, Change] = {}
    for renormalize, said in ((True, ", renormalised"), (False, "")):
        found |= {
            f"first {rank} of {top_k} kept{said}": first(rank, renormalize=renormalize)
            for rank in ranks
        }
    found |= {f"{share:.0%} dropped": dropped(share) for share in (0.1, 0.3, 0.5)}
    found |= {f"{share:.0%} random": at_random(share) for share in (0.1, 0.3, 0.5, 1.0)}
    return found | {
        f"wrong ones (index + {SHIFT})": wrong,
        "none (all zeroed)": lambda experts, weights, *_: (experts, weights * 0),
    }


def changed(specimen: Specimen, change: Change) -> AbstractContextManager[None]:
    draws = torch.Generator().manual_seed(0)

    def in_order(_: int, experts: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        order = weights.argsort(-1, descending=True)
        sorted_ones = experts.gather(-1, order), weights.gather(-1, order)
        return change(*sorted_ones, specimen.num_experts, draws)

    return rerouted(specimen, in_order)


def losses(specimen: Specimen, pages: list[list[int]]) -> dict[str, float]:
    """Nats a token under no change, then what each change adds."""
    plain = specimen.text_loss(pages)
    found = {"loss": plain}
    for name, change in changes(specimen.top_k).items():
        with changed(specimen, change):
            found[name] = specimen.text_loss(pages) - plain
    return found


def answers(specimen: Specimen, num_documents: int) -> dict[str, list[float]]:
    """Percentages of right answers: unmodified, then at each rate of residents."""
    return {
        task: [specimen.accuracy(task, num_documents)]
        + [
            specimen.accuracy(task, num_documents, random_resident(specimen, rate))
            for rate in RATES
        ]
        for task in TASKS
    }


def right_answers(specimen: Specimen, num_documents: int) -> dict[str, dict[str, float]]:
    """By task the percentages of right answers, unmodified and under changes of growing damage.

    What a task can lose on this model, which the claims' gates compare with, and what it can rank.
    """
    known = {"unmodified": None, **changes(specimen.top_k)}
    found = {}
    for task in ASKED:
        rates = found[f"tiny_{task}"] = {}
        for level in ("unmodified", *(name for name in known if name in LEVELS)):
            with changed(specimen, known[level]) if known[level] else nullcontext():
                rates[level] = specimen.accuracy(task, num_documents)
    return found


def demo() -> dict[str, float]:
    """Shares of right answers kept on the demo's word problems, by its runs of `tiny`."""
    right = {
        run.label: sum(next(iter(run.samples["tiny_gsm8k"].values())).values())  # type: ignore[arg-type]
        for run in load_runs(RESULTS / "demo")
    }
    return {label: right[label] / right["every expert resident"] for label in LABELS.values()}


def render(models: Mapping[str, Any]) -> str:
    names, found = list(models), list(models.values())
    measures = list(dict.fromkeys(name for one in found for name in one["text"]))
    forms = {name: "{:+.3f}" for name in measures} | {"loss": "{:.3f}"}
    rows = [
        ["unmodified: nats a token" if name == "loss" else name]
        + [form.format(one["text"][name]) if name in one["text"] else "-" for one in found]
        for name, form in forms.items()
    ]
    text = text_table(["experts", *names], rows, others="--:")
    rows = [
        [*anchor, *(_shares(one, number) for one in found)] for number, anchor in enumerate(ANCHORS)
    ]
    kept = text_table(["share of right answers kept", "real models", "where", *names], rows)
    asked = {name: one for name, one in models.items() if one["right"]}
    tasks = list(dict.fromkeys(task for one in asked.values() for task in one["right"]))
    rows = [
        [f"{name}: {level}", _nats(one["text"], level)]
        + [f"{one['right'][task][level]:.0f}" for task in tasks]
        for name, one in asked.items()
        for level in ("unmodified", *LEVELS)
    ]
    right = text_table(["% of answers right", "nats", *tasks], rows, others="--:")
    read = "; ".join(f"{name}: {one['read']}" for name, one in models.items())
    return (
        "# What each model loses when its experts are changed\n\n"
        f"Added to the loss, in nats a token, mean over pages ({read}):\n\n{text}\n\n"
        "What a task can lose, and which changes it can rank (100 documents each; a percentage is "
        f"known to 4 or 5 points):\n\n{right}\n\n"
        f"Against real models, whose figures are the papers':\n\n{kept}\n"
    )


def _nats(text: Mapping[str, float], level: str) -> str:
    return f"{text[level]:+.2f}" if level in text else "0"


def _shares(one: Mapping[str, Any], number: int) -> str:
    """A model's answer to an anchor; a dash where there is none."""
    if number == 0 and one["answers"]:
        return "; ".join(
            f"{task} " + " / ".join(f"{right / row[0]:.2f}" for right in row[1:])
            for task, row in one["answers"].items()
        )
    if LABELS.get(number) in one.get("demo", {}):
        return f"{one['demo'][LABELS[number]]:.2f}"
    if number == len(ANCHORS) - 1:
        worst = next(value for name, value in one["text"].items() if name.startswith("first 1 of"))
        return f"loss {worst:+.2f} nats a token (perplexity x{math.exp(worst):.1f})"
    return "-"


def page_of(line: str) -> str:
    return str(json.loads(line)["page"]) if line.startswith("{") else line


def main() -> None:
    sizes = {"pages": 60, "tokens": 512, "documents": 100}
    options = arguments(__doc__, model=["tiny=tiny"], text=None, **sizes, write=False)
    torch.set_num_threads(1)
    file = RESULTS / "sensitivity/models.json"
    models: dict[str, Any] = json.loads(file.read_text()) if options.write and file.exists() else {}
    pages, source = list(documents.wikitext()["test"]["page"]), "held-out text"
    if options.text:
        text = Path(options.text).resolve()
        pages, source = list(map(page_of, text.read_text("utf-8").splitlines())), text.parent.name
    for item in options.model:
        name, _, folder = item.partition("=")
        specimen = Specimen(folder)
        texts = [specimen.ids(page)[: options.tokens] for page in pages[: options.pages]]
        asked = options.documents and not options.text
        models[name] = {
            "read": f"{len(texts)} pages of {source}, {options.tokens} tokens",
            "text": losses(specimen, texts),
            "answers": answers(specimen, options.documents) if asked else {},
            "right": right_answers(specimen, options.documents) if asked else {},
            "demo": demo() if folder == TINY and asked else {},
        }
    if options.write:
        file.write_text(json.dumps(models, indent=1) + "\n")
        file.with_name("table.md").write_text(render(models))
    print(render(models))


if __name__ == "__main__":
    main()
