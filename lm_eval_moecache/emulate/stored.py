"""Bits of a stored weight: the precisions of the field by name, and those of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from lm_eval_moecache.records.files import read_csv
from lm_eval_moecache.records.numbers import (
    MOST_COUNT,
    listed,
    nearest,
    read_count,
    read_number,
    shown,
)
from lm_eval_moecache.records.real_model import BF16, Stored

PRECISIONS_FILE = Path(__file__).with_name("precisions.csv")
FILES_FILE = PRECISIONS_FILE.with_name("files.csv")
CACHE_BITS = {
    **{"f16": 16.0, "bf16": 16.0, "fp8": 8.0, "q8_0": 8.5},
    **{"q5_1": 6.0, "q5_0": 5.5, "q4_1": 5.0, "q4_0": 4.5},
}
"""Bits of an element of the KV cache, by the name of its type."""
_GGUF = "GGUF"
_Q8_0 = 8.5
_LEAST_DENSE, _FEW = 4.5, 3.5
"""Bits in which files of fewer keep all but the experts."""
_FORMS = "ud-NAME of a GGUF type, 4bit (MLX), exl3:4.0, 4.5bpw"


@cache
def precisions(kind: str = "") -> Mapping[str, Stored]:
    """Return the bits of the field's precisions by each of their names, as precisions.csv has them.

    A GGUF's are the mean of a file of that type, which says it exactly itself (`plan FILE`). With
    `kind=GGUF` its types alone.
    """
    found: dict[str, Stored] = {}
    for row in read_csv(PRECISIONS_FILE, str(PRECISIONS_FILE)):
        if kind not in ("", row["about"]):
            continue
        usual = row["experts"] if row["about"] == _GGUF else "16"
        if float(usual) < _FEW:
            usual = str(_LEAST_DENSE)
        parts = ("experts", "rest", "vocabulary")
        experts, rest, vocabulary = (float(row[part] or usual) for part in parts)
        stored = Stored(row["name"], experts, rest, vocabulary)
        found |= dict.fromkeys([stored.name, *row["also"].split()], stored)
    return found


def load_stored(name: str) -> Stored:
    """Return the stored precision of a name of the field, in any case.

    Allowed are `precisions`, `ud-q4_k_xl` (Unsloth's: experts of that type, the rest in eight
    bits), `q4_k_xl` (GGUF's with the vocabulary in eight bits), `4bit` (MLX in groups of 64),
    `exl3:4.0` and `4.5bpw`. Raises ValueError with what is allowed.
    """
    typed = re.sub(r"[\s-]+", "_", str(name).strip().lower())
    is_dynamic, known = typed.startswith("ud_"), precisions()
    plain = typed.removeprefix("ud_")
    plain = known[plain].name if plain in known else plain
    full = f"ud-{plain}" if is_dynamic else plain
    if full in known:
        return known[full]
    family = re.sub("_x?l$", "", plain)
    larger = "_l" if plain.endswith("_xl") and not is_dynamic else "_m"
    bases = map(precisions(_GGUF).get, (plain, family + larger, family))
    if base := next(filter(None, bases), None):
        bits = base.expert_bits
        rest = max(bits, _Q8_0) if is_dynamic else base.dense_bits
        vocabulary = rest if base.name == plain else max(bits, _Q8_0)
        return Stored(full, bits, rest, vocabulary)
    if mlx := re.fullmatch(r"(?:mlx_?)?([2-8])_?bits?|mlx_?([2-8])", plain):
        bits = int(mlx[1] or mlx[2]) + 32 / 64
        return Stored(f"{bits - 0.5:g}bit", bits, bits, bits)
    number = r"~?([0-9]+(?:\.[0-9]+)?)"
    if exl := re.fullmatch(rf"(exl[23])[:_@]?{number}(?:_?bpw)?", plain):
        bits = read_number(f"precision={shown(name)}", exl[2], above=0, most=16)
        return Stored(f"{exl[1]}:{bits:g}", bits, bits, 6)  # the output layer in six bits
    if bpw := re.fullmatch(rf"{number}_?bpw", plain):
        bits = read_number(f"precision={shown(name)}", bpw[1], above=0, most=16)
        return Stored(f"{bits:g}bpw", bits, bits, bits)
    names = list(dict.fromkeys(stored.name for stored in known.values()))
    near = nearest(plain, names)
    raise ValueError(
        f"precision={shown(name)} is not known.{near} Allowed: {listed(names, name)}; {_FORMS}."
    )


@cache
def published_files() -> Mapping[tuple[str, str], float]:
    """Return the bytes of files by model and type of file, as files.csv has them."""
    rows = read_csv(FILES_FILE, str(FILES_FILE))
    return {(row["model"], row["type"]): 1e9 * float(row["gigabytes"]) for row in rows}


def read_stored(config: Mapping[str, Any], what: str) -> Stored:
    """Return a checkpoint's stored precision, from `quantization_config` or `expert_bits`.

    Raises ValueError for a method with unknown bits: to take it for bf16 would be four times off.
    """
    if config.get("expert_bits") is not None:
        bits = read_number(f"{what}: expert_bits", config["expert_bits"], above=0, most=64)
        return Stored(f"{bits:g} bits", bits)
    key = "quantization_config"
    if config.get(key) is None:
        key = "quantization"  # MLX's name
    quantized = config.get(key)
    if quantized is None:
        return BF16
    what = f"{what}: {key}"
    quantized = mapping_of(quantized, what)
    method = str(quantized.get("quant_method", quantized.get("quant_algo", ""))).lower()
    bits = _bits(method, quantized, what)
    exclusions = ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules")
    if method == "" and quantized.get("bits") is not None:  # MLX, of every weight
        return Stored(f"{quantized['bits']}bit", bits, bits, bits)
    excluded = str([quantized.get(key) for key in exclusions])
    dense_bits = 16 if method == "mxfp4" or "attn" in excluded or "attention" in excluded else bits
    if quantized.get("expert_dtype", config.get("expert_dtype")) == "fp4":  # DeepSeek-V4
        return Stored("mxfp4 experts in fp8", 4.25, bits)
    return Stored(method, bits, dense_bits)


def mapping_of(value: object, what: str) -> Mapping[str, Any]:
    """Return a value that has to be a mapping. ValueError begins with `what`."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{what}={shown(value)} must be a mapping.")
    return value


