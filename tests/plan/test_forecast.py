"""The formula of runtimes' speeds: by hand, in its limits, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm_eval_moecache.emulate.models import load_real_model
from lm_eval_moecache.emulate.stored import load_stored
from lm_eval_moecache.records.hardware import load_hardware
from lm_eval_moecache.records.real_model import LayerCaches, RealModel, Stored
from lm_eval_moecache.records.runtimes import Runtime, load_runtime
from moecache_plan.forecast import (
    forecast,
    prefill_tok_per_s,
    prompt_work,
    rule_of_thumb_s,
    scale_by,
    token_work,
)
from moecache_plan.machines import Machine
from moecache_plan.mechanisms import Mechanisms, mechanisms
from moecache_plan.placement import (
    Placement,
    automatic,
    hit_rate,
    place,
    read_placement,
    room,
    settled,
    touched_share,
)

# Experts of 1 MB, two of four in each of ten layers; 100 MB of dense weights are read, all bytes.
MODEL = RealModel(
    name="m",
    num_layers=10,
    num_experts=4,
    top_k=2,
    expert_weights=1_000_000,
    stored=Stored("bytes", 8, 8, 8),
    layer_weights=10_000_000,
    read_once=0,
    embedding=0,
    caches=(LayerCaches(10, 100.0, 1),),
)
MACHINE = Machine(
    name="box",
    memory_bytes_per_s=1e12,
    memory_bytes=24e9,
    peak_flops=1e14,
    host_memory_channels=1,
    host_memory_mt_per_s=1e11 / 8e6,
    link_bytes_per_s=2e10,
    link_latency_s=0.0,
    kernel_overhead_s=0.0,
    drive_random_bytes_per_s=5e9,
)
ALONE = replace(
    MACHINE, is_processor=True, memory_bytes_per_s=1e11, host_memory_channels=0, cores=8
)
KNOWN = Mechanisms(
    constants={
        **{"card_share": 0.5, "host_share": 0.4, "link_share": 0.8, "drive_share": 1.0},
        **{"cuda_layer_us": 10, "rocm_layer_us": 20, "metal_layer_us": 30, "eager_layer_us": 40},
        **{"host_layer_us": 100, "copy_layer_us": 200, "read_layer_us": 300},
        **{"attention_share": 0.1, "card_state_us": 50, "host_state_us": 500},
        **{"host_attention_us": 16e4, "host_shared_us": 2e4, "crossing_us": 1000},
        **{"prefill_compute_share": 0.5, "prefill_link_share": 1.0},
        **{"prefill_card_share": 0.5, "prefill_chunk_ms": 10.0, "prefill_core_gflops": 50.0},
    },
    curve=0.1,
    routings={
        "r": {"experts": 4, "top_k": 2, "hits": [0.2, 0.5, 0.8, 1.0], "popularity_shape": 1.0}
    },
)
HOST = Runtime(name="r", absent="host")


def seconds(placement: str, runtime: Runtime, hit: float | None = None, context: int = 0) -> float:
    placed = place(MODEL, MACHINE, runtime, read_placement(placement), context, hit, KNOWN)
    found = forecast(MODEL, MACHINE, runtime, placed, context, known=KNOWN)
    return 1 / found.tok_per_s


def test_each_mechanism_by_hand() -> None:
    """A token needs 20 MB of experts and 100 MB of dense weights."""
    card = 120e6 / 0.5e12 + 10 * 10e-6
    assert seconds("resident", HOST) == pytest.approx(card)
    # Experts of 4 of 10 layers: 8 MB at 40 GB/s instead of on the card, and 4 overheads.
    host = 112e6 / 0.5e12 + 8e6 / 0.4e11 + 10 * 10e-6 + 4 * 100e-6
    assert seconds("host_layers=4", HOST) == pytest.approx(host)
    assert seconds("cpu", HOST) == pytest.approx(120e6 / 0.4e11 + 10 * 100e-6)
    copy = Runtime(name="c", absent="copy")
    assert seconds("slots=1", copy, hit=0.75) == pytest.approx(card + 5e6 / 1.6e10 + 10 * 200e-6)
    read = Runtime(name="d", absent="read")
    assert seconds("slots=1", read, hit=0.75) == pytest.approx(card + 5e6 / 5e9 + 10 * 300e-6)
    both = Runtime(name="b", absent="both")
    by_both = 115e6 / 0.5e12 + 5e6 / 0.4e11 + 10 * 110e-6
    assert seconds("cache=10MB", both, hit=0.75) == pytest.approx(by_both)
    # Whole layers: a quarter... 4 of 10 layers' 40 MB, whatever was routed.
    layer = Runtime(name="l", absent="layer")
    assert seconds("host_layers=4", layer) == pytest.approx(card + 16e6 / 1.6e10 + 10 * 200e-6)
    # 1000 tokens of context: 1 MB of KV cache, and 20 kFLOP of attention, or by the processor.
    longer = card + 1e6 / 0.5e12 + 2e4 / 1e13
    assert seconds("resident", HOST, context=1000) == pytest.approx(longer)
    alone = 121e6 / 0.4e11 + 10 * 100e-6 + 2e-5 * 10e-3
    assert seconds("cpu", HOST, context=1000) == pytest.approx(alone)


def test_layers_cost_what_the_kind_of_card_and_program_and_the_number_of_cards_make_of_them() -> (
    None
):
    """120 MB in 0.24 ms; ten layers of 10 us by graphs, 20 by HIP, 30 by Metal, 40 more eager."""

    def token(machine: Machine, runtime: Runtime = HOST, model: RealModel = MODEL) -> float:
        placed = place(model, machine, runtime, Placement(kind="resident"), 0, known=KNOWN)
        return 1 / forecast(model, machine, runtime, placed, 0, known=KNOWN).tok_per_s

    for name, layer in (("rtx-3090", 10), ("rx-7900", 20), ("m4-max", 30), ("box", 10)):
        found = token(replace(MACHINE, name=name))
        assert found == pytest.approx(0.24e-3 + 10e-6 * layer)
    assert token(MACHINE, replace(HOST, eager=True)) == pytest.approx(0.24e-3 + 0.5e-3)
    # Layer after layer a token crosses to a second card; over both, each reads half.
    assert token(replace(MACHINE, cards=2)) == pytest.approx(0.34e-3 + 1e-3)
    split = replace(MACHINE, cards=2, is_tensor_parallel=True)
    assert token(split) == pytest.approx(0.12e-3 + 0.1e-3)
    assert token(replace(MACHINE, cards=2), replace(HOST, splits="tensor")) == token(split)
    # 2 MB of linear attention's state, 50 us each on a card and 500 by the processor.
    linear = replace(MODEL, state_bytes=2_000_000)
    assert token(MACHINE, model=linear) == pytest.approx(0.34e-3 + 0.1e-3)
    assert token(ALONE, model=linear) == pytest.approx(3e-3 + 1e-3 + 1e-3)


def test_whole_layers_on_the_host_have_their_attention_and_dense_weights_there() -> None:
    """Four of ten layers: 40% of 120 MB, of a state of 2 MB and of 20 kFLOP a 1,000 tokens."""
    linear = replace(MODEL, state_bytes=2_000_000)
    placed = place(linear, MACHINE, HOST, read_placement("-ngl 6"), 1000, known=KNOWN)
    assert (placed.mechanism, placed.whole, placed.cached) == ("host", 0.4, pytest.approx(0.6))
    work = token_work(linear, MACHINE, HOST, placed, 1000)
    assert work.card == pytest.approx(0.6 * 121e6 / 1e12)
    assert work.host == pytest.approx(0.4 * 121e6 / 1e11)
    assert (work.host_layer, work.cuda_layer) == (pytest.approx(4), pytest.approx(6))
    assert (work.host_state, work.card_state) == (pytest.approx(0.8), pytest.approx(1.2))
    assert work.host_attention == pytest.approx(0.4 * 2e-5 / 16), "of one of 16 cores"
    assert place(MODEL, MACHINE, HOST, read_placement("gpu_layers=10"), 0).mechanism == "resident"
    # 70 of the 140 MB of weights: five layers, where experts alone would all stay.
    small = replace(MACHINE, memory_bytes=1e9 + 70e6)
    whole = replace(HOST, placement="gpu_layers")
    assert automatic(MODEL, small, whole, 0) == Placement(kind="gpu_layers", amount=5)
    assert automatic(MODEL, MACHINE, whole, 0).kind == "resident"


def test_a_processors_attention_goes_by_its_cores_and_kernels_and_by_what_heads_share() -> None:
    """20 MFLOP of 1,000 tokens: 16 cores' 160 ms a GFLOP; where all heads share vectors, 20 ms."""

    def added(machine: Machine, runtime: Runtime, is_shared: bool) -> float:
        caches = (LayerCaches(10, 0.0, 1000, is_shared=is_shared),)
        model = replace(MODEL, caches=caches)
        cpu = Placement(kind="cpu")
        placed = place(model, machine, runtime, cpu, 1000, known=KNOWN)
        tokens = (
            forecast(model, machine, runtime, placed, context, known=KNOWN).tok_per_s
            for context in (1000, 0)
        )
        return sum(sign / speed for sign, speed in zip((1, -1), tokens, strict=True))

    usual, fast = replace(ALONE, cores=None), replace(HOST, core_factor=4.0)
    for machine, runtime, cores in ((usual, HOST, 16), (ALONE, HOST, 8), (ALONE, fast, 32)):
        assert added(machine, runtime, False) == pytest.approx(0.02 * 160e-3 / cores)
        assert added(machine, runtime, True) == pytest.approx(0.02 * 20e-3 / cores)


