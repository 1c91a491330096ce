"""One command for owners of an accelerator: is the wall clock correct there, and how fast is it?

    python benchmarks/gpu_check.py [--minutes 8] [--device cuda] [--shape olmoe4] [--out gpu_check]

Takes `--minutes` on one device, without network, with random models, the most important first: the
tests marked `gpu` (equality under random delays, slots, fences, pinned copies, codecs); lossless
policies against plain transformers, bit for bit, alone and in batches; whole evaluations against
`--model hf`; copies of experts against one large pinned copy; prefill and decode against plain
transformers at 100% and against accelerate's offloading at 25%; the virtual clock's prediction,
from a profile measured in the same run, against the wall; and the shipped model's answers here and
on the host.

Each check has its own limit, a share of the minutes left. `check.json`, `table.md` and each check's
output lie in `--out` from the first minute on, so that a run that is cut off has shown what it did.
Any accelerator that torch supports will do. On a CPU the command tries every script, small, in two
minutes, and lists what it leaves out; its figures apply to no device.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from grid import arguments

from lm_eval_moecache.model.device import best_device, devices, name_of
from lm_eval_moecache.records.files import write_whole

ROOT = Path(__file__).resolve().parent.parent
TESTS = "-m pytest -q -p no:cacheprovider -m gpu tests/model/wall/test_on_device.py -k"
ONCE = "--rounds 1 --tokens 2 --prompt 8"


class Check(NamedTuple):
    """What runs on a device, and on a CPU (`{}`: device and shape); its part of the time."""

    command: str
    trial: str
    part: float
    left_out: str = ""
    """What a CPU leaves out."""


CHECKS: Mapping[str, Check] = {
    "tests": Check(
        f"{TESTS} not(in_batches)",
        f"{TESTS} test_dropping",
        2,
        "all but one of the tests, and streams, fences and pinned copies: scripted streams stand "
        "for a device",
    ),
    "equality": Check(
        f"{TESTS} in_batches", f"{TESTS} in_batches[olmoe-16-wall]", 1, "all but one family"
    ),
    "evaluation": Check(
        "vs_hf.py {} --evaluate 8 --batches 1,16,64 --rounds 1 --tokens 64",
        "vs_hf.py {} --evaluate 1 --batches 1 --rounds 1 --tokens 2",
        3,
        "batches, and a model of real size",
    ),
    "link": Check(
        "link.py {} --rounds 5",
        "link.py {} --rounds 1 --tokens 2",
        1,
        "a link: copies are within host memory",
    ),
    "vs_hf": Check("vs_hf.py {} --rounds 11", f"vs_hf.py {{}} {ONCE}", 1),
    "vs_accelerate": Check(
        "vs_accelerate.py {} --rounds 3 --policy on_demand",
        f"vs_accelerate.py {{}} {ONCE} --policy on_demand",
        1.5,
        "offloading to host memory (the disk tier alone)",
    ),
    "clock": Check(
        "clock_fidelity.py {} --policies on_demand,specmd --capacities 25% --sweeps 1 "
        "--bandwidth 4GB/s",
        f"clock_fidelity.py {{}} --policies on_demand --capacities 25% --sweeps 1 {ONCE}",
        2,
        "specmd",
    ),
    "answers": Check(
        "-m lm_eval_moecache eval --model moecache --limit 10 --tasks tiny_gsm8k --log_samples",
        "-m lm_eval_moecache eval --model moecache --limit 1 --tasks tiny_gsm8k --log_samples",
        1.5,
        "a second device: the two clocks are compared",
    ),
}
"""The checks, the most important first."""
MEDIAN, RATIO = r" +median ([\d.]+)", r"[\d.]+ / [\d.]+ = ([\d.]+)"
FIGURES: Mapping[str, tuple[str, str, tuple[float, float] | None]] = {
    "documents a second / hf, by batch": ("evaluation", r"ratio ([\d.]+)", None),
    "documents a second, by batch": ("evaluation", r"a second ([\d.]+)", None),
    "1, 4, 16, 64 experts / one large copy": ("link", f"at once: share .*{MEDIAN}", None),
    "link, share of one large copy": ("link", f"as it is: share .*{MEDIAN}", (0.9, inf)),
    "link at 1GB/s, share of it": ("link", f"throttled to .*: share .*{MEDIAN}", (0.9, inf)),
    "prefill / transformers at 100%": ("vs_hf", f"plain, prefill:{MEDIAN}", (0.97, inf)),
    "decode / transformers at 100%": ("vs_hf", f"plain, decode:{MEDIAN}", (1.15, inf)),
    "prefill / accelerate at 25%": ("vs_accelerate", f"accelerate, prefill:{MEDIAN}", None),
    "decode / accelerate at 25%": ("vs_accelerate", f"accelerate, decode:{MEDIAN}", (3.0, inf)),
    "bytes a step, accelerate / ours": ("vs_accelerate", r": ([\d.]+) times fewer", None),
    "TTFT virtual / wall": ("clock", f"TTFT {RATIO}", (0.85, 1.15)),
    "TPOT virtual / wall": ("clock", f"TPOT {RATIO}", (0.85, 1.15)),
    "answers as under the first": ("answers", r"^alike ([\d.]+)$", (1.0, 1.0)),
}
"""Label -> the check that prints the figure, its pattern, and the lower and upper target.

