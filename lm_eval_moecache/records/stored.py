"""How many bits a checkpoint stores of each weight: by name, or by its `quantization_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from lm_eval_moecache.records.errors import unknown
from lm_eval_moecache.records.numbers import read_count, read_number, shown


class Stored(NamedTuple):
    """Bits a weight, scales included: of the experts, the other layers, and the vocabulary."""

    name: str
    expert_bits: float
    dense_bits: float = 16
    vocab_bits: float = 16
    """Of the embedding and of the output layer."""
    about: str = ""


BF16 = Stored("bf16", 16, about="two bytes a weight")
PRECISIONS = {
    stored.name: stored
    for stored in (
        BF16,
        Stored("fp8", 8 + 32 / 128**2, 8 + 32 / 128**2, about="one fp32 scale for 128 x 128"),
        Stored("int8", 8.5, 8.5, about="one fp16 scale for 32 weights"),
        Stored("int4", 4.5, 4.5, about="one fp16 scale for 32 weights"),
        Stored("nf4", 4.5, 4.5, about="bitsandbytes, one fp32 scale for 64 weights"),
        Stored("mxfp4", 4.25, about="one 8-bit scale for 32 weights; the rest in bf16"),
        Stored("q8_0", 8.5, 8.5, 8.5, about="GGUF, the whole file"),
        Stored("q4_k_m", 4.87, 4.87, 4.87, about="GGUF, the whole file; 18.6 GB of Qwen3-30B-A3B"),
    )
}
"""Names of `--precision`. The vocabulary stays in bf16, as checkpoints of transformers leave it,
but for GGUF's."""


def load_stored(name: str) -> Stored:
    if name not in PRECISIONS:
        raise unknown("precision", name, PRECISIONS)
    return PRECISIONS[name]


def read_stored(config: Mapping[str, Any], what: str) -> Stored:
    """Return what a configuration says of its checkpoint: `quantization_config`, or `expert_bits`.

    ValueError for a method whose bits are not known: to take it for bf16 would be four times off.
    """
    if config.get("expert_bits") is not None:
        bits = read_number(f"{what}: expert_bits", config["expert_bits"], above=0, most=64)
        return Stored(f"{bits:g} bits", bits)
    quantized = config.get("quantization_config")
    if quantized is None:
        return BF16
    what = f"{what}: quantization_config"
    if not isinstance(quantized, Mapping):
        raise ValueError(f"{what}={shown(quantized)} must be a mapping.")
    method = str(quantized.get("quant_method", quantized.get("quant_algo", ""))).lower()
    bits = _bits(method, quantized, what)
    left_out = ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules")
    left = str([quantized.get(key) for key in left_out])
    dense_bits = 16 if method == "mxfp4" or "attn" in left or "attention" in left else bits
    if quantized.get("expert_dtype", config.get("expert_dtype")) == "fp4":  # DeepSeek-V4
        return Stored("mxfp4 experts in fp8", 4.25, bits)
    return Stored(method, bits, dense_bits)


def _bits(method: str, quantized: Mapping[str, Any], what: str) -> float:
    if method == "mxfp4":
        return 4.25
    if method in ("fp8", "fbgemm_fp8"):
        block = quantized.get("weight_block_size") or [128, 128]
        edges = [read_count(f"{what}: weight_block_size", edge, least=1) for edge in block]
        return 8 + 32 / (edges[0] * edges[-1])
    if method in ("gptq", "awq", "auto-round", "autoround"):
        told = quantized.get("bits", quantized.get("w_bit", 4))
        bits = read_count(f"{what}: bits", told, least=1)
        group = _group(quantized.get("group_size", quantized.get("q_group_size", 128)), what)
        return bits + (16 + bits) / group  # an fp16 scale and a zero point for each group
    if method == "bitsandbytes":
        if quantized.get("load_in_8bit"):
            return 8
        return 4.127 if quantized.get("bnb_4bit_use_double_quant") else 4.5
    if method == "hqq":
        inner = (quantized.get("quant_config") or {}).get("weight_quant_params", quantized)
        bits = read_count(f"{what}: nbits", inner.get("nbits", 4), least=1)
        return bits + 32 / _group(inner.get("group_size", 64), what)
    if method in ("modelopt", "nvfp4", "fp8_pb_wo") and "nvfp4" in str(quantized).lower():
        return 4.5  # four bits, and one of eight for sixteen weights
    if method == "modelopt" and "fp8" in str(quantized).lower():
        return 8
    if method == "compressed-tensors":
        groups = quantized.get("config_groups") or {}
        for group in groups.values():
            weights = group.get("weights") or {}
            bits = read_count(f"{what}: num_bits", weights.get("num_bits"), least=1)
            size = weights.get("group_size")
            scale = 8 if weights.get("type") == "float" and bits == 4 else 16
            return bits + (scale / _group(size, what) if size else 0)
    raise ValueError(
        f"{what}: the bits of quant_method={shown(method)} are not known. Allowed: mxfp4, fp8, "
        "gptq, awq, auto-round, bitsandbytes, hqq, modelopt, compressed-tensors; or give a YAML "
        "with `expert_bits`."
    )


def _group(value: object, what: str) -> float:
    """Return a group's size; -1 is a whole row of a matrix, taken for 2048 weights."""
    if value in (-1, "-1"):
        return 2048.0
    return read_count(f"{what}: group_size", value, least=1)
