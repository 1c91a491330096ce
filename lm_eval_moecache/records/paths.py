"""Where the folders that ship with the package lie, and what a model may be called."""

from pathlib import Path

from lm_eval_moecache.records.errors import nearest
from lm_eval_moecache.records.files import exists
from lm_eval_moecache.records.numbers import shown

TINY = "tiny"
"""What `pretrained=` calls the shipped model."""
TINY_DRAFT = "tiny-draft"
"""What `draft=` calls the dense draft that ships beside it."""
_LONGEST_ID = 96
"""Characters of a name on the hub."""
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


def check_place(key: str, name: str) -> None:
    """Refuse the name of a model that is neither a folder nor anything that the hub could have."""
    if name in (TINY, TINY_DRAFT) or (name.strip() and exists(name)):
        return
    is_path = name.startswith(("/", ".", "~")) or name.count("/") > 1 or name.endswith("/")
    if is_path or not name.strip() or set(name) & {"\0", "\\"} or len(name) > _LONGEST_ID:
        raise ValueError(
            f"{key}={shown(name)}: there is no such folder, nor can the hub have a model of that "
            f"name.{nearest(name, (TINY, TINY_DRAFT))} Allowed: a folder, a hub id, or {TINY!r}."
        )
