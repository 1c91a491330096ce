"""Sizes of real models, from their configurations and the bits of a stored weight."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from lm_eval_moecache.emulate.stored import mapping_of, read_stored
from lm_eval_moecache.records.files import read_csv
from lm_eval_moecache.records.numbers import MOST_COUNT, read_count, shown
from lm_eval_moecache.records.real_model import DTYPE_BYTES, LayerCaches, RealModel

KEYS_FILE = Path(__file__).with_name("keys.csv")
_MOST_LAYERS, _MOST_EXPERTS = 4096, 2**17
_NESTED = ("thinker_config", "text_config", "language_config", "llm_config")
"""Parts of a configuration with the text model's sizes, the outermost first."""
_PARTS = ("attn_config", "ffn_config", "linear_attn_config")
"""Parts of it with sizes of one kind of layer (DBRX, Kimi-Linear)."""
_LAYERS, _EXPERTS, _TOP_K = "num_hidden_layers", "num_local_experts", "num_experts_per_tok"
_INNER, _DENSE = "moe_intermediate_size", "intermediate_size_mlp"


@cache
def keys() -> Mapping[str, Mapping[str, bool]]:
    """Return key -> its names, itself the first, each with whether there may be one a layer."""
    return {
        row["key"]: dict.fromkeys([row["key"], *row["also"].split()], bool(row["each"]))
        for row in read_csv(KEYS_FILE, str(KEYS_FILE))
    }


def read_config(config: object, what: str) -> RealModel:
    """Return the model of a configuration with the keys of transformers' models.

    Its `model_type` decides little that its sizes do not. Raises ValueError beginning with `what`.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"{what} must hold a mapping of a model's configuration.")
    _Reader(config, what).text("model_type")
    config = _flat(config, what)
    read = _Reader(config, what)
    _check_experts(read)
    hidden = read("hidden_size")
    inner = read(_INNER)
    blocks = _blocks(read)
    if blocks:
        total_layers, dense_layers = blocks.count("moe"), 0
        dense_blocks = blocks.count("mlp")
    else:
        total_layers = read(_LAYERS, most=_MOST_LAYERS)
        dense_layers = dense_blocks = _dense_layers(read, total_layers)
    num_layers = total_layers - dense_layers
    if num_layers < 1:
        raise ValueError(
            f"{what}: none of its {total_layers} layers has experts. Allowed: "
            f"first_k_dense_replace and other keys of dense layers that leave one."
        )
    num_experts = read(_EXPERTS, most=_MOST_EXPERTS)
    top_k = read(_TOP_K)
    if top_k > num_experts:
        raise ValueError(f"{what}: num_experts_per_tok={top_k} of {num_experts} experts.")
    if empty := read("zero_expert_num", default=0):
        # LongCat's router may choose nothing, as often as it has entries without weights.
        top_k = max(1, round(top_k * num_experts / (num_experts + empty)))
    attention, caches, state_bytes = _attention(read, hidden, total_layers, blocks)
    dense_inner = read(_DENSE, default=inner)
    vocabulary = read("vocab_size") * hidden
    attended = round(attention / total_layers)
    # Squared ReLU has no gate, so that its experts lack the third matrix.
    matrices = 2 if config.get("mlp_hidden_act") == "relu2" else 3
    latent = read("moe_latent_size", default=hidden)
    between = 2 * hidden * latent if latent != hidden else 0
    shared = hidden * matrices * _shared(read, inner)
    expert = matrices * latent * inner
    routes, kind = num_experts + empty, read.text("model_type")
    if kind == "doge":
        # Experts of a row and a column each with a dense network, found by the products of keys.
        expert, routes = 2 * hidden, 2 * math.isqrt(num_experts)
        shared = 3 * hidden * inner
    if kind == "jetmoe":
        # Its attention has experts, too: a query and an output matrix each, chosen separately.
        expert += 2 * hidden * read("kv_channels") * read("num_key_value_heads")
    if kind.startswith("longcat_flash"):
        # Two blocks of attention and of a dense network a layer, around one of experts.
        attended *= 2
        caches = tuple(cache._replace(num_layers=2 * cache.num_layers) for cache in caches)
        shared = 2 * matrices * hidden * dense_inner
    return RealModel(
        name=str(config.get("name", "model")),
        num_layers=num_layers,
        num_experts=num_experts,
        top_k=top_k,
        expert_weights=expert,
        stored=read_stored(config, what),
        layer_weights=attended + hidden * routes + between + shared,
        read_once=vocabulary
        + dense_layers * attended
        + dense_blocks * matrices * hidden * dense_inner,
        output=vocabulary,
        embedding=0 if read.flag("tie_word_embeddings") else vocabulary,
        caches=caches,
        state_bytes=state_bytes,
        source=str(config.get("source", "its configuration" + _without(config))),
    )


def _without(config: Mapping[str, Any]) -> str:
    """Return what a configuration has besides the text's experts, in words."""
    sizes = config.get("moe_intermediate_size")
    images = isinstance(sizes, list) and len(sizes) == 2
    return ", without its experts for images" if images else ""


