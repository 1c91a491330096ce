"""The draft model: loaded or made from the target, measured for the clock, and watched by hooks.

Shapes: T tokens of a forward of the draft, E experts of the target, D hidden size.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.generation.candidate_generator import (
    AssistedCandidateGenerator,
    CandidateGenerator,
)

from lm_eval_moecache.engine.draft_stage import DraftStage
from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.engine.setting import SELF
from lm_eval_moecache.model.checkpoint import model_path
from lm_eval_moecache.model.device import device_of, timed, total_memory
from lm_eval_moecache.model.gate import Gate
from lm_eval_moecache.model.moe_layers import (
    MoELayer,
    dense_bytes,
    describe,
    find_moe_layers,
    place_of,
)
from lm_eval_moecache.model.precision.codecs import expert_bytes, expert_matrices
from lm_eval_moecache.model.precision.ladder import codec
from lm_eval_moecache.records.event import PREFILL
from lm_eval_moecache.records.geometry import NO_TARGET, Draft, Geometry


@dataclass(frozen=True, slots=True)
class Block:
    """One feed-forward block of the draft: its decoder layer, and its router where it has one."""

    decoder_layer: int
    feed_forward: nn.Module
    router: nn.Module | None


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A draft model and its blocks in order of execution; `cost.geometry` counts the same ones."""

    name: str
    model: Any
    blocks: tuple[Block, ...]
    cost: Draft

    def drafting(self, tokens: int) -> DraftModel:
        """Return the same model for drafts of `tokens` tokens."""
        return replace(self, cost=replace(self.cost, tokens=tokens))


ExpertsOf = Callable[[int], Mapping[str, Tensor]]
"""MoE layer -> its experts' parameters, copied from where they are stored."""


def make_draft(
    name: str, target: Any, tokens: int = 1, experts_of: ExpertsOf | None = None
) -> DraftModel:
    """Load a draft by name, on the target's device and at its dtype, or make it from the target.

    The caller has checked that they fit. `experts_of` returns the target's experts where its
    modules do not hold them. A draft of the target's own weights (`self:` and a precision) computes
    on decoded values and is timed at stored size.
    """
    level, stored_bytes = name.removeprefix(SELF), list[int]()
    if name.startswith(SELF):
        model, stored_bytes = _own_model(level, target, experts_of)
    else:
        path = model_path(name)
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=target.dtype)
        model.to(device_of(target)).eval()
    blocks, geometry = measure(model, name)
    nbytes = sum(p.nbytes for p in model.parameters())
    if stored_bytes:
        nbytes = sum(stored_bytes) * geometry.num_experts
        levels = zip(geometry.expert_bytes, stored_bytes, strict=True)
        geometry = replace(
            geometry,
            expert_bytes=tuple((full, stored) for (full,), stored in levels),
            precision=(*geometry.precision, level),
        )
    own_level, targets = len(geometry.precision) - 1, _targets(model, blocks, target)
    cost = Draft(geometry=geometry, level=own_level, nbytes=nbytes, tokens=tokens, targets=targets)
    return DraftModel(name, model, blocks, cost)


def _own_model(level: str, target: Any, experts_of: ExpertsOf | None) -> tuple[Any, list[int]]:
    """Copy the target with its experts at low precision; return it, and an expert's stored bytes.

    Those are by layer. All tensors but the experts are shared, so only these take memory.
    """
    expert_codec = codec(level)
    expert_codec.check(device_of(target).type)
    copied_ids = {id(p) for layer in find_moe_layers(target) for p in layer.experts.parameters()}
    if experts_of is not None:
        # Replaced below, so a copy would be wasted.
        copied_ids = set()
    tensors = [*target.parameters(), *target.buffers()]
    model = copy.deepcopy(target, {id(t): t for t in tensors if id(t) not in copied_ids})
    stored_bytes: list[int] = []
    for index, layer in enumerate(find_moe_layers(model)):
        if experts_of is not None:
            for parameter, tensor in experts_of(index).items():
                expert_weights = nn.Parameter(tensor.to(device_of(target)), requires_grad=False)
                setattr(layer.experts, parameter, expert_weights)
        for stacked in expert_matrices(layer.experts).values():
            for matrix in stacked:
                oriented = matrix.t() if layer.experts.is_transposed else matrix
                oriented.copy_(
                    expert_codec.decode(expert_codec.encode(oriented), oriented.shape, matrix.dtype)
                )
        stored_bytes += expert_bytes(layer.experts, [expert_codec])
    return model, stored_bytes


