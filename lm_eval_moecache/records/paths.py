"""Where the folders that ship with the package lie, in a wheel and in a source tree."""

from pathlib import Path

TINY = "tiny"
"""What `pretrained=` calls the shipped model."""
TINY_DRAFT = "tiny-draft"
"""What `draft=` calls the dense draft that ships beside it."""
_PACKAGE = Path(__file__).resolve().parent.parent


def shipped_dir(name: str) -> Path:
    """The folder `name` beside this module (a wheel), or else at the repository root."""
    candidates = (_PACKAGE / name, _PACKAGE.parent / name)
    for folder in candidates:
        if folder.is_dir():
            return folder
    places = " and ".join(str(folder) for folder in candidates)
    raise FileNotFoundError(f"the folder {name!r} of lm-eval-moecache is missing: tried {places}")


def policies_dir() -> Path:
    """The folder of composition YAMLs."""
    return shipped_dir("policies")


def recipes_dir() -> Path:
    """The folder of the papers' tables and figures, one YAML each."""
    return shipped_dir("recipes")


def task_configs_dir() -> Path:
    """The folder to give to lm-eval's `--include_path`."""
    return shipped_dir("task_configs")


def traces_dir() -> Path:
    """The folder of routing traces of real models."""
    return shipped_dir("traces")