def _flat(config: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Return a configuration with the keys of its text model's parts added to its own."""
    flat = dict(config)
    for key in (*_NESTED, *_PARTS):
        if flat.get(key) is None:
            continue
        part = mapping_of(flat[key], f"{what}: {key}")
        inner = {n: v for n, v in part.items() if v is not None or n not in flat}
        if key == "linear_attn_config":
            renamed = ("head_dim", "num_heads")
            inner = {f"linear_{n}" if n in renamed else n: v for n, v in inner.items()}
        flat = {**inner, **flat} if key in _PARTS else {**flat, **inner}
    # The model around the text's has the output layer.
    if config.get("tie_word_embeddings") is not None:
        flat["tie_word_embeddings"] = config["tie_word_embeddings"]
    return flat


def _check_experts(read: _Reader) -> None:
    """Raise ValueError where a configuration says that there are no routed experts."""
    no_experts = "it is not a configuration of a Mixture-of-Experts model."
    for key in ("enable_moe_block", "is_moe"):
        if key in read.config and not read.flag(key):
            raise ValueError(f"{read.what}: {key} is not set: {no_experts}")
    if not any(name in read.config for name in keys()[_EXPERTS]):
        raise ValueError(f"{read.what} lacks num_local_experts or num_experts: {no_experts}")
    if read(_EXPERTS, most=_MOST_EXPERTS) == 1:
        raise ValueError(f"{read.what} has one expert, which is a dense layer: {no_experts}")


_BLOCKS = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}


def _blocks(read: _Reader) -> list[str]:
    """Return the kinds of blocks of a model that has one a layer (Nemotron-H), else nothing."""
    pattern = read.config.get("hybrid_override_pattern")
    if pattern is None:
        kinds = read.names("layers_block_type")
        return kinds if "moe" in kinds else []
    kinds = [_BLOCKS.get(letter, "") for letter in str(pattern)]
    if "moe" not in kinds or "" in kinds:
        raise ValueError(
            f"{read.what}: hybrid_override_pattern={shown(pattern)} must be of the letters "
            f"{', '.join(_BLOCKS)}, with an E for each layer of experts."
        )
    return kinds


def read_caches(
    config: Mapping[str, Any], hidden: int, num_layers: int, what: str
) -> tuple[tuple[LayerCaches, ...], int]:
    """Return the KV caches of a configuration's layers, and the bytes of its states."""
    _, caches, state_bytes = _attention(_Reader(config, what), hidden, num_layers, [])
    return caches, state_bytes


def _dense_layers(read: _Reader, total: int) -> int:
    """Return the number of layers without experts."""
    if kinds := read.names("mlp_layer_types", total):
        return sum(kind in ("dense", "mlp") for kind in kinds)
    if isinstance(read.config.get("moe_layer_freq"), list):  # MiMo: one 0 or 1 a layer
        return read.numbers("moe_layer_freq", total)[:total].count(0)
    if isinstance(flags := read.config.get("is_moe_layer"), list):  # K-EXAONE
        return flags[:total].count(False)
    if listed := read.config.get("moe_layers_enum"):  # Step-3: "4,5,6"
        return total - len({number.strip() for number in str(listed).split(",")})
    if listed := read.numbers("moe_layers"):
        return total - len(set(listed))
    if read.config.get("expert_layer_period") is not None:  # Jamba
        period = read("expert_layer_period")
        offset = read("expert_layer_offset", default=0)
        return sum(layer % period != offset for layer in range(total))
    step = read("interleave_moe_layer_step", default=1)
    first = read("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers", default=0)
    named = set(read.numbers("mlp_only_layers"))
    return sum(layer < first or (layer + 1) % step != 0 or layer in named for layer in range(total))


