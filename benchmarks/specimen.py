"""Prints how much the shipped model is like real ones: routing, redundancy, swaps, skills, text.

Usage: python benchmarks/specimen.py --model new=tiny --model old=FOLDER \
    --draft new=tiny-draft --trace OLMoE=trace.jsonl --trace Qwen3=qwen.route.csv \
    --corpus output/corpus

Traces are JSON lines of expert ids, or `route_trace v1` CSV (their decode steps). With --corpus
(see tools/train_tiny/corpus.py) an n-gram baseline reads the text that the model was trained on.
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from statistics import mean

import torch
from specimen_clusters import clusters_found, swap_costs, swapped_clusters
from specimen_draft import acceptance, hidden_cosine
from specimen_model import (
    chosen_cosine,
    last_rank,
    next_gate_recall,
    observe,
    random_resident,
    routing_of,
    swapped,
)
from specimen_routing import (
    Routing,
    hit_rates,
    lfu_hits,
    lru_hits,
    read_json_lines,
    read_route_csv,
    stream_rate,
    use_of_experts,
)
from specimen_skills import Scorer, held_out_pages, ngram_bits, read_pages
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from lm_eval_moecache.tiny import DRAFT_DIR, MODEL_DIR
from lm_eval_moecache.tiny.generator import ASKED, held_out

NUM_TEXTS, NUM_TOKENS = 16, 299
NUM_SWAPPED = 100
NUM_PROMPTS, NUM_DRAFTED = 10, 30
SHIPPED = {"tiny": MODEL_DIR, "tiny-draft": DRAFT_DIR}
Column = dict[str, str]
logger = logging.getLogger(__name__)


def shown(value: float) -> str:
    return f"{value:.0f}" if value == int(value) else f"{value:.2f}"


def spread(values: list[float]) -> str:
    return f"{mean(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def of_routing(routings: list[Routing]) -> Column:
    facts = hit_rates(routings) | use_of_experts(routings)
    facts["tokens replayed"] = float(sum(len(one.chosen) for one in routings))
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
        rates = [stream_rate(read, 2.0, replay) for replay in (lru_hits, lfu_hits)]
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


def table(columns: dict[str, Column]) -> str:
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    lines = [f"| measure | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name in names:
        cells = " | ".join(column.get(name, "-") for column in columns.values())
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", default=[], help="NAME=FOLDER; tiny is known")
    parser.add_argument("--draft", action="append", default=[], help="NAME=FOLDER of its draft")
    parser.add_argument("--pages", type=Path, help="more held-out pages, one JSON line each")
    parser.add_argument("--trace", action="append", default=[], help="NAME=FILE")
    parser.add_argument("--corpus", type=Path, help="folder of the training text's packages")
    parser.add_argument("--documents", type=int, default=500)
    parser.add_argument("--json", type=Path, help="where to write the table's cells")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    columns, drafts = dict[str, Column](), dict(one.split("=", 1) for one in arguments.draft)
    for item in arguments.model or ["new=tiny"]:
        name, _, folder = item.partition("=")
        columns[name] = of_model(folder, drafts.get(name), arguments.pages, arguments.documents)
    for item in arguments.trace:
        name, _, file = item.partition("=")
        read = read_route_csv if file.endswith(".csv") else read_json_lines
        columns[name] = of_routing([read(Path(file))])
    if arguments.corpus:
        bits = ngram_bits(arguments.corpus)
        columns["6-gram"] = {"held-out text, bits per byte": f"{bits:.3f}"}
    print(table(columns))
    if arguments.json:
        arguments.json.write_text(json.dumps(columns, indent=2) + "\n")


if __name__ == "__main__":
    main()
