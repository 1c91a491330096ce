"""Sizes of real models from the tensors of their files, whose weights are not read.

Each tensor has a precision of its own in most GGUF files, and a configuration does not say which.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from lm_eval_moecache.emulate.configuration import read_caches, read_config
from lm_eval_moecache.records.files import (
    check_file,
    is_file,
    open_file,
    opened_gguf,
    parse_json,
    read_json,
)
from lm_eval_moecache.records.numbers import read_count, shown
from lm_eval_moecache.records.real_model import BF16, RealModel, Stored

_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
_MOST_HEADER, _MOST_BYTES = 2**28, 2**53
_LEFT_OUT = ("vision", "visual", "image", "audio", "mtp", "mm_proj", "multi_modal_projector")
"""Parts of checkpoints that a text's tokens do not pass through, and layers that predict ahead."""
_ALIKE = 0.05
"""Share by which a file may differ from what is said of it: norms in float32, image encoders."""
_KINDS = {
    "imatrix": "an importance matrix, to be read by `moecache profile use`",
    "mmproj": "an image encoder, which belongs to a model's file",
    "adapter": "an adapter, to be merged into its model first",
}


class Tensor(NamedTuple):
    """One tensor of a file: its name, how many weights it holds, and its bytes there."""

    name: str
    weights: int
    nbytes: int


@dataclass
class _Part:
    """Weights and bytes of one part of a model."""

    weights: int = 0
    nbytes: int = 0

    def add(self, more: Tensor) -> None:
        self.weights += more.weights
        self.nbytes += more.nbytes

    def __add__(self, other: _Part) -> _Part:
        return _Part(self.weights + other.weights, self.nbytes + other.nbytes)

    @property
    def bits(self) -> float:
        return 8 * self.nbytes / self.weights if self.weights else 16.0


@dataclass
class _Parts:
    """A model's tensors by what a pass does with them."""

    experts: _Part = field(default_factory=_Part)
    layers: _Part = field(default_factory=_Part)
    """What a pass reads in the layers that have experts, besides the experts."""
    once: _Part = field(default_factory=_Part)
    embedding: _Part = field(default_factory=_Part)
    output: _Part = field(default_factory=_Part)
    expert_layers: set[int] = field(default_factory=set)


def read_gguf(path: Path, what: str) -> RealModel:
    """Return the sizes of the model in a GGUF file, and in the files that it is split into.

    Only the index is read. Sums over tensors are exact; layers are sized alike, by their mean.
    Layers that predict further tokens, and tables of embeddings a layer (looked up on the host),
    are left out. Raises ValueError, beginning with `what`, for a file that is no such model,
    is damaged, or lacks one of its parts.
    """
    values: dict[str, Any] = {}
    tensors: list[Tensor] = []
    for part in _split_files(path, what):
        part_values, part_tensors = _read_index(part, what)
        values = {**part_values, **values}
        tensors += part_tensors
    architecture = str(values.get("general.architecture", ""))
    kind = str(values.get("general.type", "model"))
    if kind in _KINDS or architecture in ("imatrix", "clip"):
        kind = _KINDS.get(kind) or _KINDS["imatrix" if architecture == "imatrix" else "mmproj"]
        raise ValueError(f"{what} is {kind}, not a model.")

    def value(key: str, default: Any = None) -> Any:
        return values.get(f"{architecture}.{key}", default)

    blocks = read_count(f"{what}: block_count", value("block_count"), least=1)
    predicting = read_count(f"{what}: nextn_predict_layers", value("nextn_predict_layers", 0))
    own = [
        tensor
        for tensor in tensors
        if _gguf_layer(tensor.name) < blocks - predicting
        and not tensor.name.startswith("per_layer_token_embd")
    ]
    experts = r"ffn_\w+_exps\.|ffn_(?:gate|up|down)\.\d+\."
    parts = _parts(own, rf"blk\.(?P<layer>\d+)\.(?:{experts})?", "token_embd.", "output.weight")
    if not parts.expert_layers:
        holds = f"{len(tensors)} tensors, none of them experts (`*_exps`)" if tensors else "none"
        raise ValueError(
            f"{what} is not a Mixture-of-Experts model: {architecture or 'no architecture'}, "
            f"{holds}. A dense model reads all of its weights for every token, and has no experts "
            "to cache."
        )
    attention = _gguf_attention(value, own, blocks - predicting, architecture == "gpt-oss")
    caches, state_bytes = read_caches(
        attention,
        read_count(f"{what}: embedding_length", value("embedding_length"), least=1),
        len(attention["layer_types"]) or blocks - predicting,
        what,
    )
    file_type = _file_type(values.get("general.file_type"))
    return _model(
        parts,
        name=str(values.get("general.name") or path.stem),
        num_experts=read_count(f"{what}: expert_count", value("expert_count"), least=1),
        top_k=read_count(f"{what}: expert_used_count", value("expert_used_count"), least=1),
        precision=file_type,
        source=f"the tensors of {path.name}, {sum(t.nbytes for t in tensors) / 1e9:.2f} GB",
        caches=caches,
        state_bytes=state_bytes,
    )