@pytest.mark.parametrize(
    ("model", "stored", "rate", "context", "adds"),
    [
        ("DeepSeek-V2-Lite", "q4_0", 83.2e9, 5120, 4.1e-3),
        ("GLM-4.7-Flash", "iq5_k", 614.4e9, 16_000, 30e-3),
        ("gpt-oss-20b", "mxfp4_moe", 83.2e9, 8192, 8.1e-3),
    ],
)
def test_the_context_that_16_cores_attend_to_adds_what_was_measured(
    model: str, stored: str, rate: float, context: int, adds: float
) -> None:
    """ik_llama.cpp's PR 410 and loftllc.dev, of MLA, and its pull request of gpt-oss, of GQA: by
    the shipped constants within twice (GLM: what is left of 49.4 ms after its weights)."""
    real = replace(load_real_model(model), stored=load_stored(stored))
    machine = replace(ALONE, memory_bytes_per_s=rate, memory_bytes=1e11, cores=16)
    ik = load_runtime("ik_llama.cpp")
    placed = place(real, machine, ik, Placement(kind="cpu"), context)
    long, short = (forecast(real, machine, ik, placed, n).tok_per_s for n in (context, 1))
    assert adds / 2 < 1 / long - 1 / short < adds * 2


def test_a_rule_of_thumb_and_the_ideal_are_bandwidths_alone() -> None:
    placed = place(MODEL, MACHINE, HOST, read_placement("host_layers=5"), 0)
    work = token_work(MODEL, MACHINE, HOST, placed, 0)
    assert rule_of_thumb_s(work) == pytest.approx(110e6 / 0.55e12 + 10e6 / 0.7e11)
    ideal = load_runtime("ideal")
    found = forecast(MODEL, MACHINE, ideal, placed, 0, known=KNOWN)
    assert found.tok_per_s == pytest.approx(1 / (110e6 / 1e12 + 10e6 / 1e11))


