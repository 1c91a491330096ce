"""Prints how much the shipped model is like real ones: routing, redundancy, swaps, skills, text.

Usage: python benchmarks/specimen.py --model new=tiny --model old=FOLDER \
    --trace OLMoE=trace.jsonl --trace Qwen3=qwen.route.csv --corpus output/corpus

Traces are JSON lines of expert ids, or `route_trace v1` CSV (their decode steps). With --corpus
(see tools/train_tiny/corpus.py) an n-gram baseline reads the text that the model was trained on.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean

import torch
from specimen_model import (
    chosen_cosine,
    last_rank,
    next_gate_recall,
    observe,
    random_resident,
    routing_of,
    swapped,
)
from specimen_routing import Routing, hit_rates, read_json_lines, read_route_csv, use_of_experts
from specimen_skills import Scorer, held_out_pages, ngram_bits
from transformers import AutoModelForCausalLM, AutoTokenizer

from lm_eval_moecache.tiny import MODEL_DIR

NUM_TEXTS, NUM_TOKENS = 16, 299
NUM_SWAPPED = 100
Column = dict[str, str]


def shown(value: float) -> str:
    return f"{value:.0f}" if value == int(value) else f"{value:.2f}"


def spread(values: list[float]) -> str:
    return f"{mean(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def of_routing(routings: list[Routing]) -> Column:
    facts = hit_rates(routings) | use_of_experts(routings)
    facts["tokens replayed"] = float(sum(len(one.chosen) for one in routings))
    return {name: shown(value) for name, value in facts.items()}


def of_model(folder: Path, num_documents: int) -> Column:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [tokenizer(page).input_ids[:NUM_TOKENS] for page in held_out_pages()[:NUM_TEXTS]]
    calls = [observe(model, ids) for ids in texts]
    column = of_routing([routing_of(model, one) for one in calls])
    recalls = [next_gate_recall(model, one) for one in calls]
    column["next-gate recall by layer, %"] = spread([mean(x) for x in zip(*recalls, strict=True)])
    cosines = [chosen_cosine(model, one) for one in calls[:4]]
    by_layer = [mean(x) for x in zip(*cosines, strict=True)]
    column["cosine of co-chosen experts by layer"] = spread(by_layer)
    column["layers with a cosine of at least 0.2"] = str(sum(one >= 0.2 for one in by_layer))
    scorer = Scorer(model, tokenizer)
    column["held-out text, bits per byte"] = f"{scorer.bits_per_byte():.3f}"
    return column | of_skills(scorer, num_documents)


def of_skills(scorer: Scorer, num_documents: int) -> Column:
    """Accuracy of each task, and what the two swaps take from it, in points."""
    column = Column()
    for task in scorer.tasks:
        accuracy = 100 * scorer.accuracy(task, num_documents)
        column[f"tiny_{task}, %"] = f"{accuracy:.1f}"
    for task in scorer.tasks:
        plain = scorer.accuracy(task, NUM_SWAPPED)
        lost = list[str]()
        for swap in (random_resident(scorer.model, 0.25, 0), last_rank(scorer.model, 0)):
            with swapped(scorer.model, swap):
                lost.append(f"{100 * (plain - scorer.accuracy(task, NUM_SWAPPED)):.0f}")
        column[f"tiny_{task}, points lost: random at 25%, last rank"] = ", ".join(lost)
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
    parser.add_argument("--trace", action="append", default=[], help="NAME=FILE")
    parser.add_argument("--corpus", type=Path, help="folder of the training text's packages")
    parser.add_argument("--documents", type=int, default=500)
    parser.add_argument("--json", type=Path, help="where to write the table's cells")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    columns = dict[str, Column]()
    for item in arguments.model or ["new=tiny"]:
        name, _, folder = item.partition("=")
        columns[name] = of_model(
            MODEL_DIR if folder == "tiny" else Path(folder), arguments.documents
        )
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