def _split_files(path: Path, what: str) -> list[Path]:
    """Return all files of a GGUF, in order, whichever of them was named."""
    match = _SPLIT.fullmatch(path.name)
    if not match:
        check_file(path, what)
        return [path]
    stem, count = match[1], int(match[3])
    files = [path.with_name(f"{stem}-{n:05d}-of-{count:05d}.gguf") for n in range(1, count + 1)]
    missing = [file.name for file in files if not is_file(file)]
    if missing or not files:
        raise ValueError(
            f"{what} is one of {count} files, of which {len(missing)} are not in its folder: "
            f"{', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}."
        )
    return files


def _read_index(path: Path, what: str) -> tuple[dict[str, Any], list[Tensor]]:
    with opened_gguf(path, what) as reader:
        values = {
            key: field.contents()
            for key, field in reader.fields.items()
            if not key.startswith(("tokenizer.", "GGUF."))
        }
        return values, [Tensor(t.name, int(t.n_elements), int(t.n_bytes)) for t in reader.tensors]


def _gguf_layer(name: str) -> int:
    """Return the layer that a tensor belongs to; -1 outside the layers."""
    match = re.match(r"blk\.(\d+)\.", name)
    return int(match[1]) if match else -1


def _gguf_attention(
    value: Any, tensors: Iterable[Tensor], num_layers: int, is_alternating: bool
) -> dict[str, Any]:
    """Return what the KV caches follow from, under the names of transformers' configurations.

    `is_alternating`: every second layer has a window, which gpt-oss's files do not say.
    """
    kinds: list[str | None] = [None] * num_layers
    for tensor in tensors:
        layer = _gguf_layer(tensor.name)
        if layer >= 0 and (match := re.match(r"blk\.\d+\.(ssm|shortconv|attn)_", tensor.name)):
            found = {"ssm": "linear_attention", "shortconv": "conv"}.get(match[1])
            # Layers of both kinds of tensors are linear: their norms are named after attention.
            kinds[layer] = found or kinds[layer] or "full_attention"
    window = value("attention.sliding_window")
    pattern = value("attention.sliding_window_pattern", 2 if is_alternating else None)
    if window and pattern is not None:
        for layer, kind in enumerate(kinds):
            windowed = pattern[layer] if isinstance(pattern, list) else (layer + 1) % pattern
            if kind == "full_attention" and windowed:
                kinds[layer] = "sliding_attention"

    def of_kind(numbers: Any, kind: str) -> Any:
        """Return the largest figure of the layers of a kind, where each layer has its own."""
        if not isinstance(numbers, list):
            return numbers
        return max((n for n, k in zip(numbers, kinds, strict=False) if k == kind), default=None)

    groups, heads = value("attention.head_count_kv"), value("attention.head_count")
    is_windowed = "sliding_attention" in kinds
    first = "sliding_attention" if is_windowed else "full_attention"
    config = {
        "layer_types": [kind for kind in kinds if kind],
        "num_attention_heads": of_kind(heads, first),
        "num_key_value_heads": of_kind(groups, first),
        "head_dim": value("attention.key_length"),
        "sliding_window": window if is_windowed else None,
        "conv_L_cache": value("shortconv.l_cache"),
    }
    if is_windowed and value("attention.key_length_swa"):
        config["head_dim"] = value("attention.key_length_swa")
        config["global_head_dim"] = value("attention.key_length")
        config["num_global_key_value_heads"] = of_kind(groups, "full_attention")
    if rank := value("attention.kv_lora_rank"):
        rope = value("rope.dimension_count", 0)
        config |= {"kv_lora_rank": rank, "qk_rope_head_dim": rope, "v_head_dim": 1}
        config["qk_nope_head_dim"] = 1  # a width of weights, which the tensors give
    if (size := value("ssm.state_size")) and (ranks := value("ssm.time_step_rank")):
        width = value("ssm.inner_size", 0) // ranks
        config |= {"mamba_num_heads": ranks, "mamba_head_dim": width, "ssm_state_size": size}
        config["n_groups"] = value("ssm.group_count")
    if size := value("kda.head_dim"):  # Kimi-Linear
        linear_heads = of_kind(heads, "linear_attention") or config["num_attention_heads"]
        config |= {"linear_num_heads": linear_heads, "linear_head_dim": size}
    if not {"mamba_num_heads", "linear_num_heads", "conv_L_cache"} & {
        k for k in config if config[k]
    }:
        # States of a kind that the file does not size are not counted.
        config["layer_types"] = [kind for kind in kinds if kind and kind != "linear_attention"]
    return {key: number for key, number in config.items() if number is not None}


