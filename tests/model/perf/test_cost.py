"""What a product costs, by the equations of docs/performance-model.md written down a second time; what a request adds up to."""

import dataclasses
import math

import numpy as np
import pytest

from model.accelerator import AcceleratorConfig, Mode
from model.perf.constants import constant
from model.perf.estimate import cost, estimate
from model.perf.gemm_cycles import array_cycles, rtl_cycles
from model.perf.hardware import DATAPATHS, Hardware
from model.perf.language_model import LanguageModel
from model.perf.workload import Gemm, Mix, decode, prefill

SMALL = AcceleratorConfig(rows=4, columns=4)
M, N, K, COUNT, LAYERS = 300, 24, 64, 3, 5
AUTOEMATIC, NVFP4 = DATAPATHS["autoematic"], DATAPATHS["nvfp4"]
REFINED_BYTES = 18 + 1 + 1.6
"""Codes and scales of 32 elements, masks, offsets."""
SPARSE = LanguageModel("sparse", 4, 256, 512, 8, 2, 32, 1, 512, 16, 2, 128, 64)


def gemm(m=M, n=N, k=K, count=COUNT, **more):
    return Gemm("product", *(np.array([float(x)]) for x in (m, n, k, count)), LAYERS, **more)


# Datapath, bits, mode, K-vectors that run, bytes of each of the product's two K-vectors, what a vector operation takes, an idle element.
RUNS = [
    ("autoematic", 2, Mode.AUTOFP2, 2, 18, "vmac_autofp2_fj", "vmac_idle_fj"),
    ("autoematic", 4, Mode.NVFP4, 2, 18, "vmac_nvfp4_fj", "vmac_idle_fj"),
    ("autoematic", 6, Mode.AUTOFP6, 2, REFINED_BYTES, "vmac_autofp6_fj", "vmac_idle_fj"),
    ("nvfp4", 2, Mode.NVFP4, 2, 18, "nvfp4_only_fj", "nvfp4_only_idle_fj"),
    ("nvfp4", 6, Mode.NVFP4, 3, 18 * 1.5, "nvfp4_only_fj", "nvfp4_only_idle_fj"),
    ("autofp2", 2, Mode.AUTOFP2, 2, 18, "autofp2_only_fj", "autofp2_only_idle_fj"),
    ("autofp2", 4, Mode.AUTOFP2, 4, 18, "autofp2_only_fj", "autofp2_only_idle_fj"),
    ("autofp2", 6, Mode.AUTOFP2, 6, 18 * 1.5, "autofp2_only_fj", "autofp2_only_idle_fj"),
    ("uniform", 2, Mode.AUTOFP6, 2, REFINED_BYTES, "vmac_autofp6_fj", "vmac_idle_fj"),
]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("run", RUNS, ids=[f"{name}-{bits}" for name, bits, *_ in RUNS])
def test_a_product_costs_what_the_equations_say(run, overlap):
    name, bits, mode, kv, octets, busy, idle = run
    clock, bandwidth = 500e6, 2e9
    hardware = Hardware(SMALL, 500.0, 2.0, schedule="array", overlap=overlap, refined_share=0.5)
    found = cost(hardware, DATAPATHS[name], bits, gemm())
    tiles = array_cycles(SMALL, mode, M, N, kv, octets * 2 / kv / bandwidth * clock)
    assert tiles.panels > 1
    per_vector = 2 if mode == Mode.AUTOFP2 else 1
    operands = COUNT * (M + int(tiles.panels) * N) * 2 * octets
    memory = operands + COUNT * M * N * 4.5 / 8
    banks = COUNT * int(tiles.tiles) * 4 * (int(tiles.tile_m) + int(tiles.tile_n) * per_vector) * kv
    buffer = operands + banks * (23 if DATAPATHS[name].refines else 18)
    vectors = COUNT * M * N / per_vector * kv
    cycles = COUNT * float(tiles.cycles)
    times = cycles / clock, memory / bandwidth
    seconds = max(times) if overlap else sum(times)
    for value, expected in (
        (found.cycles, cycles),
        (found.seconds, seconds),
        (found.memory, memory),
        (found.buffer, buffer),
        (found.vectors, vectors),
        (found.macs, COUNT * M * N * K),
        (found.energy[0] * 1e15, vectors * constant(busy)),
        (found.energy[1] * 1e15, (seconds * clock * 16 - vectors) * constant(idle)),
        (found.energy[2] * 1e15, vectors * 39 * constant("pe_buffer_fj_per_byte")),
        (found.energy[3] * 1e15, buffer * constant("global_buffer_fj_per_byte")),
        (found.energy[4] * 1e15, memory * constant("dram_fj_per_byte")),
    ):
        assert float(value[0]) == pytest.approx(LAYERS * expected, rel=1e-12)