def test_hits_are_the_mean_of_the_curve_and_the_replay_and_whole_where_all_is_cached() -> None:
    missed = math.sqrt((1 - 0.5 * 1.1 / 0.6) * 0.5)
    assert hit_rate(MODEL, 0.5, KNOWN) == pytest.approx(1 - missed)
    assert (hit_rate(MODEL, 0.0, KNOWN), hit_rate(MODEL, 1.0, KNOWN)) == (0.0, 1.0)


@given(st.floats(0, 1), st.floats(0, 1))
def test_more_cache_never_hits_less(one: float, other: float) -> None:
    model = replace(MODEL, num_experts=128, top_k=8)
    low, high = sorted((one, other))
    assert hit_rate(model, low) <= hit_rate(model, high) + 1e-12


@given(st.integers(0, 10), st.integers(0, 10))
def test_fewer_layers_on_the_host_are_never_slower(one: int, other: int) -> None:
    low, high = sorted((one, other))
    assert seconds(f"host_layers={low}", HOST) <= seconds(f"host_layers={high}", HOST)


def test_automatic_leaves_room_for_the_cache_and_buffers() -> None:
    """Of 41 MB of cards' memory beyond buffers and dense weights, 1 MB a layer is one expert."""
    small = replace(MACHINE, memory_bytes=1e9 + 100e6 + 25e6)
    assert room(MODEL, small, 0) == 25e6
    # 25 of 40 MB fit: 6 of 10 layers, so 4 stay on the host; 2 of 4 experts a layer.
    assert automatic(MODEL, small, HOST, 0) == Placement(kind="host_layers", amount=4)
    copy = Runtime(name="c", absent="copy")
    assert automatic(MODEL, small, copy, 0) == Placement(kind="slots", amount=2)
    assert automatic(MODEL, MACHINE, copy, 0).kind == "resident"
    with pytest.raises(ValueError, match="keeps every expert in the device's memory"):
        automatic(MODEL, small, Runtime(name="x", absent="resident"), 0)


