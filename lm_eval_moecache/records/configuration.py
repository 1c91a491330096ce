"""Sizes of real models, from their configurations and the bits of a stored weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from lm_eval_moecache.records.geometry import DTYPES, Geometry
from lm_eval_moecache.records.numbers import MOST_COUNT, read_count, shown
from lm_eval_moecache.records.stored import BF16, Stored, read_stored

_DTYPE_BYTES = 2
"""Models compute in bf16, whatever precision their weights are stored in."""


class LayerCaches(NamedTuple):
    """The KV caches of those of a model's layers that keep the same amount per token."""

    num_layers: int
    bytes_per_token: float
    multiply_adds: int
    """Multiply-adds of one query token with one cached token, in one layer."""
    window: int | None = None
    """Tokens that such a layer attends to; None for the whole context."""

    def tokens(self, context: int) -> int:
        """Return the cached tokens that a layer attends to in a context of this length."""
        return context if self.window is None else min(context, self.window)


@dataclass(frozen=True, kw_only=True, slots=True)
class RealModel:
    """One real Mixture-of-Experts model, in numbers of weights; what concerns layers is per layer.

    `layer_weights` are those a pass reads in one MoE layer beside its experts (attention, router,
    shared experts), averaged over layers of several kinds; `read_once` those it reads outside the
    MoE layers (output layer, dense layers); `embedding` is held in memory, but looked up rather
    than read. Multi-token prediction layers (MTP) and image encoders are left out.
    """

    name: str
    num_layers: int
    num_experts: int
    top_k: int
    expert_weights: int
    stored: Stored = BF16
    """Bits per weight of the checkpoint."""
    layer_weights: int
    read_once: int
    output: int = 0
    """Weights of the output layer, a part of `read_once`."""
    embedding: int
    caches: tuple[LayerCaches, ...] = ()
    state_bytes: int = 0
    """Bytes that linear-attention layers keep per sequence, whatever its length."""
    source: str = ""

    @property
    def expert_bytes(self) -> int:
        """Stored bytes of one expert."""
        return round(self.expert_weights * self.stored.expert_bits / 8)

    @property
    def all_expert_bytes(self) -> int:
        """Stored bytes of all experts of all layers."""
        return self.num_layers * self.num_experts * self.expert_bytes

    @property
    def num_weights(self) -> int:
        """Weights of the whole model."""
        experts = self.num_layers * self.num_experts * self.expert_weights
        return experts + self.num_layers * self.layer_weights + self.read_once + self.embedding

    @property
    def dense_bytes(self) -> int:
        """Bytes of everything but the experts."""
        vocabulary = self.embedding + self.output
        dense = self.num_layers * self.layer_weights + self.read_once - self.output
        return round((dense * self.stored.dense_bits + vocabulary * self.stored.vocab_bits) / 8)

    @property
    def layer_dense_bytes(self) -> int:
        """Dense bytes that a pass reads per MoE layer, with the layer's share of `read_once`."""
        output = self.output // self.num_layers
        dense = self.layer_weights + self.read_once // self.num_layers - output
        return int((dense * self.stored.dense_bits + output * self.stored.vocab_bits) / 8)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes by which the KV cache grows with each token of a short context."""
        return round(sum(cache.num_layers * cache.bytes_per_token for cache in self.caches))

    def kv_bytes(self, context: int) -> int:
        """Return the bytes of the KV cache at a context length, windows and states considered."""
        sizes = (c.num_layers * c.bytes_per_token * c.tokens(context) for c in self.caches)
        return round(sum(sizes)) + self.state_bytes

    def attention_flops(self, context: int) -> float:
        """Return the FLOP of one token's attention to a context, over all layers."""
        return 2.0 * sum(c.num_layers * c.multiply_adds * c.tokens(context) for c in self.caches)

    def prompt_flops(self, num_tokens: int) -> float:
        """Return the FLOP of a prompt's pass, whose last token alone goes through the output."""
        weights = self.num_layers * (self.layer_weights + self.top_k * self.expert_weights)
        flops = 2.0 * num_tokens * (weights + self.read_once - self.output) + 2.0 * self.output
        return flops + num_tokens * self.attention_flops(num_tokens) / 2

    def record(self) -> dict[str, Any]:
        """Return the figures that charges follow from, for a run's record and identity."""
        sizes = ("name", "num_layers", "num_experts", "top_k", "expert_weights")
        others = ("layer_weights", "read_once", "embedding", "kv_bytes_per_token", "source")
        return {
            **{name: getattr(self, name) for name in sizes},
            "expert_bits": float(self.stored.expert_bits),
            **{name: getattr(self, name) for name in others},
        }

    def geometry(self) -> Geometry:
        """Return the geometry of the model itself, all layers alike."""
        unsized = Geometry(
            model=self.name,
            num_layers=self.num_layers,
            num_experts=self.num_experts,
            top_k=self.top_k,
            expert_bytes=((self.expert_bytes,),) * self.num_layers,
            dense_bytes=(0,) * self.num_layers,
        )
        return self.emulated_by(unsized)

    def emulated_by(self, own: Geometry) -> Geometry:
        """Return `own` with every layer charged as one of this model.

        Layers, experts and top-k stay, as they determine the routing. So do capacities given as a
        share or as a number of experts; those in bytes are in this model's bytes. An expert stored
        encoded (`precision=int4`) keeps its bits per weight, scales included; one stored at a dtype
        gets this model's. Lower levels keep their ratio to the first.
        """
        bf16_bytes = _DTYPE_BYTES * self.expert_weights
        if own.compute_bytes and own.precision[0] not in DTYPES:
            first = [
                bf16_bytes * levels[0] / compute_bytes
                for levels, compute_bytes in zip(own.expert_bytes, own.compute_bytes, strict=True)
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
            compute_bytes=(bf16_bytes,) * own.num_layers,
            emulates=self.name,
        )


