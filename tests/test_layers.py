"""Which module may import which: the flow of the design, in the imports and in the guide."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from lm_eval_moecache import api
from lm_eval_moecache.algorithms.registry import AXES, modules_of
from lm_eval_moecache.records import plugins
from lm_eval_moecache.records.errors import MoECacheError
from tests.conftest import Moecache
from tests.house import (
    MODULES,
    NAME,
    ORDER,
    PACKAGE,
    SISTERS,
    floors,
    imports,
    imports_of,
    own_imports_of,
    picture,
    tree_of,
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
# A replay's future is a record, too: offline algorithms take it.
ALGORITHM_MAY_IMPORT = ("records.", "trace.future")
# The vocabulary of rules that rank residents, state what an expert costs, or learned offline.
LOOPS = tuple(f"algorithms.{n}" for n in ("choosing", "cheapest", "likeliest", "substitution"))
RANKINGS = ("algorithms.features", "algorithms.importance", *LOOPS)
LEARNED = "algorithms.learned."


def matches(module: str, allowed: tuple[str, ...]) -> bool:
    return any(module == a or (a.endswith(".") and f"{module}.".startswith(a)) for a in allowed)


def algorithms() -> set[str]:
    return {path.removeprefix(f"{NAME}.") for axis in AXES for path in modules_of(axis).values()}


def test_a_models_first_parameter_is_taken_nowhere_for_the_device_that_computes() -> None:
    def is_model(node: ast.expr) -> bool:
        name = getattr(node, "id", getattr(node, "attr", ""))
        return name in ("model", "_model", "target", "pretrained", "plain")

    takers = [
        f"{module}:{node.lineno}"
        for module in MODULES
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.Attribute) and node.attr == "device" and is_model(node.value)
    ]
    # `device_of` falls back to it.
    assert len(takers) == 1 and takers[0].startswith("model.device:"), takers


@pytest.mark.parametrize("library", MAY_IMPORT)
def test_heavy_libraries_stay_where_they_belong(library: str) -> None:
    users = [
        module
        for module in MODULES
        if any(matches(name, (library, f"{library}.")) for name in imports_of(module))
    ]
    assert users, f"nothing imports {library}: is the walk broken?"
    assert [module for module in users if not matches(module, MAY_IMPORT[library])] == []


def test_a_folder_imports_only_folders_before_it() -> None:
    inside = {module.partition(".")[0] for module in MODULES if "." in module.rstrip(".")}
    assert inside | set(SISTERS) == set(ORDER)
    for folder, others in imports().items():
        assert others <= set(ORDER[: ORDER.index(folder)]), folder


def test_the_evaluator_imports_neither_sister_and_the_forecaster_not_the_laboratory() -> None:
    evaluator, (plan, lab) = [folder for folder in ORDER if folder not in SISTERS], SISTERS
    graph = imports()
    assert [folder for folder in evaluator if graph[folder] & {plan, lab}] == []
    assert lab not in graph[plan]


def test_algorithms_are_leaves_and_their_bases_see_the_records_only() -> None:
    """They import records, the ranking vocabulary and their axis's base; bases what axes share."""
    for module in algorithms():
        allowed = (*ALGORITHM_MAY_IMPORT, *RANKINGS, LEARNED, f"{module.rpartition('.')[0]}.base")
        assert [n for n in own_imports_of(module) if not matches(n, allowed)] == [], module
    for axis in AXES:
        base_imports = own_imports_of(f"algorithms.{axis}.base")
        shared = ("algorithms.parameters", "algorithms.features", *LOOPS)
        allowed = (*ALGORITHM_MAY_IMPORT, *shared)
        assert [name for name in base_imports if not matches(name, allowed)] == [], axis


def test_nobody_imports_an_algorithm_by_name() -> None:
    by_name = algorithms()
    imports_by_module = {module: sorted(own_imports_of(module) & by_name) for module in MODULES}
    assert {module: names for module, names in imports_by_module.items() if names} == {}


def test_there_are_no_cycles_not_even_of_types() -> None:
    graph = {name: own_imports_of(name, typing=True) - {name} for name in MODULES}
    TopologicalSorter(graph).prepare()