def test_a_prompt_ships_what_its_chunks_touch_and_the_processors_share_is_not_modelled() -> None:
    placed = place(MODEL, MACHINE, HOST, read_placement("host_layers=4"), 0)
    work = prompt_work(MODEL, MACHINE, HOST, placed, 1024, chunk=256, known=KNOWN)
    assert work is not None
    assert work.chunks == 4
    # Of 16 MB on the host 256 tokens, each of half the experts, leave 1 in 129, in four chunks.
    assert work.link == pytest.approx(4 * 128 / 129 * 16e6 / 2e10)
    assert work.compute == pytest.approx(2 * 1024 * 120e6 / 1e14, rel=0.01)
    whole = prompt_work(MODEL, MACHINE, replace(HOST, prefill="layer"), placed, 1024, 256, KNOWN)
    assert whole is not None and whole.link == pytest.approx(4 * 16e6 / 2e10)
    assert prompt_work(MODEL, MACHINE, HOST, placed, 8) is None
    cpu = place(MODEL, MACHINE, HOST, read_placement("cpu"), 0)
    assert prompt_work(MODEL, MACHINE, HOST, cpu, 1024) is None, "of how many cores?"


def test_a_processors_cores_compute_a_prompt_at_their_programs_rate() -> None:
    cpu = place(MODEL, ALONE, HOST, read_placement("cpu"), 0)
    work = prompt_work(MODEL, ALONE, HOST, cpu, 1024, known=KNOWN)
    assert work is not None and work.core == pytest.approx(1e-9 * MODEL.prompt_flops(1024) / 8)
    # 1,024 tokens of 120 M weights are 246 GFLOP and attention: at 50 GFLOP/s a core 0.6 s.
    speed = prefill_tok_per_s(work, 1024, HOST, KNOWN)
    assert speed == pytest.approx(1024 / (246 / 8 / 50), rel=0.01)
    faster = replace(HOST, core_factor=3.0)
    twice = prompt_work(MODEL, replace(ALONE, cores=16), faster, cpu, 1024, known=KNOWN)
    assert twice is not None
    assert prefill_tok_per_s(twice, 1024, faster, KNOWN) == pytest.approx(6 * speed)


def test_a_prompt_token_after_token_is_as_fast_as_decoding() -> None:
    reads = Runtime(name="r", absent="read", prefill="token")
    placed = place(MODEL, MACHINE, reads, read_placement("slots=2"), 0, 0.75, KNOWN)
    work = prompt_work(MODEL, MACHINE, reads, placed, 100, known=KNOWN)
    assert work is not None
    decoded = forecast(MODEL, MACHINE, reads, placed, 50, known=KNOWN)
    assert prefill_tok_per_s(work, 100, reads, KNOWN) == pytest.approx(decoded.tok_per_s)


def test_few_experts_are_popular_in_a_text() -> None:
    """As in the shipped routing of 48 layers: 46% of 128 experts in 64 tokens of 6 each."""
    model = replace(MODEL, num_experts=128, top_k=6)
    shares = [touched_share(model, tokens) for tokens in (1, 2, 64, 512, 1e9)]
    assert shares == sorted(shares) and shares[0] == 6 / 128
    assert shares[1] <= 12 / 128
    assert shares[2] == pytest.approx(0.465, rel=0.1)
    assert 0.6 < shares[3] < 0.9 and 0.99 < shares[4] <= 1


@pytest.mark.parametrize("text", ["all", "host_layers = ALL", "-ot exps=CPU", "--cpu-moe"])
def test_placements_are_read_as_llama_cpp_has_them(text: str) -> None:
    assert read_placement(text) == Placement(kind="host_layers", amount=math.inf)
    assert read_placement("--n-cpu-moe 25") == Placement(kind="host_layers", amount=25)


def test_the_runtime_ideal_changes_no_device_and_others_slow_it() -> None:
    device = load_hardware("rtx-3090")
    assert load_runtime("ideal").on(device) is device
    slower = load_runtime("llama.cpp").on(device)
    assert slower.memory_bytes_per_s == pytest.approx(
        device.memory_bytes_per_s * mechanisms().constants["card_share"]
    )
    assert slower.layer_overhead_s > 0


def test_page_faults_of_a_mapped_file_reach_a_fifth_of_the_drive() -> None:
    """Of 20 MB of experts a token misses 5 MB: 1 ms at 5 GB/s, 5 ms by faults."""
    reads = Runtime(name="r", absent="read")
    placed = place(MODEL, MACHINE, reads, read_placement("slots=1"), 0, 0.75, KNOWN)
    drives = [
        token_work(MODEL, MACHINE, reads, each, 0).drive
        for each in (placed, replace(placed, by_faults=True))
    ]
    assert drives == pytest.approx([1e-3, 5e-3])