KEYS = frozenset(
    "name source hidden_size intermediate_size moe_intermediate_size intermediate_size_mlp "
    "num_hidden_layers first_k_dense_replace mlp_only_layers mlp_layer_types decoder_sparse_step "
    "interleave_moe_layer_step num_local_experts num_experts n_routed_experts num_experts_per_tok "
    "top_k_experts n_shared_experts shared_expert_intermediate_size shared_intermediate_size "
    "num_attention_heads num_key_value_heads head_dim attn_output_gate q_lora_rank kv_lora_rank "
    "qk_nope_head_dim qk_rope_head_dim v_head_dim o_lora_rank o_groups compress_ratios "
    "index_head_dim layer_types full_attention_interval sliding_window sliding_window_pattern "
    "attention_chunk_size global_head_dim num_global_key_value_heads attention_k_eq_v "
    "linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim "
    "linear_conv_kernel_dim vocab_size tie_word_embeddings expert_bits quantization_config "
    "model_type enable_moe_block moe_num_experts moe_k moe_num_shared_experts "
    "moe_layer_start_index moe_shared_expert_intermediate_size num_dense_layers conv_L_cache "
    "hybrid_override_pattern layers_block_type mamba_num_heads mamba_head_dim n_groups "
    "ssm_state_size conv_kernel mlp_hidden_act".split()
)
"""The keys that sizes follow from: names of transformers' configurations, and `expert_bits`, the
stored bits per expert weight."""
_MOST_LAYERS, _MOST_EXPERTS = 4096, 2**17


