"""Real models by name, or from their configuration: what a run emulates."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from lm_eval_moecache.emulate.configuration import keys, read_config
from lm_eval_moecache.emulate.stored import load_stored, published_files
from lm_eval_moecache.records.files import is_file, read_json, read_yaml
from lm_eval_moecache.records.names import Naming, UnknownNameError, find_name, read_aliases, spell
from lm_eval_moecache.records.numbers import shown, unknown_name_error
from lm_eval_moecache.records.real_model import RealModel, Stored

EMULATED_DIR = Path(__file__).resolve().parent
ALSO_FILE = EMULATED_DIR / "also.csv"
_FILLER = (
    "instruct chat base it inst (?<!-k-2-)thinking preview gguf hf distill reasoning exp speciale "
    "[0-9]{4} v-0\\.[0-9] pt paddle bf-16 mlx jang latest quantized dynamic abliterated heretic "
    "uncensored derestricted nvidia ai-21 i-1 imatrix"
)
_STORED = re.compile(
    r"[-_.](?P<name>(ud[-_])?i?q[1-8]_[a-z0-9_]+|fp8|nvfp4|mxfp4(?:_moe)?|awq|gptq|int[48]|bnb-4bit|"
    r"w[48]a(?:8|16)|[2-8]-?bit)(?:[-_.](?:int4|int8|dynamic|block|mixed|4bit|8bit|gguf|autoround))*$",
    re.IGNORECASE,
)
"""What a repository's name says of how its files are stored."""
_STORED_AS = {"bnb-4bit": "nf4", "w4a16": "gptq", "w8a8": "int8", "w8a16": "int8", "w4a8": "int4"}
_OTHER = re.compile(r"-[0-9.]+-[bmt](?=-|$)|reap|prune|merge|draft|eagle|mtp|lora|adapter")
"""What a finetune of a model has not in its name besides the model's: other sizes, parts of it."""
_DENSE = re.compile(
    r"(?:code|tiny|meta)?-?llama-?(?:[123](?:\.[123])?)?-[0-9.]+b|qwen-?(?:1\.5|2|2\.5)-.*\b[0-9.]+b"
    r"|qwen-?3-(?:vl-)?(?:0\.6|1\.7|2|4|8|14|32)b|qwq|qwen-?3\.[5-9]-(?:0\.8|2|4|9|27)b|vicuna"
    r"|mistral-(?:7b|nemo|small-[23]|large-2)|ministral|devstral|codestral|gemma-?(?:[23]-)?[0-9]+b"
    r"|phi-?(?:[1234]\b|3\.5-mini)|gpt-?2\b|opt-[0-9.]+b|pythia|falcon-|yi-[0-9.]|smollm|glm-?4-9b"
    r"|olmo-?[23]?-[0-9.]+b|deepseek-r1-distill|granite-3\.[0-9]-[28]b|command-r",
    re.IGNORECASE,
)
"""Beginnings of the names of well-known models without experts."""


@cache
def naming() -> Naming:
    """Return how models are called: as in also.csv, and without what tells no sizes.

    Active parameters may be left out, where one model alone has the rest of the name.
    """
    return Naming(
        aliases=read_aliases(ALSO_FILE, emulated_names()),
        filler=f"-(?:{'|'.join(_FILLER.split())})",
        optional="-?a-[0-9.]+-b$",
    )


def emulated_names() -> list[str]:
    """Return the names of the shipped models, sorted."""
    return sorted(path.stem for path in EMULATED_DIR.glob("*.yaml"))


def load_real_model(name: str, key: str = "emulate") -> RealModel:
    """Load a model by name, or from its configuration: a `config.json`, its folder, or a YAML.

    Names are found as people type them and as the hub has them: `qwen3 30b`,
    `Qwen/Qwen3-30B-A3B-Instruct-2507`; the local hub cache decides of a hub id that it has. Raises
    ValueError, naming `key` and the value, for an unknown name, a configuration without
    Mixture-of-Experts, and a YAML key that nothing reads.
    """
    path, what = Path(name), f"{key}={shown(name)}"
    if is_file(path / "config.json"):
        path = path / "config.json"
    if path.suffix.lower() == ".json":
        return read_model_json(path, what)
    cached = cached_folder(str(name))
    if cached is not None and is_file(cached / "config.json"):
        model = read_model_json(cached / "config.json", what)
        return replace(model, name=str(name).partition("/")[2])
    if not str(name).endswith((".yaml", ".yml")):
        return _shipped(str(name), key)
    config = read_yaml(path, what)
    # A config.json from the hub has many keys that nothing reads; a YAML is written for us.
    known = {name for names in keys().values() for name in names}
    for field in config if isinstance(config, Mapping) else ():
        if field not in known:
            raise unknown_name_error(f"{what}: the key", field, known)
    return read_config(config, what)


