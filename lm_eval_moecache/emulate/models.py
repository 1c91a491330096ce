"""Real models by name or by their files: what a run emulates, and what `plan` plans."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from lm_eval_moecache.emulate.configuration import KEYS, read_config
from lm_eval_moecache.emulate.stored import load_stored
from lm_eval_moecache.emulate.tensors import read_gguf, read_safetensors_index
from lm_eval_moecache.records.files import is_file, read_json, read_yaml
from lm_eval_moecache.records.names import Naming, find_name, spell
from lm_eval_moecache.records.numbers import shown, unknown_name_error
from lm_eval_moecache.records.real_model import RealModel

EMULATED_DIR = Path(__file__).resolve().parent
MODEL_FILES = "a config.json, its folder, a YAML, a GGUF, an index of safetensors"
_SAME = {
    "GLM-4.5-Air": "GLM-4.5V, GLM-4.6V, INTELLECT-3",
    "GLM-4.7": "GLM-4.5, GLM-4.6",
    "GLM-5": "GLM-5.1, GLM-5.2",
    "Kimi-K2.6": "Kimi-K2-Thinking, Kimi-K2.5",
    "MiniMax-M2": "MiniMax-M2.1, MiniMax-M2.5, MiniMax-M2.7",
    "MiniMax-Text-01": "MiniMax-01, MiniMax-M1, MiniMax-M1-40k, MiniMax-M1-80k, MiniMax-VL-01",
    "DeepSeek-V2": "DeepSeek-V2.5, DeepSeek-Coder-V2",
    "DeepSeek-V2-Lite": "DeepSeek-Coder-V2-Lite",
    "DeepSeek-V3": "DeepSeek-R1, DeepSeek-V3.1, DeepSeek-V3.1-Terminus, DeepSeek-V3.2",
    "Qwen1.5-MoE-A2.7B": "Qwen1.5-MoE",
    "Qwen3-30B-A3B": "Qwen3-VL-30B-A3B, Qwen3-Coder-30B-A3B, Qwen3-Omni-30B-A3B",
    "Qwen3-235B-A22B": "Qwen3-VL-235B-A22B",
    "Qwen3-Next-80B-A3B": "Qwen3-Coder-Next",
    "gpt-oss-20b": "gpt-oss-safeguard-20b",
    "gpt-oss-120b": "gpt-oss-safeguard-120b",
    "Llama-4-Scout": "Llama-4-Scout-17B-16E",
    "Llama-4-Maverick": "Llama-4-Maverick-17B-128E",
    "Jamba-Mini": "Jamba, Jamba-v0.1, Jamba-1.5-Mini, Jamba-Mini-1.6, Jamba-Mini-1.7",
    "Jamba-Large": "Jamba-1.5-Large, Jamba-Large-1.6, Jamba-Large-1.7",
    "Hy3": "Hy3-295B-A21B, Hunyuan-3",
    "Ling-mini-2.0": "Ling-mini, Ring-mini, Ring-mini-2.0",
    "Ling-flash-2.0": "Ling-flash, Ring-flash, Ring-flash-2.0",
    "Ling-2.6-flash": "Ring-2.6-flash",
    "Ling-1T": "Ring-1T",
    "Kimi-Linear-48B-A3B": "Kimi-Linear",
    "Trinity-Nano": "Trinity-Nano-6B-A1B",
    "Trinity-Mini": "Trinity-Mini-26B-A3B",
    "Trinity-Large": "Trinity-Large-400B-A13B, Trinity-Large-TrueBase",
    "Nemotron-3-Super-120B-A12B": "Nemotron-3-Super",
    "Nemotron-3-Nano-30B-A3B": "Nemotron-3-Nano",
    "Moonlight-16B-A3B": "Moonlight, Kimi-VL-A3B",
    "LongCat-Flash": "LongCat-Flash-Omni",
    "dots.llm1": "dots1",
    "K-EXAONE-236B-A23B": "K-EXAONE",
    "Solar-Open-100B": "Solar-Open",
}
"""Models -> others of the same sizes, or of another spelling."""
_FILLER = (
    "instruct chat base it inst (?<!-k-2-)thinking preview gguf hf distill reasoning exp speciale "
    "[0-9]{4} v-0\\.[0-9] pt paddle bf-16 mlx jang latest quantized dynamic abliterated heretic "
    "uncensored derestricted nvidia ai-21 i-1 imatrix"
)
_NAMING = Naming(
    aliases={other: name for name, others in _SAME.items() for other in others.split(", ")},
    filler=f"-(?:{'|'.join(_FILLER.split())})",
    optional="-?a-[0-9.]+-b$",
)
"""Active parameters may be left out, where one model alone has the rest of the name."""
_STORED = re.compile(
    r"[-_.](?P<name>(ud[-_])?i?q[1-8]_[a-z0-9_]+|fp8|nvfp4|mxfp4(?:_moe)?|awq|gptq|int[48]|bnb-4bit|"
    r"w[48]a(?:8|16)|[2-8]-?bit)(?:[-_.](?:int4|int8|dynamic|block|mixed|4bit|8bit|gguf|autoround))*$",
    re.IGNORECASE,
)
"""What a repository's name says of how its files are stored."""
_STORED_AS = {"bnb-4bit": "nf4", "w4a16": "gptq", "w8a8": "int8", "w8a16": "int8", "w4a8": "int4"}
_OTHER = re.compile(r"-[0-9.]+-[bmt](?=-|$)|reap|prune|merge|draft|eagle|mtp|lora|adapter")
"""What a finetune of a model has not in its name besides the model's: other sizes, parts of it."""


