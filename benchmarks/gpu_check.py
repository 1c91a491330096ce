"""One command for owners of an accelerator: is the wall clock correct there, and how fast is it?

    python benchmarks/gpu_check.py [--device cuda] [--shape olmoe4] [--out gpu_check]

Takes under ten minutes on one device, without network, with a random model: the tests marked `gpu`
(bit-for-bit equality under random delays, slots, fences, pinned copies, codecs); link use against
one large pinned copy; prefill and decode against plain transformers at 100% capacity (the overhead)
and against accelerate's offloading to host memory at 25% (real size); the virtual clock's
prediction against the wall. Then the shipped model answers a few questions under both clocks;
`moecache table gpu_check/runs` reads those runs.

Any accelerator that torch supports will do. On a CPU the script lists the checks it leaves out and
runs the rest with a CPU's store, which shows that the script works; its figures apply to no device.
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
from typing import Any

import torch
import transformers
from grid import arguments

from lm_eval_moecache.model.device import best_device, devices, name_of

ROOT = Path(__file__).resolve().parent.parent
NEEDS_A_DEVICE = {
    "tests": "streams, fences and pinned copies (scripted streams stand for the device)",
    "link": "a link: copies are within host memory",
    "vs_accelerate": "offloading to host memory (the disk tier alone)",
}
"""The part of each check that a CPU leaves out."""
ONCE = "--rounds 1 --tokens 2 --prompt 8"
CHECKS: Mapping[str, tuple[str, str, str]] = {
    "link": ("link.py", "--rounds 5", "--rounds 1 --tokens 2"),
    "vs_hf": ("vs_hf.py", "--rounds 11", ONCE),
    "vs_accelerate": ("vs_accelerate.py", "--rounds 3 --policy on_demand", ONCE),
    "clock": ("clock_fidelity.py", "--sweeps 1", f"{ONCE} --policies on_demand --capacities 25%"),
}
"""Name -> script, its arguments, and those of a trial that takes a minute."""
MEDIAN, RATIO = r" +median ([\d.]+)", r"[\d.]+ / [\d.]+ = ([\d.]+)"
FIGURES: Mapping[str, tuple[str, str, tuple[float, float] | None]] = {
    "link, share of one large copy": ("link", f"as it is: share .*{MEDIAN}", (0.9, inf)),
    "link at 1GB/s, share of it": ("link", f"throttled to .*: share .*{MEDIAN}", (0.9, inf)),
    "prefill / transformers at 100%": ("vs_hf", f"plain, prefill:{MEDIAN}", (0.97, inf)),
    "decode / transformers at 100%": ("vs_hf", f"plain, decode:{MEDIAN}", (1.15, inf)),
    "prefill / accelerate at 25%": ("vs_accelerate", f"accelerate, prefill:{MEDIAN}", None),
    "decode / accelerate at 25%": ("vs_accelerate", f"accelerate, decode:{MEDIAN}", (3.0, inf)),
    "bytes a step, accelerate / ours": ("vs_accelerate", r": ([\d.]+) times fewer", None),
    "TTFT virtual / wall": ("clock", f"TTFT {RATIO}", (0.85, 1.15)),
    "TPOT virtual / wall": ("clock", f"TPOT {RATIO}", (0.85, 1.15)),
}
"""Label -> the check that prints the figure, its pattern, and the lower and upper target.

If the pattern matches several times, all figures must meet the target.
"""


def commands_of(name: str, device: str, shape: str, quick: bool, runs: Path) -> list[list[str]]:
    """Return the commands of one check, to be run by this Python."""
    if name == "tests":
        tests = "-m pytest -q -p no:cacheprovider -m gpu tests/model/wall/test_on_device.py"
        return [tests.split()]
    if name == "runs":
        options = f"pretrained=tiny,policy=on_demand,capacity=25%,device={device}"
        command = f"-m lm_eval_moecache eval --model moecache --limit {1 if quick else 10}"
        command += f" --tasks tiny_gsm8k --log_samples --model_args {options}"
        return [
            [*f"{command},clock={clock} --output_path".split(), str(runs / clock)]
            for clock in ("virtual", "wall")
        ]
    script, defaults, trial = CHECKS[name]
    options = f"--device {device} --shape {shape} {defaults} {trial if quick else ''}"
    return [[str(ROOT / "benchmarks" / script), *options.split()]]


def _run(arguments: list[str], device: str, limit_s: float) -> tuple[int, str]:
    """Return a command's exit code and its output. On a CPU, tests use scripted streams."""
    name = "scripted" if device == "cpu" else device
    keywords: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "cwd": ROOT}
    keywords |= {"env": {**os.environ, "MOECACHE_TEST_DEVICE": name}, "text": True}
    try:
        process = subprocess.run([sys.executable, *arguments], timeout=limit_s, **keywords)
    except subprocess.TimeoutExpired as error:
        return 124, f"{error.stdout or ''}\nstopped after {limit_s:.0f} s"
    return process.returncode, process.stdout