def _shared(read: _Reader, inner: int) -> int:
    """Return the inner width of shared experts or of a dense block in their place, 0 if neither."""
    always = read.text("model_type").startswith(("llama4", "hunyuan"))
    dense = always or read.config.get("enable_moe_block")
    default = read("intermediate_size") if dense else read("n_shared_experts", default=0) * inner
    return read("shared_expert_intermediate_size", default=default, least=0)


class _Reader:
    """Reads counts of a configuration, each under any of its names (keys.csv)."""

    def __init__(self, config: Mapping[str, Any], what: str) -> None:
        self.config, self.what = config, what

    def __call__(
        self, *given: str, default: int | None = None, least: int = 1, most: int = MOST_COUNT
    ) -> int:
        least = 0 if default == 0 else least
        names = {n: each for key in given for n, each in keys().get(key, {key: False}).items()}
        for name, may_be_listed in names.items():
            value = self.config.get(name)
            if value is None:
                continue
            if isinstance(value, (list, tuple)) and may_be_listed and value:
                counts = [self._count(name, item, least, most) for item in value]
                # That of most layers; of two modalities the text's, which comes first.
                return max(counts, key=counts.count)
            return self._count(name, value, least, most)
        if default is None:
            empty = next((name for name in names if name in self.config), None)
            first = empty or next(iter(names))
            others = [name for name in names if name != first][:3]
            also = f" (or {', '.join(others)})" if others else ""
            null = ", which is null or no finite number there" if empty else ""
            raise ValueError(f"{self.what} lacks {first}{also}{null}.")
        return default

    def _count(self, name: str, value: object, least: int, most: int) -> int:
        if isinstance(value, str):
            raise ValueError(f"{self.what}: {name}={shown(value)} is text, not a number.")
        return read_count(f"{self.what}: {name}", value, least=least, most=most)

    def text(self, key: str) -> str:
        """Return a text of the configuration, empty where it is missing."""
        return str(self._of(str, key, "a text") or "")

    def flag(self, key: str) -> bool:
        """Return whether a key is set."""
        return bool(self._of(bool, key, "true or false"))

    def _of(self, kind: type, key: str, words: str) -> object:
        value = self.config.get(key)
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{self.what}: {key}={shown(value)} must be {words}.")
        return value

    def numbers(self, key: str, total: int | None = None) -> list[int]:
        """Return a list of whole numbers, of `total` layers if given; empty where missing."""
        return [self._count(key, value, 0, MOST_COUNT) for value in self._list(key, total)]

    def names(self, key: str, total: int | None = None) -> list[str]:
        """Return a list of names, of `total` layers if given; empty where missing.

        Further names are of layers that predict ahead.
        """
        values = self._list(key, total)
        if wrong := [value for value in values if not isinstance(value, str)]:
            raise ValueError(f"{self.what}: {key} has {shown(wrong[0])}, which is not a name.")
        return values if total is None else values[:total]

    def _list(self, key: str, total: int | None) -> list[Any]:
        value = self.config.get(key)
        if value is None:
            return []
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"{self.what}: {key}={shown(value)} must be a list.")
        ahead = self("num_nextn_predict_layers", default=0) if total else 0
        if total and value and len(value) not in (total, total + ahead):
            raise ValueError(f"{self.what}: {key} has {len(value)} entries for {total} layers.")
        return list(value)


