"""Finds the command lines that our documents print, and runs them as a user would.

A command line is a line of a fenced block without a language, a code span in the text that begins
with one of our tools and goes on after the subcommand (`moecache eval` alone is a name), or a
comment of an example that begins so. `...` is for the reader to complete: such a line is no whole
command. Of words in capitals only those of `STAND_INS` are filled in.
"""

from __future__ import annotations

import glob
import importlib
import multiprocessing
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

TOOLS = ("moecache", "lm_eval")
INSTALLERS = ("make", "pip", "pre-commit", "git", "cd")
"""They install from the network into an environment: their lines are found and not run."""
# Options that shorten a long command: of an option given twice, the last holds.
SHORTER = {
    "lm_eval run": "--limit 1",
    "moecache eval": "--limit 1",
    "moecache tune": "--limit 1 --trials 1 --timeout 1 --tasks tiny_bbh",
    "moecache analyze sensitivity": "--max_tokens 64 --seeds 1",
    "moecache analyze coactivation": "--max_tokens 256 --sample_tokens 16",
    "moecache analyze locality": "--max_tokens 128",
    "moecache analyze drafting": "--max_tokens 64",
    "moecache analyze divergence": "--max_tokens 32 --policies big_moe_on_edge_drop_cold",
    "moecache analyze predictability": "--limit 1",
    "moecache profile buddies": "--limit 40 --max_tokens 4096 --sample_tokens 16",
    "moecache profile predictor": "--limit 4 --tokens 2 --max_epochs 1",
    "moecache profile logit_range": "--limit 2 --max_tokens 256",
    "moecache profile hardware": "--size 1MiB --matmul 64",
}
STAND_INS = {
    **{"BASELINE": "results/baseline", "NEW": "results/baseline", "FOLDER": "task_configs"},
    "TRACE": str(Path(__file__).resolve().parent.parent / "traces/olmoe-1b-7b.parquet"),
}
# Models and tasks on the hub, which tests cannot reach: `shortened` puts local ones in their place.
_HUB = re.compile(r"(?<=pretrained=)[\w.-]+/[\w.-]+")
_HUB_TASKS = re.compile(r"(?<=--tasks )(?!tiny_|moecache_offline|pass_at_k)\S+")
_PRELOADED = ("lm_eval.evaluator", "lm_eval._cli", "lm_eval_moecache.harness.lm")


def commands_of(document: Path) -> list[str]:
    """Return the command lines of a document, in order, each as it is printed."""
    text = document.read_text()
    if document.suffix == ".md":
        return list(_of_markdown(text))
    comments = re.findall(r"^# ((?:moecache|lm_eval) .*?)(?: {2,}.*)?$", text, re.MULTILINE)
    return [command.strip() for command in comments]


def _of_markdown(text: str) -> Iterator[str]:
    fences = r"^```(\w*)\n(.*?)^```$|`([^`\n]+)`"
    for language, block, span in re.findall(fences, text, re.MULTILINE | re.DOTALL):
        if language:
            continue
        lines = block.replace("\\\n", " ").split("\n") if block else [span]
        for line in lines:
            words = line.split()
            if not words or "..." in line:
                continue
            is_run = words[0] in TOOLS and len(words) > (2 if span else 1)
            installs = words[0] in INSTALLERS and (block or words[:2] == ["pip", "install"])
            if is_run or installs:
                yield line.strip()


def shortened(command: str) -> list[str]:
    """Return a command's words, changed so that it runs briefly and without a network."""
    offline = _HUB_TASKS.sub("tiny_arc", _HUB.sub("tiny", command))
    if offline != command and "--include_path" not in offline:
        offline += " --include_path task_configs"
    extra = next((more for start, more in SHORTER.items() if command.startswith(start)), "")
    return [STAND_INS.get(word, word) for word in shlex.split(f"{offline} {extra}")]


class Runner:
    """Runs each command in a process of its own, forked after the heavy imports."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*_PRELOADED])

    def run(self, words: list[str], folder: Path) -> tuple[int, str]:
        """Return the exit code and all output."""
        log = folder / ".log"
        process = self._context.Process(target=_run, args=(words, str(folder), str(log)))
        process.start()
        process.join(300)
        if process.is_alive():
            process.kill()
            process.join()
        assert process.exitcode is not None
        return process.exitcode, log.read_text()


def _run(words: list[str], folder: str, log: str) -> None:
    os.chdir(folder)
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # As a shell does.
    arguments = [name for word in words[1:] for name in sorted(glob.glob(word)) or [word]]
    sys.argv = [words[0], *arguments]
    if words[0] == "lm_eval":
        importlib.import_module("lm_eval.__main__").cli_evaluate()
    else:
        sys.exit(importlib.import_module("lm_eval_moecache.cli.main").main(arguments))
