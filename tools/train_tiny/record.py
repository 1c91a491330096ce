"""Output of a training run: the bf16 model folder, `training.json` and the loss curve."""

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
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tools.train_tiny.evaluate import share_exact
from tools.train_tiny.skills.generator import MAKERS, held_out

NUM_FINAL = 40
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors")
HEADER = ("step", "text_loss", "skill_loss", "balance_loss", "rate_share")
Row = tuple[int, float, float, float, float]


@dataclass(slots=True, kw_only=True)
class Curve:
    """Losses and the share of the full learning rate, one row per step."""

    rows: list[Row] = field(default_factory=list)

    def add(self, step: int, text: float, skills: float, balance: float, share: float) -> None:
        row = (round(number, 5) for number in (text, skills, balance, share))
        self.rows.append((step, *row))  # type: ignore[arg-type]

    def told(self, window: int) -> str:
        last = self.rows[-window:]
        means = [sum(row[place] for row in last) / len(last) for place in (1, 2, 3)]
        step = last[-1][0] + 1
        return f"step {step} text {means[0]:.3f} skills {means[1]:.3f} balance {means[2]:.3f}"

    def write_csv(self, path: Path) -> None:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(HEADER)
            writer.writerows(self.rows)


def _command() -> str:
    """Return the command as typed, without its folders, which do not affect the weights."""
    arguments = sys.argv[1:]
    for option in ("--out", "--cache"):
        if option in arguments:
            arguments[arguments.index(option) + 1] = "DIR"
    module = Path(sys.argv[0]).stem
    return shlex.join(["python", "-m", f"tools.train_tiny.{module}", *arguments])


def write_folder(
    out: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    curve: Curve,
    facts: Mapping[str, object],
) -> None:
    """Round to bf16, score the rounded model, and move each file into place once finished."""
    model.to(torch.bfloat16).eval()
    if hasattr(model.config, "num_experts"):
        model.set_experts_implementation("eager")
    with torch.no_grad():
        scores = {
            name: round(share_exact(model, tokenizer, held_out((name,), NUM_FINAL, 0)), 4)
            for name in MAKERS
        }
    summary = {
        "command": _command(),
        **facts,
        "num_parameters": sum(weight.numel() for weight in model.parameters()),
        "share_exact_bf16": scores,
        "num_threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version()}
        | {package: version(package) for package in PACKAGES},
    }
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as folder:
        part = Path(folder)
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        curve.write_csv(part / "loss.csv")
        (part / "training.json").write_text(json.dumps(summary, indent=2) + "\n")
        for file in sorted(part.iterdir()):
            file.chmod(0o644)  # safetensors writes for the owner only
            os.replace(file, out / file.name)