_FULL, _WINDOWED, _LINEAR = "full", "windowed", "linear"
_KINDS = {
    **dict.fromkeys(("linear_attention", "mamba", "mamba2", "conv", "short_conv"), _LINEAR),
    **dict.fromkeys(("sliding_attention", "chunked_attention", "local_attention"), _WINDOWED),
    **dict.fromkeys(("hybrid_sliding", "reference_sliding_attention"), _WINDOWED),
}
"""Names of layers that keep less than the whole context; all others keep it."""
_LINEAR_SIZES = (
    *("conv_L_cache", "linear_num_heads", "linear_num_key_heads", "mamba_num_heads"),
    *("mamba_n_heads", "mamba_d_state"),
)
_DELTA = ("no_kda_lora", "kda_safe_gate", "kda_lower_bound")
"""What configurations say of Kimi Delta Attention that give no sizes of their own (Ling 3.0)."""
_GATED = ("qwen3_next", "qwen3_5", "qwen4", "afmoe", "beam", "inkling2", "muse_spark", "hy_v4")
"""Beginnings of the types whose attention has a gate as wide as its output."""


class _Mixer(NamedTuple):
    """What a layer has to mix tokens with, and what it keeps of them."""

    weights: int
    bytes_per_token: float = 0
    multiply_adds: int = 0
    window: int | None = None
    is_shared: bool = False
    state_bytes: int = 0


def _attention(
    read: _Reader, hidden: int, num_layers: int, blocks: list[str]
) -> tuple[int, tuple[LayerCaches, ...], int]:
    """Return all layers' attention weights, their KV caches, and the bytes of their states."""
    if read("o_lora_rank", default=0):
        return _compressed(read, hidden, num_layers)
    kinds = _kinds(read, num_layers, blocks)
    mixers = [
        _mixer(_Reader({**read.config, **own}, read.what), hidden, kind)
        for kind, own in zip(kinds, _own_sizes(read, kinds), strict=True)
    ]
    alike = Counter(mixer[1:5] for mixer in mixers if mixer.bytes_per_token)
    caches = tuple(LayerCaches(count, *cache) for cache, count in alike.items())
    states = sum(mixer.state_bytes for mixer in mixers)
    return sum(mixer.weights for mixer in mixers), caches, states


def _kinds(read: _Reader, num_layers: int, blocks: list[str]) -> list[str]:
    """Return for each layer whether its attention is full, windowed or linear."""
    named = [name for name in blocks if name not in ("moe", "mlp")]
    if named := named or read.names("layer_types", num_layers):
        return [_KINDS.get(name, _FULL) for name in named]
    layers = range(num_layers)
    if full := read.numbers("full_attn_layers"):  # Kimi-Linear counts from one
        return [_FULL if layer + 1 in full else _LINEAR for layer in layers]
    if full := read.numbers("full_attn_idxs"):
        return [_FULL if layer in full else _LINEAR for layer in layers]
    if kinds := read.numbers("attn_type_list", num_layers):  # MiniMax-01
        return [_FULL if kind else _LINEAR for kind in kinds[:num_layers]]
    if kinds := read.numbers("hybrid_layer_pattern", num_layers):  # MiMo
        return [_WINDOWED if kind else _FULL for kind in kinds[:num_layers]]
    if read("attn_layer_period", default=0):
        period, offset = read("attn_layer_period"), read("attn_layer_offset", default=0)
        return [_FULL if layer % period == offset else _LINEAR for layer in layers]
    if group := read("layer_group_size", default=0):  # Ling and Ring: what is left over is full
        last = num_layers // group * group
        is_full = [(layer + 1) % group == 0 or layer >= last for layer in layers]
        return [_FULL if full else _LINEAR for full in is_full]
    if every := read("full_attention_interval", default=0):
        return [_LINEAR if (layer + 1) % every else _FULL for layer in layers]
    pattern = read.config.get("sliding_window_pattern")
    if isinstance(pattern, str) and pattern:  # EXAONE: LLLG
        letters = (pattern * num_layers)[:num_layers]
        return [_WINDOWED if letter == "L" else _FULL for letter in letters]
    if any(read.config.get(key) for key in _LINEAR_SIZES):
        read("layer_types")  # which layers are linear, nothing says
    every = read("sliding_window_pattern", default=1)
    return [_WINDOWED if (layer + 1) % every else _FULL for layer in layers]