def measure(model: Any, name: str) -> tuple[tuple[Block, ...], Geometry]:
    """Return a draft's blocks and geometry (it may be on the meta device).

    In a dense draft each feed-forward block counts as one expert that every token needs. Raises
    ValueError where the blocks cannot be identified.
    """
    if any("expert" in path.rpartition(".")[2].lower() for path, _ in model.named_modules()):
        layers = find_moe_layers(model)
        geometry = describe(model, layers, name)
        modules = dict(model.named_modules())
        blocks = [
            Block(place_of(layer.path)[1], modules[layer.path.rpartition(".")[0]], layer.router)
            for layer in layers
        ]
    else:
        layers = _dense_blocks(model, name)
        sizes = [sum(p.nbytes for p in layer.experts.parameters()) for layer in layers]
        blocks = [Block(place_of(layer.path)[1], layer.experts, None) for layer in layers]
        geometry = Geometry(
            model=name,
            num_layers=len(layers),
            num_experts=1,
            top_k=1,
            expert_bytes=tuple((size,) for size in sizes),
            dense_bytes=dense_bytes(model, layers),
            element_bytes=float(next(model.parameters()).dtype.itemsize),
        )
    return tuple(blocks), geometry


def _dense_blocks(model: Any, name: str) -> list[MoELayer]:
    """Return each decoder layer's feed-forward block: the child that transformers names `mlp`."""
    blocks = [
        MoELayer(path, module, module, Gate(module, module, 0, 1))
        for path, module in model.named_modules()
        if path.rpartition(".")[2] == "mlp" and place_of(path)[1] >= 0
    ]
    if len(blocks) != model.config.get_text_config().num_hidden_layers:
        raise ValueError(
            f"draft={name!r}: {type(model).__name__} has no module `mlp` in each of its layers, so "
            "its drafting cannot be timed. Allowed: models with that name for it, or prompt_lookup."
        )
    return blocks


def _targets(model: Any, blocks: Sequence[Block], target: Any) -> tuple[int, ...]:
    """Return for each block the target's layer whose gate can read the draft's hidden states."""
    width, target_width = (m.config.get_text_config().hidden_size for m in (model, target))
    if width != target_width:
        return ()
    matches = matching_layers(blocks, find_moe_layers(target))
    return tuple(matches.get(index, NO_TARGET) for index in range(len(blocks)))


def matching_layers(blocks: Sequence[Block], targets: Sequence[MoELayer]) -> dict[int, int]:
    """Return block index -> MoE layer of the target, by their place among the decoder layers."""
    by_place = {place_of(layer.path)[1]: index for index, layer in enumerate(targets)}
    return {
        index: by_place[block.decoder_layer]
        for index, block in enumerate(blocks)
        if block.decoder_layer in by_place
    }


FORWARDS = 5


def measure_overlap(draft: DraftModel, engine: Engine, stage: DraftStage) -> None:
    """Solve for the cutoff layer from measured times (SP-MoE section 3.2 profiles them offline).

    Times one token through the draft, and the critical experts of one layer over the real link
    into the empty cache; other layers' loads scale with their bytes.
    """
    prefetch = engine.rules.prefetch.draft_stage
    if prefetch is None:
        return
    model = draft.model
    token = torch.ones((1, 1), dtype=torch.int64, device=device_of(model))
    with torch.no_grad():
        # One token through the draft, its head included.
        seconds = timed(partial(model, token, use_cache=True), device_of(model), FORWARDS)
    load_s = engine.time_load(prefetch.num_critical)
    first_bytes = engine.geometry.expert_bytes[0][0]
    stage.solve(
        engine.geometry,
        engine.setting.capacity.bytes_by_partition,
        statistics.median(seconds) / draft.cost.geometry.num_layers,
        [load_s * levels[0] / first_bytes for levels in engine.geometry.expert_bytes],
        float(total_memory(device_of(model)) or math.inf),
    )