def _file_type(number: Any) -> str:
    from gguf import LlamaFileType

    try:
        return LlamaFileType(int(number)).name.removeprefix("MOSTLY_").lower()
    except (TypeError, ValueError):
        return "mixed"


def read_safetensors_index(path: Path, what: str) -> RealModel:
    """Return the sizes of a checkpoint by its `*.safetensors.index.json`.

    Sizes are those of the `config.json` next to it; the bits of the experts and of the rest are
    those of the tensors where the files are there, else of the index's total. Raises ValueError,
    beginning with `what`.
    """
    index = read_json(path, what)
    files = index.get("weight_map") if isinstance(index, Mapping) else None
    if not isinstance(files, Mapping):
        raise ValueError(f"{what} has no `weight_map`: it is not an index of safetensors.")
    config_path = path.with_name("config.json")
    if not is_file(config_path):
        raise ValueError(f"{what}: its folder has no config.json, which says what tensors are.")
    config = read_json(config_path, f"{what}: config.json")
    names = {path.parent / Path(str(name)).name for name in files.values()}
    here = sorted(names) if all(map(is_file, names)) else []
    tensors = [tensor for file in here for tensor in _safetensors(file, f"{what}: {file.name}")]
    config = {"name": path.resolve().parent.name, **config}
    try:
        model = read_config(config, what)
    except ValueError:
        # Where it stores in an unknown way, the bytes of its tensors say how.
        model = read_config({**config, "quantization_config": None}, what)
    if tensors:
        parts = _checkpoint_parts(tensors, model.num_layers + _dense_before(config))
        return _with_bits(model, parts, path.name)
    total = read_count(
        f"{what}: metadata.total_size",
        (index.get("metadata") or {}).get("total_size"),
        least=1,
        most=_MOST_BYTES,
    )
    if abs(total / (model.all_expert_bytes + model.dense_bytes) - 1) < _ALIKE:
        return replace(model, source=f"config.json, and the bytes of {path.name}")
    model = replace(model, stored=BF16)
    experts = model.num_layers * model.num_experts * model.expert_weights
    bits = 8 * (total - model.dense_bytes) / experts
    if not 0 < bits < 64:
        raise ValueError(f"{what}: its {total} bytes are not of a model of {config_path.name}.")
    return replace(
        model,
        stored=Stored(f"{bits:.3g} bits", bits),
        source=f"config.json, and the bytes of {path.name} less {model.dense_bytes} of bf16",
    )


def _safetensors(path: Path, what: str) -> Iterator[Tensor]:
    """Yield the tensors of a safetensors file, from its header, without their weights: some pack
    several into an element."""
    with open_file(path, what) as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= _MOST_HEADER:
            raise ValueError(f"{what} is not a safetensors file.")
        try:
            header = parse_json(file.read(length), what)
            for name, entry in header.items():
                if name != "__metadata__":
                    begin, end = entry["data_offsets"]
                    yield Tensor(name, 0, end - begin)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{what} is not a safetensors file: {error}.") from None


