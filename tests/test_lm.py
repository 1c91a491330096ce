"""The harness model on a random checkpoint: which passes a request gets, and their counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lm_eval
import pandas
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from lm_eval.tasks import TaskManager

from lm_eval_moecache.harness.arguments import read_config
from lm_eval_moecache.harness.lm import MoECacheLM, MoECacheSpecLM
from lm_eval_moecache.report.metrics import request_metrics
from lm_eval_moecache.trace.importers import load_trace
from tests.conftest import Checkpoint
from tests.harness import STOP, answers, choices, generations, make_instance, small_tasks, texts


@pytest.fixture(scope="module")
def lm(checkpoint: Checkpoint) -> MoECacheLM:
    """One loaded model; each test installs its own cache."""
    return MoECacheLM(
        pretrained=str(checkpoint("olmoe")), device="cpu", max_length=48, policy="on_demand"
    )


def install(lm: MoECacheLM, **ours: Any) -> MoECacheLM:
    lm.install(read_config({"policy": "on_demand", "capacity": "25%", **ours}))
    return lm


def test_a_generation_has_a_pass_for_each_token_the_prompt_being_the_first(lm: MoECacheLM) -> None:
    install(lm)
    requests = generations(3)
    lm.generate_until(requests, disable_tqdm=True)
    for request, record in zip(requests, lm.engine.ledger.requests, strict=True):
        assert record.prompt_tokens == len(lm.tok_encode(request.args[0]))
        assert [p.phase for p in record.passes] == ["prefill"] + ["decode"] * (
            (record.output_tokens or 0) - 1
        )
        assert record.passes[0].num_tokens == record.prompt_tokens
        figures = request.moecache
        assert figures["e2el_ms"] > figures["ttft_ms"] > 0
        assert figures["request_hit_rate"] + figures["request_miss_rate"] == pytest.approx(1)
        assert type(request.args[0]) is str


def test_a_chunk_of_a_prompt_is_a_prefill_and_its_last_gives_the_first_token(
    lm: MoECacheLM, tmp_path: Path
) -> None:
    install(lm, streams=2, trace=str(tmp_path))
    requests = generations(2)
    lengths = [len(lm.tok_encode(request.args[0])) for request in requests]
    for request in requests:
        request.args[1]["prefill_chunk_size"] = 8
    lm.generate_until(requests, disable_tqdm=True)
    records, passes = lm.engine.ledger.requests, lm.engine.ledger.passes
    num_chunks, rest = divmod(max(lengths), 8)
    sizes = [8] * num_chunks + [rest] * bool(rest)
    prefills = passes[: len(sizes)]
    assert [p.phase for p in prefills] == ["prefill"] * len(sizes) and len(sizes) > 1
    assert all(p.phase == "decode" for p in passes[len(sizes) :])
    assert sum(p.num_tokens for p in prefills) == sum(lengths)
    for request, record in zip(requests, records, strict=True):
        assert len(record.passes) == len(sizes) - 1 + record.output_tokens
        ttft_ms = sum(p.duration_s for p in prefills) * 1000
        assert request.moecache["ttft_ms"] == pytest.approx(ttft_ms)
    # A reader that is not told of the requests finds them in the rows: one token for the prompt.
    path = lm.finish_trace()
    listed = load_trace(str(path)).requests
    table = pq.read_table(path)
    header = json.loads(table.schema.metadata[b"moecache"])
    bare = table.replace_schema_metadata({"moecache": json.dumps(header)})
    pq.write_table(bare, tmp_path / "bare.parquet")
    inferred = load_trace(str(tmp_path / "bare.parquet")).requests
    for request, other in zip(listed, inferred, strict=True):
        assert request.output_tokens == other.output_tokens
        assert request.prompt_tokens == other.prompt_tokens


def test_a_request_that_a_task_repeats_is_measured_each_time(lm: MoECacheLM) -> None:
    install(lm)
    (request,) = generations(1)
    lm.generate_until([request] * 3, disable_tqdm=True)  # how lm-eval lists `repeats`
    records = lm.engine.ledger.requests
    assert [len(r.passes) for r in records] == [r.output_tokens for r in records]
    assert len({id(p) for r in records for p in r.passes}) == len(lm.engine.ledger.passes)


def test_a_setting_without_effect_on_a_task_is_in_the_report(lm: MoECacheLM) -> None:
    install(lm, scoring="scan", capacity="2/layer")
    lm.generate_until(generations(1), disable_tqdm=True)
    lm.loglikelihood(choices(), disable_tqdm=True)
    (warning,) = lm.report()["warnings"]
    assert all(word in warning for word in ("scoring=scan", "gen"))


def test_padding_of_a_batch_is_nobodys_token(lm: MoECacheLM) -> None:
    install(lm, streams=3)
    requests = generations(3)
    lm.generate_until(requests, disable_tqdm=True)
    first = lm.engine.ledger.passes[0]
    assert first.num_tokens == sum(len(lm.tok_encode(r.args[0])) for r in requests)
    assert all(r.passes[0] is first for r in lm.engine.ledger.requests)
    assert lm.report()["totals"]["requests"] == 3


@pytest.mark.parametrize("streams", [1, 3])
def test_choices_of_one_token_share_their_forward(lm: MoECacheLM, streams: int) -> None:
    install(lm, streams=streams)
    lm.loglikelihood(choices(), disable_tqdm=True)
    a, b, long_one, other, _, other_long = records = lm.engine.ledger.requests
    assert a.passes == b.passes
    assert a.passes[0] is b.passes[0]
    assert a.prompt_tokens == b.prompt_tokens < long_one.prompt_tokens
    passes = lm.engine.ledger.passes
    assert {id(p) for r in records for p in r.passes} == {id(p) for p in passes}
    # Padding left out, each input is computed once.
    inputs = (a, long_one, other, other_long)
    assert sum(p.num_tokens for p in passes) == sum(r.prompt_tokens for r in inputs)


@pytest.mark.parametrize("streams", [1, 3])
def test_windows_of_a_text_are_passes_of_its_request(lm: MoECacheLM, streams: int) -> None:
    install(lm, streams=streams)
    requests = texts()
    lm.loglikelihood_rolling(requests, disable_tqdm=True)
    records = lm.engine.ledger.requests
    assert len(records) == 2
    assert all(r.passes for r in records)
    served = {id(p) for r in records for p in r.passes}
    assert served == {id(p) for p in lm.engine.ledger.passes}
    if streams == 1:
        assert [len(r.passes) for r in records] == [2, 3]  # 90 and 110 tokens in windows of 48
    assert all("tpot_ms" not in request.moecache for request in requests)


@pytest.mark.parametrize("streams", [1, 3])
def test_a_request_has_no_pass_after_its_end_though_others_go_on(
    lm: MoECacheLM, streams: int
) -> None:
    install(lm, streams=streams)
    answers = lm.generate_until(generations(3), disable_tqdm=True)
    stop = next(text[:2] for text in answers if sum(text[:2] in other for other in answers) == 1)
    install(lm, streams=streams)
    requests = generations(3)
    for request in requests:
        request.args[1]["until"] = [stop]
    lm.generate_until(requests, disable_tqdm=True)
    records = lm.engine.ledger.requests
    counts = [record.output_tokens for record in records]
    assert min(counts) < max(counts) == 6
    assert [len(record.passes) for record in records] == counts
    if streams > 1:
        assert len(lm.engine.ledger.passes) == 6


@pytest.mark.parametrize("streams", [1, 2])
def test_a_scored_text_is_as_long_as_what_the_model_reads_of_it(
    lm: MoECacheLM, streams: int
) -> None:
    """A text longer than `max_length` is cut on the left, and its last token is only scored."""
    install(lm, streams=streams)
    lengths = {20: 20, 48: 48, 49: 48, 90: 48}
    requests = [
        make_instance("loglikelihood", "text", i, "x" * (length - 2), "abc")
        for i, length in enumerate(lengths)
    ]
    lm.loglikelihood(requests, disable_tqdm=True)
    records = lm.engine.ledger.requests
    assert [record.prompt_tokens for record in records] == [*lengths.values()]
    assert sum(p.num_tokens for p in lm.engine.ledger.passes) == sum(lengths.values())


def test_output_ends_with_the_closing_token_or_the_stop_string(lm: MoECacheLM) -> None:
    eos, pad = lm.tokenizer.eos_token_id, lm.tokenizer.pad_token_id
    row = lm.tok_encode("ab\n\ncd")
    assert lm._count_output(row, ["\n\n"]) == 4
    assert lm._count_output(row, ["zz"]) == 6
    assert lm._count_output([5, eos, pad, pad], ["zz"]) == 2
    assert lm._count_output([eos, pad], ["zz"]) == 1
    assert lm._count_output([7], ["zz"]) == 1


def test_cache_reset_starts_each_request_cold(lm: MoECacheLM) -> None:
    install(lm, capacity="100%")
    same = [make_instance("generate_until", "t", i, "Hello", STOP) for i in range(2)]
    lm.generate_until(same, disable_tqdm=True)
    first, second = (r.passes for r in lm.engine.ledger.requests)
    assert [p.misses for p in first] == [p.misses for p in second]
    assert sum(p.misses for p in second) > 0
    install(lm, capacity="100%", cache_reset="never")
    lm.generate_until(same, disable_tqdm=True)
    assert sum(p.misses for p in lm.engine.ledger.requests[1].passes) == 0


def test_report_is_plain_json_and_speed_a_flat_table_of_it(lm: MoECacheLM) -> None:
    install(lm, policy="specmd", cache_reset="never")
    lm.generate_until(generations(2), disable_tqdm=True)
    lm.loglikelihood(choices(), disable_tqdm=True)
    report = json.loads(json.dumps(lm.report(), allow_nan=False))
    totals = report["totals"]
    assert list(report["tasks"]) == ["choice", "gen"]
    assert report["policy"]["name"] == "specmd"
    assert report["policy"]["eviction"]["name"] == "least_stale"
    assert totals["requests"] == 8
    bytes_moved = sum(task["bytes_moved"] for task in report["tasks"].values())
    assert totals["bytes_moved"] == bytes_moved == lm.engine.memory.run.moved
    assert totals["peak_cache_bytes"] <= report["capacity_bytes"]
    table = pandas.DataFrame(lm.speed()).set_index("task")
    assert list(table.index) == ["choice", "gen", "all"]
    last = table.loc["all"]
    assert last["tok_per_s"] == totals["tok_per_s"]
    assert last["ttft_ms"] == totals["ttft_ms"]["mean"]
    assert last["ttft_ms_p90"] == totals["ttft_ms"]["p90"]
    assert not any(isinstance(value, dict) for row in lm.speed() for value in row.values())


def test_stored_answers_are_refused(lm: MoECacheLM) -> None:
    class Hook:
        dbdict: dict[str, str] = {}  # noqa: RUF012

    with pytest.raises(ValueError, match="--use_cache"):
        lm.set_cache_hook(Hook())


def test_the_report_says_where_the_model_ran_and_the_table_is_printed_once(
    checkpoint: Checkpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    """lm-eval asks for cuda:0 by default, even where there is none."""
    options = {"device": "cuda:0", "batch_size": 1}
    lm = MoECacheLM.create_from_arg_string(f"pretrained={checkpoint('olmoe')}", options)
    assert lm.get_model_info()["moecache"]["device"] == str(lm.model.device)
    assert capsys.readouterr().out.count("moecache (specmd") == 1
    lm.get_model_info()
    assert capsys.readouterr().out == ""


Loaded = tuple[Any, Any]


@pytest.fixture
def loaded(checkpoint: Checkpoint) -> Loaded:
    folder = checkpoint("olmoe")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def test_a_loaded_model_runs_as_the_same_model_by_name(
    loaded: Loaded, checkpoint: Checkpoint
) -> None:
    model, tokenizer = loaded
    settings: dict[str, Any] = {"policy": "specmd", "max_length": 48}
    preloaded = MoECacheLM(pretrained=model, tokenizer=tokenizer, **settings)
    by_name = MoECacheLM(pretrained=str(checkpoint("olmoe")), device="cpu", **settings)
    assert answers(preloaded) == answers(by_name)
    assert preloaded.report() == by_name.report()


def test_the_model_is_in_one_cache_at_a_time_and_given_back_as_it_was(loaded: Loaded) -> None:
    model, tokenizer = loaded
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        expected = model(tokens).logits
        lm = MoECacheLM(pretrained=model, tokenizer=tokenizer, policy="on_demand")
        with pytest.raises(ValueError, match="is inside an expert cache already"):
            MoECacheLM(pretrained=model, tokenizer=tokenizer)
        lm.wrapped.unwrap()
        assert torch.equal(model(tokens).logits, expected)
    assert model.get_experts_implementation() != "moecache"


def test_a_loaded_model_may_draft_for_itself(loaded: Loaded) -> None:
    model, tokenizer = loaded
    lm = MoECacheSpecLM(
        pretrained=model, tokenizer=tokenizer, draft="self:int8", policy="on_demand"
    )
    assert lm.report()["draft"]["name"] == "self:int8"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"clock": "wall"}, "clock='wall' cannot be combined with a model that is already loaded"),
        ({"precision": "int8"}, "precision='int8' cannot be combined with a model that is already"),
        ({"dtype": "float16"}, "dtype='float16' has no effect on a model that is already loaded"),
        ({"subfolder": "x"}, "subfolder='x' has no effect"),
    ],
    ids=str,
)
def test_what_only_loading_can_do_is_refused(
    loaded: Loaded, given: dict[str, str], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        MoECacheLM(pretrained=loaded[0], tokenizer=loaded[1], **given)


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> TaskManager:
    return small_tasks(tmp_path_factory.mktemp("tasks"), {})


def evaluate(lm: Any, manager: TaskManager, *tasks: str, **options: Any) -> dict[str, Any]:
    results: dict[str, Any] = lm_eval.simple_evaluate(
        model=lm, tasks=list(tasks), task_manager=manager, bootstrap_iters=0, **options
    )
    return results


def figures(lm: Any, manager: TaskManager, *tasks: str) -> dict[str, Any]:
    report: dict[str, Any] = evaluate(lm, manager, *tasks)["config"]["moecache"]
    return report


def test_each_evaluation_reports_its_own_requests_as_a_model_of_its_own_would(
    lm: MoECacheLM, manager: TaskManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(lm, capacity="50%")
    first, second = figures(lm, manager, "generated"), figures(lm, manager, "chosen")
    assert (list(first["tasks"]), list(second["tasks"])) == (["generated"], ["chosen"])
    assert first["totals"]["requests"] == 4
    assert figures(lm, manager, "generated") == first
    # An evaluation that fails half way leaves nothing.
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(lm, "loglikelihood", lambda *_: 1 / 0)
        evaluate(lm, manager, "generated", "chosen")
    assert figures(lm, manager, "generated") == first
    for _ in range(2):
        lm_eval.evaluate(lm=lm, task_dict=manager.load(["generated"]), bootstrap_iters=0)
        assert lm.report()["totals"]["requests"] == 4


def test_reset_empties_cache_and_counts(lm: MoECacheLM) -> None:
    def misses() -> list[int]:
        lm.generate_until(generations(2), disable_tqdm=True)
        return [p.misses for p in lm.engine.ledger.passes]

    install(lm, capacity="50%", cache_reset="never")
    assert lm.report()["totals"]["requests"] == 0
    cold = misses()
    warm = misses()
    assert warm[: len(cold)] == cold
    assert sum(warm[len(cold) :]) < sum(cold)
    lm.reset()
    assert lm.report()["totals"]["requests"] == 0
    assert misses() == cold


def test_each_evaluation_has_a_trace_of_its_own(
    lm: MoECacheLM, manager: TaskManager, tmp_path: Path
) -> None:
    install(lm, trace=str(tmp_path))
    requests = [
        figures(lm, manager, task)["totals"]["requests"] for task in ("generated", "chosen")
    ]
    assert requests == [4, 8]
    assert len([load_trace(str(path)) for path in tmp_path.glob("*.parquet")]) == 2


def test_figures_of_any_task_join_its_scores_and_on_its_samples(
    lm: MoECacheLM, manager: TaskManager
) -> None:
    install(lm)
    results = evaluate(lm, manager, "generated", "chosen")
    requests = lm.engine.ledger.requests
    generated = [r for r in requests if r.task == "generated"]
    ttft_ms = [request_metrics(r)["ttft_ms"] for r in generated]
    row = results["results"]["generated"]
    assert row["ttft_ms,speed"] == pytest.approx(sum(ttft_ms) / 4)
    assert row["ttft_ms_stderr,speed"] > 0
    assert "tpot_ms,speed" not in results["results"]["chosen"]  # nothing is decoded there
    assert results["higher_is_better"]["generated"]["request_miss_rate"] is False
    samples = [s for s in results["samples"]["generated"] if s["filter"] == "strict"]
    assert [s["speed"]["ttft_ms"] for s in samples] == ttft_ms
    # Latencies are read against the prompt's length, which is no metric in the results table.
    assert [s["speed"]["prompt_tokens"] for s in samples] == [r.prompt_tokens for r in generated]
    assert 0 < generated[0].prompt_tokens < generated[3].prompt_tokens
    assert "prompt_tokens,speed" not in row
    # Two choices of a document are one figure: their mean.
    e2el_ms = [request_metrics(r)["e2el_ms"] for r in requests if r.task == "chosen"]
    assert results["samples"]["chosen"][0]["speed"]["e2el_ms"] == pytest.approx(
        sum(e2el_ms[:2]) / 2
    )


def test_figures_are_those_of_the_documents_that_were_asked_for(
    lm: MoECacheLM, manager: TaskManager
) -> None:
    install(lm)
    results = evaluate(lm, manager, "generated", samples={"generated": [3, 1]})
    by_length = sorted(lm.engine.ledger.requests, key=lambda r: r.prompt_tokens)
    short, long = (request_metrics(r)["ttft_ms"] for r in by_length)
    # Keyed by text: lm-eval misnumbers documents that are requested out of order.
    ttft_by_text = {
        s["doc"]["text"][:6]: s["speed"]["ttft_ms"] for s in results["samples"]["generated"]
    }
    assert ttft_by_text == {"page 3": long, "page 1": short}
