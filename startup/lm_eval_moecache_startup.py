"""Tell lm-eval about our models once it has loaded its own list; nothing else happens at start-up.

Installed beside the package and run by `lm_eval_moecache.pth` (Python < 3.15) or
`lm_eval_moecache.start` (PEP 829). Imports nothing but `sys`, not even our own package.
Why it exists and what is fragile in it: `lm_eval_moecache/harness/plugin.py`.
"""

import sys

TYPE_CHECKING = False  # `typing` would be the costliest import of a bare interpreter start
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class ModelsFinder:
    """Waits for the import of `lm_eval.models`, then steps out of the way for good."""

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
    """Make this one loader object run `register_models` after its module's own code."""
    exec_module = loader.exec_module

    def exec_then_register(module: "ModuleType") -> None:
        del loader.exec_module  # one shot: falls back to the method
        exec_module(module)
        register_models()

    loader.exec_module = exec_then_register  # type: ignore[method-assign]


def check_command() -> None:
    """Let a command line that names our models be checked; whatever fails in that is lm-eval's."""
    if any("moecache" in word for word in getattr(sys, "argv", ())):
        from contextlib import suppress

        with suppress(ImportError):
            from lm_eval_moecache.harness.evaluation_options import check_lm_eval_command

            check_lm_eval_command(sys.argv[1:])


def register_models() -> None:
    """Register, or warn: whatever goes wrong here, `lm_eval --model hf` must go on working."""
    try:
        from lm_eval_moecache.harness.plugin import register

        register()
    except Exception as error:
        missing = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
        if missing.partition(".")[0] == "lm_eval_moecache":
            return  # the package is gone and this file was left behind
        import warnings
        from contextlib import suppress

        # With `-W error` a warning is raised: even then lm-eval's own models must go on working.
        with suppress(Warning):
            text = f"lm-eval-moecache could not register its models: {error!r}"
            warnings.warn(text, stacklevel=2)


def arm() -> None:
    """Called at interpreter start. Safe to call twice."""
    if not any(type(finder).__name__ == "ModelsFinder" for finder in sys.meta_path):
        sys.meta_path.insert(0, ModelsFinder())
