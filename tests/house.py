"""Which folder imports which: `python -m tests.house` prints the picture.

A folder of the first package, or a sister package, stands one floor above the highest that it
imports. CONTRIBUTING.md shows the picture, and a test keeps it equal to the code.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import lm_eval_moecache

PACKAGE = Path(lm_eval_moecache.__file__).resolve().parent
NAME = "lm_eval_moecache"
SISTERS = ("moecache_plan", "moecache_lab")


def modules_below(folder: Path, root: Path) -> dict[str, Path]:
    return {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix("__init__"): path
        for path in sorted(folder.rglob("*.py"))
    }


# Of the first package without its name, of a sister with it.
MODULES = modules_below(PACKAGE, PACKAGE)
for sister in SISTERS:
    MODULES |= modules_below(PACKAGE.parent / sister, PACKAGE.parent)

# The floors of the house, from the bottom up: a folder imports only folders that stand before it.
# tiny/ is the shipped model and its documents, which any folder may open.
ORDER = (
    *("records", "emulate", "tiny", "trace", "algorithms", "engine", "testing", "model", "report"),
    *("harness", "sweep", "tune", "profiling", "cli"),
    *SISTERS,
)


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def nodes_of(module: str, typing: bool = False) -> Iterator[ast.AST]:
    """Walk a module, without its `if TYPE_CHECKING` blocks unless `typing`."""
    waiting: list[ast.AST] = [tree_of(module)]
    while waiting:
        node = waiting.pop()
        yield node
        children = ast.iter_child_nodes(node)
        waiting += [child for child in children if typing or not is_type_checking(child)]


@cache
def imports_of(module: str, typing: bool = False) -> frozenset[str]:
    """Return the full dotted names that a module imports, `from a import b` as both a and a.b."""
    names = set()
    for node in nodes_of(module, typing):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            assert node.module
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def own_imports_of(module: str, typing: bool = False) -> set[str]:
    """Return the modules of our packages that a module imports, named as in `MODULES`."""
    names = {name.removeprefix(f"{NAME}.") for name in imports_of(module, typing)}
    return (names | {f"{name}." for name in names}) & MODULES.keys()


def imports() -> dict[str, set[str]]:
    """Return folder -> the folders that it imports."""
    graph: dict[str, set[str]] = {folder: set() for folder in ORDER}
    for module in MODULES:
        names = {name.partition(".")[0] for name in own_imports_of(module)}
        graph.get(module.partition(".")[0], set()).update(names & graph.keys())
    return {folder: names - {folder} for folder, names in graph.items()}


def floors() -> list[list[str]]:
    """Return the folders of each floor, the ground floor first."""
    below, height = imports(), dict[str, int]()
    for folder in ORDER:
        height[folder] = 1 + max((height[name] for name in below[folder]), default=-1)
    return [[f for f in ORDER if height[f] == floor] for floor in range(max(height.values()) + 1)]


def picture() -> str:
    """Draw the floors from the top down, each folder with its imports.

    Imports that another import implies are left out (the transitive reduction).
    """
    below, lines = imports(), []

    def reach(folder: str) -> set[str]:
        return below[folder].union(*(reach(name) for name in below[folder]))

    width = max(len(folder) for folder in ORDER)
    for number, folders in reversed(list(enumerate(floors()))):
        for column, folder in enumerate(folders):
            through = set[str]().union(*(reach(name) for name in below[folder]))
            direct = [name for name in ORDER if name in below[folder] - through]
            floor = f"{number}" if column == 0 else " "
            arrow = f" --> {', '.join(direct)}" if direct else ""
            lines.append(f"{floor:>2} [ {folder:{width}} ]{arrow}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(picture() + "\n")
