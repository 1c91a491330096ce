"""The start-up files by themselves: silent after a half-removed install, and with `-W error`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

STARTUP = Path(__file__).resolve().parent.parent / "startup"
FILES = ("lm_eval_moecache.pth", "lm_eval_moecache_startup.py")
BROKEN = """
import lm_eval_moecache_startup as startup, sys, types
plugin = types.ModuleType("lm_eval_moecache.harness.plugin")
def register(): raise RuntimeError("registry changed")
plugin.register = register
for name in ("lm_eval_moecache", "lm_eval_moecache.harness"):
    sys.modules[name] = types.ModuleType(name)
sys.modules[plugin.__name__] = plugin
startup.register_models()
"""


def run(folder: Path, then: str = "pass", *options: str) -> subprocess.CompletedProcess[str]:
    script = f"import site, sys\nsite.addsitedir(sys.argv[1])\n{then}"
    command = [sys.executable, "-S", *options, "-c", script, str(folder)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("kept", [FILES, FILES[:1], FILES[1:]])
def test_any_part_of_the_start_up_files_is_silent(tmp_path: Path, kept: tuple[str, ...]) -> None:
    for name in kept:
        shutil.copy(STARTUP / name, tmp_path)
    done = run(tmp_path, "print(any(type(f).__name__ == 'ModelsFinder' for f in sys.meta_path))")
    assert (done.stderr, done.returncode) == ("", 0)
    assert done.stdout == f"{kept == FILES}\n"


def test_a_failing_registration_breaks_nothing_even_where_warnings_are_errors(
    tmp_path: Path,
) -> None:
    for name in FILES:
        shutil.copy(STARTUP / name, tmp_path)
    plain = run(tmp_path, BROKEN)
    assert "could not register its models" in plain.stderr and plain.returncode == 0
    strict = run(tmp_path, BROKEN, "-W", "error")
    assert (strict.stderr, strict.returncode) == ("", 0)
