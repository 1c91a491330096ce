"""The package as users get it: built, installed into an empty environment, found by lm-eval."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
STARTUP_FILES = ("lm_eval_moecache.pth", "lm_eval_moecache.start", "lm_eval_moecache_startup.py")

REPORT = """
import json, sys
import lm_eval.models
from lm_eval.api.registry import model_registry
print(json.dumps({
    "models": {name: str(target) for name, target in model_registry.items()},
    "torch": "torch" in sys.modules,
}))
"""

SCANNING_LM_EVAL = """
import lm_eval.api.registry as registry
registry.load_plugins = lambda group, registry: []
"""

WITHOUT_HOOK = """
import sys
sys.meta_path = [f for f in sys.meta_path if type(f).__name__ != 'ModelsFinder']
from lm_eval_moecache.harness.plugin import register
register(); register()
"""

OTHER_CLASS = """
import sys, types
from lm_eval.api.model import LM
from lm_eval.api.registry import get_model, register_model
module = types.ModuleType("lm_eval_moecache.harness.lm")
class MoECacheLM(LM):
    __module__ = "lm_eval_moecache.harness.lm"
    loglikelihood = loglikelihood_rolling = generate_until = None
module.MoECacheLM = MoECacheLM
sys.modules["lm_eval_moecache.harness.lm"] = module
"""


@dataclass(frozen=True)
class Environment:
    """A virtual environment that holds our package and borrows everything else from this one."""

    root: Path

    @property
    def python(self) -> str:
        return str(self.root / "bin" / "python")

    @property
    def site_packages(self) -> Path:
        names = {"base": str(self.root), "platbase": str(self.root)}
        return Path(sysconfig.get_path("purelib", "posix_prefix", vars=names))

    def run(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        # Outside the repository, so that nothing is importable by being in the current folder.
        return subprocess.run(
            [self.python, *arguments],
            cwd=self.root,
            env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=check,
        )

    def report(self, before: str = "") -> dict[str, Any]:
        process = self.run("-W", "error::UserWarning", "-c", before + REPORT)
        assert process.stderr == ""
        report: dict[str, Any] = json.loads(process.stdout)
        return report


def make_environment(root: Path, *install: str) -> Environment:
    """Install into a new environment, with no network.

    A path line makes this interpreter's packages importable without running their .pth files, so
    that the copy of our package that runs these tests cannot register models there.
    """
    venv.create(root, with_pip=False, symlinks=True)
    environment = Environment(root)
    borrowed = sysconfig.get_path("purelib")
    (environment.site_packages / "zz_borrowed.pth").write_text(f"{borrowed}\n")
    pip = [sys.executable, "-m", "pip", "--python", environment.python, "install", "--quiet"]
    isolation = ["--no-deps", "--no-build-isolation", "--ignore-installed", "--no-index"]
    process = subprocess.run(
        [*pip, *isolation, *install], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    return environment


@pytest.fixture(scope="module", params=["normal", "editable"])
def installed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Environment:
    flags = ["--editable"] if request.param == "editable" else []
    return make_environment(tmp_path_factory.mktemp(request.param), *flags, str(REPOSITORY))


HOLDS = {
    "the registry resolves moecache to our class": OTHER_CLASS
    + "import lm_eval.models\nfound = get_model('moecache')\n"
    "assert found.__module__ == 'lm_eval_moecache.harness.lm', found\n",
    "so it does when the class is decorated": OTHER_CLASS
    + "import lm_eval.models\nregister_model('moecache')(MoECacheLM)\n"
    "assert get_model('moecache') is MoECacheLM\n",
    "the hook is gone after its one use": """
import sys
names = lambda: [type(f).__name__ for f in sys.meta_path]
assert 'ModelsFinder' in names(), names()
import lm_eval.models
assert 'ModelsFinder' not in names(), names()
assert 'exec_module' not in vars(lm_eval.models.__loader__)
""",
    "the entry point names the same class as the placeholder": """
