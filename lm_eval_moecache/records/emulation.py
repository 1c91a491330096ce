"""Real models by name or by their files: what a run emulates, and what `plan` plans."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from lm_eval_moecache.records.configuration import KEYS, LayerCaches, RealModel, read_config
from lm_eval_moecache.records.files import is_file, read_json, read_yaml
from lm_eval_moecache.records.names import Naming, find_name
from lm_eval_moecache.records.numbers import shown, unknown_name_error
from lm_eval_moecache.records.tensors import read_gguf, read_safetensors_index

__all__ = [
    "EMULATED_DIR",
    "MODEL_FILES",
    "LayerCaches",
    "RealModel",
    "emulated_names",
    "load_real_model",
]

EMULATED_DIR = Path(__file__).resolve().parent.parent / "emulate"
MODEL_FILES = "a config.json, its folder, a YAML, a GGUF, an index of safetensors"
_NAMING = Naming(
    aliases={
        "Llama-4-Scout-17B-16E": "Llama-4-Scout",
        "GLM-5.1": "GLM-5",
        "GLM-5.2": "GLM-5",
        "Kimi-K2-Thinking": "Kimi-K2.6",
        "Kimi-K2.5": "Kimi-K2.6",
        "MiniMax-M2.1": "MiniMax-M2",
        "MiniMax-M2.5": "MiniMax-M2",
        "DeepSeek-R1": "DeepSeek-V3",
        "DeepSeek-V3.2": "DeepSeek-V3",
        "DeepSeek-Coder-V2-Lite": "DeepSeek-V2-Lite",
        "Qwen3-VL-30B-A3B": "Qwen3-30B-A3B",
        "Qwen3-VL-235B-A22B": "Qwen3-235B-A22B",
        "DeepSeek-V3.1": "DeepSeek-V3",
        "Qwen3-Coder-30B-A3B": "Qwen3-30B-A3B",
        "Qwen3-Coder-Next": "Qwen3-Next-80B-A3B",
    },
    filler=r"-(?:instruct|chat|base|it|(?<!-k-2-)thinking|preview|gguf|hf|distill|[0-9]{4}|v-0\.[0-9])",
    optional="-?a-[0-9.]+-b$",
)
"""Active parameters may be left out, where one model alone has the rest of the name."""


def emulated_names() -> list[str]:
    """Return the names of the shipped models, sorted."""
    return sorted(path.stem for path in EMULATED_DIR.glob("*.yaml"))


def load_real_model(name: str, key: str = "emulate") -> RealModel:
    """Load a model by name, or from its files.

    Files are a `config.json` under any name ending so, its folder, a YAML of the same keys, a GGUF
    file (any of those it is split into), or an index of safetensors; of weights only the index.
    Names are found as people type them and as the hub has them: `qwen3 30b`,
    `Qwen/Qwen3-30B-A3B-Instruct-2507`. Raises ValueError, naming `key` and the value, for an
    unknown name, a configuration without Mixture-of-Experts, and a YAML key that nothing reads.
    """
    path, what = Path(name), f"{key}={shown(name)}"
    if is_file(path / "config.json"):
        path = path / "config.json"
    elif os.path.isdir(path) and ("/" in str(name) or any(path.glob("*.gguf"))):
        # A folder of results that is called after a model is not meant.
        path = _model_file(path, what)
    if path.suffix.lower() in (".gguf", ".json"):
        return _read_file(path, what)
    if not str(name).endswith((".yaml", ".yml")):
        without_organisation = re.sub(r"^[\w.-]+/(?=[^/]+$)", "", str(name))
        found = find_name(key, without_organisation, emulated_names(), _NAMING)
        path = EMULATED_DIR / f"{found}.yaml"
    config = read_yaml(path, what)
    # A config.json from the hub has many keys that nothing reads; a YAML is written for us.
    for field in config if isinstance(config, Mapping) else ():
        if field not in KEYS:
            raise unknown_name_error(f"{what}: the key", field, KEYS)
    return read_config(config, what)


def _model_file(folder: Path, what: str) -> Path:
    """Return a folder's GGUF file, the first of those it is split into."""
    found = sorted(folder.glob("*.gguf"))
    wholes = {re.sub(r"-\d{5}-of-\d{5}$", "", file.stem) for file in found}
    if len(wholes) == 1:
        return found[0]
    several = f" There are {len(wholes)} GGUF models in it: name one." if wholes else ""
    raise ValueError(f"{what} is a folder without a config.json or one GGUF model.{several}")


def _read_file(path: Path, what: str) -> RealModel:
    if path.suffix.lower() == ".gguf":
        return read_gguf(path, what)
    config = read_json(path, what)
    if isinstance(config, Mapping):
        if "weight_map" in config:
            return read_safetensors_index(path, what)
        name = path.resolve().parent.name if path.name == "config.json" else path.stem
        config = {"name": name, **config}
    return read_config(config, what)
