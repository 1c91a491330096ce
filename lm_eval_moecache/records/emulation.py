"""Sizes of named real models: what one of their layers weighs, from their public configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lm_eval_moecache.records.errors import unknown
from lm_eval_moecache.records.files import is_file, read_json, read_yaml
from lm_eval_moecache.records.geometry import DTYPES, Geometry
from lm_eval_moecache.records.numbers import read_count, read_number, shown

EMULATED_DIR = Path(__file__).resolve().parent.parent / "emulate"
_DTYPE_BYTES = 2
"""The models compute in bf16, whatever the precision of their stored experts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RealModel:
    """One real Mixture-of-Experts model, in numbers of weights. Sizes of layers are of one layer.

    `layer_weights` are what a pass reads beside the experts on its way through one MoE layer
    (attention, router, shared experts); `read_once` what it reads beside the MoE layers (output
    layer, dense layers); `embedding` is held, and looked up rather than read.
    """

    name: str
    num_layers: int
    num_experts: int
    top_k: int
    expert_weights: int
    expert_bits: float
    layer_weights: int
    read_once: int
    embedding: int
    kv_bytes_per_token: int
    source: str = ""

    @property
    def expert_bytes(self) -> int:
        return round(self.expert_weights * self.expert_bits / 8)

    @property
    def num_weights(self) -> int:
        experts = self.num_layers * self.num_experts * self.expert_weights
        return experts + self.num_layers * self.layer_weights + self.read_once + self.embedding

    @property
    def dense_bytes(self) -> int:
        """Bytes of everything but the experts."""
        return _DTYPE_BYTES * (
            self.num_layers * self.layer_weights + self.read_once + self.embedding
        )

    @property
    def layer_dense_bytes(self) -> int:
        """Dense bytes that a pass reads for a MoE layer, with its share of what it reads once."""
        return _DTYPE_BYTES * (self.layer_weights + self.read_once // self.num_layers)

    def geometry(self) -> Geometry:
        """Return the model's own sizes, all layers alike."""
        return self.emulated_by(
            Geometry(
                model=self.name,
                num_layers=self.num_layers,
                num_experts=self.num_experts,
                top_k=self.top_k,
                expert_bytes=((self.expert_bytes,),) * self.num_layers,
                dense_bytes=(0,) * self.num_layers,
            )
        )

    def emulated_by(self, own: Geometry) -> Geometry:
        """Return `own` with every layer charged as one of this model.

        Layers, experts and top-k stay: they decide what is routed where. So do capacities given as
        a share or as a number of experts; those given in bytes count this model's. An expert
        that is stored encoded (`precision=int4`) has as many bits a weight here as there, scales
        included; at a dtype it has this model's own. A lower level keeps its share of the first.
        """
        whole = _DTYPE_BYTES * self.expert_weights
        if own.compute_bytes and own.precision[0] not in DTYPES:
            first = [
                whole * levels[0] / computed
                for levels, computed in zip(own.expert_bytes, own.compute_bytes, strict=True)
            ]
        else:
            first = [float(self.expert_bytes)] * own.num_layers
        sizes = tuple(
            tuple(max(1, round(best * size / levels[0])) for size in levels)
            for best, levels in zip(first, own.expert_bytes, strict=True)
        )
        return replace(
            own,
            expert_bytes=sizes,
            dense_bytes=(self.layer_dense_bytes,) * own.num_layers,
            element_bytes=float(_DTYPE_BYTES),
            compute_bytes=(whole,) * own.num_layers,
            emulates=self.name,
        )


def emulated_names() -> list[str]:
    return sorted(path.stem for path in EMULATED_DIR.glob("*.yaml"))


def load_real_model(name: str, key: str = "emulate") -> RealModel:
    """Load a model by name, from a folder with its `config.json`, or from a YAML of the same keys.

    Names are matched without regard to case and organisation: `allenai/OLMoE-1B-7B` is one.
    Raises ValueError, naming `key` and the value, for what is not known and for a configuration
    without Mixture-of-Experts.
    """
    path, what = Path(name), f"{key}={shown(name)}"
    if str(name).endswith((".yaml", ".yml")):
        if not is_file(path):
            raise ValueError(f"{what}: there is no such file.")
        return read_real_model(read_yaml(path, what), what)
    if is_file(path / "config.json"):
        config = read_json(path / "config.json", what)
        return read_real_model({"name": path.resolve().name, **config}, what)
    known = {stem.lower(): stem for stem in emulated_names()}
    stem = known.get(str(name).rpartition("/")[2].lower())
    if stem is None:
        raise unknown(key, name, emulated_names())
    file = EMULATED_DIR / f"{stem}.yaml"
    return read_real_model(read_yaml(file, what), what)


def read_real_model(config: object, what: str) -> RealModel:
    """Read a configuration by the keys that transformers' models use."""
    if not isinstance(config, Mapping):
        raise ValueError(f"{what} must hold a mapping of a model's configuration.")
    read = _Reader(config, what)
    hidden = read("hidden_size")
    inner = read("moe_intermediate_size", "intermediate_size")
    dense_layers = read("first_k_dense_replace", default=0)
    total_layers = read("num_hidden_layers")
    if dense_layers >= total_layers:
        raise ValueError(f"{what}: first_k_dense_replace={dense_layers} leaves no MoE layer.")
    num_experts = read("num_local_experts", "num_experts", "n_routed_experts")
    attention, kv_weights = _attention(read, hidden)
    shared = read("n_shared_experts", default=0) * inner
    shared = read("shared_expert_intermediate_size", default=shared)
    dense = dense_layers * (attention + 3 * hidden * read("intermediate_size", default=inner))
    vocabulary = read("vocab_size") * hidden
    top_k = read("num_experts_per_tok")
    if top_k > num_experts:
        raise ValueError(f"{what}: num_experts_per_tok={top_k} of {num_experts} experts.")
    bits = read_number(f"{what}: expert_bits", config.get("expert_bits", 16), above=0, most=64)
    return RealModel(
        name=str(config.get("name", "model")),
        num_layers=total_layers - dense_layers,
        num_experts=num_experts,
        top_k=top_k,
        expert_weights=3 * hidden * inner,
        expert_bits=bits,
        layer_weights=attention + hidden * num_experts + 3 * hidden * shared,
        read_once=vocabulary + dense,
        embedding=0 if config.get("tie_word_embeddings") else vocabulary,
        kv_bytes_per_token=_DTYPE_BYTES * kv_weights * total_layers,
        source=str(config.get("source", "")),
    )


def _attention(read: _Reader, hidden: int) -> tuple[int, int]:
    """Return one layer's attention weights, and the numbers of one token in its KV cache."""
    heads = read("num_attention_heads")
    if read("kv_lora_rank", default=0):
        # Multi-head latent attention (DeepSeek-V2): the compressed vector is what is cached.
        rank, rope = read("kv_lora_rank"), read("qk_rope_head_dim")
        nope, value = read("qk_nope_head_dim"), read("v_head_dim")
        q_rank = read("q_lora_rank", default=0)
        query = heads * (nope + rope)
        queries = hidden * q_rank + q_rank * query if q_rank else hidden * query
        keys = hidden * (rank + rope) + rank * heads * (nope + value)
        return queries + keys + heads * value * hidden, rank + rope
    width = read("head_dim", default=hidden // heads)
    groups = read("num_key_value_heads", default=heads)
    return 2 * hidden * width * (heads + groups), 2 * groups * width


class _Reader:
    """Reads counts of a configuration by any of several names."""

    def __init__(self, config: Mapping[str, Any], what: str) -> None:
        self._config, self._what = config, what

    def __call__(self, *names: str, default: int | None = None) -> int:
        for name in names:
            if self._config.get(name) is not None:
                least = 0 if default == 0 else 1
                return read_count(f"{self._what}: {name}", self._config[name], least=least)
        if default is None:
            raise ValueError(
                f"{self._what} lacks {' or '.join(names)}: it is no configuration of a "
                "Mixture-of-Experts model."
            )
        return default
