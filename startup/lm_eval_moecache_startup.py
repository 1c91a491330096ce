"""Register our models with lm-eval once it has loaded its own list; start-up does nothing else.

Installed next to the package and run by `lm_eval_moecache.pth` (Python < 3.15) or
`lm_eval_moecache.start` (PEP 829). At start-up it imports nothing but `sys`, not even our package.
`lm_eval_moecache/harness/plugin.py` explains why it exists and what is fragile in it.
"""

import sys

TYPE_CHECKING = False  # `typing` would be the costliest import of a bare interpreter start
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class ModelsFinder:
    """Waits for the import of `lm_eval.models`, then removes itself for good."""

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if name == "lm_eval.evaluator":
            check_command()
        if name != "lm_eval.models":
            return None
        if self in sys.meta_path:  # another thread may have come first
            sys.meta_path.remove(self)
        from importlib.util import find_spec

        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            call_after_exec(spec.loader)
        return spec


def call_after_exec(loader: "Loader") -> None:
    """Make this loader, once, run `register_models` after its module's own code."""
    exec_module = loader.exec_module

    def exec_then_register(module: "ModuleType") -> None:
        del loader.exec_module  # one shot: falls back to the method
        exec_module(module)
        register_models()

    loader.exec_module = exec_then_register  # type: ignore[method-assign]


def check_command() -> None:
    """Check a command line that names our models; leave import errors for lm-eval to report."""
    if any("moecache" in word for word in getattr(sys, "argv", ())):
        from contextlib import suppress

        with suppress(ImportError):
            from lm_eval_moecache.harness.evaluation_options import check_lm_eval_command

            check_lm_eval_command(sys.argv[1:])


def register_models() -> None:
    """Register our models; a failure only warns, so that `lm_eval --model hf` keeps working."""
    try:
        from lm_eval_moecache.harness.plugin import register

        register()
    except Exception as error:
        missing = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
        if missing.partition(".")[0] == "lm_eval_moecache":
            return  # the package is gone and this file was left behind
        import warnings
        from contextlib import suppress

        # With `-W error` a warning is raised: even then lm-eval's own models must keep working.
        with suppress(Warning):
            text = f"lm-eval-moecache could not register its models: {error!r}"
            warnings.warn(text, stacklevel=2)


def arm() -> None:
    """Install the finder; called at interpreter start and safe to call twice."""
    if not any(type(finder).__name__ == "ModelsFinder" for finder in sys.meta_path):
        sys.meta_path.insert(0, ModelsFinder())