If the pattern matches several times, all figures must meet the target.
"""


def commands_of(name: str, device: str, shape: str, runs: Path) -> list[list[str]]:
    """Return the commands of one check, to be run by this Python."""
    check = CHECKS[name]
    command = check.trial if device == "cpu" else check.command
    if name == "answers":
        # The first is what the others are held against: the host's answers under the virtual clock.
        pairs = dict.fromkeys([("cpu", "virtual"), (device, "virtual"), (device, "wall")])
        options = "pretrained=tiny,policy=on_demand,capacity=25%"
        return [
            [
                *f"{command} --model_args {options},device={place},clock={clock}".split(),
                *("--output_path", str(runs / f"{index}_{place}_{clock}")),
            ]
            for index, (place, clock) in enumerate(pairs)
        ]
    if command.startswith(TESTS):
        return [[*TESTS.split(), command[len(TESTS) + 1 :].replace("not(", "not (")]]
    if name == "evaluation" and shape == "olmoe4":
        shape = "olmoe"
    return [f"{ROOT}/benchmarks/{command.format(f'--device {device} --shape {shape}')}".split()]


def _run(arguments: list[str], device: str, limit_s: float, said: Path) -> int:
    """Return a command's exit code, 124 at the limit; its output is appended as it comes.

    On a CPU, tests use scripted streams, and nothing is compiled: that takes longer than the trial.
    """
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    more = {"MOECACHE_TEST_DEVICE": device, "PYTHONUNBUFFERED": "1", "PYTHONPATH": paths}
    if device == "cpu":
        more |= {"MOECACHE_TEST_DEVICE": "scripted", "NUMBA_DISABLE_JIT": "1"}
        more |= {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    with said.open("a") as file:
        try:
            return subprocess.run(
                [sys.executable, *arguments],
                **{"stdout": file, "stderr": subprocess.STDOUT, "cwd": ROOT},
                **{"env": {**os.environ, **more}, "timeout": limit_s},
            ).returncode
        except subprocess.TimeoutExpired:
            return 124


def alike(runs: Path) -> list[float]:
    """Return the share of documents that each later run answers as the first does."""
    answers = []
    for folder in sorted(runs.iterdir()):
        lines = (line for file in folder.rglob("samples_*.jsonl") for line in file.open())
        samples = map(json.loads, lines)
        answers.append({(s["doc_id"], s.get("filter")): s["resps"] for s in samples})
    first = answers[0]
    return [sum(later.get(k) == first[k] for k in first) / len(first) for later in answers[1:]]


def run_check(name: str, device: str, shape: str, limit_s: float, folder: Path) -> dict[str, Any]:
    """Run one check and read its figures, those of a check that was stopped, too."""
    start, runs, said = time.perf_counter(), folder / "runs", folder / f"{name}.txt"
    said.write_text("")
    codes = [
        _run(command, device, max(1.0, start + limit_s - time.perf_counter()), said)
        for command in commands_of(name, device, shape, runs)
    ]
    if name == "answers" and not any(codes):
        with said.open("a") as file:
            file.writelines(f"\nalike {share:.3f}" for share in alike(runs))
    output, summary = said.read_text(), ""
    figures = {
        words: [float(x) for x in re.findall(pattern, output, re.MULTILINE)]
        for words, (check, pattern, _) in FIGURES.items()
        if check == name
    }
    if name in ("tests", "equality"):
        lines = output.strip().splitlines() or [""]
        summary = "; ".join([*(x for x in lines if x.startswith(("FAILED", "ERROR"))), lines[-1]])
    code, seconds = next(filter(None, codes), 0), time.perf_counter() - start
    passed = not code and all(figures.values())
    return {"code": code, "seconds": seconds, "found": figures, "said": summary, "passed": passed}


def check(
    device: str, shape: str, checks: Sequence[str], minutes: float, folder: Path
) -> dict[str, Any]:
    """Run the checks, one after another, and return the report, which is written after each."""
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    setup = {"device": name_of(torch.device(device)), "on_a_gpu": device != "cpu", "shape": shape}
    report: dict[str, Any] = {**setup, **versions, "checks": {}}
    end = time.perf_counter() + 60 * minutes
    for place, name in enumerate(checks):
        parts = [CHECKS[later].part for later in checks[place:]]
        limit_s = (end - time.perf_counter()) * parts[0] / sum(parts)
        result = run_check(name, device, shape, limit_s, folder)
        report["checks"][name] = result
        write_whole(folder / "check.json", json.dumps(report, indent=1).encode())
        write_whole(folder / "table.md", table(report).encode())
        print(f"{name}: {state_of(result)}, {result['seconds']:.0f} s", flush=True)
        for words, values in result["found"].items():
            print(f"  {words}: {', '.join(f'{value:.3g}' for value in values)}", flush=True)
    return report


def state_of(result: Mapping[str, Any]) -> str:
    failed = "stopped at its limit" if result["code"] == 124 else f"failed: exit {result['code']}"
    return "passed" if result["passed"] else failed


def table(report: Mapping[str, Any]) -> str:
    """Return a Markdown table of the figures and their targets."""
    lines = [
        f"{report['device']}, torch {report['torch']}, transformers {report['transformers']}, "
        f"model {report['shape']}",
        "",
    ]
    if not report["on_a_gpu"]:
        lines[0] += " (no accelerator: the store of a CPU, and no figure is a device's)"
        lines[1:1] = [
            f"- {name} leaves out {CHECKS[name].left_out}"
            for name in report["checks"]
            if CHECKS[name].left_out
        ]
    lines += ["| what | found | target | |", "|---|---|---|---|"]
    for name, result in report["checks"].items():
        state, seconds = f"{state_of(result)} {result['said']}", f"{result['seconds']:.0f} s"
        lines.append(f"| {name} | {state} | | {seconds} |")
        for words, values in result["found"].items():
            text, bound, met = ", ".join(f"{value:.3g}" for value in values), "", ""
            if (target := FIGURES[words][2]) is not None:
                least, most = target
                bound = f"at least {least}" if most == inf else f"{least} to {most}"
                within = bool(values) and all(least <= value <= most for value in values)
                met = "met" if within else "missed"
            lines.append(f"| {words} | {text or 'not said'} | {bound} | {met} |")
    return "\n".join([*lines, ""])


def main() -> None:
    defaults = {"checks": ",".join(CHECKS), "minutes": 8.0, "out": Path("gpu_check")}
    options = arguments(__doc__, device="auto", shape=None, **defaults)
    device = best_device() if options.device == "auto" else options.device
    if str(torch.device(device)) not in devices():
        raise SystemExit(f"--device {device}: allowed here: {', '.join(devices())}")
    checks = options.checks.split(",")
    if unknown := [name for name in checks if name not in CHECKS]:
        raise SystemExit(f"--checks {unknown[0]}: allowed: {', '.join(CHECKS)}")
    shape = options.shape or ("nano" if device == "cpu" else "olmoe4")
    folder = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    report = check(device, shape, checks, options.minutes, folder)
    print(f"\n{table(report)}\nAll output: {folder}")
    if not all(result["passed"] for result in report["checks"].values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