def _own_sizes(read: _Reader, kinds: list[str]) -> list[dict[str, Any]]:
    """Return for each layer the sizes that it has of its own, by the keys of the whole model."""
    heads = ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim")
    windowed = {name: read.config.get(f"swa_{name}") for name in heads}
    windowed["num_attention_heads"] = windowed["num_attention_heads"] or read.config.get(
        "num_sliding_attention_heads"
    )
    other = read.config.get("attention_other_setting")  # Step-3.5
    if isinstance(other, Mapping) and _KINDS.get(str(other.get("attention_type"))) == _WINDOWED:
        windowed |= {key: other.get(key) for key in (*heads, "num_attention_groups")}
    # Gemma 4: full-attention layers have heads of their own, whose keys may double as values.
    full = {
        "head_dim": read.config.get("global_head_dim"),
        "num_key_value_heads": read.config.get("num_global_key_value_heads"),
    }
    by_kind = {_WINDOWED: windowed, _FULL: full}
    by_layer = read.config.get("per_layer_config") or {}
    by_layer = mapping_of(by_layer, f"{read.what}: per_layer_config")
    each = read.numbers("num_attention_heads_per_layer", len(kinds))
    indexers = read.names("indexer_types", len(kinds))
    sizes = []
    for layer, kind in enumerate(kinds):
        own = {k: value for k, value in by_kind.get(kind, {}).items() if value is not None}
        own |= {"num_attention_heads": each[layer]} if each else {}
        own |= {"indexer": indexers[layer]} if indexers else {}
        named = by_layer.get(str(layer)) or by_layer.get(f"{layer:02d}") or {}
        own |= mapping_of(named, f"{read.what}: per_layer_config of layer {layer}")
        sizes.append(own)
    return sizes


