"""The harness model `moecache`: HFLM behind an expert cache, with its speed in the results."""

from __future__ import annotations

import copy
import inspect
import sys
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from lm_eval_moecache.harness.arguments import Config
from lm_eval_moecache.harness.attribution import RecordedStr, distinct, fingerprint, publish
from lm_eval_moecache.harness.caller import check_caller, check_generation, check_use_cache
from lm_eval_moecache.harness.draft_checks import check_draft
from lm_eval_moecache.harness.evaluation import Evaluated, watch_evaluations
from lm_eval_moecache.harness.guided import Guided
from lm_eval_moecache.harness.loaded import model_name
from lm_eval_moecache.harness.loading import Loading, LoadingLM
from lm_eval_moecache.harness.preflight import Bare, preflight
from lm_eval_moecache.harness.ranks import Ranked, merge
from lm_eval_moecache.harness.recording import recorder_of
from lm_eval_moecache.harness.refusal import refusing
from lm_eval_moecache.harness.run_report import run_report
from lm_eval_moecache.model.checkpoint import model_path, skeleton
from lm_eval_moecache.model.ended import EndedRows
from lm_eval_moecache.model.moe_layers import describe, find_moe_layers
from lm_eval_moecache.model.weights import weights_files, weights_identity
from lm_eval_moecache.model.wrap import WrappedModel
from lm_eval_moecache.records.ledger import RequestRecord
from lm_eval_moecache.records.paths import TINY
from lm_eval_moecache.report.speed_table import speed_table
from lm_eval_moecache.trace.columns import NO_REQUEST

Checked = tuple[Config, dict[str, Any]]


watch_evaluations()


