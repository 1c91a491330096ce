"""The harness models: HFLM behind an expert cache, with its speed in the results (`moecache`), and
the same with a draft model for speculative decoding (`moecache-spec`)."""

from __future__ import annotations

import copy
import logging
import sys
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from inspect import Parameter, signature
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

import torch
from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils_hf import stop_sequences_criteria
from torch import Tensor
from tqdm import tqdm

from lm_eval_moecache.engine.draft_stage import DraftStage
from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.engine.setting import PROMPT_LOOKUP
from lm_eval_moecache.engine.wall.engine import WallEngine
from lm_eval_moecache.harness.arguments import (
    Config,
    as_arguments_error,
    exit_with_message,
)
from lm_eval_moecache.harness.evaluation_options import check_use_cache
from lm_eval_moecache.harness.generation import check_generation, stands_alone
from lm_eval_moecache.harness.model_loader import ModelLoader
from lm_eval_moecache.harness.preflight import charged_geometry, check_arguments, model_name
from lm_eval_moecache.harness.recording import recorder_of
from lm_eval_moecache.harness.requests import (
    AUTO,
    ON_A_CPU,
    Ragged,
    RankRecords,
    RecordedStr,
    Seeds,
    batch_plan_of,
    chunk_size,
    cut_passes,
    fingerprint,
    in_document_order,
    merge,
    publish,
    whole_documents,
    without_padding,
)
from lm_eval_moecache.harness.run_report import run_report, speed_rows, speed_table
from lm_eval_moecache.harness.tasks import watch_evaluations
from lm_eval_moecache.model.checkpoint import model_path
from lm_eval_moecache.model.decoding import RowDecoding
from lm_eval_moecache.model.device import device_of
from lm_eval_moecache.model.hook import FinishedSequences, Row, WrappedModel
from lm_eval_moecache.model.moe_layers import find_moe_layers
from lm_eval_moecache.model.speculative import (
    DraftHooks,
    DraftModel,
    ReadAlong,
    make_draft,
    measure_overlap,
    watched_by,
)
from lm_eval_moecache.records.files import TINY
from lm_eval_moecache.records.ledger import RequestRecord
from lm_eval_moecache.records.numbers import check_typed
from lm_eval_moecache.records.schemas.keys import DEFAULTS
from lm_eval_moecache.trace.trace import NO_REQUEST

logger = logging.getLogger(__name__)