def run_check(
    name: str, device: str, shape: str, limit_s: float, quick: bool, runs: Path
) -> dict[str, Any]:
    """Run one check and read its figures."""
    start = time.perf_counter()
    commands = commands_of(name, device, shape, quick, runs)
    codes, outputs = zip(*(_run(one, device, limit_s) for one in commands), strict=True)
    code, output, summary = next(filter(None, codes), 0), "".join(outputs), ""
    figures = {
        words: [float(x) for x in re.findall(pattern, output)]
        for words, (check, pattern, _) in FIGURES.items()
        if check == name
    }
    if name == "tests":
        lines = output.strip().splitlines() or [""]
        summary = "; ".join([*(x for x in lines if x.startswith(("FAILED", "ERROR"))), lines[-1]])
    elif name == "runs":
        summary = f"moecache table {runs}"
    passed = not any(codes) and all(figures.values())
    result = {"code": code, "output": output, "seconds": time.perf_counter() - start}
    return {**result, "found": figures, "said": summary, "passed": passed}


def check(
    device: str, shape: str, checks: Sequence[str], limit_s: float, quick: bool, folder: Path
) -> dict[str, Any]:
    """Run all checks, one after another, and return the report."""
    results = {}
    for name in checks:
        results[name] = run_check(name, device, shape, limit_s, quick, folder / "runs")
        state = "passed" if results[name]["passed"] else f"FAILED ({results[name]['code']})"
        print(f"{name}: {state}, {results[name]['seconds']:.0f} s", flush=True)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    setup = {"device": name_of(torch.device(device)), "on_a_gpu": device != "cpu", "shape": shape}
    return {**setup, **versions, "checks": results}


def table(report: Mapping[str, Any]) -> str:
    """Return a Markdown table of the figures and their targets."""
    lines = [f"{report['device']}, torch {report['torch']}, model {report['shape']}", ""]
    if not report["on_a_gpu"]:
        lines[0] += " (no accelerator: the store of a CPU, and no figure is a device's)"
        left_out = {n: words for n, words in NEEDS_A_DEVICE.items() if n in report["checks"]}
        lines[1:1] = [f"- {name} leaves out {words}" for name, words in left_out.items()]
    lines += ["| what | found | target | |", "|---|---|---|---|"]
    for name, result in report["checks"].items():
        state = "passed" if result["passed"] else f"failed: exit {result['code']}"
        lines.append(f"| {name} | {state} {result['said']} | | {result['seconds']:.0f} s |")
        for words, values in result["found"].items():
            text = ", ".join(f"{value:.3g}" for value in values) or "not said"
            bound, met = "", ""
            if (target := FIGURES[words][2]) is not None:
                least, most = target
                bound = f"at least {least}" if most == inf else f"{least} to {most}"
                within = bool(values) and all(least <= value <= most for value in values)
                met = "met" if within else "missed"
            lines.append(f"| {words} | {text} | {bound} | {met} |")
    return "\n".join(lines)


def main() -> None:
    defaults = {"checks": ",".join(("tests", *CHECKS, "runs")), "quick": False}
    defaults |= {"limit_s": 240.0, "out": Path("gpu_check")}
    options = arguments(__doc__, device="auto", shape=None, **defaults)
    device = best_device() if options.device == "auto" else options.device
    if str(torch.device(device)) not in devices():
        raise SystemExit(f"--device {device}: allowed here: {', '.join(devices())}")
    shape = options.shape or ("cpu" if device == "cpu" else "olmoe4")
    folder, checks = options.out, options.checks.split(",")
    folder.mkdir(parents=True, exist_ok=True)
    report = check(device, shape, checks, options.limit_s, options.quick, folder)
    (folder / "check.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / "table.md").write_text(table(report) + "\n")
    print(f"\n{table(report)}\n\nAll output: {folder / 'check.json'}")
    if not all(result["passed"] for result in report["checks"].values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