def emulated_names() -> list[str]:
    """Return the names of the shipped models, sorted."""
    return sorted(path.stem for path in EMULATED_DIR.glob("*.yaml"))


def load_real_model(name: str, key: str = "emulate") -> RealModel:
    """Load a model by name, or from its files.

    Files are a `config.json` under any name ending so, its folder, a YAML of the same keys, a GGUF
    file (any of those it is split into), or an index of safetensors; of weights only the index.
    Names are found as people type them and as the hub has them: `qwen3 30b`,
    `Qwen/Qwen3-30B-A3B-Instruct-2507`; the local hub cache decides of a hub id that it has. Raises
    ValueError, naming `key` and the value, for an unknown name, a configuration without
    Mixture-of-Experts, and a YAML key that nothing reads.
    """
    path, what = Path(name), f"{key}={shown(name)}"
    if is_file(path / "config.json"):
        path = path / "config.json"
    elif os.path.isdir(path) and ("/" in str(name) or any(path.glob("*.gguf"))):
        # A folder of results that is called after a model is not meant.
        path = _model_file(path, what)
    if path.suffix.lower() in (".gguf", ".json"):
        return _read_file(path, what)
    if cached := _cached(str(name)):
        return replace(_read_file(cached, what), name=str(name).partition("/")[2])
    if not str(name).endswith((".yaml", ".yml")):
        return _shipped(str(name), key)
    config = read_yaml(path, what)
    # A config.json from the hub has many keys that nothing reads; a YAML is written for us.
    for field in config if isinstance(config, Mapping) else ():
        if field not in KEYS:
            raise unknown_name_error(f"{what}: the key", field, KEYS)
    return read_config(config, what)


def _cached(name: str) -> Path | None:
    """Return the configuration or GGUF of a hub id that the local hub cache has."""
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name) is None:
        return None
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, local_files_only=True))
        config = folder / "config.json"
        return config if is_file(config) else _model_file(folder, name)
    except (OSError, ValueError):
        return None


def _shipped(typed: str, key: str) -> RealModel:
    """Return the shipped model that a name means, in the bits that the name says, if any."""
    text = re.sub(r"^[\w.-]+/(?=[^/]+$)", "", typed)
    text = re.sub(r"(?<=\w):(?=\w)", "-", text)  # ollama: qwen3:30b
    found = _STORED.search(text)
    names = emulated_names()
    bare = _STORED.sub("", text) if found else text
    try:
        name = find_name(key, bare, names, _NAMING)
    except ValueError:
        # Quantisers put the organisation before: Qwen_Qwen3-30B-A3B-GGUF.
        without = re.sub(r"^[A-Za-z][A-Za-z.-]*_", "", bare)
        if without != bare:
            name = find_name(key, without, names, _NAMING)
        elif (owner := _owner(bare)) is None:
            raise
        else:
            name = owner
    model = read_config(read_yaml(EMULATED_DIR / f"{name}.yaml", key), key)
    if found is None:
        return model
    said = found["name"].lower()
    stored = load_stored(_STORED_AS.get(said, said))
    return replace(model, stored=stored, is_as_stored=True)


def _owner(text: str) -> str | None:
    """Return the model that a finetune is named after: its name with its size, and more words."""
    spelled = spell(text, _NAMING)
    for name in [*emulated_names(), *_NAMING.aliases]:
        own = spell(name, _NAMING).lstrip("-")
        before, is_in, after = spelled.partition(own)
        has_size = is_in and re.search(r"-[0-9.]+-b", own)
        if has_size and not re.match(r"[.0-9]", after) and not _OTHER.search(f"{before} {after}"):
            return _NAMING.aliases.get(name, name)
    return None


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
