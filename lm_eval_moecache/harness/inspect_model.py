"""Inspect's provider: `inspect eval TASK --model moecache/tiny -M policy=specmd -M capacity=25%`.

Inspect finds it by the entry point `inspect_ai`; importing this module loads no torch.
"""

from __future__ import annotations

import threading
from functools import cached_property
from typing import Any

from anyio import Lock, sleep, to_thread
from inspect_ai.hooks import Hooks, TaskEnd, TaskStart, hooks
from inspect_ai.log import MetadataEdit, ProvenanceData, edit_eval_log, write_eval_log_async
from inspect_ai.model import (
    ChatMessage,
    GenerateConfig,
    Logprob,
    Logprobs,
    ModelAPI,
    ModelOutput,
    ModelUsage,
    TopLogprob,
    modelapi,
)

NAME = "moecache"
_SAMPLING = ("temperature", "top_p", "top_k")
_IGNORED = (
    *("best_of", "frequency_penalty", "presence_penalty", "logit_bias", "num_choices"),
    *("prompt_logprobs", "response_schema"),
)
"""Options of Inspect that would change answers, and that no model of lm-eval's `hf` follows."""
_BATCH = 16
_Request = tuple[str, GenerateConfig, list[ModelOutput]]
"""A prompt, its options, and the place of its answer."""
_GATHERED_S = 0.05
"""How long a batch waits for the requests of samples that start together."""