def test_no_function_takes_more_than_eight_arguments_by_place() -> None:
    long = []
    for module in MODULES:
        for node in ast.walk(tree_of(module)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                names = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
                if len(names) - (names[:1] in (["self"], ["cls"])) > 8:
                    long.append(f"{module}:{node.lineno}")
    assert long == []


def test_every_module_says_what_it_is_for() -> None:
    written = [module for module, path in MODULES.items() if path.read_text()]
    silent = [module for module in written if not ast.get_docstring(tree_of(module))]
    assert silent == []


BEFORE_A_FILE_IS_READ = ("records.", "trace.", "algorithms.", "engine.")


@pytest.mark.parametrize(
    ("folders", "and_module", "heavy"),
    [
        (TORCH_FREE, "harness.arguments", {*MAY_IMPORT, "datasets", "jsonargparse"}),
        # Its import takes a tenth of a second, too long for a replay's start and `--help`.
        (BEFORE_A_FILE_IS_READ, "cli.main", {"pydantic"}),
    ],
    ids=["torch", "pydantic"],
)
def test_the_core_and_every_algorithm_start_without_heavy_libraries(
    folders: tuple[str, ...], and_module: str, heavy: set[str]
) -> None:
    exempt = ("records.schemas", "trace.schema") if heavy == {"pydantic"} else ()
    modules = [m for m in MODULES if m.startswith(folders) and not m.startswith(exempt)]
    names = [f"{NAME}.{m}".removesuffix(".") for m in (*modules, and_module)]
    script = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        f"print(sorted({heavy!r} & set(sys.modules)))\n"
    )
    command = [sys.executable, "-c", script]
    process = subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE.parent)
    assert (process.stdout, process.returncode) == ("[]\n", 0), process.stderr


def test_the_picture_in_the_guide_is_the_codes_own() -> None:
    guide = (PACKAGE.parent / "CONTRIBUTING.md").read_text()
    assert picture() in guide, "run: python -m tests.house"
    assert sum(len(floor) for floor in floors()) <= 20
    assert len(floors()) <= 11


COMMAND = '''from __future__ import annotations
from lm_eval_moecache.records.command import Report

def count(*, to: int = 3, by: int | None = None) -> Report:
    """Count up to a number.

    Args:
        to: the last number
        by: the steps
    """
    numbers = [*range(1, to + 1, by or 1)]
    return Report({"numbers": numbers}, " ".join(map(str, numbers)))
'''


def test_a_new_command_is_one_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moecache: Moecache
) -> None:
    (tmp_path / "counting.py").write_text(COMMAND)
    monkeypatch.syspath_prepend(tmp_path)
    point = EntryPoint("count", "counting:count", "lm_eval_moecache.commands")
    added = plugins.added
    monkeypatch.setattr(
        plugins,
        "added",
        lambda kind, own: {**added(kind, own), **({"count": point} if kind == "commands" else {})},
    )
    assert "Count up to a number." in moecache("--help")
    assert "the last number (default: 3)" in moecache("count", "--help")
    assert moecache("count", "--to", "4") == "1 2 3 4\n"
    assert moecache.json("count", "--by=2") == api.count(by=2) == {"numbers": [1, 3]}
    for words, said in (
        (["--to", "x"], "--to='x' must be a whole number."),
        (["--too", "4"], "option='--too' is not known. Did you mean '--to'?"),
        (["--to", "-4"], "--to=-4 must be a number"),
        (["4"], "4"),
    ):
        assert said in moecache("count", *words, code=2)
    with pytest.raises(MoECacheError, match="count: option='too' is not known"):
        api.count(too=4)


def test_nothing_enters_the_kernel_but_by_its_door() -> None:
    """`memory.door` compiles `serve`, and `visit` for the wall's arrivals; nobody else does."""
    by_name = re.compile(r"\bcompiled\(|\bdoor\(")
    callers = {
        name
        for name, path in MODULES.items()
        if by_name.search(path.read_text("utf-8")) and not name.startswith("records.")
    }
    assert callers == {
        *("algorithms.choosing", "engine.memory"),  # loops of rules, and the door itself
        *("engine.engine", "engine.rows", "engine.wall.engine"),
    }