_EXPERTS = (
    *("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    *("num_routed_experts", "moe_num_routed_experts", "num_moe_experts"),
)
_TOP_K = (
    *("num_experts_per_tok", "top_k_experts", "moe_k", "num_experts_per_token", "moe_topk"),
    *("moe_top_k", "experts_per_token", "num_selected_experts", "moe_router_topk"),
)
_INNER = (
    *("moe_intermediate_size", "expert_intermediate_size", "moe_ffn_hidden_size"),
    *("expert_ffn_hidden_size", "intermediate_size"),
)


def read_config(config: object, what: str) -> RealModel:
    """Return the model of a configuration with the keys of transformers' models.

    Its `model_type` decides nothing that its sizes do not. Raises ValueError beginning with `what`.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"{what} must hold a mapping of a model's configuration.")
    for key in ("text_config", "language_config", "llm_config"):
        if isinstance(config.get(key), Mapping):
            config = {**config, **config[key]}
    read = _Reader(config, what)
    hidden = read("hidden_size")
    inner = read(*_INNER)
    blocks = _blocks(read)
    if blocks:
        total_layers, dense_layers = blocks.count("moe"), 0
        dense_blocks = blocks.count("mlp")
    else:
        total_layers = read("num_hidden_layers", "num_layers", most=_MOST_LAYERS)
        dense_layers = dense_blocks = _dense_layers(read, total_layers)
    num_layers = total_layers - dense_layers
    if num_layers < 1:
        raise ValueError(
            f"{what}: first_k_dense_replace={dense_layers} leaves no layer of {total_layers} with "
            f"experts. Allowed: 0 to {total_layers - 1}."
        )
    num_experts = read(*_EXPERTS, most=_MOST_EXPERTS)
    top_k = read(*_TOP_K)
    if top_k > num_experts:
        raise ValueError(f"{what}: num_experts_per_tok={top_k} of {num_experts} experts.")
    attention, caches, state_bytes = _attention(read, hidden, total_layers, blocks)
    dense_inner = read("intermediate_size_mlp", "intermediate_size", default=inner)
    vocabulary = read("vocab_size") * hidden
    attended = round(attention / total_layers)
    # Squared ReLU has no gate, so that its experts lack the third matrix.
    matrices = 2 if config.get("mlp_hidden_act") == "relu2" else 3
    return RealModel(
        name=str(config.get("name", "model")),
        num_layers=num_layers,
        num_experts=num_experts,
        top_k=top_k,
        expert_weights=matrices * hidden * inner,
        stored=read_stored(config, what),
        layer_weights=attended + hidden * (num_experts + matrices * _shared(read, inner)),
        read_once=vocabulary
        + dense_layers * attended
        + dense_blocks * matrices * hidden * dense_inner,
        output=vocabulary,
        embedding=0 if config.get("tie_word_embeddings") else vocabulary,
        caches=caches,
        state_bytes=state_bytes,
        source=str(config.get("source", "its configuration")),
    )


_BLOCKS = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}


def _blocks(read: _Reader) -> list[Any]:
    """Return the kinds of blocks of a model that has one a layer (Nemotron-H), else nothing."""
    pattern = read.config.get("hybrid_override_pattern")
    if pattern is None:
        kinds = read.names("layers_block_type")
        return kinds if "moe" in kinds else []
    kinds = [_BLOCKS.get(letter) for letter in str(pattern)]
    if "moe" not in kinds or None in kinds:
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
    kinds = read.names("mlp_layer_types")
    if kinds:
        return kinds.count("dense")
    step = read("interleave_moe_layer_step", "decoder_sparse_step", default=1)
    between = total - total // step
    first = read("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers", default=0)
    return between + first + len(read.names("mlp_only_layers"))


def _shared(read: _Reader, inner: int) -> int:
    """Return the inner width of shared experts or of a dense block in their place, 0 if neither."""
    dense = read.config.get("enable_moe_block") or str(read.config.get("model_type")).startswith(
        "llama4"
    )
    shared = ("n_shared_experts", "moe_num_shared_experts")
    default = read("intermediate_size") if dense else read(*shared, default=0) * inner
    names = ("shared_expert_intermediate_size", "shared_intermediate_size")
    return read(*names, "moe_shared_expert_intermediate_size", default=default, least=0)


class _Reader:
    """Reads counts of a configuration, each under any of several names."""

    def __init__(self, config: Mapping[str, Any], what: str) -> None:
        self.config, self.what = config, what

    def __call__(
        self, *names: str, default: int | None = None, least: int = 1, most: int = MOST_COUNT
    ) -> int:
        least = 0 if default == 0 else least
        for name in names:
            if self.config.get(name) is not None:
                value = self.config[name]
                return read_count(f"{self.what}: {name}", value, least=least, most=most)
        if default is None:
            raise ValueError(
                f"{self.what} lacks {' or '.join(names)}: it is no configuration of a "
                "Mixture-of-Experts model."
            )
        return default

    def names(self, key: str) -> list[Any]:
        """Return a list-valued key of the configuration, empty where it is missing."""
        value = self.config.get(key) or []
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"{self.what}: {key}={shown(value)} must be a list.")
        return list(value)


def _attention(
    read: _Reader, hidden: int, num_layers: int, blocks: list[Any]
) -> tuple[int, tuple[LayerCaches, ...], int]:
    """Return all layers' attention weights, their KV caches, and the bytes of their states."""
    heads = read("num_attention_heads")
    if read("o_lora_rank", default=0):
        return _compressed(read, hidden, num_layers, heads)
    if read("kv_lora_rank", default=0):
        # Multi-head latent attention (DeepSeek-V2): the compressed vector is cached.
        rank, rope = read("kv_lora_rank"), read("qk_rope_head_dim")
        nope, value = read("qk_nope_head_dim"), read("v_head_dim")
        q_rank = read("q_lora_rank", default=0)
        query = heads * (nope + rope)
        queries = hidden * q_rank + q_rank * query if q_rank else hidden * query
        keys = hidden * (rank + rope) + rank * heads * (nope + value)
        cache = LayerCaches(num_layers, _DTYPE_BYTES * (rank + rope), heads * (2 * rank + rope))
        return num_layers * (queries + keys + heads * value * hidden), (cache,), 0
    full, windowed, linear = _layers_by_reach(read, num_layers, blocks)
    width = read("head_dim", default=hidden // heads)
    groups = read("num_key_value_heads", default=heads)
    gated = str(read.config.get("model_type")).startswith(("qwen3_next", "qwen3_5"))
    gates = heads if read.config.get("attn_output_gate") or gated else 0
    windowed_weights = hidden * width * (2 * heads + 2 * groups + gates)
    full_weights = windowed_weights
    caches = []
    if windowed:
        window = read("sliding_window", "attention_chunk_size")
        per_token = 2 * groups * width * _DTYPE_BYTES
        caches.append(LayerCaches(windowed, per_token, 2 * heads * width, window))
    if read("global_head_dim", default=0):
        # Gemma 4: full-attention layers have heads of their own, whose keys may double as values.
        width = read("global_head_dim")
        groups = read("num_global_key_value_heads", default=groups)
        values = 0 if read.config.get("attention_k_eq_v") else groups
        full_weights = hidden * width * (2 * heads + groups + values)
    caches.append(LayerCaches(full, 2 * groups * width * _DTYPE_BYTES, 2 * heads * width))
    linear_weights, state_bytes = _linear(read, hidden) if linear else (0, 0)
    total = full * full_weights + windowed * windowed_weights + linear * linear_weights
    return total, tuple(caches), linear * state_bytes


_LINEAR = ("linear_attention", "mamba", "conv")


def _layers_by_reach(read: _Reader, num_layers: int, blocks: list[Any]) -> tuple[int, int, int]:
    """Return the numbers of layers with full, windowed and linear attention."""
    kinds = [kind for kind in blocks if kind not in ("moe", "mlp")] or read.names("layer_types")
    if kinds:
        linear = sum(kinds.count(kind) for kind in _LINEAR)
        windowed = kinds.count("sliding_attention") + kinds.count("chunked_attention")
        return len(kinds) - linear - windowed, windowed, linear
    not_linear = num_layers // read("full_attention_interval", default=1)
    if not_linear < num_layers:
        return not_linear, 0, num_layers - not_linear
    full = num_layers // read("sliding_window_pattern", default=1)
    return full, num_layers - full, 0


def _linear(read: _Reader, hidden: int) -> tuple[int, int]:
    """Return the weights of a layer whose state does not grow, and the bytes of that state.

    Short convolutions (LFM2), Mamba-2 (Nemotron-H) or Gated DeltaNet (Qwen3-Next); states are
    kept in float32.
    """
    if read("conv_L_cache", default=0):
        kernel = read("conv_L_cache")
        return 4 * hidden**2 + kernel * hidden, 4 * kernel * hidden
    if read("mamba_num_heads", default=0):
        heads, size = read("mamba_num_heads"), read("ssm_state_size")
        width = heads * read("mamba_head_dim")
        mixed = width + 2 * read("n_groups", default=1) * size
        projections = hidden * (mixed + width + heads) + width * hidden
        return projections + mixed * read("conv_kernel", default=4), 4 * width * size
    key_heads, value_heads = read("linear_num_key_heads"), read("linear_num_value_heads")
    key_width, value_width = read("linear_key_head_dim"), read("linear_value_head_dim")
    keys, values = key_heads * key_width, value_heads * value_width
    mixed = 2 * keys + values
    projections = hidden * (mixed + values + 2 * value_heads) + values * hidden
    state = 4 * value_heads * key_width * value_width
    return projections + mixed * read("linear_conv_kernel_dim", default=4), state


def _compressed(
    read: _Reader, hidden: int, num_layers: int, heads: int
) -> tuple[int, tuple[LayerCaches, ...], int]:
    """Read DeepSeek-V4: one shared key-value head, cached for one in 4 or 128 tokens per layer.

    The weights of compressors and indexer are left out: under a tenth of a layer's.
    """
    width, q_rank, o_rank = read("head_dim"), read("q_lora_rank"), read("o_lora_rank")
    window, groups = read("sliding_window"), read("o_groups")
    queries = hidden * q_rank + q_rank * heads * width
    outputs = heads * width * o_rank + groups * o_rank * hidden
    ratios = read.names("compress_ratios")[:num_layers]
    local = LayerCaches(num_layers, _DTYPE_BYTES * width, 2 * heads * width, window)
    caches = [local]
    for ratio in sorted({r for r in ratios if r}):
        # The least compressing layers choose the tokens they attend to by an index of their own.
        index = read("index_head_dim", default=0) if ratio == min(filter(None, ratios)) else 0
        work = 2 * heads * width // ratio
        bytes_per_token = _DTYPE_BYTES * (width + index) / ratio
        caches.append(LayerCaches(ratios.count(ratio), bytes_per_token, work))
    return num_layers * (queries + hidden * width + outputs), tuple(caches), 0
