"""Generates, at each build of the site, the pages and pictures whose source is elsewhere.

Metrics are documented in results/README.md, policies and algorithms in the code; figures are in
results/. They are written into docs/reference and docs/gallery (not in git), so the site cannot
contradict them. Pages link to what is in git, so that they can be read without the site, too: here
such a link becomes one to the site's own copy.
"""

from __future__ import annotations

import inspect
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PICTURES = (".png", ".svg")
INCLUDED = r"^\[([^\]]+)\]\(\.\./\1\)$"
DRAWN = r"\(\.\./results/([^)]+\.(?:png|svg))\)"


def on_pre_build(config: Any) -> None:
    """Called by mkdocs before it lists the files."""
    sys.path[:0] = [str(DOCS), str(ROOT)]
    import wall_table

    pages = DOCS / "reference"
    pages.mkdir(exist_ok=True)
    (pages / "metrics.md").write_text(metrics_page())
    (pages / "policies.md").write_text(policies_page())
    (pages / "algorithms.md").write_text(algorithms_page())
    (pages / "wall_table.md").write_text(wall_table.page(wall_table.wall_table()))
    write_gallery(DOCS / "gallery")
    write_schema(DOCS / "schema")


def write_schema(folder: Path) -> None:
    """Write the JSON schema of `config.moecache`."""
    from lm_eval_moecache.report.runs.schema import published_schema

    folder.mkdir(exist_ok=True)
    text = json.dumps(published_schema(), indent=2)
    (folder / "config.moecache.json").write_text(text + "\n")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Include a file of the repository where a line of a page is a link to it, and no more.

    On GitHub, which includes nothing, the link leads there.
    """
    markdown = re.sub(INCLUDED, lambda m: _fenced(ROOT / m[1]), markdown, flags=re.M)
    markdown = markdown.replace("(../results/README.md)", "(gallery/index.md)")
    return re.sub(DRAWN, lambda m: f"(gallery/{m[1].replace('/', '-')})", markdown)


def _fenced(path: Path) -> str:
    """Fenced here, because in a page a code formatter would reformat the line."""
    return f"```{path.suffix.removeprefix('.')}\n{path.read_text().rstrip()}\n```"


def keys_table() -> str:
    """The table of docs/keys.md; a test compares the two."""
    from lm_eval_moecache.records.schemas.keys import DEFAULTS, HELP

    lines = ["| key | what | default |", "|---|---|---|"]
    lines.append(
        "| `pretrained` | hub id, folder, `tiny`, or (from Python) a loaded model | `tiny` |"
    )
    for key, text in HELP.items():
        default = "" if DEFAULTS[key] is None else f"`{DEFAULTS[key]}`"
        lines.append(f"| `{key}` | {text} | {default} |")
    return "\n".join(lines)


def metrics_table() -> str:
    """The dictionary's table of metrics in results/README.md; a test compares the two."""
    from lm_eval_moecache.report.metrics import METRICS

    better = {True: "more", False: "less", None: ""}
    lines = ["| field | unit | better | meaning |", "|---|---|---|---|"]
    lines += [
        f"| `{name}` | {m.unit} | {better[m.higher_is_better]} | {m.meaning} |"
        for name, m in METRICS.items()
    ]
    return "\n".join(lines)


def metrics_page() -> str:
    text = (ROOT / "results" / "README.md").read_text()
    start = text.index("## Dictionary of columns")
    return "# Metrics\n\n" + _without_links(text[start:].partition("\n")[2].strip()) + "\n"


def policies_page() -> str:
    from lm_eval_moecache.algorithms.policy import load_policy, policy_names
    from lm_eval_moecache.algorithms.registry import AXES
    from lm_eval_moecache.records.files import policies_dir

    lines = ["# Policies", "", "What `policy=NAME` takes. Any axis can be replaced alone."]
    for name in policy_names():
        file = (policies_dir() / f"{name}.yaml").read_text()
        words = [line[1:].strip() for line in file.splitlines() if line.startswith("#")]
        policy = load_policy(name)
        lines += ["", f"## {name}", "", " ".join(words), "", "| axis | algorithm | parameters |"]
        lines += ["|---|---|---|"]
        for axis in AXES:
            choice = getattr(policy, axis)
            parameters = ", ".join(f"`{key}={value}`" for key, value in choice.parameters.items())
            lines.append(f"| {axis} | `{choice.name}` | {parameters} |")
    return "\n".join(lines) + "\n"


def algorithms_page() -> str:
    from lm_eval_moecache.algorithms.registry import AXES, algorithm_names, find_algorithm
    from lm_eval_moecache.records.files import read_yaml

    cases = read_yaml(ROOT / "tests/algorithms/by_hand.yaml", "by_hand.yaml")
    lines = ["# Algorithms", "", "Parameters are given as `eviction.NAME=value`. What the words of"]
    lines += ["the cases mean is at the head of `tests/algorithms/by_hand.yaml`."]
    for axis in AXES:
        lines += ["", f"## {axis.capitalize()}"]
        for name in algorithm_names(axis):
            algorithm = find_algorithm(axis, name)
            words = _without_links(inspect.getdoc(algorithm) or "").replace("[", "\\[")
            lines += ["", f"### `{axis}={name}`", "", words, "", f"Source: {algorithm.source}."]
            worked = cases[axis].get(name, ())
            lines += ["", "Worked by hand:", "", *map(_case, worked)] if worked else []
    return "\n".join(lines) + "\n"


def _case(case: Any) -> str:
    """Return a case worked by hand as an item of a list."""
    given = dict(case) if isinstance(case, dict) else {"script": case}
    why = given.pop("why", "").replace("[", "\\[")
    shown = ", ".join(f"{key}: {json.dumps(value)}" for key, value in given.items())
    return f"- `{given.get('script', shown) if len(given) == 1 else shown}`" + (why and f" ({why})")


def write_gallery(folder: Path) -> None:
    """Write one section for each experiment of results/: its title, opening and pictures."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    origin = "Every figure is regenerated from the experiment's recipe in `results/`."
    lines = ["# Gallery", "", origin]
    for experiment in sorted((ROOT / "results").iterdir()):
        plots = [p for p in sorted(experiment.rglob("*")) if p.suffix in PICTURES]
        plots = [p for p in plots if p.suffix == ".png" or not p.with_suffix(".png").exists()]
        if not plots:
            continue
        title, _, rest = (experiment / "README.md").read_text().partition("\n")
        opening = next(part for part in rest.split("\n\n") if part.strip())
        lines += ["", f"## {title.lstrip('# ')}", "", _without_links(opening.strip())]
        for picture in plots:
            name = "-".join(picture.relative_to(ROOT / "results").parts)
            shutil.copyfile(picture, folder / name)
            lines += ["", f"![{picture.stem} of {experiment.name}]({name})"]
    (folder / "index.md").write_text("\n".join(lines) + "\n")


def _without_links(text: str) -> str:
    """Replace links to files of the repository, which the site lacks, by their text."""
    return re.sub(r"\[([^\]]+)\]\((?!http)[^)]*\)", r"\1", text)