class MoECacheLM(Ranked, Evaluated, Guided, LoadingLM):
    """Any Mixture-of-Experts model of transformers, run inside an expert cache.

    Takes the keys of `arguments.KEYS` and all arguments of HFLM; `pretrained` may be a loaded model
    (which is taken over until `wrapped.unwrap()`) and `policy` a mapping. Every error a setting can
    cause is raised before the weights are loaded. Requests, prompts and scores are HFLM's own. Each
    evaluation starts with a cold cache and reports its own requests only.
    """

    def __init__(self, pretrained: Any = TINY, **arguments: Any) -> None:
        with refusing(pretrained):
            check_caller(self.is_speculative)
            config, theirs = self._check(pretrained, arguments)
        self._model_name = model_name(pretrained)
        bare = skeleton(pretrained, theirs)
        path = model_path(pretrained)
        files = weights_files(path, theirs)
        self.loading = Loading(config, bare, weights_identity(path, theirs), files)
        super().__init__(pretrained=model_path(pretrained), **theirs)
        self.count_ranks()
        self._moe_layers = find_moe_layers(self.model)
        self.geometry = describe(self.model, self._moe_layers, self._model_name, config.ladder)
        self._wrap(config)

    def _check(self, pretrained: Any, arguments: Mapping[str, Any]) -> Checked:
        return check_arguments(pretrained, arguments)

    def install(self, config: Config) -> None:
        """Put the loaded model behind a new, cold cache with empty counts: a sweep's next run."""
        self.loading.check(config)
        if hasattr(self, "wrapped"):
            self.finish_trace()
            self.wrapped.unwrap()
            # Freed first: the slots of two caches may not fit.
            del self.wrapped, self.engine
        self._wrap(config)

    def reset(self) -> None:
        """Start anew under the same setting: a cold cache and empty counts, as after loading."""
        self.install(self.moecache)

    def begin_evaluation(self) -> None:
        """Reset where there have been requests: no evaluation's figures depend on an earlier."""
        if self.engine.ledger.requests or self.engine.ledger.passes:
            self.reset()

    def evaluated(self) -> list[RequestRecord]:
        return [record for requests, _ in self.all_figures() for record in requests]

    def _wrap(self, config: Config) -> None:
        self.moecache = config
        self.forget_ranks()
        parts = self.loading.engine_for(self.model, self.geometry, self._setting(config))
        self.wrapped = WrappedModel(self.model, self._moe_layers, *parts)
        self.engine = parts[0]
        self.wrapped.recorder = recorder_of(config, self.engine, self._moe_layers, self.model)
        self._follow(self.wrapped, self.engine)
        self._waiting: dict[bytes, list[tuple[RequestRecord, int]]] = {}
        self._last_served: list[int] = []

    def set_cache_hook(self, cache_hook: Any) -> None:
        check_use_cache(getattr(cache_hook, "dbdict", None))
        super().set_cache_hook(cache_hook)

    # --- requests to records ------------------------------------------------------------------

    def _records(self, requests: Sequence[Instance]) -> list[RequestRecord]:
        ledger, count = self.engine.ledger, self.without_padding(requests)
        records = [
            ledger.new_request(str(r.task_name), r.request_type, document=r.doc_id, place=r.idx)
            for r in requests
        ]
        ledger.forget(records[count:])
        self.has_run = True
        return records

    @contextmanager
    def _serving(self, records: list[RequestRecord], rows: list[int]) -> Iterator[None]:
        """Attribute the passes of this block to these requests; `rows` has one for each row."""
        if self.wrapped.recorder is not None:
            self.wrapped.recorder.row_requests = rows
        # Windows of one text and its forwards are one request: only another one starts cold.
        served = [record.index for record in records]
        if self.moecache.cache_reset == "request" and served != self._last_served:
            self.engine.reset_cache()
        self._last_served = served
        self.engine.ledger.serve(records)
        try:
            yield
            if self.wrapped.recorder is not None:
                self.wrapped.recorder.keep(self.engine.ledger.requests)
        finally:
            self.engine.ledger.serve([])
            self.wrapped.forget_batch()

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """As HFLM; each context carries its record through HFLM's sorting and batching."""
        for request in requests:
            check_generation(request.args[1], self.is_speculative)
        records = self._records(requests)
        # Copies: lm-eval lists one Instance several times where a task repeats its requests.
        copies = [copy.copy(request) for request in requests]
        for request, record in zip(copies, records, strict=True):
            context, *rest = request.arguments
            request.arguments = (RecordedStr(context, record), *rest)
        outputs: list[str] = super().generate_until(copies, disable_tqdm=disable_tqdm)
        publish(requests, records)
        return outputs

    def tok_batch_encode(self, strings: Sequence[str], *args: Any, **kwargs: Any) -> Any:
        self._batch = [s.record for s in strings if isinstance(s, RecordedStr)]
        return super().tok_batch_encode([str(s) for s in strings], *args, **kwargs)

    def _model_generate(self, context: Tensor, *args: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        lengths = [context.shape[1]] * len(context) if mask is None else mask.sum(-1).tolist()
        records = self._batch
        for record, length in zip(records, lengths, strict=True):
            record.prompt_tokens = int(length)
        with self._serving(records, [record.index for record in records]):
            self.wrapped.ended = EndedRows.in_generation(self.model, kwargs)
            output = self._generate(context, *args, **kwargs)
        for record, row in zip(records, output[:, context.shape[1] :].tolist(), strict=True):
            record.output_tokens = self._count_output(row, kwargs["stop"])
            # Passes after a row has ended served the others of its batch.
            del record.passes[record.output_tokens :]
        return output

    def _generate(self, context: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super()._model_generate(context, *args, **kwargs)

    def _count_output(self, row: list[int], stop: Sequence[str]) -> int:
        """Count generated tokens up to and with the closing one or the end of a stop string.

        What follows is padding, or text that the row went on with while others of its batch had
        not stopped yet.
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
        """As HFLM. Choices of one token that share a forward share its pass."""
        self._scored = records = self._records(requests)
        outputs: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm)
        publish(requests, records)
        return outputs

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """As HFLM; the windows of one text are passes of one request."""
        records = self._records(requests)
        self._scored = []
        for request, record in zip(requests, records, strict=True):
            windows = utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            self._scored += [record for _ in windows]
        outputs: list[float] = super().loglikelihood_rolling(requests, disable_tqdm)
        publish(requests, records)
        return outputs

    def _loglikelihood_tokens(self, requests: Any, *args: Any, **kwargs: Any) -> Any:
        """Note which record waits for which input, then let HFLM sort and batch as it likes."""
        records, self._scored = self._scored[: len(requests)], self._scored[len(requests) :]
        records = self.filled_up(records, len(requests))
        for record, (_, context, continuation) in zip(records, requests, strict=True):
            tokens = (context + continuation)[-(self.max_length + 1) :][:-1]
            record.prompt_tokens += len(tokens)
            self._waiting.setdefault(fingerprint(tokens), []).append((record, len(tokens)))
        outputs = super()._loglikelihood_tokens(requests, *args, **kwargs)
        self._waiting.clear()
        return outputs

    def _model_call(self, inps: Tensor, *args: Any, **kwargs: Any) -> Any:
        served: list[RequestRecord] = []
        lengths: list[int] = []
        rows: list[int] = []
        for row in inps.tolist():
            # One forward answers every request with this input where HFLM groups them.
            waiting = self._waiting.get(fingerprint(row), [])
            taken = waiting if self.logits_cache else waiting[:1]
            served += [record for record, _ in taken]
            lengths.append(taken[0][1] if taken else len(row))
            rows.append(taken[0][0].index if taken else NO_REQUEST)
            if not self.logits_cache:
                del waiting[:1]
        with self._serving(distinct(served), rows):
            self.wrapped.valid_rows = lengths
            self.wrapped.scan_scoring = self.moecache.scoring == "scan"
            return super()._model_call(inps, *args, **kwargs)

    # --- results ------------------------------------------------------------------------------

    def get_model_info(self) -> dict[str, Any]:
        """Add `moecache` to the results' `config`, and print the table of speed."""
        info: dict[str, Any] = super().get_model_info()
        self.finish_trace()
        info["moecache"] = report = self.report()
        sys.stdout.write(speed_table(report) + "\n")
        return info

    def finish_trace(self) -> Path | None:
        """Give the recorded trace its name and return its path; further passes are refused."""
        if self.wrapped.recorder is None:
            return None
        return self.wrapped.recorder.close(self.engine.ledger.requests)

    def report(self) -> dict[str, Any]:
        """Return the run's setting and figures: `config.moecache` of the results JSON."""
        ranks = self.all_figures()
        measured = self.loading.measured(self.device)
        report = run_report(self.engine, self.moecache, *merge(ranks), measured)
        return {**report, "ranks": len(ranks)} if len(ranks) > 1 else report

    def own_figures(self) -> tuple[list[RequestRecord], int]:
        return self.engine.ledger.requests, self.engine.peak_cache_bytes


def check_arguments(
    pretrained: Any,
    arguments: Mapping[str, Any],
    speculative: bool = False,
    bare: Bare = skeleton,
) -> Checked:
    """Divide the arguments into our checked setting and HFLM's, without loading any weights.

    Raises every ValueError that a setting can cause, so that a sweep knows before its first run.
    `bare` builds the model without weights: who checks many settings need not build it each time.
    """
    host_keys = set(inspect.signature(HFLM.__init__).parameters) - {"self", "kwargs"}
    config, theirs = preflight(pretrained, arguments, host_keys, speculative, bare)
    if config.draft is not None and not speculative:
        check_draft(config, pretrained, theirs)
    return config, theirs
