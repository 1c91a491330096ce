"""Who may import whom: the flow of the design, visible in the imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import lm_eval_moecache
from lm_eval_moecache.algorithms.registry import AXES, algorithm_names

PACKAGE = Path(lm_eval_moecache.__file__).resolve().parent
NAME = "lm_eval_moecache"
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}

# The floors of the house, from the bottom up: a folder imports only folders that stand before it.
# tiny/ is the shipped model and its documents, which everybody may open.
ORDER = (
    "records",
    "tiny",
    "trace",
    "algorithms",
    "engine",
    "testing",
    "model",
    "report",
    "harness",
    "sweep",
    "tune",
    "analysis",
    "profiling",
    "cli",
)
# Which folders (or modules) may import a heavy library, at any depth of their functions. A name
# ending in a dot stands for a folder.
HARNESS_AND_ABOVE = tuple(f"{name}." for name in ORDER[ORDER.index("harness") :])
MAY_IMPORT = {
    "torch": ("model.", "tiny.", *HARNESS_AND_ABOVE),
    "transformers": ("model.", "tiny.", *HARNESS_AND_ABOVE),
    "lm_eval": ("tiny.", *HARNESS_AND_ABOVE),
}
TORCH_FREE = ("records.", "trace.", "algorithms.", "engine.", "report.")
# The future of a replay is a record, too: the offline algorithms are given it.
ALGORITHM_MAY_IMPORT = ("records.", "trace.future")
# What rules that rank residents are written in.
RANKINGS = ("algorithms.features", "algorithms.ranked")


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def nodes_of(module: str) -> Iterator[ast.AST]:
    """Walk a module, leaving out what only the type checker sees."""
    waiting: list[ast.AST] = [tree_of(module)]
    while waiting:
        node = waiting.pop()
        yield node
        children = ast.iter_child_nodes(node)
        waiting += [child for child in children if not is_type_checking(child)]


@cache
def imports_of(module: str) -> frozenset[str]:
    """Return the full dotted names that a module imports, `from a import b` as both a and a.b."""
    found = set()
    for node in nodes_of(module):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            assert node.module
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def own_imports_of(module: str) -> set[str]:
    """Return the modules of this package that a module imports."""
    prefix = f"{NAME}."
    names = {name.removeprefix(prefix) for name in imports_of(module) if name.startswith(prefix)}
    return {name for name in names if name in MODULES}


def matches(module: str, allowed: tuple[str, ...]) -> bool:
    return any(module == a or (a.endswith(".") and f"{module}.".startswith(a)) for a in allowed)


def algorithms() -> list[str]:
    return [f"algorithms.{axis}.{name}" for axis in AXES for name in algorithm_names(axis)]


@pytest.mark.parametrize("library", MAY_IMPORT)
def test_heavy_libraries_stay_where_they_belong(library: str) -> None:
    users = [
        module
        for module in MODULES
        if any(name == library or name.startswith(f"{library}.") for name in imports_of(module))
    ]
    assert users, f"nothing imports {library}: is the walk broken?"
    assert [module for module in users if not matches(module, MAY_IMPORT[library])] == []


def test_every_folder_has_its_floor() -> None:
    folders = {module.partition(".")[0] for module in MODULES if "." in module.rstrip(".")}
    assert folders == set(ORDER)


@pytest.mark.parametrize("folder", ORDER)
def test_a_folder_imports_only_folders_before_it(folder: str) -> None:
    allowed = {f"{name}." for name in ORDER[: ORDER.index(folder) + 1]}
    found = {
        f"{module} imports {name}"
        for module in MODULES
        if module.startswith(f"{folder}.")
        for name in own_imports_of(module)
        if f"{name.partition('.')[0]}." not in allowed
    }
    assert found == set()


@pytest.mark.parametrize("module", algorithms())
def test_algorithms_are_leaves(module: str) -> None:
    """They see the records and their base (or shared helpers of their own axis), nothing else."""
    axis = module.rpartition(".")[0]
    allowed = (*ALGORITHM_MAY_IMPORT, *RANKINGS, f"{axis}.base")
    assert [name for name in own_imports_of(module) if not matches(name, allowed)] == []


@pytest.mark.parametrize("axis", AXES)
def test_bases_see_the_records_only(axis: str) -> None:
    own = own_imports_of(f"algorithms.{axis}.base")
    assert [name for name in own if not matches(name, ALGORITHM_MAY_IMPORT)] == []


def test_nobody_imports_an_algorithm_by_name() -> None:
    by_name = set(algorithms())
    found = {module: sorted(own_imports_of(module) & by_name) for module in MODULES}
    assert {module: names for module, names in found.items() if names} == {}


def test_there_are_no_cycles() -> None:
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path, module))
        if module not in done:
            for name in sorted(own_imports_of(module)):
                if name != module:
                    visit(name, (*path, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())


def test_every_module_says_what_it_is_for() -> None:
    written = [module for module, path in MODULES.items() if path.read_text()]
    silent = [module for module in written if not ast.get_docstring(tree_of(module))]
    assert silent == []


def test_the_core_and_every_algorithm_start_without_heavy_libraries() -> None:
    modules = [m for m in MODULES if m.startswith(TORCH_FREE)]
    names = [f"{NAME}.{m}".removesuffix(".") for m in (*modules, "harness.arguments")]
    script = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "heavy = {'torch', 'transformers', 'lm_eval', 'datasets', 'jsonargparse'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=PACKAGE.parent
    )
    assert (result.stdout, result.returncode) == ("[]\n", 0), result.stderr


def test_pydantic_waits_until_a_file_is_read() -> None:
    """Its import takes a tenth of a second, which a replay's start and `--help` should not."""
    folders = ("records.", "trace.", "algorithms.", "engine.")
    modules = [m for m in MODULES if m.startswith(folders) and not m.startswith("records.schemas")]
    names = [f"{NAME}.{m}".removesuffix(".") for m in (*modules, "cli.main")]
    script = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "print('pydantic' in sys.modules)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=PACKAGE.parent
    )
    assert (result.stdout, result.returncode) == ("False\n", 0), result.stderr