def test_a_given_placement_fits_or_is_refused_with_what_is_left() -> None:
    """Of 1.131 GB a GB is for buffers, 100 MB are dense weights, 1 MB KV cache: 30 MB are left.

    Experts of three of ten layers on the host leave 28 MB of 40 on the card, of two 32.
    """
    small = replace(MACHINE, memory_bytes=1.131e9)
    fits = settled(MODEL, small, HOST, 1000, read_placement("n-cpu-moe 3"))
    assert (fits.mechanism, fits.on_host) == ("host", 0.3)
    with pytest.raises(ValueError, match=r"host_layers=2 needs 0\.0 GB for experts; dense weights"):
        settled(MODEL, small, HOST, 1000, read_placement("--n-cpu-moe 2"))
    # Of layers that go whole to the host, dense weights and KV cache go, too: 141 MB in ten of
    # them, of which nine need 126.9 of 131 MB that buffers leave.
    whole = settled(MODEL, small, HOST, 1000, read_placement("-ngl 9"))
    assert whole.whole == pytest.approx(0.1)
    with pytest.raises(ValueError, match="gpu_layers=10 needs"):
        settled(MODEL, small, HOST, 1000, read_placement("-ngl 10"))
    # In eight bits the KV cache takes half of its MB, in q4_0 4.5 of 16 parts.
    assert MODEL.with_cache_bits(8).kv_bytes(1000) == 500_000
    assert MODEL.with_cache_bits(4.5).kv_bytes(1000) == 281_250
    # A processor needs all of it in RAM, besides 4 GB of the system's; else the drive is read.
    for ram, mechanism in ((4.2e9, "host"), (4.12e9, "read")):
        where = settled(
            MODEL, replace(small, host_memory_bytes=ram), HOST, 1000, read_placement("cpu")
        )
        assert (where.mechanism, where.placement.kind) == (mechanism, "cpu")
        assert where.by_faults == (mechanism == "read")


def test_each_card_has_buffers_of_its_own() -> None:
    """24 GB less 1 GB of each, 100 MB of dense weights, and 1 MB for 1,000 tokens of context."""
    rooms = [room(MODEL, replace(MACHINE, cards=cards), 1000) for cards in (1, 2, 3)]
    assert rooms == [22.899e9, 45.899e9, 68.899e9]


@pytest.mark.parametrize("absent", ["host", "copy", "read", "both"])
def test_a_runtimes_factor_is_that_of_every_speed(absent: str) -> None:
    """A program of half the speed of its mechanism takes twice the time, whatever it waits for."""
    usual, slow = (Runtime(name="r", absent=absent, factor=factor) for factor in (1.0, 0.5))
    assert seconds("slots=1", slow, 0.75) == pytest.approx(2 * seconds("slots=1", usual, 0.75))
    device = replace(load_hardware("rtx-3090"), link_efficiency=0.5, link_lane_bytes_per_s=None)
    plain, halved = usual.on(device), slow.on(device)
    shares = mechanisms().constants
    link, host = shares["drive_share" if absent == "read" else "link_share"], shares["host_share"]
    assert plain.link_rate == pytest.approx(device.link_rate * link)
    nominal = device.host_nominal_bytes_per_s
    assert nominal and plain.host_memory_bytes_per_s == pytest.approx(nominal * host)
    extra = {"copy": "copy_layer_us", "read": "read_layer_us"}.get(absent, "host_layer_us")
    layer_us = shares["cuda_layer_us"] + shares[extra]
    assert plain.layer_overhead_s == pytest.approx(1e-6 * layer_us)
    for name in ("memory_bytes_per_s", "host_memory_bytes_per_s", "link_rate", "lane_rate"):
        assert getattr(halved, name) == pytest.approx(getattr(plain, name) / 2)
    assert halved.layer_overhead_s == pytest.approx(2 * plain.layer_overhead_s)


def test_one_measurement_scales_a_machine_or_its_drive() -> None:
    # Forecast 10 tok/s, measured 5: everything is twice as slow.
    assert scale_by(5, 0.1, 0.0) == pytest.approx((0.5, 1.0))
    # Of 0.2 s 0.05 are not the drive's, which took 0.05 for the 0.15 left.
    assert scale_by(5, 0.05, 0.05) == pytest.approx((1.0, 1 / 3))
    # Faster than all but the drive would allow: no rate of a drive explains it.
    assert scale_by(40, 0.05, 0.05) == pytest.approx((4.0, 1.0))