class MoECacheAPI(ModelAPI):
    """A mixture-of-experts model inside an expert cache, as a model of Inspect.

    Requests that wait together are one batch (`batch_size=1` repeats to the digit); each is served
    as if it were alone. Decoding is greedy unless the task gives a temperature. Messages go through
    the model's chat template, or are texts with a blank line between.

    Every output's `metadata["moecache"]` has the speed of its request. A finished task's log has
    the run's record (`config.moecache` of a results JSON) and its table under `metadata`.

    Args:
        model_name: A folder, a hub id, or `tiny`.
        config: Inspect's generation options.
        model_args: The keys of `--model_args` (`-M policy=specmd`).
    """

    def __init__(self, model_name: str, config: GenerateConfig, **model_args: Any) -> None:
        from lm_eval_moecache.harness.arguments import hflm_keys, read_config, split_arguments

        # Of a service; Inspect always names them.
        service = {key: model_args.pop(key, None) for key in ("base_url", "api_key")}
        super().__init__(model_name, config=config, **service)
        read_config(split_arguments(model_args, hflm_keys())[0])
        self._arguments = {"batch_size": _BATCH, **model_args}
        self._waiting: list[_Request] = []
        self._served = Lock()

    @cached_property
    def lm(self) -> Any:
        """The model, loaded when the first request comes.

        Inspect makes one provider for each set of generation options, and some that it never asks.
        """
        from lm_eval_moecache.harness.lm import MoECacheLM

        key = self.model_name, repr(sorted(self._arguments.items()))
        with _LOADING:
            if key not in _LOADED:
                _LOADED[key] = MoECacheLM(self.model_name, **self._arguments)
        return _LOADED[key]

    def max_connections(self) -> int:
        """Requests that Inspect sends at once: the rows of a batch."""
        size = self._arguments["batch_size"]
        return size if isinstance(size, int) else _BATCH

    async def generate(
        self, input: list[ChatMessage], tools: list[Any], tool_choice: Any, config: GenerateConfig
    ) -> ModelOutput:
        """Answer one request. Raises ValueError for tools and for options it cannot follow."""
        if tools:
            raise ValueError(f"moecache: tools={[tool.name for tool in tools]} cannot be called.")
        for key in _IGNORED:
            if (value := getattr(config, key)) is not None and (key, value) != ("num_choices", 1):
                raise ValueError(f"moecache: {key}={value!r} is not followed. Leave it out.")
        await to_thread.run_sync(lambda: self.lm)
        if config.logprobs and not self.lm.moecache.policy.is_lossless:
            raise ValueError(
                f"moecache: logprobs=True with policy={self.lm.moecache.policy.name!r}, whose "
                "rules change the model as the cache stands. Allowed with it: a lossless policy."
            )
        outputs: list[ModelOutput] = []
        self._waiting.append((self._prompt(input), config, outputs))
        await sleep(_GATHERED_S)
        async with self._served:
            if not outputs:
                batch, self._waiting = self._waiting, []
                try:
                    await to_thread.run_sync(self._serve, batch)
                except Exception:
                    # The others try again, and fail by errors of their own if they have any.
                    self._waiting += [one for one in batch if not one[2] and one[2] is not outputs]
                    raise
        return outputs[0]

    def _prompt(self, messages: list[ChatMessage]) -> str:
        if not self.lm.tokenizer.chat_template:
            return "\n\n".join(message.text for message in messages)
        chat = [{"role": message.role, "content": message.text} for message in messages]
        return str(self.lm.apply_chat_template(chat))

    def _serve(self, batch: list[_Request]) -> None:
        import torch
        from lm_eval.api.instance import Instance

        first, instances = len(self.lm.evaluated()), []
        for place, (prompt, config, _) in enumerate(batch, first):
            given = {k: v for k in _SAMPLING if (v := getattr(config, k)) is not None}
            given |= {"do_sample": bool(config.temperature), "until": config.stop_seqs or []}
            given["max_gen_toks"] = config.max_tokens or int(self.lm.max_gen_toks)
            document = _TASKS[-1], place, 1
            instances.append(Instance("generate_until", {}, (prompt, given), 0, document))
        if (seed := batch[0][1].seed) is not None:
            torch.manual_seed(seed)
        texts = self.lm.generate_until(instances, disable_tqdm=True)
        records = self.lm.evaluated()[first:]
        served = zip(batch, instances, texts, records, strict=True)
        for (prompt, config, outputs), instance, text, record in served:
            read, answer = record.prompt_tokens, record.output_tokens
            reason = "max_tokens" if answer >= instance.args[1]["max_gen_toks"] else "stop"
            output = ModelOutput.from_content(self.model_name, text, reason)
            output.usage = ModelUsage(
                input_tokens=read, output_tokens=answer, total_tokens=read + answer
            )
            output.metadata = {NAME: instance.moecache}
            if config.logprobs:
                likely = self._logprobs(prompt, text, config.top_logprobs or 0)
                output.choices[0].logprobs = Logprobs(content=likely)
            outputs.append(output)

    def _logprobs(self, prompt: str, text: str, most: int) -> list[Logprob]:
        """Return the answer's log-probabilities, of one more pass that no figure counts."""
        import torch

        context, answer = self.lm._encode_pair(prompt, text) if text else ([], [])
        if not answer:
            return []
        window = (context + answer)[-self.lm.max_length :]
        logits = self.lm._model_call(torch.tensor([window], device=self.lm.device))[0]
        rows = logits[-len(answer) - 1 : -1].float().log_softmax(-1)

        def told(kind: Any, row: Any, token: int) -> Any:
            return kind(token=self.lm.tok_decode([token]), logprob=row[token].item())

        likely = [told(Logprob, row, token) for row, token in zip(rows, answer, strict=True)]
        for logprob, row in zip(likely, rows if most else (), strict=False):
            places = row.topk(most).indices.tolist()
            logprob.top_logprobs = [told(TopLogprob, row, place) for place in places]
        return likely


_LOADING = threading.Lock()
_LOADED: dict[tuple[str, str], Any] = {}
"""Model and arguments -> the model, of this process."""
_TASKS = [NAME]  # the tasks begun, the present one last


modelapi(name=NAME)(lambda: MoECacheAPI)


@hooks(name=f"{NAME}_speed", description="Speed of a model in an expert cache, in its tasks' logs")
class SpeedInLog(Hooks):
    """Starts each task with empty counts, and puts its record and table into its log."""

    async def on_task_start(self, data: TaskStart) -> None:
        _TASKS.append(data.spec.task.rpartition("/")[2])
        for lm in _LOADED.values():
            lm.begin_evaluation()

    async def on_task_end(self, data: TaskEnd) -> None:
        from lm_eval_moecache.harness.run_report import speed_table

        log, author = data.log, ProvenanceData(author=NAME, reason="speed of the run")
        for (name, _), lm in _LOADED.items():
            if log.eval.model == f"{NAME}/{name}" and log.location and lm.evaluated():
                table = speed_table(record := lm.report())
                edit = MetadataEdit(metadata_set={NAME: record, f"{NAME}_table": table})
                log = edit_eval_log(log, [edit], author)
                await write_eval_log_async(log, log.location, header_only=True)
                print(table)