def _checkpoint_parts(tensors: Iterable[Tensor], num_layers: int) -> _Parts:
    """Sort a checkpoint's tensors; layers from `num_layers` on predict ahead and are left out."""
    pattern = r".*?layers\.(?P<layer>\d+)\.(?:.*\bexperts\.(?:\d+\.)?(?!bias)\w)?"
    own = [
        tensor
        for tensor in tensors
        if not any(part in tensor.name.lower() for part in _LEFT_OUT)
        and (not (match := re.match(pattern, tensor.name)) or int(match["layer"]) < num_layers)
    ]
    return _parts(own, pattern, "embed_tokens.", "lm_head.")


def _with_bits(model: RealModel, parts: _Parts, source: str) -> RealModel:
    """Return a model with the bits that its tensors have."""
    experts = model.num_layers * model.num_experts * model.expert_weights
    vocabulary = model.embedding + model.output
    dense = model.num_weights - experts - vocabulary
    bits = _Part(experts, parts.experts.nbytes).bits
    stored = Stored(
        f"{bits:.3g} bits",
        bits,
        _Part(dense, (parts.layers + parts.once).nbytes).bits,
        _Part(vocabulary, (parts.embedding + parts.output).nbytes).bits,
    )
    stored = model.stored if _alike(stored, model.stored) else stored
    return replace(model, stored=stored, source=f"config.json, and the tensors of {source}")


def _alike(found: Stored, said: Stored) -> bool:
    """Whether tensors have the bits that were said of them, but for norms and the like."""
    return all(abs(a / b - 1) < _ALIKE for a, b in zip(found[1:4], said[1:4], strict=True))


def _dense_before(config: Mapping[str, Any]) -> int:
    inner = config.get("text_config")
    sizes = inner if isinstance(inner, Mapping) else config
    return int(sizes.get("first_k_dense_replace") or sizes.get("num_dense_layers") or 0)


# --- parts ---


def _parts(tensors: Iterable[Tensor], layer: str, embedding: str, output: str) -> _Parts:
    """Sort tensors. `layer` matches a layer's, and those of its experts beyond the layer's number.

    `embedding` and `output` are parts of the names of the vocabulary's two tables.
    """
    parts, others = _Parts(), []
    for tensor in tensors:
        match = re.match(layer, tensor.name)
        # The pattern goes on beyond `layers.N.` where the tensor is one of the experts.
        if match and match.end() > match.end("layer") + 1:
            parts.experts.add(tensor)
            parts.expert_layers.add(int(match["layer"]))
        else:
            others.append((int(match["layer"]) if match else None, tensor))
    for number, tensor in others:
        if number in parts.expert_layers:
            parts.layers.add(tensor)
        elif number is None and embedding in tensor.name:
            parts.embedding.add(tensor)
        elif number is None and tensor.name.startswith(output):
            parts.output.add(tensor)
        else:
            parts.once.add(tensor)
    return parts


def _model(
    parts: _Parts,
    *,
    name: str,
    num_experts: int,
    top_k: int,
    precision: str,
    source: str,
    **caches: Any,
) -> RealModel:
    """Return the model that has these parts; an embedding without an output layer is both."""
    num_layers = len(parts.expert_layers)
    expert_weights = max(1, round(parts.experts.weights / (num_layers * num_experts)))
    if top_k > num_experts:
        raise ValueError(f"{shown(name)}: {top_k} of {num_experts} experts for a token.")
    is_tied = not parts.output.weights
    output = parts.embedding.weights if is_tied else parts.output.weights
    dense, vocabulary = parts.layers + parts.once, parts.embedding + parts.output
    stored = Stored(precision, parts.experts.bits, dense.bits, vocabulary.bits)
    is_whole = _alike(stored, BF16)
    return RealModel(
        name=name,
        num_layers=num_layers,
        num_experts=num_experts,
        top_k=top_k,
        expert_weights=expert_weights,
        stored=BF16 if is_whole else stored,
        is_as_stored=not is_whole,
        layer_weights=round(parts.layers.weights / num_layers),
        read_once=parts.once.weights + output,
        output=output,
        embedding=0 if is_tied else parts.embedding.weights,
        source=source,
        **caches,
    )
