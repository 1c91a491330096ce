"""A request is a sample: what is measured of it depends on no batch, order or other request.

A batch may round a near tie otherwise, as plain transformers does. In float64 none is that near, so
that all else can be compared exactly; `test_float32_batches_...` says how rare they are in float32.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from lm_eval_moecache import MoECacheLM
from lm_eval_moecache.algorithms.policy import load_policy, policy_names
from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.harness.arguments import read_config
from lm_eval_moecache.harness.requests import AUTO, ON_A_CPU, Seeds, whole_documents
from lm_eval_moecache.model import decoding
from lm_eval_moecache.model.decoding import MASK, Batch, RowDecoding
from lm_eval_moecache.model.device import device_of
from lm_eval_moecache.model.hook import WrappedModel
from lm_eval_moecache.records.files import task_configs_dir
from lm_eval_moecache.records.ledger import Counters, RequestRecord, total
from lm_eval_moecache.tiny import MODEL_DIR
from tests.artifacts import artifacts_of, predictor_of
from tests.conftest import Checkpoint
from tests.harness import choices, generations, make_instance, texts

HOST: dict[str, Any] = {
    **{"device": "cpu", "max_length": 48},
    # torch's grouped kernel knows no float64.
    **{"dtype": "float64", "experts_implementation": "batched_mm"},
}
QUICK = ("on_demand", "specmd", "mixture_cache", "buddymoe", "importance_scheduling", "hobbit")
OF_TOP_8 = ("buddymoe", "commitmoe", "commitmoe_deepseek")
"""Compositions with parameters for routers that choose many experts: they run on `tiny`."""
EVERY = [name for name in policy_names() if not load_policy(name).prefetch.algorithm.needs_draft]
CASES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in EVERY]
LADDERS: list[dict[str, Any]] = [
    {"policy": "hobbit"},
    {"policy": "hobbit", "eviction": "arc"},  # is served row by row
    {"policy": "on_demand", "miss": "fetch_priority", "miss.upgrade": True},
    {"policy": "specmd", "miss": "fetch_lowest"},
    {"policy": "on_demand", "miss": "drop_cascade", "miss.t1": 0.3, "miss.t2": 0.5},
    {"policy": "on_demand", "routing": "cache_prior", "miss": "cascade", "prefetch": "next_gate"},
]
NEAR = {
    **dict.fromkeys(("stall_s", "start_s", "end_s", "link_busy_s", "host_s", "host_wait_s"), 1e-9),
    # A sum of the router's own float32 weights.
    "lost_weight": 1e-5,
}
"""Sums of floats, and the relative error that their order and rounding may make."""


@pytest.fixture(scope="module")
def lm(checkpoint: Checkpoint) -> MoECacheLM:
    path = str(checkpoint("olmoe"))
    return MoECacheLM(path, **HOST, policy="on_demand")


def setting(lm: MoECacheLM, policy: str, **changes: Any) -> dict[str, Any]:
    """Return arguments of a policy with the artifacts and the ladder that it needs."""
    find = artifacts_of if lm.model.config.hidden_size < 100 else predictor_of
    return {"policy": policy, "capacity": "40%", **find(lm.model, load_policy(policy)), **changes}


Served = dict[tuple[str, Any, int], Any]


def serve(
    lm: MoECacheLM, given: dict[str, Any], requests: Sequence[Instance], batch: Any
) -> Served:
    """Return each request's answer and all that is counted of its passes."""
    lm.install(read_config(given))
    lm.batch_size_per_gpu = batch
    answers: Served = {}
    for kind in ("generate_until", "loglikelihood", "loglikelihood_rolling"):
        own = [request for request in requests if request.request_type == kind]
        for request, answer in zip(own, getattr(lm, kind)(own, disable_tqdm=True), strict=True):
            answers[request.task_name, request.doc_id, request.idx] = answer
    lm.engine.check_integrity()
    lm.batch_size_per_gpu = 1
    return {
        (record.task, record.document, record.place): (
            answers[record.task, record.document, record.place],
            record.prompt_tokens,
            record.output_tokens,
            [{**asdict(each), "index": 0} for each in record.passes],
        )
        for record in lm.engine.ledger.requests
    }


def assert_same(found: Served, expected: Served) -> None:
    for name, (answer, *counts, passes) in found.items():
        wanted, *other_counts, others = expected[name]
        near = wanted if isinstance(wanted, str) else pytest.approx(wanted, rel=1e-5)
        assert (answer, counts) == (near, other_counts), name
        assert len(passes) == len(others), name
        for one, other in zip(passes, others, strict=True):
            for key, value in one.items():
                if key in NEAR:
                    about = pytest.approx(other[key], rel=NEAR[key], abs=1e-12)
                    assert value == about, (name, key)
                else:
                    assert value == other[key], (name, key)


