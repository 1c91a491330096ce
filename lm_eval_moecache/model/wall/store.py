"""The wall clock's store: executes each layer from the slots that hold its experts.

It has the arithmetic of transformers' own kernels, in as many parts as an event has waves.

Shapes: T tokens, E experts, K experts per token, S = T x K assignments, D hidden size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from lm_eval_moecache.engine.wall.engine import HOST
from lm_eval_moecache.model.device import copy_to_device, copy_to_host
from lm_eval_moecache.model.store import GroupedCall, Kernel, OnSlots, Slots, Store, Waves
from lm_eval_moecache.model.wall.pools import DeviceMover, Places
from lm_eval_moecache.records.arrays import BoolArray
from lm_eval_moecache.records.geometry import Geometry

KERNELS = ("grouped_mm", "batched_mm")
MAX_GROUPS = 1023
"""The most groups that CUDA's grouped product takes."""
MOST = 2**62
AT_ONCE = 8
"""Experts whose weights the host reads from a file, or decodes, together."""


class SlotStore(Store):
    """Runs experts from slots, as transformers' own kernel would from the whole layer."""

    def __init__(
        self, pools: DeviceMover, geometry: Geometry, kernel: str, device_type: str
    ) -> None:
        self.pools, self.geometry = pools, geometry
        self.kernel = self._kernel = kernel
        self.on_cpu = device_type == "cpu"
        self._host = ThreadPoolExecutor(1, "moecache-host")
        """Executes experts on the host while the caller goes on."""
        self.note_host: Callable[[float, float], None] = lambda busy_s, wait_s: None
        """Called with the seconds that the host worked on an event, and that the caller waited."""
        self.padding: BoolArray | None = None
        """Marks the tokens [T] of this pass whose output is discarded, if there are any."""

    def begin_pass(self, *, decoding: bool, padding: BoolArray | None = None) -> None:
        swap = decoding and self._kernel == "grouped_mm" and not self.on_cpu
        self.kernel = "batched_mm" if swap else self._kernel
        self.padding = padding

    def close(self) -> None:
        self._host.shutdown()

    def at(self, layer: int, waves: Waves) -> Kernel:
        return partial(self._run, layer, waves)

    def _run(
        self,
        layer: int,
        waves: Waves,
        module: nn.Module,
        hidden_TD: Tensor,
        index_TK: Tensor,
        w_TK: Tensor,
    ) -> Tensor:
        """Execute the experts of the layer's event wave by wave.

        Assignments to experts that the event does not need (dropped ones) add nothing.
        """
        kind = WorkInGroups if self.on_cpu and self.kernel == "grouped_mm" else WorkOnPool
        work = kind(self, layer, module, hidden_TD, index_TK, w_TK)
        host: Future[float] | None = None
        first_key = self.geometry.key(layer, 0)
        for slot_of, is_all in waves():
            places = {key - first_key: slot for key, slot in slot_of.items()}
            if HOST in places.values():
                host = self.on_host(work.host_call(list(places)), layer, module, list(places))
            else:
                work.execute(places, is_all)
        if host is not None:
            start_s = time.perf_counter()
            self.note_host(host.result(), time.perf_counter() - start_s)
        if self.padding is not None:
            work.pad(self.padding)
        return work.result()

    def on_host(
        self, call: GroupedCall, layer: int, module: nn.Module, experts: Sequence[int]
    ) -> Future[float]:
        """Execute the assignments to these experts on the host; the result is the seconds taken."""
        # Modes are per thread: the host's has to be the caller's.
        inference = torch.is_inference_mode_enabled()

        def work() -> float:
            start_s = time.perf_counter()
            with torch.inference_mode() if inference else torch.no_grad():
                for start in range(0, len(experts), AT_ONCE):
                    batch = experts[start : start + AT_ONCE]
                    places = ((expert, place) for place, expert in enumerate(batch))
                    call.run(places, self.pools.elsewhere(module, layer, batch))
            return time.perf_counter() - start_s

        return self._host.submit(work)


@dataclass(eq=False)
class Work:
    """One call of an experts module, executed in one part or several.

    The outputs of several parts are weighted and added once, in the order of the router's choice,
    so that the result does not depend on the parts.
    """

    store: SlotStore
    layer: int
    module: nn.Module
    hidden_TD: Tensor
    index_TK: Tensor
    w_TK: Tensor
    done: Tensor | None = None
    """The module's output [T, D], where one part had all experts."""

    @property
    def num_experts(self) -> int:
        return self.store.geometry.num_experts

    def ask_whole(self, kernel: str) -> bool:
        """Run all at once if the cache holds the layer in one piece; return whether it does."""
        stand_in = self.store.pools.whole(self.module, self.layer)
        if stand_in is not None:
            run = ALL_EXPERTS_FUNCTIONS[kernel]
            self.done = run(stand_in, self.hidden_TD, self.index_TK, self.w_TK)
        return stand_in is not None


