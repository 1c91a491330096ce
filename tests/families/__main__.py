"""Tries every model type and writes the table: `make families`, or with a part of them to print.

python -m tests.families [--write] [TYPE ...]
"""

from __future__ import annotations

import argparse
import json
import logging
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import transformers

from lm_eval_moecache.model.weighting import RULES
from tests.families.check import AS_HF, FAILED, REFUSED, RUNS, Row, check
from tests.families.configs import causal_types, other_types

DOCS = Path(__file__).resolve().parents[2] / "docs"
COLUMNS = (
    "virtual",
    "batch",
    "prefetching",
    "trace",
    "lossy",
    "wall_ram",
    "wall_disk",
    "router",
    "rule",
)


def table(rows: Sequence[Row]) -> str:
    """Return the page of all model types."""
    counts = {word: sum(row.verdict == word for row in rows) for word in (RUNS, REFUSED, FAILED)}
    lines = [
        "# Model families",
        "",
        f"Every model type of transformers {transformers.__version__} with the experts interface, "
        "tried with random weights and two layers on a CPU: "
        + ", ".join(f"{count} {word}" for word, count in counts.items())
        + ". Made by `make families`; the same as data is in `families.json`.",
        "",
        "`equal`: outputs (generations, scores) are bit for bit the plain model's at batch size 1; "
        "under `trace`, a replay gives the live run's counts. `batch`: six prompts of 3 to 60 "
        "words at batch size 4, whose rows end at different tokens. There `equal`: texts and "
        "scores are the plain model's, in the same batches and alone; `as hf`: scores are the "
        "plain model's in the same batches, and its own texts or scores change with a batch by "
        "more than rounding (what a sparse indexer or a compressor picks hangs on the padded "
        "length); a row that takes an ended one's place has another padding than in the plain "
        "model's batch. `runs`: lossy "
        "algorithms change selections, and the model is as it was afterwards. `refused`: before "
        "anything is loaded, with the reason below. Columns: on demand under the virtual clock, "
        "alone and in batches; the default policy with prefetching; its trace replayed; "
        "`swap_rank` routing and `miss=drop`; the wall clock from memory and from disk.",
        "",
        "Answers change with a batch: "
        + ", ".join(f"`{row.model_type}`" for row in rows if row.batch == AS_HF)
        + ".",
        "",
        "| model type | " + " | ".join(COLUMNS) + " |",
        "|---|" + "---|" * len(COLUMNS),
    ]
    for row in rows:
        cells = (str(getattr(row, column)) for column in COLUMNS)
        lines.append(f"| `{row.model_type}` | " + " | ".join(cells) + " |")
    lines += ["", "## Reasons", ""]
    lines += [f"- `{row.model_type}`: {' '.join(r.split())}" for row in rows for r in row.reasons]
    lines += ["", "## Weighting rules", ""]
    lines += [f"- `{rule.__name__}`: {' '.join(str(rule.__doc__).split())}" for rule in RULES]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--write", action="store_true", help="write docs/families.md and .json: without TYPE"
    )
    parser.add_argument("types", nargs="*")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    rows = []
    for model_type in options.types or [*causal_types(), *other_types()]:
        start = time.perf_counter()
        rows.append(check(model_type))
        seconds = time.perf_counter() - start
        print(json.dumps({**rows[-1].as_dict(), "seconds": round(seconds, 1)}), flush=True)
    if options.write and not options.types:
        DOCS.mkdir(exist_ok=True)
        (DOCS / "families.md").write_text(table(rows))
        data = [row.as_dict() for row in rows]
        (DOCS / "families.json").write_text(json.dumps(data, indent=1) + "\n")
    raise SystemExit(any(row.verdict == FAILED for row in rows))


if __name__ == "__main__":
    main()
