"""What a training run leaves: the bf16 model folder, `training.json` and the loss curve."""

from __future__ import annotations

import csv
import json
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import OlmoeForCausalLM, PreTrainedTokenizerFast

from lm_eval_moecache.tiny.evaluate import accuracies

NUM_FINAL = 200
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors")


@dataclass(slots=True, kw_only=True)
class Curve:
    """Loss, balance loss and rate of each step."""

    rows: list[tuple[int, float, float, float]] = field(default_factory=list)

    def add(self, *, step: int, loss: float, balance: float, rate: float) -> None:
        self.rows.append((step, round(loss, 5), round(balance, 5), round(rate, 8)))

    def recent(self, window: int = 100) -> float:
        last = self.rows[-window:]
        return sum(row[1] for row in last) / len(last)

    def means(self, window: int = 20) -> list[tuple[int, float, float, float]]:
        """One row per `window` steps, so that the shipped file stays small."""
        blocks = (self.rows[i : i + window] for i in range(0, len(self.rows), window))
        return [
            (
                block[-1][0] + 1,
                round(sum(row[1] for row in block) / len(block), 5),
                round(sum(row[2] for row in block) / len(block), 5),
                block[-1][3],
            )
            for block in blocks
        ]

    def write_csv(self, path: Path) -> None:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("step", "answer_loss", "balance_loss", "rate"))
            writer.writerows(self.means())


def _command() -> str:
    """The command as typed, with the folder left out: it is no part of the result."""
    arguments = sys.argv[1:]
    if "--out" in arguments:
        arguments[arguments.index("--out") + 1] = "DIR"
    return shlex.join(["python", "-m", "lm_eval_moecache.tiny.train", *arguments])


def write_folder(
    out: Path,
    model: OlmoeForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    curve: Curve,
    facts: Mapping[str, object],
) -> None:
    """Rounds to bf16, scores that model, and puts each finished file in place at once."""
    model.to(torch.bfloat16)
    model.set_experts_implementation("eager")
    summary = {
        "command": _command(),
        **facts,
        "num_parameters": sum(weight.numel() for weight in model.parameters()),
        "accuracy_bf16": accuracies(model, tokenizer, count=NUM_FINAL, seed=0),
        "num_threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version()}
        | {package: version(package) for package in PACKAGES},
    }
    with tempfile.TemporaryDirectory(dir=out) as folder:
        part = Path(folder)
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        curve.write_csv(part / "loss.csv")
        (part / "training.json").write_text(json.dumps(summary, indent=2) + "\n")
        for file in sorted(part.iterdir()):
            file.chmod(0o644)  # safetensors writes for the owner only
            os.replace(file, out / file.name)