def all_requests() -> list[Instance]:
    return [*generations(5), *choices(), *texts()]


@pytest.fixture(scope="module")
def tiny() -> MoECacheLM:
    return MoECacheLM("tiny", **HOST, policy="on_demand")


@pytest.mark.parametrize("policy", CASES)
def test_a_request_costs_and_answers_the_same_in_any_batch(
    lm: MoECacheLM, tiny: MoECacheLM, policy: str
) -> None:
    lm = tiny if policy in OF_TOP_8 else lm
    ladder = load_policy(policy).miss.algorithm.uses_ladder
    if ladder:
        pytest.skip("a store of several precisions is loaded for them: see test_a_ladder")
    given = setting(lm, policy)
    alone = serve(lm, given, all_requests(), 1)
    for batch in (3, 16, "auto"):
        assert_same(serve(lm, given, all_requests(), batch), alone)
    if lm.moecache.cache_reset == "never":
        return
    # Where each starts anew, neither their order nor their number matters.
    shuffled = all_requests()
    random.Random(0).shuffle(shuffled)
    assert_same(serve(lm, given, shuffled, 3), alone)
    assert_same(serve(lm, given, shuffled[:5], 2), alone)


def test_a_ladder_gives_each_request_its_own_precisions(checkpoint: Checkpoint) -> None:
    path, common = str(checkpoint("olmoe")), {"capacity": "40%", "precision": "int8:int4:int2"}
    # bitsandbytes encodes no float64.
    lm = MoECacheLM(path, **{**HOST, "dtype": "float32"}, **LADDERS[0], **common)
    for own in LADDERS:
        given = {**own, **common}
        alone = serve(lm, given, all_requests(), 1)
        assert_same(serve(lm, given, all_requests()[::-1], 4), alone)
        assert_same(serve(lm, given, all_requests(), 16), alone)
        passes = lm.engine.ledger.passes
        assert 0 < sum(each.low_precision for each in passes) < sum(p.executed for p in passes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "ours",
    [
        *({"policy": name} for name in ("on_demand", "specmd", "mixture_cache", "buddymoe")),
        {"policy": "importance_scheduling"},
        {"policy": "specmd", "eviction": "hazard"},
    ],
    ids=lambda ours: "-".join(ours.values()),
)
def test_float32_batches_change_one_answer_in_a_hundred_at_most(ours: dict[str, str]) -> None:
    """A batch rounds near ties as plain transformers does: 200 documents of three tasks."""
    lm = MoECacheLM("tiny", device="cpu", **ours)
    manager = TaskManager(include_path=str(task_configs_dir()), include_defaults=False)
    found: list[tuple[dict[Any, Any], list[Counters]]] = []
    for batch in (1, 16, 64):
        lm.batch_size_per_gpu = batch
        answers, counted = dict[Any, Any](), list[Counters]()
        for task, limit in (("tiny_gsm8k", 20), ("tiny_bbh", 90), ("tiny_mmlu", 90)):
            results = lm_eval.simple_evaluate(
                lm, tasks=[task], limit=limit, task_manager=manager, bootstrap_iters=0
            )
            samples = [(name, each) for name, of in results["samples"].items() for each in of]
            answers |= {(n, s["doc_id"]): answer_of(s["filtered_resps"]) for n, s in samples}
            counted += lm.engine.ledger.passes
        found.append((answers, counted))
    (alone, counts), *others = found
    assert len(alone) == 200
    for answers, counted in others:
        assert sum(alone[name] == answers[name] for name in alone) >= 0.99 * len(alone)
        for name in ("requests", "misses", "bytes_moved", "evictions", "dropped", "substituted"):
            own, other = getattr(total(counted), name), getattr(total(counts), name)
            assert own == pytest.approx(other, rel=1e-3), name


def answer_of(responses: list[Any]) -> Any:
    """Return a document's text, or the place of the choice that is likeliest."""
    if isinstance(responses[0], str):
        return responses
    return max(range(len(responses)), key=lambda choice: responses[choice][0])


