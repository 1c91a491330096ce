"""Loss of the dense and the carved model on the same text, at several numbers of groups a token.

Usage: python -m examples.carved_gemma.measure --text wikitext/test.jsonl --stage tuned

`--text` has a page a line, plain or JSON (`page`); without it, the held-out text of carve.py.
Prints a table of nats a token; the carved model is tuned for one of the columns only.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoTokenizer

from examples.carved_gemma.carve import LENGTH, from_states, ids_of, nats, placed
from examples.carved_gemma.carving import Shape
from examples.carved_gemma.dense import dense_folder, loaded
from examples.carved_gemma.text import windows

FILES = {"fitted": "layers.pt", "tuned": "tuned.pt"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path("output/carved_gemma"))
    parser.add_argument("--text", type=Path)
    parser.add_argument("--stage", choices=FILES, default="tuned")
    parser.add_argument("--windows", type=int, default=8, help=f"of {LENGTH} tokens")
    parser.add_argument("--tops", type=int, nargs="+", default=[8, 12, 16, 20, 24])
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = dense_folder(options.work)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), loaded(folder)
    if options.text:
        lines = options.text.read_text("utf-8").splitlines()
        pages = (str(json.loads(line)["page"]) if line[:1] == "{" else line for line in lines)
        tokenized = (tokenizer(page).input_ids[:LENGTH] for page in pages if len(page) > LENGTH)
        text = (tokens for tokens in tokenized if len(tokens) == LENGTH)
    else:
        text = windows("test", options.work / "text", tokenizer, LENGTH, seed=0)
    ids = ids_of(text, options.windows)
    states = torch.load(options.work / FILES[options.stage], weights_only=True)[0]
    ffns = from_states(model, states, Shape())
    losses = {"dense": nats(model, ids)}
    for top in tqdm(options.tops, desc="groups a token"):
        for ffn in ffns:
            ffn.shape = dataclasses.replace(ffn.shape, top=top)
        with placed(model, ffns):
            losses[f"{top} of 32"] = nats(model, ids)
        print(f"{top}: {losses[f'{top} of 32']:.3f}", flush=True)
    print(f"| {options.stage}, {ids.numel()} tokens | " + " | ".join(losses) + " |")
    print("|---|" + "--:|" * len(losses))
    first, *others = losses.values()
    added = " | ".join(f"{loss:.3f} (+{loss - first:.3f})" for loss in others)
    print(f"| nats a token | {first:.3f} | {added} |")


if __name__ == "__main__":
    main()