def test_rtl_has_the_cycles_of_the_prediction_latency_and_panels_included():
    hardware = Hardware(SMALL, bandwidth_gb=1e6, latency=50)
    found = cost(hardware, AUTOEMATIC, 4, gemm())
    cycles, tiles = rtl_cycles(SMALL, Mode.NVFP4, M, N, K, 50)
    assert float(found.cycles[0]) == LAYERS * COUNT * cycles
    assert cycles > rtl_cycles(SMALL, Mode.NVFP4, M, N, K)[0]
    panels = math.ceil(M / (4 * tiles.tile_m))
    assert panels > 1
    assert float(found.memory[0]) == pytest.approx(LAYERS * COUNT * ((M + panels * N) * 2 * 18 + M * N * 4.5 / 8))
    # A bus to read and one to write, each as wide, for each accelerator.
    wide = AcceleratorConfig(rows=4, columns=4, data_width=256)
    assert Hardware(wide, 500.0, 1e6, accelerators=3).bandwidth == 3 * 2 * 32 * 500e6
    assert Hardware(wide, 500.0, 5.0, accelerators=3).bandwidth == 5e9
    assert Hardware(wide, 500.0, 1e6, schedule="array", accelerators=3).bandwidth == 1e15


def test_keys_and_values_come_in_pages_in_rtl_alone():
    rtl, array = Hardware(SMALL), Hardware(SMALL, schedule="array")
    steps = {each.name: each for each in decode(SPARSE, np.array([257.0, 512.0, 513.0]), 1)}
    for name in ("scores", "values"):
        paged, exact = (cost(hardware, AUTOEMATIC, 4, steps[name]).cycles for hardware in (rtl, array))
        assert paged[0] == paged[1] < paged[2]
        assert len(set(exact.tolist())) == 3


def test_head_and_routers_run_at_four_bits():
    for gemms in (prefill(SPARSE, 40, 2), decode(SPARSE, np.array([41.0]), 2)):
        assert [each.name for each in gemms if each.fixed] == ["router", "head"]
    head = gemm(fixed=True)
    for bits in (2, 6):
        for datapath in (AUTOEMATIC, NVFP4):
            fixed, four = cost(Hardware(SMALL), datapath, bits, head), cost(Hardware(SMALL), datapath, 4, gemm())
            assert (fixed.energy == four.energy).all()
            assert fixed.seconds == four.seconds
    assert cost(Hardware(SMALL), AUTOEMATIC, 6, gemm()).seconds > fixed.seconds


@pytest.mark.parametrize("tokens", [1, 8, 100])
def test_experts_share_the_tokens_that_meet_them(tokens):
    expert = {each.name: each for each in decode(SPARSE, np.array([5.0]), tokens)}["expert down"]
    met = 16 * (1 - (14 / 16) ** tokens)
    assert float(expert.count[0]) == pytest.approx(met)
    assert float(expert.m[0]) == math.ceil(tokens * 2 / met - 1e-6)


def test_figures_of_a_request_are_those_of_its_products():
    found = estimate(SPARSE, Hardware(SMALL), AUTOEMATIC, Mix.of("20/40/40"), 30, 4, 3)
    row = found.as_json()
    phases = row["phases"]
    assert set(phases) == {"prefill", "decode"}
    # Each step meets one key more, the first its own beside the prompt's.
    keys = 31 + 32 + 33 + 34
    assert phases["decode"]["scores"]["macs"] == pytest.approx(3 * keys * 8 * 32 * SPARSE.layers)
    assert phases["prefill"]["scores"]["macs"] == pytest.approx(3 * 30 * 30 * 8 * 32 * SPARSE.layers)
    assert phases["decode"]["head"]["macs"] == pytest.approx(3 * 4 * SPARSE.width * SPARSE.vocabulary)
    products = [each for phase in phases.values() for each in phase.values()]
    for name, key in (("seconds", "seconds"), ("memory_bytes", "memory"), ("buffer_bytes", "buffer")):
        assert row[name] == pytest.approx(sum(each[key] for each in products))
    energy = {name: sum(each["energy"][name] for each in products) for name in products[0]["energy"]}
    assert row["joules"] == pytest.approx(sum(energy.values()))
    assert row["chip_joules"] == pytest.approx(row["joules"] - energy["memory"])
    assert row["seconds"] == pytest.approx(row["prefill_seconds"] + row["decode_seconds"])
    assert row["decode_seconds"] == pytest.approx(sum(each["seconds"] for each in phases["decode"].values()))
    assert row["tokens_per_second"] == pytest.approx(3 * 4 / row["decode_seconds"])
    operations = 2 * sum(each["macs"] for each in products) / row["seconds"]
    assert row["tera_operations_per_second"] == pytest.approx(1e-12 * operations)
    assert row["operations_per_second_and_ge"] == pytest.approx(operations / row["area_ge"])
    assert row["use"] == pytest.approx(sum(each["vectors"] for each in products) / (row["seconds"] * 1e9 * 16))
    # Clock and memory twice as fast: half the time, and no other figure of the work.
    fast = dataclasses.replace(found.hardware, clock_mhz=2000.0, bandwidth_gb=2000.0)
    twice = estimate(SPARSE, fast, AUTOEMATIC, Mix.of("20/40/40"), 30, 4, 3).as_json()
    assert twice["seconds"] == pytest.approx(row["seconds"] / 2)
    assert twice["joules"] == pytest.approx(row["joules"])