_MOST_BITS = 16


def _bits(method: str, quantized: Mapping[str, Any], what: str) -> float:
    def count(fields: Mapping[str, Any], *names: str, default: object = None) -> int:
        name = next((name for name in names if fields.get(name) is not None), names[0])
        value = default if fields.get(name) is None else fields[name]
        # A group of -1 is a whole matrix row, taken as 2048 weights.
        if "group_size" in name and value in (-1, "-1"):
            return 2048
        if isinstance(value, str):
            raise ValueError(f"{what}: {name}={shown(value)} is text, not a number.")
        most = MOST_COUNT if "group_size" in name else _MOST_BITS
        return read_count(f"{what}: {name}", value, least=1, most=most)

    match method:
        case "mxfp4":
            return 4.25
        case "fp8" | "fbgemm_fp8":
            block = quantized.get("weight_block_size") or [128, 128]
            if not isinstance(block, (list, tuple)) or len(block) != 2:
                raise ValueError(
                    f"{what}: weight_block_size={shown(block)} must be a list of two numbers."
                )
            edges = [read_count(f"{what}: weight_block_size", edge, least=1) for edge in block]
            return 8 + 32 / (edges[0] * edges[1])
        case "gptq" | "awq" | "auto-round" | "autoround":
            bits = count(quantized, "bits", "w_bit", default=4)
            # An fp16 scale and a zero point per group.
            return bits + (16 + bits) / count(quantized, "group_size", "q_group_size", default=128)
        case "" if quantized.get("bits") is not None:
            return count(quantized, "bits") + 32 / count(quantized, "group_size", default=64)
        case "bitsandbytes":
            fourth = 4.127 if quantized.get("bnb_4bit_use_double_quant") else 4.5
            return 8 if quantized.get("load_in_8bit") else fourth
        case "hqq":
            outer = mapping_of(quantized.get("quant_config") or {}, f"{what}: quant_config")
            inner = outer.get("weight_quant_params", quantized)
            inner = mapping_of(inner, f"{what}: weight_quant_params")
            return count(inner, "nbits", default=4) + 32 / count(inner, "group_size", default=64)
        case "modelopt" | "nvfp4" | "fp8_pb_wo" if "nvfp4" in str(quantized).lower():
            return 4.5  # four bits, plus an 8-bit scale per sixteen weights
        case "modelopt" if "fp8" in str(quantized).lower():
            return 8
        case "compressed-tensors" if groups := quantized.get("config_groups"):
            first = next(iter(mapping_of(groups, f"{what}: config_groups").values()))
            first = mapping_of(first, f"{what}: config_groups' first")
            weights = mapping_of(first.get("weights"), f"{what}: config_groups' weights")
            bits = count(weights, "num_bits")
            scale = 8 if weights.get("type") == "float" and bits == 4 else 16
            return bits + (scale / count(weights, "group_size") if weights.get("group_size") else 0)
    raise ValueError(
        f"{what}: the bits of quant_method={shown(method)} are not known. Allowed: mxfp4, fp8, "
        "gptq, awq, auto-round, bitsandbytes, hqq, modelopt, compressed-tensors; or give a YAML "
        "with `expert_bits`."
    )
