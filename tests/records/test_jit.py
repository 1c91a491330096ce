"""When plain Python gives way to machine code, and where that is looked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lm_eval_moecache.records import jit


def test_code_is_loaded_made_or_left_by_the_work_done_and_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept, asked = [False], list[int]()

    def is_kept(modules: object, entry: str) -> bool:
        asked.append(1)
        return kept[0]

    monkeypatch.setattr(jit, "is_kept", is_kept)
    monkeypatch.setattr(jit, "has_numba", lambda: True)
    monkeypatch.setattr(jit, "_midway", [True])
    upgrade = jit.Upgrade((jit,), "column", load=10, make=100)
    assert not upgrade.is_due(done=9) and not asked
    # Asked once, and not again before the work has doubled.
    assert not upgrade.is_due(done=1) and not upgrade.is_due(done=5) and len(asked) == 1
    kept[0] = True
    assert upgrade.is_due(done=5) and upgrade.is_due() and len(asked) == 2
    # Known work counts at once; where nothing is kept, only what takes longer than compiling.
    kept[0] = False
    upgrade.restart()
    assert not upgrade.is_due(ahead=99) and upgrade.is_due(ahead=100)
    # A measured run makes none.
    upgrade.restart()
    monkeypatch.setattr(jit, "_midway", [False])
    assert not upgrade.is_due(ahead=1000)
    kept[0] = True
    assert upgrade.is_due(ahead=3000)
    monkeypatch.setattr(jit, "has_numba", lambda: False)
    assert not upgrade.is_due(ahead=3000)


MODULE = """
import sys
from lm_eval_moecache.records import jit
import twice

print(jit.is_kept((twice,), "double"))
if sys.argv[1:]:
    print(jit.compiled((twice,), "double")(21))
    print(jit.is_kept((twice,), "double"))
"""


def test_numba_is_asked_wherever_its_cache_lies(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    (tmp_path / "twice.py").write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "ask.py").write_text(MODULE)
    paths = os.pathsep.join([str(tmp_path), str(Path(jit.__file__).parents[2])])

    def ask(*words: str, **more: str) -> list[str]:
        environment = {**os.environ, "PYTHONPATH": paths, "NUMBA_DISABLE_JIT": "0", **more}
        command = [sys.executable, str(tmp_path / "ask.py"), *words]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    elsewhere = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    assert ask("make", **elsewhere) == ["False", "42", "True"]
    assert ask(**elsewhere) == ["True"]
    # Neither in another cache, nor for another CPU, nor of an earlier source.
    assert ask(NUMBA_CACHE_DIR=str(tmp_path / "other")) == ["False"]
    assert ask(**elsewhere, NUMBA_CPU_NAME="generic") == ["False"]
    (tmp_path / "twice.py").write_text("def double(x):\n    return x + x\n")
    assert ask(**elsewhere) == ["False"]


PARTS = """
import sys
from numba.core.codegen import JITCodeLibrary
from lm_eval_moecache.records import jit
import parts

finalize, made = JITCodeLibrary.finalize, []
JITCodeLibrary.finalize = lambda self: (made.append(self.name.split("_")[0]), finalize(self))
print(jit.compiled((parts,), "outer")(4), *(name for name in made if name in dir(parts)))
"""


def test_only_the_outermost_function_is_made_executable(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    source = "def inner(x):\n    return x + 1\n\n\ndef middle(x):\n    return inner(inner(x))\n"
    source += "\n\ndef outer(x):\n    return middle(x) * inner(x)\n"
    (tmp_path / "parts.py").write_text(source)
    (tmp_path / "ask.py").write_text(PARTS)
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "0", "NUMBA_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(Path(jit.__file__).parents[2])])
    command = [sys.executable, str(tmp_path / "ask.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stdout.split() == ["30", "outer"], done.stderr