class MoECacheLM(HFLM):
    """A mixture-of-experts model of transformers, run inside an expert cache.

    Requests, prompts and scores are HFLM's own. Each evaluation starts with a cold cache and
    reports only its own requests. All errors in the setting are raised before the weights load.

    Args:
        pretrained: A hub id, a folder, `tiny`, or a loaded model (which is taken over until
            `wrapped.unwrap()`).
        arguments: Our keys (`records/schemas/keys.py` explains them), and all arguments of HFLM. An
            algorithm with parameters is `eviction={"name": "least_stale", "order": "fifo"}`.

    Example:
        >>> from lm_eval_moecache import MoECacheLM  # doctest: +SKIP
        >>> lm = MoECacheLM("tiny", policy="specmd", capacity="25%")  # doctest: +SKIP
        >>> lm_eval.simple_evaluate(lm, tasks=["tiny_gsm8k"], limit=4)  # doctest: +SKIP
        >>> pandas.DataFrame(lm.speed())[["task", "tok_per_s", "miss_rate"]]  # doctest: +SKIP
    """

    is_speculative: ClassVar[bool] = False
    _draft: DraftModel | None = None
    _draft_hooks: ReadAlong | DraftHooks | None = None
    _gathered: list[RankRecords] | None = None
    """The metrics of all ranks, on the first, once the harness has gathered them."""
    _has_unsent = False
    """Whether there have been requests since the ledger was last sent to the first rank."""

    def __init__(self, pretrained: Any = TINY, **arguments: Any) -> None:
        with as_arguments_error(pretrained):
            speculative = self.is_speculative
            config, hflm_args = check_arguments(pretrained, arguments, speculative=speculative)
        self._model_name = model_name(pretrained)
        self.loader = ModelLoader(config, pretrained, hflm_args)
        super().__init__(pretrained=model_path(pretrained), **hflm_args)
        # HFLM splits documents over the GPUs of one host; here every process is a rank, even
        # without a GPU or on another host.
        if (accelerator := getattr(self, "accelerator", None)) is not None:
            self._rank = int(accelerator.process_index)
            self._world_size = int(accelerator.num_processes)
        self._moe_layers = find_moe_layers(self.model)
        self.geometry = charged_geometry(self.model, pretrained, config, hflm_args)
        self._has_shown = False
        self._batch: list[RecordedStr] = []
        self._reaches: dict[tuple[str, ...], int] = {}
        self._wrap(config)

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: dict[str, Any] | None = None
    ) -> MoECacheLM:
        """Make the model from the text of `--model_args`."""
        check_typed(arg_string)
        return cls.create_from_arg_obj(
            utils.simple_parse_args_string(arg_string), additional_config
        )

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> MoECacheLM:
        """Make the model; `--model_args` takes precedence over lm-eval's options.

        lm-eval always passes `device` and `batch_size`: given twice, they would be a TypeError.
        """
        options = {k: v for k, v in (additional_config or {}).items() if v is not None}
        # lm-eval names the folder of results after what it finds here, or at random.
        arg_dict.setdefault("pretrained", TINY)
        with exit_with_message():
            return cls(**{**options, **arg_dict})

    # --- loading ------------------------------------------------------------------------------

    def _get_accelerate_args(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        hflm_arguments: dict[str, Any] = super()._get_accelerate_args(*args, **kwargs)
        return {**hflm_arguments, **self.loader.arguments()}

    def _create_model(self, *args: Any, **kwargs: Any) -> None:
        create_model = super()._create_model
        device = torch.device(self.loader.device or self.device)
        if device.type != torch.device(self.device).type:
            # HFLM has a fixed list of devices, and takes the CPU for all others.
            self._device = device

        def create() -> Any:
            create_model(*args, **kwargs)
            return self._model

        self.loader.load(create, self.device)

    def install(self, config: Config) -> None:
        """Put the loaded model behind a new, cold cache with empty counts, for a sweep's next run.

        ValueError where `config` needs the model loaded anew.
        """
        self.loader.check(config)
        if hasattr(self, "wrapped"):
            self.finish_trace()
            self.wrapped.unwrap()
            # Free it first: the slots of two caches may not fit.
            del self.wrapped, self.engine
        self._wrap(config)

    def reset(self) -> None:
        """Start over under the same setting: a cold cache and empty counts, as after loading."""
        self.install(self.moecache)

    def begin_evaluation(self) -> None:
        """Reset after earlier requests: no evaluation's metrics depend on a previous one."""
        if self.engine.ledger.requests or self.engine.ledger.passes:
            self.reset()

    def evaluated(self) -> list[RequestRecord]:
        """Return the requests of this evaluation; on the first rank, those of all ranks."""
        ranks = self._gathered or [self._own_records()]
        return [record for requests, _ in ranks for record in requests]

    def _wrap(self, config: Config) -> None:
        self.moecache = config
        self._gathered, self._has_unsent = None, False
        if self._draft_hooks is not None:
            self._draft_hooks.remove()
            self._draft_hooks = None
        self._draft = self._find_draft(config)
        cost = None if self._draft is None else self._draft.cost
        setting = replace(config.setting(self.geometry), draft=cost)
        self.engine, store = self.loader.engine_for(self.model, self.geometry, setting)
        self.wrapped = WrappedModel(self.model, self._moe_layers, self.engine, store)
        self.wrapped.recorder = recorder_of(config, self.engine, self._moe_layers, self.model)
        if self._draft is not None:
            stage = self.engine.draft_stage
            assert stage is not None, "a draft model without a draft stage"
            if config.clock == "wall":
                measure_overlap(self._draft, self.engine, stage)
            self._draft_hooks = self._follow(self._draft, stage)
        self._waiting: dict[bytes, list[tuple[RequestRecord, int]]] = {}
        self._last_served: list[int] = []
        self._rows: dict[int, Row] = {}
        """Index of a request -> its row, from its first pass until it is served."""
        self._shared: dict[int, list[RequestRecord]] = {}
        """Index of a request -> the requests that share its passes, itself included."""
        self.batch_plan = batch_plan_of(
            config, self.engine, self.wrapped.recorder, self.is_speculative
        )
        self._progress: Any = None
        self._at_once = 1
        """Requests decoded side by side."""
        self._is_alone = False
        """Whether transformers' own loop decodes them, one at a time."""
        self._computed: set[int] = set()
        """How many requests were computed together, of each kind of them."""
        self._in_documents = False
        self._began_s: float | None = None
        if self.batch_size not in (1, self.batch_plan.max_rows) and self.batch_plan.reason:
            logger.warning(
                "batch_size=%s: requests are computed %s at a time: %s.",
                *(self.batch_size, self.batch_plan.max_rows, self.batch_plan.reason),
            )

    def _find_draft(self, config: Config) -> DraftModel | None:
        """Return the draft to use, reusing the loaded one if it is the same model."""
        name, tokens = config.draft, config.draft_tokens or 1
        if name is None or name == PROMPT_LOOKUP:
            return None
        if self._draft is not None and self._draft.name == name:
            return self._draft.drafting(tokens)
        # Free it first: two drafts may not fit.
        self._draft = None
        return make_draft(name, self.model, tokens, self.loader.experts_of())

    def _follow(self, draft: DraftModel, stage: DraftStage) -> ReadAlong | DraftHooks:
        """Let the draft of `prefetch=draft` read along before each pass; it drafts no tokens."""
        read_along = ReadAlong(draft, self._moe_layers, self.wrapped.engine)
        self.wrapped.reads_first = read_along.begin_pass
        return read_along

    def set_cache_hook(self, cache_hook: Any) -> None:
        check_use_cache(getattr(cache_hook, "dbdict", None))
        super().set_cache_hook(cache_hook)

    # --- requests to records ------------------------------------------------------------------

    def _records(self, requests: Sequence[Instance]) -> list[RequestRecord]:
        ledger = self.engine.ledger
        self._began_s = self._began_s or time.monotonic()
        records = [
            ledger.new_request(str(r.task_name), r.request_type, document=r.doc_id, place=r.idx)
            for r in requests
        ]
        if self.world_size > 1:
            ledger.forget(records[without_padding(requests) :])
        self._has_unsent = True
        return records

    @contextmanager
    def _serving(self, records: list[RequestRecord], rows: list[int]) -> Iterator[None]:
        """Attribute the passes of this block to `records`; `rows` holds each row's request."""
        if self.wrapped.recorder is not None:
            self.wrapped.recorder.row_requests = rows
        # All windows and forwards of a text are one request: only another request starts cold.
        served = [record.index for record in records]
        if served != self._last_served and not self.batch_plan.isolated:
            self._restart()
        self._last_served = served
        serving = self.wrapped.engine
        serving.ledger.serve(records)
        try:
            yield
            if serving is not self.engine:
                self.engine.merge(serving)
            if self.wrapped.recorder is not None and not self.batch_plan.isolated:
                self.wrapped.recorder.writer.keep(self.engine.ledger.requests)
        finally:
            serving.ledger.serve([])
            self.wrapped.forget_batch()

    def _restart(self) -> None:
        """Let the next requests find the device as the first ones did."""
        if self.wrapped.recorder is not None:
            self.wrapped.recorder.restart()
        if self.moecache.cache_reset != "request":
            return
        if isinstance(self.engine, WallEngine):
            self.engine.restart()
            return
        engine = self.engine.fresh()
        self.wrapped.engine = engine
        before = self.engine.ledger.passes
        self.wrapped.passes_before = lambda: len(before) - engine.num_adopted
        if self._draft_hooks is not None and self._draft is not None:
            stage = engine.draft_stage
            assert stage is not None, "a draft model without a draft stage"
            self._draft_hooks.remove()
            self._draft_hooks = self._follow(self._draft, stage)
            if self.wrapped.recorder is not None:
                stage.notes = self.wrapped.recorder.draft_notes

    def _row_of(self, record: RequestRecord) -> Row:
        """Return the row of a request, with an engine of its own where it needs one."""
        row = self._rows.get(record.index)
        if row is None:
            row = self._rows[record.index] = Row(None if self.engine.can_defer else self._engine())
            self._shared[record.index] = [record]
        return row

    def _engine(self) -> Engine:
        """Return the engine of the next request in turn."""
        return self.engine.fresh() if self.moecache.cache_reset == "request" else self.engine

    def _finish(self, records: Sequence[RequestRecord]) -> None:
        """Serve these requests, in this order; enter what they cost and, where asked, record it."""
        ledger, recorder = self.engine.ledger, self.wrapped.recorder
        for record in records:
            row = self._rows.pop(record.index, None)
            if row is None:
                continue  # It shared the passes of an earlier one.
            served = self._shared.pop(record.index)
            engine, first = row.engine or self._engine(), len(ledger.passes)
            if row.engine is None:
                if engine is self.engine:
                    ledger.serve(served)
                row.serve(engine)
                ledger.serve([])
            if engine is not self.engine:
                self.engine.merge(engine, served)
            elif row.engine is not None and record.passes:
                first = record.passes[0].index
            for each in served:
                if each.output_tokens is not None:
                    cut_passes(each)
            if recorder is not None:
                recorder.restart()
                recorder.add_request(record.index, first, row.noted)
                recorder.writer.keep(ledger.requests)

    def rows_at_once(self, longest: Sequence[int] = (), new_tokens: int = 1) -> int:
        """Return how many requests are computed together; `auto` is found out by the longest."""
        if self.batch_plan.max_rows is not None:
            return self.batch_plan.max_rows
        if self.batch_size != AUTO:
            return int(self.batch_size)
        if self.device.type == "cpu":
            return ON_A_CPU
        self.wrapped.is_paused = True
        try:
            tokens = [*longest][: self.max_length]
            return int(self._detect_batch_size([(None, tokens, [0] * new_tokens)]))
        finally:
            self.wrapped.is_paused = False

    @contextmanager
    def _computing(self, rows: int, total: int, kind: str, hidden: bool) -> Iterator[None]:
        """Compute so many requests together in this block, and show how many are done."""
        asked: Any = self.batch_size
        self.batch_size_per_gpu = rows
        hidden = hidden or self.rank != 0
        self._progress = tqdm(total=total, disable=hidden, desc=f"Running {kind} requests")
        try:
            yield
        finally:
            self._progress.close()
            self._progress, self.batch_size_per_gpu = None, asked

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """As in HFLM; each context carries its record through HFLM's sorting and batching."""
        # A task's requests have equal options, by far the most often.
        own = self.model.generation_config.to_dict()
        asked = [each for each, _ in groupby(request.args[1] for request in requests)]
        for options in asked:
            check_generation(options, self.is_speculative, own)
        records = self._records(requests)
        seeds = Seeds()
        # Copies, because lm-eval lists one Instance several times where a task repeats requests.
        copies = [copy.copy(request) for request in requests]
        for request, record in zip(copies, records, strict=True):
            context, *rest = request.arguments
            request.arguments = (RecordedStr(context, record, seeds.next(record)), *rest)
        longest = self.tok_encode(max((c.arguments[0] for c in copies), key=len, default=""))
        rows, outputs = self.rows_at_once(longest, self.max_gen_toks), list[str]()
        alone = any(stands_alone(options, own) for options in asked)
        self._is_alone = alone and self.batch_plan.isolated
        rows = 1 if self._is_alone else rows
        size = 1 if self._is_alone else chunk_size(self.batch_plan, rows)
        self._computed.add(rows)
        # HFLM sorts and pads what it gets; a row that has ended makes place for the next of it.
        self._at_once = rows
        with self._computing(size, len(copies), "generate_until", disable_tqdm):
            for start in range(0, len(copies), size):
                outputs += super().generate_until(copies[start : start + size], disable_tqdm=True)
                self._finish(records[start : start + size])
        publish(requests, records)
        return outputs

    def tok_batch_encode(self, strings: Sequence[str], *args: Any, **kwargs: Any) -> Any:
        self._batch = [s for s in strings if isinstance(s, RecordedStr)]
        return super().tok_batch_encode([str(s) for s in strings], *args, **kwargs)

    def _model_generate(self, context: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._progress is None:
            # Called outside of a task's requests: its passes belong to none.
            return self._generate(context, *args, **kwargs)
        mask = kwargs.get("attention_mask")
        lengths = [context.shape[1]] * len(context) if mask is None else mask.sum(-1).tolist()
        contexts = self._batch
        records = [each.record for each in contexts]
        for record, length in zip(records, lengths, strict=True):
            record.prompt_tokens = int(length)
        if self.batch_plan.isolated:
            rows = self._generate_apart(context, contexts, *args, **kwargs)
        else:
            with self._serving(records, [record.index for record in records]):
                end_tokens = self.model.generation_config.eos_token_id
                self.wrapped.ended = FinishedSequences(kwargs.get("eos_token_id", end_tokens))
                self.wrapped.prompt_length = context.shape[1]
                output = self._generate(context, *args, **kwargs)
            rows = output[:, context.shape[1] :].tolist()
            self._progress.update(len(records))
        for record, row in zip(records, rows, strict=True):
            record.output_tokens = self._count_output(row, kwargs["stop"])
            if not self.batch_plan.isolated:
                cut_passes(record)
        return Ragged([prompt + row for prompt, row in zip(context.tolist(), rows, strict=True)])

    def _generate_apart(
        self, context: Tensor, contexts: Sequence[RecordedStr], **kwargs: Any
    ) -> list[list[int]]:
        """Return the new tokens of each row, which is served separately from the others."""
        records, wrapped = [each.record for each in contexts], self.wrapped

        def take(rows: Sequence[int], prompt_length: int) -> None:
            wrapped.rows = [self._row_of(records[row]) for row in rows]
            wrapped.prompt_length = prompt_length

        shared = [] if self.moecache.cache_reset == "request" else records
        with self._serving(shared, []):
            if self._is_alone:
                take([0], context.shape[1])
                with self._seeded(contexts[0].seed):
                    output = self._generate(context, disable_compile=True, **kwargs)
                self._progress.update()
                return [output[0, context.shape[1] :].tolist()]
            decoding = RowDecoding(
                self._at_once,
                partial(self._have_stopped, stop=kwargs["stop"]),
                [torch.Generator(self.device).manual_seed(each.seed) for each in contexts],
                take,
                self._progress.update,
            )
            self._generate(context, custom_generate=decoding, **kwargs)
            return decoding.generated

    @contextmanager
    def _seeded(self, seed: int) -> Iterator[None]:
        """Seed what is drawn in this block, and nothing else."""
        kind = self.device.type
        with torch.random.fork_rng([] if kind == "cpu" else [self.device], device_type=kind):
            torch.manual_seed(seed)
            yield

    def _have_stopped(self, texts: Sequence[Sequence[int]], stop: Sequence[str]) -> list[bool]:
        """Return which of these texts end, as in HFLM, with a stop string in their last tokens."""
        if not stop:
            return [False] * len(texts)
        ends = self.tokenizer.batch_decode([text[-self._reach_of(tuple(stop)) :] for text in texts])
        return [any(string in end for string in stop) for end in ends]

    def _reach_of(self, stop: tuple[str, ...]) -> int:
        """Return how many last tokens can hold a stop string: two more than its own."""
        if stop not in self._reaches:
            encode = partial(self.tokenizer.encode, add_special_tokens=False)
            self._reaches[stop] = 2 + max(len(encode(string)) for string in stop)
        return self._reaches[stop]

    def _generate(self, context: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super()._model_generate(context, *args, **kwargs)

    def _count_output(self, row: list[int], stop: Sequence[str]) -> int:
        """Count generated tokens up to and including the end token or the end of a stop string.

        Whatever follows is padding, or text generated while other rows of the batch went on.
        """
        ends = self.model.generation_config.eos_token_id
        stops = {*(ends if isinstance(ends, list) else [ends]), self.tokenizer.eos_token_id}
        end = next((i for i, token in enumerate(row, start=1) if token in stops), len(row))

        def has_stopped(length: int) -> bool:
            text = self.tok_decode(row[:length])
            return any(string in text for string in stop)

        return 1 + bisect_left(range(1, end), True, key=has_stopped)

    # --- scoring ------------------------------------------------------------------------------

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """As in HFLM. One-token choices that share a forward share its pass."""
        self._scored = records = self._records(requests)
        self._in_documents, self._is_hidden = True, disable_tqdm
        try:
            outputs: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm)
        finally:
            self._in_documents = False
        publish(requests, records)
        return outputs

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """As in HFLM; the windows of one text are passes of one request, one after another."""
        records, outputs = self._records(requests), list[float]()
        with self._computing(1, len(requests), "loglikelihood_rolling", disable_tqdm):
            for request, record in zip(requests, records, strict=True):
                windows = utils.get_rolling_token_windows(
                    token_list=self.tok_encode(request.args[0]),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                )
                self._scored = [record for _ in windows]
                outputs += super().loglikelihood_rolling([request], disable_tqdm=True)
                self._finish([record])
                self._progress.update(1)
        publish(requests, records)
        return outputs

    def _loglikelihood_tokens(
        self, requests: Any, disable_tqdm: bool = False, **kwargs: Any
    ) -> Any:
        """Note which record waits for which input, then let HFLM sort and batch."""
        records, self._scored = self._scored[: len(requests)], self._scored[len(requests) :]
        # A rank with fewer windows than others gets its first one again, for no request.
        missing = len(requests) - len(records)
        records += [RequestRecord(NO_REQUEST, "", "padding") for _ in range(missing)]
        inputs = []
        for record, (_, context, continuation) in zip(records, requests, strict=True):
            tokens = (context + continuation)[-(self.max_length + 1) :][:-1]
            record.prompt_tokens += len(tokens)
            inputs.append(tokens)
        if not self._in_documents:
            return self._score(requests, records, inputs, **kwargs)
        documents = [(record.task, record.document) for record in records]
        longest: list[int] = max(inputs, key=len, default=[])
        rows, outputs = self.rows_at_once(longest), list[Any]()
        self._computed.add(rows)
        keys = [fingerprint(tokens) for tokens in inputs]
        if not self.logits_cache:
            keys = [b"%d" % place for place in range(len(inputs))]
        size = chunk_size(self.batch_plan, rows)
        with self._computing(rows, len(requests), "loglikelihood", self._is_hidden):
            for part in whole_documents(documents, keys, size):
                outputs += self._score(requests[part], records[part], inputs[part], **kwargs)
                self._finish(in_document_order(records[part], inputs[part], documents[part]))
                self._progress.update(len(records[part]))
        return outputs

    def _score(
        self,
        requests: Any,
        records: Sequence[RequestRecord],
        inputs: Sequence[list[int]],
        **kwargs: Any,
    ) -> Any:
        """Let HFLM sort, batch and score some requests."""
        for record, tokens in zip(records, inputs, strict=True):
            self._waiting.setdefault(fingerprint(tokens), []).append((record, len(tokens)))
        outputs = super()._loglikelihood_tokens(requests, disable_tqdm=True, **kwargs)
        self._waiting.clear()
        return outputs

    def _model_call(self, inps: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self._waiting:
            # Called outside of a task's requests: its pass belongs to none.
            return super()._model_call(inps, *args, **kwargs)
        # By index: two windows of one text may be in one batch.
        served: dict[int, RequestRecord] = {}
        lengths: list[int] = []
        rows: list[int] = []
        apart: list[Row | None] = []
        for row in inps.tolist():
            # With its logits cache, HFLM serves all requests with this input in one forward.
            waiting = self._waiting.get(fingerprint(row), [])
            entries = waiting if self.logits_cache else waiting[:1]
            served |= {record.index: record for record, _ in entries}
            lengths.append(entries[0][1] if entries else len(row))
            rows.append(entries[0][0].index if entries else NO_REQUEST)
            if self.batch_plan.isolated:
                sharing = [record for record, _ in entries if record.index != NO_REQUEST]
                apart.append(self._row_of(sharing[0]) if sharing else None)
                if sharing:
                    self._shared[sharing[0].index] = sharing
            if not self.logits_cache:
                del waiting[:1]
        with self._serving(list(served.values()), rows):
            self.wrapped.valid_rows = lengths
            self.wrapped.scan_scoring = self.moecache.scoring == "scan"
            if self.batch_plan.isolated:
                self.wrapped.rows = apart
            return super()._model_call(inps, *args, **kwargs)

    # --- results ------------------------------------------------------------------------------

    def _own_records(self) -> RankRecords:
        return self.engine.ledger.requests, self.engine.peak_cache_bytes

    def gather_object(self, obj: Any, dst: int = 0) -> Any:
        """As in HFLM, but each rank also sends its ledger along with its scores."""
        # Sent once, and not with every task's scores: it is large.
        records = self._own_records() if self._has_unsent else None
        self._has_unsent = False
        pairs = super().gather_object((obj, records), dst)
        if pairs is None:
            return None
        if any(rank_figures is not None for _, rank_figures in pairs):
            self._gathered = [rank_figures or ([], 0) for _, rank_figures in pairs]
        return [scores for scores, _ in pairs]

    def get_model_info(self) -> dict[str, Any]:
        """Add `moecache` to the results' `config`; print the speed table the first time."""
        info: dict[str, Any] = super().get_model_info()
        # What lm-eval prints beside its own option, which does not know the model arguments.
        self.batch_sizes = {rows: rows for rows in sorted(self._computed) if rows > 1}
        self.finish_trace()
        info["moecache"] = report = self.report()
        if not self._has_shown:
            sys.stdout.write(f"{speed_table(report)}\n{self._own_duration()}\n")
        self._has_shown = True
        return info

    def _own_duration(self) -> str:
        """Return a sentence on how long this machine took, whatever was emulated."""
        documents = len({(record.task, record.document) for record in self.evaluated()})
        seconds = time.monotonic() - (self._began_s or time.monotonic())
        rate = f", {documents / seconds:.2g} a second" if seconds and documents else ""
        return (
            f"This machine took {seconds:.3g} s for {documents} documents{rate} (without loading)."
        )

    def finish_trace(self) -> Path | None:
        """Give the recorded trace its name and return its path; further passes are refused."""
        if self.wrapped.recorder is None:
            return None
        return self.wrapped.recorder.writer.close(self.engine.ledger.requests)

    def report(self) -> dict[str, Any]:
        """Return the run's setting and metrics: `config.moecache` of the results JSON."""
        ranks = self._gathered or [self._own_records()]
        measured = self.loader.measured(self.device)
        report = run_report(self.engine, self.moecache, *merge(ranks), measured)
        report = {**report, "device": str(device_of(self.model))}
        return {**report, "ranks": len(ranks)} if len(ranks) > 1 else report

    def speed(self) -> list[dict[str, Any]]:
        """Return the metrics of the last evaluation: one flat row per task, and one for all.

        `pandas.DataFrame(lm.speed())` is a table; percentiles have columns of their own (`ttft_ms`
        is the mean, `ttft_ms_p90` a percentile).
        """
        return speed_rows(self.report())


class MoECacheSpecLM(MoECacheLM):
    """`moecache` with speculative decoding: greedy, one request at a time.

    Takes the keys of `moecache`, `draft` and `draft_tokens`. The outputs equal those of plain
    greedy decoding, token for token, as long as the policy is lossless and no two logits tie in the
    model's precision. Scoring requests run without the draft, as under `moecache`.
    """

    is_speculative: ClassVar[bool] = True

    def _follow(self, draft: DraftModel, stage: DraftStage) -> DraftHooks:
        return DraftHooks(draft, self._moe_layers, stage)

    def _settle(self, drafted: int, accepted: int) -> None:
        self.wrapped.engine.settle_drafts(drafted, accepted)
        if self.wrapped.recorder is not None:
            self.wrapped.recorder.writer.settle(drafted, accepted)

    def _generate(
        self, context: Tensor, *, stop: Sequence[str], max_length: int, **kwargs: Any
    ) -> Tensor:
        """Generate greedily with the draft, and cut tokens accepted beyond the stop string."""
        tokens = self.moecache.draft_tokens
        assert tokens is not None
        criteria = stop_sequences_criteria(self.tokenizer, list(stop), context.shape[1], 1)
        for criterion in criteria:
            # The criterion checks only the last tokens, and a verify pass adds several.
            criterion.sequence_id_len += tokens
        if self._draft is None:
            kwargs["prompt_lookup_num_tokens"] = tokens
        else:
            kwargs["assistant_model"] = self._draft.model
            drafting = self._draft.model.generation_config
            # Turn off adaptive length and confidence: each draft has exactly `draft_tokens`.
            drafting.num_assistant_tokens = tokens
            drafting.num_assistant_tokens_schedule = "constant"
            drafting.assistant_confidence_threshold = 0.0
        # `check_generation` has made sure that the sampling options mean greedy decoding.
        for key in ("temperature", "do_sample", "top_p"):
            kwargs.pop(key, None)
        # As HFLM does around its own call.
        lower = self.mixed_precision_dtype
        autocast = torch.autocast(self.device.type, dtype=lower, enabled=lower is not None)
        with watched_by(self._settle, self.wrapped.engine, self.model), autocast:
            output: Tensor = self.model.generate(
                input_ids=context,
                max_length=max_length,
                stopping_criteria=criteria,
                pad_token_id=self.tokenizer.pad_token_id,
                use_cache=True,
                do_sample=False,
                **kwargs,
            )
        row: list[int] = output[0, context.shape[1] :].tolist()
        return output[:, : context.shape[1] + self._count_output(row, stop)]


def _shows_keys() -> None:
    """Make `help` and notebooks show the model's own keys with their defaults, not only `**`."""
    own = [Parameter(k, Parameter.KEYWORD_ONLY, default=v) for k, v in DEFAULTS.items()]
    *named, rest = signature(MoECacheLM.__init__).parameters.values()
    shown = signature(MoECacheLM.__init__).replace(parameters=[*named, *own, rest])
    MoECacheLM.__init__.__signature__ = shown  # type: ignore[attr-defined]


_shows_keys()
watch_evaluations(MoECacheLM)