class DraftHooks:
    """Reports to a draft stage every block that the draft runs while the stage is open.

    Changes: forward hooks on the draft's blocks and routers, until `remove`.
    """

    def __init__(self, draft: DraftModel, targets: Sequence[MoELayer], stage: DraftStage) -> None:
        self._stage = stage
        self._targets = targets
        matches = matching_layers(draft.blocks, targets)
        self._handles: list[Any] = []
        for index, block in enumerate(draft.blocks):
            block_hook = partial(self._enter_block, index, matches.get(index), block.router is None)
            self._handles.append(block.feed_forward.register_forward_pre_hook(block_hook))
            if block.router is not None:
                router_hook = partial(self._routed, index)
                self._handles.append(block.router.register_forward_hook(router_hook))

    def remove(self) -> None:
        """Take the hooks off. Safe to call twice."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter_block(
        self, index: int, target: int | None, is_dense: bool, block: nn.Module, args: Any
    ) -> None:
        stage = self._stage
        if not stage.is_open:
            return
        hidden_TD: Tensor = args[0].reshape(-1, args[0].shape[-1])
        stage.dense(index, len(hidden_TD))
        if target is not None and stage.wants(target):
            # The last token only: those before it (the prompt) have been verified already.
            gate = self._targets[target].gate
            logits = gate.predict(hidden_TD[-1:].to(gate.dtype)).float()
            stage.predict(target, logits.reshape(1, -1).cpu().numpy())
        if is_dense:
            stage.experts(index, 1, len(hidden_TD))

    def _routed(self, index: int, router: nn.Module, args: Any, output: Any) -> None:
        if self._stage.is_open:
            experts: Tensor = output[2].reshape(-1, output[2].shape[-1])
            # One token's experts are distinct: reading them would wait for the device.
            is_single = len(experts) == 1
            count = experts.numel() if is_single else len(set(experts.flatten().tolist()))
            self._stage.experts(index, count, len(experts))


class ReadAlong(DraftHooks):
    """Runs the draft before each decode pass, on the tokens that it has not read yet.

    Its time and its predictions are handled as in speculative drafting, but it generates nothing.
    As there, the prefill runs without it: it reads the prompt before the first decoded token.
    """

    def __init__(self, draft: DraftModel, targets: Sequence[MoELayer], engine: Engine) -> None:
        assert engine.draft_stage is not None, "a draft model without a draft stage"
        super().__init__(draft, targets, engine.draft_stage)
        self._model, self._engine = draft.model, engine
        self._ids: Tensor | None = None
        self._past: Any = None
        self._num_read = 0

    @torch.no_grad()
    def begin_pass(self, input_ids: Tensor, past_length: int, phase: str) -> None:
        """Append a pass's tokens [1, tokens] to the text; when decoding, run the draft on it."""
        if past_length == 0 or self._ids is None:
            self._ids, self._past, self._num_read = input_ids, None, 0
            return
        if len(input_ids) > 1:
            raise ValueError(
                f"num_beams: prefetch='draft' reads one text at a time, and this pass decodes "
                f"{len(input_ids)}. Allowed: num_beams=1."
            )
        assert self._ids.shape[1] == past_length, "a text that the draft has not followed"
        self._ids = torch.cat([self._ids, input_ids], dim=1)
        if phase == PREFILL:  # a further chunk of the prompt
            return
        self._engine.begin_draft()
        output = self._model(
            self._ids[:, self._num_read :], past_key_values=self._past, use_cache=True
        )
        self._past, self._num_read = output.past_key_values, self._ids.shape[1]


Settle = Callable[[int, int], object]
"""(tokens drafted, tokens accepted)"""


class WatchedCandidates(CandidateGenerator):
    """Keeps drafts out of the first pass, and announces each later draft to the engine.

    transformers drafts before the first pass and verifies those drafts along with the prompt.
    Here the first pass is a plain prefill, so that TTFT, the prefill rates and the first token's
    logits are those without a draft; the draft reads the prompt after it.
    """

    requires_model_outputs = False

    def __init__(self, drafter: Any, engine: Engine, settle: Settle) -> None:
        self._drafter = drafter
        self._engine = engine
        self._settle = settle
        self._num_calls = 0
        self._drafted: list[int] = []

    def get_candidates(self, input_ids: Any, **kwargs: Any) -> tuple[Any, Any]:
        self._num_calls += 1
        if self._num_calls == 1:
            return input_ids, None
        if isinstance(self._drafter, AssistedCandidateGenerator):
            if self._num_calls == 2:
                # The prompt has grown by a token since these were made for it.
                self._drafter.assistant_kwargs.pop("position_ids", None)
                mask = input_ids.new_ones(input_ids.shape)
                self._drafter.assistant_kwargs["attention_mask"] = mask
            self._engine.begin_draft()
        candidate_ids, logits = self._drafter.get_candidates(input_ids, **kwargs)
        self._drafted = candidate_ids[0, input_ids.shape[1] :].tolist()
        return candidate_ids, logits

    def update_candidate_strategy(self, input_ids: Any, scores: Any, num_matches: int) -> None:
        """Settle a draft after the target's pass; the draft length stays fixed."""
        accepted, drafted = int(num_matches), self._drafted
        # transformers stops at an end token, and counts a drafted one as the pass' own.
        accepted += drafted[accepted : accepted + 1] == input_ids[0, -1:].tolist()
        self._settle(len(drafted), accepted)


@contextmanager
def watched_by(settle: Settle, engine: Engine, model: Any) -> Iterator[None]:
    """Watch the drafts of a model's assisted generation during a block.

    `settle` is called after each pass with the numbers of tokens drafted for it and accepted.
    """
    original = model._get_candidate_generator

    def make(*args: Any, **kwargs: Any) -> WatchedCandidates:
        return WatchedCandidates(original(*args, **kwargs), engine, settle)

    model._get_candidate_generator = make
    try:
        yield
    finally:
        del model._get_candidate_generator