def _mixer(read: _Reader, hidden: int, kind: str) -> _Mixer:
    """Return what one layer of a kind has."""
    if kind == _LINEAR:
        weights, state_bytes = _linear(read, hidden)
        return _Mixer(weights, state_bytes=state_bytes)
    heads = read("num_attention_heads")
    window = None
    if kind == _WINDOWED:
        window = read("sliding_window")
    gated = read.config.get("attn_output_gate") or read.text("model_type").startswith(_GATED)
    indexed = (
        0 if window or read.config.get("indexer") == "shared" else read("index_head_dim", default=0)
    )
    chosen = read("q_lora_rank", default=0) or hidden
    # Sparse attention chooses its tokens by an index of its own (DeepSeek-V3.2).
    index = read("index_n_heads", default=0) * (chosen * indexed + hidden) + hidden * indexed
    if read("kv_lora_rank", default=0):
        # Multi-head latent attention (DeepSeek-V2): the compressed vector is cached.
        rank, rope = read("kv_lora_rank"), read("qk_rope_head_dim", default=0)
        nope, value = read("qk_nope_head_dim"), read("v_head_dim")
        q_rank = read("q_lora_rank", default=0)
        query = heads * (nope + rope)
        queries = hidden * q_rank + q_rank * query if q_rank else hidden * query
        keys = hidden * (rank + rope) + rank * heads * (nope + value)
        outputs = heads * value * hidden * (2 if gated else 1)
        cached = DTYPE_BYTES * (rank + rope + indexed)
        work = heads * (2 * rank + rope)
        return _Mixer(queries + keys + outputs + index, cached, work, window, True)
    width = read("head_dim", default=max(1, hidden // heads))
    value = read("v_head_dim", default=width)
    groups = read("kv_n_heads", default=heads)
    queries = hidden * heads * width
    if shared := read("share_q_dim", default=0):  # Step-3
        queries = hidden * shared + shared * heads * width
    has_values = not (read("global_head_dim", default=0) and read.flag("attention_k_eq_v"))
    is_keyed = kind == _FULL and not has_values
    keys = hidden * groups * (width if is_keyed else width + value)
    outputs = heads * value * hidden * (2 if gated else 1)
    if read.text("model_type") == "jetmoe":
        queries = outputs = 0  # counted as the experts'
    cached = DTYPE_BYTES * (groups * (width + value) + indexed)
    work = heads * (width + value)
    return _Mixer(queries + keys + outputs + index, cached, work, window, groups == 1)


def _linear(read: _Reader, hidden: int) -> tuple[int, int]:
    """Return the weights of a layer whose state does not grow, and the bytes of that state.

    Short convolutions (LFM2), Kimi Delta Attention, Gated DeltaNet (Qwen3-Next), Mamba-2
    (Nemotron-H, Granite 4.0-H), Mamba (Jamba) or lightning attention (MiniMax-01, Ring-2.5);
    states are kept in float32.
    """
    if read("conv_L_cache", default=0):
        kernel = read("conv_L_cache")
        return 4 * hidden**2 + kernel * hidden, 4 * kernel * hidden
    is_delta = any(read.config.get(key) is not None for key in _DELTA)
    if read("linear_num_heads", default=0) or is_delta:
        heads = read("linear_num_heads", "num_attention_heads")
        size = read("linear_head_dim", "head_dim")
        width = heads * size
        kernel = read("linear_conv_kernel_dim", default=4)
        full_rank = read.flag("no_kda_lora") or read.text("model_type").startswith("bailing")
        gate = hidden * width if full_rank else (hidden + width) * size
        weights = 4 * hidden * width + 2 * gate + hidden * heads + 3 * kernel * width
        return weights, 4 * width * size
    if heads := read("mamba_num_heads", default=0):
        size = read("ssm_state_size")
        width = heads * read("mamba_head_dim")
        mixed = width + 2 * read("n_groups", default=1) * size
        projections = hidden * (mixed + width + heads) + width * hidden
        kernel = read("conv_kernel", default=4)
        return projections + mixed * kernel, 4 * width * size
    if read("mamba_d_state", default=0):
        size = read("mamba_d_state")
        width = read("mamba_expand", default=2) * hidden
        rank = math.ceil(hidden / 16)
        if read.config.get("mamba_dt_rank") != "auto":
            rank = read("mamba_dt_rank", default=rank)
        inner = width * (2 * rank + 2 * size) + width * (size + read("mamba_d_conv", default=4))
        return 3 * hidden * width + inner, 4 * width * size
    lightning = ("attn_type_list", "layer_group_size", "linear_attn_alpha_factor")
    if any(read.config.get(key) is not None for key in lightning):
        heads = read("num_attention_heads")
        size = read("head_dim", default=max(1, hidden // heads))
        return 5 * hidden * heads * size, 4 * heads * size**2
    key_heads, value_heads = read("linear_num_key_heads"), read("linear_num_value_heads")
    key_width, value_width = read("linear_key_head_dim"), read("linear_value_head_dim")
    keys, values = key_heads * key_width, value_heads * value_width
    mixed = 2 * keys + values
    projections = hidden * (mixed + values + 2 * value_heads) + values * hidden
    state = 4 * value_heads * key_width * value_width
    return projections + mixed * read("linear_conv_kernel_dim", default=4), state


def _compressed(
    read: _Reader, hidden: int, num_layers: int
) -> tuple[int, tuple[LayerCaches, ...], int]:
    """Read DeepSeek-V4: one shared key-value head, cached for one in 4 or 128 tokens per layer.

    The weights of compressors and indexer are left out: under a tenth of a layer's.
    """
    heads = read("num_attention_heads")
    width, q_rank, o_rank = read("head_dim"), read("q_lora_rank"), read("o_lora_rank")
    window, groups = read("sliding_window"), read("o_groups")
    queries = hidden * q_rank + q_rank * heads * width
    outputs = heads * width * o_rank + groups * o_rank * hidden
    ratios = read.numbers("compress_ratios")[:num_layers]
    rates = read.config.get("compress_rates")
    if not ratios and isinstance(rates, Mapping):  # as transformers writes them
        by_name = _Reader(rates, f"{read.what}: compress_rates")
        ratios = [by_name(name, default=0) for name in read.names("layer_types", num_layers)]
    local = LayerCaches(num_layers, DTYPE_BYTES * width, 2 * heads * width, window, True)
    caches = [local]
    for ratio in sorted({r for r in ratios if r}):
        # The least compressing layers choose the tokens they attend to by an index of their own.
        index = read("index_head_dim", default=0) if ratio == min(filter(None, ratios)) else 0
        work = 2 * heads * width // ratio
        bytes_per_token = DTYPE_BYTES * (width + index) / ratio
        layers = ratios.count(ratio)
        caches.append(LayerCaches(layers, bytes_per_token, work, is_shared=True))
    return num_layers * (queries + hidden * width + outputs), tuple(caches), 0
