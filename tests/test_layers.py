"""Who may import whom, how long a module and a function may be: DESIGN sections 3 and 5."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import lm_eval_moecache
from lm_eval_moecache.registry import AXES, algorithm_names

PACKAGE = Path(lm_eval_moecache.__file__).resolve().parent
NAME = "lm_eval_moecache"
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}

# Which modules may import a heavy library, at any depth of their functions. A name ending in a dot
# stands for a folder.
MAY_IMPORT = {
    "torch": (
        "adapters",
        "experts",
        "lm",
        "moe_layers",
        "preflight",
        "store",
        "wrap",
        "precision.",
        "predictor.",
        "speculative.",
        "profiling.",
        "analysis.",
        "sweep.",
        "tiny.",
        "wall.",
    ),
    "transformers": (
        "experts",
        "lm",
        "moe_layers",
        "preflight",
        "store",
        "wrap",
        "predictor.make",
        "speculative.",
        "profiling.",
        "analysis.",
        "tiny.",
        "wall.",
    ),
    "lm_eval": (
        "lm",
        "plugin",
        "tasks",
        "cli.eval",
        "sweep.",
        "speculative.",
        "profiling.",
        "tiny.",
    ),
}
# What the torch-free core may use of the package: itself, the axes' bases, and error texts.
CORE_MAY_IMPORT = ("core.", "errors", *(f"{axis}.base" for axis in AXES))
# The future of a replay and artefacts (and what they hold) are records, too: some are given them.
ALGORITHM_MAY_IMPORT = (
    "core.records",
    "core.future",
    "core.artefact",
    "core.coactivation",
    "core.predictor",
)

# Offenders against the limits of size that have a reason to be so. Keep it empty.
LONG_MODULES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}
MAX_MODULE_LINES, MAX_FUNCTION_LINES = 300, 40


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
    return [f"{axis}.{name}" for axis in AXES for name in algorithm_names(axis)]


@pytest.mark.parametrize("library", MAY_IMPORT)
def test_heavy_libraries_stay_where_they_belong(library: str) -> None:
    users = [
        module
        for module in MODULES
        if any(name == library or name.startswith(f"{library}.") for name in imports_of(module))
    ]
    assert users, f"nothing imports {library}: is the walk broken?"
    assert [module for module in users if not matches(module, MAY_IMPORT[library])] == []


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("core.")])
def test_the_core_imports_itself_and_the_bases_only(module: str) -> None:
    assert [name for name in own_imports_of(module) if not matches(name, CORE_MAY_IMPORT)] == []


@pytest.mark.parametrize("module", algorithms())
def test_algorithms_are_leaves(module: str) -> None:
    """They see the records and their base (or shared helpers of their own axis), nothing else."""
    axis = module.partition(".")[0]
    allowed = (*ALGORITHM_MAY_IMPORT, f"{axis}.base")
    assert [name for name in own_imports_of(module) if not matches(name, allowed)] == []


@pytest.mark.parametrize("axis", AXES)
def test_bases_see_the_records_only(axis: str) -> None:
    assert own_imports_of(f"{axis}.base") <= set(ALGORITHM_MAY_IMPORT)


def test_nobody_imports_an_algorithm_by_name() -> None:
    by_name = set(algorithms())
    found = {module: sorted(own_imports_of(module) & by_name) for module in MODULES}
    assert {module: names for module, names in found.items() if names} == {}


def test_imports_follow_the_line_of_the_design() -> None:
    """lm -> wrap -> ... -> core -> report: nobody imports what stands to its left."""
    line = ("lm", "wrap", "experts", "store")
    for place, module in enumerate(line):
        assert not own_imports_of(module) & set(line[:place]), module
    for module in MODULES:
        if module not in ("lm", "plugin") and not module.startswith(
            ("cli.", "sweep.", "speculative.", "profiling.", "analysis.", "tune")
        ):
            assert "lm" not in own_imports_of(module), module
        if not module.startswith("cli."):
            assert not any(n.startswith("cli.") for n in own_imports_of(module)), module
    assert not own_imports_of("report.metrics") & {"core.engine", "core.layer_step", "lm"}


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


def test_modules_are_short() -> None:
    lengths = {m: len(path.read_text().splitlines()) for m, path in MODULES.items()}
    long = {m: n for m, n in lengths.items() if n >= MAX_MODULE_LINES and m not in LONG_MODULES}
    assert long == {}


def test_functions_are_short() -> None:
    long = {}
    for module in MODULES:
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                length = node.end_lineno - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    long[f"{module}.{node.name}"] = length
    assert {name: n for name, n in long.items() if name not in LONG_FUNCTIONS} == {}


def test_exceptions_to_the_limits_are_still_needed() -> None:
    assert set(LONG_MODULES) <= set(MODULES)
    names = {
        f"{module}.{node.name}"
        for module in MODULES
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.FunctionDef)
    }
    assert set(LONG_FUNCTIONS) <= names


def test_every_module_says_what_it_is_for() -> None:
    written = [module for module, path in MODULES.items() if path.read_text()]
    silent = [module for module in written if not ast.get_docstring(tree_of(module))]
    assert silent == []


def test_the_core_and_every_algorithm_start_without_heavy_libraries() -> None:
    modules = [m for m in MODULES if m.startswith("core.") or m in algorithms()]
    names = [f"{NAME}.{m}".removesuffix(".") for m in (*modules, "policy", "registry", "config")]
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