@pytest.mark.parametrize("batch", [1, 3, 16])
def test_any_batch_answers_as_the_plain_model_does(
    lm: MoECacheLM, checkpoint: Checkpoint, batch: int
) -> None:
    plain = HFLM(str(checkpoint("olmoe")), batch_size=batch, **HOST)
    kinds, expected = (generations(6), choices(), texts()), list[Any]()
    for kind in kinds:
        if kind[0].request_type == "loglikelihood_rolling":
            # Equal windows of two texts would share a forward that they do not share alone.
            plain.batch_size_per_gpu = 1
        expected += getattr(plain, kind[0].request_type)(kind, disable_tqdm=True)
    requests = [request for kind in kinds for request in kind]
    served = serve(lm, setting(lm, "specmd"), requests, batch)
    for request, answer in zip(requests, expected, strict=True):
        found = served[request.task_name, request.doc_id, request.idx][0]
        assert found == (answer if isinstance(answer, str) else pytest.approx(answer, rel=1e-5))


def test_a_drawn_answer_depends_on_its_request_alone(lm: MoECacheLM) -> None:
    drawn = {"until": ["\n\n"], "max_gen_toks": 6, "do_sample": True, "temperature": 1.5}
    requests = [make_instance("generate_until", "g", i, "Draw " + "x" * i, drawn) for i in range(5)]
    alone = serve(lm, setting(lm, "mixture_cache"), requests, 1)
    assert_same(serve(lm, setting(lm, "mixture_cache"), requests[::-1], 4), alone)
    assert len({answer for answer, *_ in alone.values()}) > 1
    record = RequestRecord(0, "t", "generate_until", document=3)
    seeds = Seeds()
    assert seeds.next(record) == Seeds().next(record) != seeds.next(record)


@pytest.mark.parametrize(
    "options", [{"repetition_penalty": 1.3}, {"num_beams": 2}, {"min_new_tokens": 4}]
)
def test_options_that_would_see_padding_are_computed_alone(
    lm: MoECacheLM, options: dict[str, Any]
) -> None:
    asked = {"until": ["\n\n"], "max_gen_toks": 5, **options}
    requests = [make_instance("generate_until", "g", i, "Say " + "y" * i, asked) for i in range(4)]
    alone = serve(lm, setting(lm, "specmd"), requests, 1)
    assert_same(serve(lm, setting(lm, "specmd"), requests, 4), alone)


# --- seeded faults: the comparison above sees each of them ---


def neighbour(patch: pytest.MonkeyPatch) -> None:
    """A row is served to its neighbour."""
    begin = WrappedModel._parts

    def turned(self: WrappedModel, *args: Any) -> Any:
        assert self.rows is not None
        self.rows = [*self.rows[1:], self.rows[0]]
        return begin(self, *args)

    patch.setattr(WrappedModel, "_parts", turned)


def carried(patch: pytest.MonkeyPatch) -> None:
    """A rule's state is carried over to the next request."""
    make = Engine.fresh

    def keeping(self: Engine, future: Any = None) -> Engine:
        engine = make(self, future)
        engine.rules = self.rules
        engine.alone.restart()
        return engine

    patch.setattr(Engine, "fresh", keeping)


def padded(patch: pytest.MonkeyPatch) -> None:
    """A padding token is counted."""
    patch.setattr(WrappedModel, "_valid_tokens", lambda *_: None)


def mistaken(patch: pytest.MonkeyPatch) -> None:
    """Where rows have ended, others are kept than go on."""
    keep = decoding._keep

    def first_ones(kwargs: dict[str, Any], rows: Sequence[int]) -> None:
        keep(kwargs, [*range(len(rows))])

    patch.setattr(decoding, "_keep", first_ones)


def lingering(patch: pytest.MonkeyPatch) -> None:
    """A row goes on for a token after its end."""
    advance = RowDecoding._advance

    def late(self: RowDecoding, batch: Batch, outputs: Any) -> Batch | None:
        has_stopped = self._has_stopped
        self._has_stopped = lambda texts: has_stopped([text[:-1] for text in texts])
        after = advance(self, batch, outputs)
        self._has_stopped = has_stopped
        return after

    patch.setattr(RowDecoding, "_advance", late)


def unmasked(patch: pytest.MonkeyPatch) -> None:
    """A prompt that takes the place of an ended row sees its padding."""
    join = decoding._join

    def seeing(first: Batch, second: Batch) -> Batch:
        joined = join(first, second)
        joined.kwargs[MASK] = torch.ones_like(joined.kwargs[MASK])
        return joined

    patch.setattr(decoding, "_join", seeing)