class WorkInGroups(Work):
    """One product per expert: on a CPU, bit for bit what `grouped_mm` computes there.

    It visits only the chosen experts, `grouped_mm` every slot of the pool. That kernel runs where
    it has no more to do: a layer in one piece, many tokens, none of them padding.
    """

    @cached_property
    def _call(self) -> GroupedCall:
        inputs = self.hidden_TD, self.index_TK, self.w_TK
        return GroupedCall(self.module, *inputs, self.num_experts)

    @cached_property
    def _served(self) -> set[int]:
        return set()

    def execute(self, places: Places, is_all: bool) -> None:
        """Run the assignments to these experts in their slots; `is_all`: there are no others."""
        many = self.store.padding is None and self.index_TK.numel() >= self.num_experts
        if is_all and many and self.ask_whole("grouped_mm"):
            return
        self._served.update(places)
        parts = self.store.pools.parts(self.module, self.layer, dict(sorted(places.items())))
        for slot_of, matrices in parts:
            self._call.run(slot_of.items(), matrices)

    def host_call(self, experts: Sequence[int]) -> GroupedCall:
        """Return the call in which the host runs these experts; take `result` after it has ended.

        Host and caller write to the same buffers, allocated here before either begins.
        """
        self._served.update(experts)
        self._call.reserve(self.store.pools.elsewhere(self.module, self.layer, experts[:1]))
        return self._call

    def pad(self, padding: BoolArray) -> None:
        """Run the experts that only padding, a mask of tokens [T], has chosen; cache none.

        The output at padding positions is discarded, but goes on to the next layers in products
        shared with real tokens: with other rows in them, these would round differently.
        """
        pools, layer = self.store.pools, self.layer
        for expert in torch.unique(self.index_TK[torch.from_numpy(padding)]).tolist():
            if expert not in self._served:
                self._call.run([(expert, 0)], pools.elsewhere(self.module, layer, [expert]))

    def result(self) -> Tensor:
        """Return the module's output [T, D]."""
        return self._call.result() if self.done is None else self.done


class WorkOnPool(Work):
    """transformers' kernel on the pool itself, with slots as indices: on CUDA, few launches.

    Each part has as many rows as the whole, so that a kernel chosen by their number is the same for
    every part; a row's result does not depend on the contents of others.
    """

    _out_SD: Tensor | None = None
    _on_host: GroupedCall | None = None

    def execute(self, places: Places, is_all: bool) -> None:
        """Run the assignments to these experts in their slots; `is_all`: there are no others."""
        kernel = self.store.kernel
        if is_all and self.ask_whole(kernel):
            return
        max_slots = MAX_GROUPS if kernel == "grouped_mm" else MOST
        for slot_of, slots in self.store.pools.windows(self.layer, places, max_slots):
            self._execute_window(kernel, slots, slot_of, is_all and len(slot_of) == len(places))

    def host_call(self, experts: Sequence[int]) -> GroupedCall:
        """Return the call, in host memory, in which the host runs its assignments."""
        hidden_TD, index_TK, w_TK = self.hidden_TD, self.index_TK, self.w_TK
        # They are fetched as float32, which is exact for expert indices and 16-bit values.
        arrays = copy_to_host([hidden_TD.float(), index_TK, w_TK.float()])
        hidden, index, weights = map(torch.from_numpy, arrays)
        hidden, index = hidden.to(hidden_TD.dtype), index.to(index_TK.dtype)
        self._on_host = GroupedCall(self.module, hidden, index, weights, self.num_experts)
        return self._on_host

    def pad(self, padding: BoolArray) -> None:
        """Do nothing: here a row's result does not depend on the others."""

    def result(self) -> Tensor:
        """Return the module's output [T, D]."""
        if self.done is not None:
            return self.done
        if self._on_host is not None:
            host_SD = copy_to_device(self._on_host.unweighted(), self.hidden_TD.device)
            if getattr(self.module, "has_post_expert_norm", False):
                host_SD = self.module.post_expert_norm(host_SD)  # type: ignore[operator]
            self._add(host_SD)
        if self._out_SD is None:
            return torch.zeros_like(self.hidden_TD)
        weighted_SD = self._out_SD * self.w_TK.reshape(-1, 1)
        tokens, top_k = self.index_TK.shape
        return weighted_SD.view(tokens, top_k, -1).sum(dim=1).to(self.hidden_TD.dtype)

    def _execute_window(self, kernel: str, slots: Slots, slot_of: Places, is_all: bool) -> None:
        num_slots, top_k = len(next(iter(slots.values()))), self.index_TK.shape[-1]
        run: Kernel = ALL_EXPERTS_FUNCTIONS[kernel]
        # Experts outside this window point beyond the last slot.
        table_E = torch.full((self.num_experts,), num_slots, dtype=torch.int64)
        table_E[list(slot_of)] = torch.tensor(list(slot_of.values()))
        slot_TK = copy_to_device(table_E, self.index_TK.device)[self.index_TK]
        one_token = len(self.hidden_TD) == 1 and len(slot_of) == top_k
        skips = kernel == "grouped_mm"
        stand_in = OnSlots(self.module, slots, sparse=skips and not one_token)
        here_TK: Tensor | None = None
        if not (skips or one_token):
            # This kernel computes absent experts, too, and a slot being written may hold a NaN,
            # which times 0 stays one: it reads a slot that holds an expert instead.
            here_TK = slot_TK < num_slots
            slot_TK = slot_TK.where(here_TK, next(iter(slot_of.values())))
        if is_all:
            w_TK = self.w_TK if here_TK is None else self.w_TK * here_TK
            self.done = run(stand_in, self.hidden_TD, slot_TK, w_TK)
            return
        hidden_SD = self.hidden_TD.repeat_interleave(top_k, dim=0)
        slot_S1 = slot_TK.reshape(-1, 1)
        w_S1 = hidden_SD.new_ones(slot_S1.shape)
        if here_TK is not None:
            w_S1 = w_S1 * here_TK.reshape(-1, 1)
        self._add(run(stand_in, hidden_SD, slot_S1, w_S1))

    def _add(self, more_SD: Tensor) -> None:
        self._out_SD = more_SD if self._out_SD is None else self._out_SD + more_SD