def read_model_json(path: Path, what: str) -> RealModel:
    """Return the model of a `config.json`, under any name."""
    config = read_json(path, what)
    if isinstance(config, Mapping):
        name = path.resolve().parent.name if path.name == "config.json" else path.stem
        config = {"name": name, **config}
    return read_config(config, what)


def cached_folder(name: str) -> Path | None:
    """Return the folder of a hub id that the local hub cache has."""
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name) is None:
        return None
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (OSError, ValueError):
        return None


def _shipped(typed: str, key: str) -> RealModel:
    """Return the shipped model that a name means, in the bits that the name says, if any."""
    text = re.sub(r"^[\w.-]+/(?=[^/]+$)", "", typed)
    text = re.sub(r"(?<=\w):(?=\w)", "-", text)  # ollama: qwen3:30b
    found = _STORED.search(text)
    bare = _STORED.sub("", text) if found else text
    # Quantisers put the organisation before: Qwen_Qwen3-30B-A3B-GGUF.
    without = re.sub(r"^[A-Za-z][A-Za-z.-]*_", "", bare)
    try:
        name = find_name(key, bare, emulated_names(), naming())
    except ValueError as error:
        try:
            name = find_name(key, without, emulated_names(), naming())
        except ValueError:
            if (owner := _owner(bare)) is None:
                raise _unknown(key, typed, text, error) from None
            name = owner
    model = read_config(read_yaml(EMULATED_DIR / f"{name}.yaml", key), key)
    if found is None:
        return model
    said = found["name"].lower()
    stored = load_stored(_STORED_AS.get(said, said))
    return replace(as_stored(model, stored), is_as_stored=True)


def as_stored(model: RealModel, stored: Stored) -> RealModel:
    """Return a model in a precision; where its file's size is published (files.csv), of that size.

    The experts' bits are then those that make up the rest of the file.
    """
    sized = replace(model, stored=stored)
    size = published_files().get((model.name, stored.name))
    if size is None:
        return sized
    experts = model.num_layers * model.num_experts * model.expert_weights
    bits = 8 * (size - sized.dense_bytes) / experts
    return replace(model, stored=stored._replace(expert_bits=bits))


def _unknown(key: str, typed: str, text: str, error: ValueError) -> ValueError:
    """Return the error of a name that no model has: that of a dense model, or of nothing here."""
    if not isinstance(error, UnknownNameError):
        return error
    if _DENSE.match(text):
        return ValueError(
            f"{key}={shown(typed)} is a dense model: every token reads all of its weights, and it "
            "has no experts to cache. Allowed: a Mixture-of-Experts model."
        )
    if os.path.exists(typed):
        what = "a folder without a config.json" if os.path.isdir(typed) else "no configuration"
        return ValueError(f"{key}={shown(typed)} is {what}. Allowed: a config.json, or a YAML.")
    alike = [name for name in emulated_names() if _is_near(_weights(text), _weights(name))]
    rest = str(unknown_name_error(key, typed, alike)).partition(" is not known.")[2]
    return ValueError(
        f"{key}={shown(typed)} is not known, and there is no such file or folder.{rest}"
    )


def _weights(name: str) -> float | None:
    """Return how many billions of weights a name states; None for one that states no number."""
    found = re.search(r"-([0-9.]+)([bt])\b", name.lower())
    return None if found is None else float(found[1]) * (1000 if found[2] == "t" else 1)


def _is_near(one: float | None, other: float | None) -> bool:
    """Whether neither of two sizes is over ten times the other, as far as both are known."""
    return not one or not other or one / 10 <= other <= one * 10


def _owner(text: str) -> str | None:
    """Return the model that a finetune is named after: its name with its size, and more words."""
    spelled = spell(text, naming())
    for name in [*emulated_names(), *naming().aliases]:
        own = spell(name, naming()).lstrip("-")
        before, is_in, after = spelled.partition(own)
        has_size = is_in and re.search(r"-[0-9.]+-b", own)
        if has_size and not re.match(r"[.0-9]", after) and not _OTHER.search(f"{before} {after}"):
            return naming().aliases.get(name, name)
    return None