from importlib.metadata import entry_points
from lm_eval_moecache.harness.plugin import MODELS
found = {e.name: e.value for e in entry_points(group='lm_eval.models')}
assert found == MODELS, (found, MODELS)
""",
    "shipped folders are found from anywhere": """
from lm_eval_moecache.records.files import task_configs_dir
assert (task_configs_dir() / 'leaderboard.yaml').is_file()
""",
}


@pytest.mark.parametrize("name", HOLDS)
def test_in_an_installed_environment(name: str, installed: Environment) -> None:
    installed.run("-c", HOLDS[name])


def test_unknown_model_is_answered_with_our_name_among_the_known(installed: Environment) -> None:
    script = "from lm_eval.api.registry import get_model; get_model('moecach')"
    process = installed.run("-c", script, check=False)
    assert process.returncode == 1
    assert " hf," in process.stderr and "moecache" in process.stderr


def test_lm_eval_lists_our_models_without_torch_with_the_hook_or_without_and_never_twice(
    installed: Environment,
) -> None:
    for prelude in ("", WITHOUT_HOOK):
        report = installed.report(prelude)
        assert report["models"]["moecache"] == "lm_eval_moecache.harness.lm:MoECacheLM"
        assert report["models"]["hf"] == "lm_eval.models.huggingface:HFLM"
        assert report["torch"] is False
    models = installed.report(before=SCANNING_LM_EVAL)["models"]
    assert "hf" in models and "moecache" not in models


def test_startup_files_are_installed_and_agree(installed: Environment) -> None:
    for name in STARTUP_FILES:
        assert (installed.site_packages / name).is_file()
    start = (installed.site_packages / "lm_eval_moecache.start").read_text().strip()
    line = (installed.site_packages / "lm_eval_moecache.pth").read_text().strip()
    module, _, function = start.partition(":")
    assert line.startswith("import ")
    assert line.endswith(f'__import__("{module}").{function}()')


@pytest.mark.slow
def test_leftover_startup_files_are_silent_when_the_package_is_gone(tmp_path: Path) -> None:
    environment = make_environment(tmp_path / "env", str(REPOSITORY))
    package = environment.site_packages / "lm_eval_moecache"
    package.rename(package.with_name("removed"))

    assert environment.run("-c", "pass").stderr == ""
    models = environment.report(before=GONE)["models"]
    assert "hf" in models and "moecache" not in models


STARTUP = REPOSITORY / "startup"
FILES = ("lm_eval_moecache.pth", "lm_eval_moecache_startup.py")
# The borrowed packages may hold another copy of ours: hide that, too.
GONE = """
import sys
class Gone:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] == 'lm_eval_moecache':
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Gone())
"""
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


def run_with(folder: Path, then: str = "pass", *options: str) -> subprocess.CompletedProcess[str]:
    script = f"import site, sys\nsite.addsitedir(sys.argv[1])\n{then}"
    command = [sys.executable, "-S", *options, "-c", script, str(folder)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("kept", [FILES, FILES[:1], FILES[1:]])
def test_any_part_of_the_start_up_files_is_silent(tmp_path: Path, kept: tuple[str, ...]) -> None:
    for name in kept:
        shutil.copy(STARTUP / name, tmp_path)
    process = run_with(
        tmp_path, "print(any(type(f).__name__ == 'ModelsFinder' for f in sys.meta_path))"
    )
    assert (process.stderr, process.returncode) == ("", 0)
    assert process.stdout == f"{kept == FILES}\n"


def test_a_failing_registration_breaks_nothing_even_where_warnings_are_errors(
    tmp_path: Path,
) -> None:
    for name in FILES:
        shutil.copy(STARTUP / name, tmp_path)
    plain = run_with(tmp_path, BROKEN)
    assert "could not register its models" in plain.stderr and plain.returncode == 0
    strict = run_with(tmp_path, BROKEN, "-W", "error")
    assert (strict.stderr, strict.returncode) == ("", 0)