@pytest.mark.parametrize(
    ("fault", "policy", "batch"),
    [
        (neighbour, "on_demand", 4),
        (neighbour, "max_rank", 4),
        (padded, "on_demand", 4),
        (padded, "max_rank", 4),
        (carried, "specmd", 4),
        (lingering, "on_demand", 4),
        (mistaken, "on_demand", 4),
        (unmasked, "on_demand", 2),
    ],
)
def test_a_seeded_fault_is_seen(
    tiny: MoECacheLM,
    fault: Callable[[Any], None],
    policy: str,
    batch: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lm, given = (
        tiny,
        setting(tiny, policy, cache_reset="never" if policy == "on_demand" else "request"),
    )
    # A stop string that ends the rows at different places.
    stops = {"until": ["t"], "max_gen_toks": 12}
    asked = [
        make_instance("generate_until", "g", i, f"Tom has {i} " * i, stops) for i in (1, 2, 3, 4)
    ]
    requests = [*asked, *choices()]
    alone = serve(lm, given, requests, 1)
    assert fault is not lingering or len({counts[1] for _, *counts, _ in alone.values()}) > 2
    fault(monkeypatch)
    with pytest.raises((AssertionError, IndexError, ValueError)):
        assert_same(serve(lm, given, requests, batch), alone)
    monkeypatch.undo()
    lm._rows.clear()


def test_a_prompt_takes_the_place_of_a_row_that_has_ended(tiny: MoECacheLM) -> None:
    stops = {"until": ["t"], "max_gen_toks": 12}
    asked = [
        make_instance("generate_until", "g", i, f"Tom has {i} " * i, stops) for i in (1, 2, 3, 4)
    ]
    given, shapes = setting(tiny, "on_demand"), list[tuple[int, int]]()
    alone = serve(tiny, given, asked, 1)
    handle = tiny.model.register_forward_pre_hook(
        lambda _, __, more: shapes.append((*more["input_ids"].shape,)), with_kwargs=True
    )
    assert_same(serve(tiny, given, asked, 2), alone)
    handle.remove()
    read = [place for place, (rows, tokens) in enumerate(shapes) if rows == 1 and tokens > 1]
    assert any(shapes[place + 1] == (2, 1) for place in read)
    # Every row that is computed is waited for.
    decoded = sum(rows for rows, tokens in shapes if tokens == 1)
    assert decoded == sum(counts[1] - 1 for _, *counts, _ in alone.values())


def test_weights_on_disk_are_computed_where_accelerate_says(tmp_path: Path) -> None:
    """Without a card `parallelize=True` leaves all weights on disk: `model.device` is then none."""
    host = {**HOST, "parallelize": True, "offload_folder": str(tmp_path)}
    alone, batched = (
        MoECacheLM(str(MODEL_DIR), batch_size=batch, policy="on_demand", **host) for batch in (1, 3)
    )
    assert batched.model.device.type == "meta" != device_of(batched.model).type
    expected = alone.generate_until(generations(), disable_tqdm=True)
    assert batched.generate_until(generations(), disable_tqdm=True) == expected
    assert batched.report()["device"] == "cpu"


# --- in whose turn ---


def test_documents_are_never_divided_nor_share_an_input_with_another() -> None:
    documents, inputs = [*"aabbbcd"], [*"1123452"]
    parts = [*whole_documents(documents, inputs, 2)]
    assert not {part.start for part in parts} & {1, 3, 4}
    for part in parts:
        owners: dict[str, str] = {}
        for document, given in zip(documents[part], inputs[part], strict=True):
            assert owners.setdefault(given, document) == document
    assert [i for part in parts for i in range(part.start, part.stop)] == [*range(7)]


@pytest.mark.parametrize(
    ("ours", "why"),
    [
        ({"scoring": "scan", "capacity": "4/layer"}, "one text token after token"),
        ({"policy": "mixture_cache", "cache_reset": "never"}, "depends on the request before"),
        ({"streams": 3}, "share the cache"),
    ],
)
def test_what_cannot_go_in_a_batch_is_computed_alone_and_said_once(
    lm: MoECacheLM, ours: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    lm.batch_size_per_gpu = 8
    lm.install(read_config({"policy": "on_demand", "capacity": "40%", **ours}))
    said = [record.message for record in caplog.records if "batch_size=8" in record.message]
    assert len(said) == 1 and why in said[0]
    lm.batch_size_per_gpu = 1


def test_auto_is_a_number_of_rows_that_a_cpu_is_fastest_on(lm: MoECacheLM) -> None:
    lm.install(read_config({"policy": "on_demand"}))
    assert serve(lm, {"policy": "on_demand"}, generations(3), AUTO)
    # lm-eval prints them beside its own option, which stays 1.
    assert lm.get_model_info() and list(lm.batch_sizes.values()) == [ON_A_CPU]
    assert serve(lm, {"policy": "on_demand"}, generations(3), 1)
    assert lm.get_model_info() and list(lm.batch_sizes.values()) == []
