"""Models to plan: by name or configuration, as runs emulate them, or by the files of weights."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from lm_eval_moecache.emulate.models import cached_folder, load_real_model
from lm_eval_moecache.records.files import is_file, read_json
from lm_eval_moecache.records.numbers import shown
from lm_eval_moecache.records.real_model import RealModel
from moecache_plan.tensors import read_gguf, read_safetensors_index

MODEL_FILES = "a config.json, its folder, a YAML, a GGUF, an index of safetensors"


def load_model(name: str) -> RealModel:
    """Load a model as `load_real_model` does, or from a GGUF file or an index of safetensors.

    A folder without a `config.json`, also of the local hub cache, is its one GGUF model (any of
    the files it is split into); of weights only the index is read. Raises ValueError, naming the
    model, where there is none.
    """
    path, what = Path(name), f"model={shown(name)}"
    folder = path if os.path.isdir(path) else cached_folder(name)
    if folder is not None and not is_file(folder / "config.json"):
        found = sorted(folder.glob("*.gguf"))
        wholes = {re.sub(r"-\d{5}-of-\d{5}$", "", file.stem) for file in found}
        if len(wholes) == 1:
            return read_gguf(found[0], what)
        # A folder of results that is called after a model is not meant.
        if folder is path and (found or "/" in name):
            several = f" There are {len(wholes)} GGUF models in it: name one." if found else ""
            raise ValueError(
                f"{what} is a folder without a config.json or one GGUF model.{several}"
            )
    if path.suffix.lower() == ".gguf":
        return read_gguf(path, what)
    if path.suffix.lower() == ".json":
        index = read_json(path, what)
        if isinstance(index, Mapping) and "weight_map" in index:
            return read_safetensors_index(path, what)
    return load_real_model(name, "model")
