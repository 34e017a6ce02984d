"""cocotb bench of the weight encoder, combinational or registered, with the golden model as the reference."""

from collections.abc import Mapping
from typing import Any

import cocotb
import numpy as np
from cocotb.triggers import RisingEdge, Timer

from model.weight_encoder import encode
from sim.bench_common import PERIOD_NS, bench_settings, cover, coverage_goals_met, pins, start_clock
from sim.coverage import ENCODER_MODES, SCALE_RELATIONS
from sim.design import config_of
from sim.harness import pack_fields
from sim.stimuli import EncoderShape, encoder_stimulus

SETTLE_NS = 1


class Setup:
    """The encoder under test: drives a row of inputs and returns the outputs that belong to it."""

    def __init__(self, dut: Any) -> None:
        settings = bench_settings()
        self.dut = dut
        self.config = config_of("weight_encoder", **settings["parameters"])
        self.shape = EncoderShape.of(self.config)
        self.latency: int = settings["latency"]
        self.rows: int = settings["rows"]

    async def start(self) -> None:
        """Start the clock, if there is one."""
        if self.shape.clocked:
            self.dut.rst.value = 0
            start_clock(self.dut)

    async def run(self, inputs: Mapping[str, int]) -> tuple[int, int]:
        """Drive inputs and return ``w`` and ``w_scale``; behind registers the inputs change before the outputs are sampled."""
        for name, value in inputs.items():
            getattr(self.dut, name).value = value
        if self.shape.clocked:
            for _ in range(self.latency):
                await RisingEdge(self.dut.clk)
            for name in inputs:
                getattr(self.dut, name).value = 0
            await Timer(PERIOD_NS // 2, "ns")
        else:
            await Timer(SETTLE_NS, "ns")
        values = pins(self.dut, ["w", "w_scale"])
        return values["w"], values["w_scale"]


def integer(octets: np.ndarray) -> int:
    """Return little-endian bytes as an integer."""
    return int.from_bytes(octets.tobytes(), "little")


@cocotb.test(timeout_time=100, timeout_unit="us")
async def worked_by_hand(dut: Any) -> None:
    """Examples of table 8 and of the pair scale, worked by hand."""
    setup = Setup(dut)
    await setup.start()
    zero, lanes = 0b11100, setup.shape.lanes
    ones = sum(0x38 << (8 * k) for k in range(lanes // 16))

    def row(code: int, lane: int = 0) -> int:
        return code << (4 * lane)

    def pairs(pair: int, lane: int = 0) -> int:
        return sum((pair if k == lane else zero) << (5 * k) for k in range(lanes))

    # Table 8: magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
    table = (0b11100, 0b01100, 0b10100, 0b01000, 0b10101, 0b01101, 0b01001, 0b00001)
    negative = (0b11100, 0b00110, 0b10110, 0b00010, 0b10111, 0b00111, 0b00011, 0b01011)
    for code, pair in enumerate(table + negative):
        inputs = {
            "mode_nvfp4": 1,
            "row_even": row(code),
            "row_odd": (1 << 4 * lanes) - 1,
            "scale_even": ones,
            "scale_odd": 0,
        }
        w, scale = await setup.run(inputs)
        assert w == pairs(pair), f"code {code}: {w:#x}"
        assert scale == ones
    # AutoFP2 under the group's own scale: 6 and -1 become 2 and -1.
    w, _ = await setup.run(
        {"mode_nvfp4": 0, "row_even": row(7), "row_odd": row(10), "scale_even": ones, "scale_odd": ones}
    )
    assert w == pairs(0b01001)
    if not setup.shape.grouped:
        # Scales 1 and 2 share 2: 1.5 is below it, 2 reaches it, 6 stays below 3.5 · 2.
        shared = ones + (0x08 << 8)
        for code, pair in ((3, zero), (4, 0b11000), (7, 0b11000)):
            inputs = {"mode_nvfp4": 0, "row_even": row(code), "row_odd": 0, "scale_even": shared, "scale_odd": ones}
            w, scale = await setup.run(inputs)
            assert w == pairs(pair), f"code {code}: {w:#x}"
            assert scale & 0xFFFF == 0x3840


@cocotb.test(timeout_time=10, timeout_unit="ms")
async def random_rows(dut: Any) -> None:
    """Random codes and scales, often close to the digits' thresholds, and a mode that changes every row."""
    setup = Setup(dut)
    await setup.start()
    inputs = encoder_stimulus(setup.shape, setup.rows, np.random.default_rng(cocotb.RANDOM_SEED))
    expected_w, expected_scale = encode(
        inputs["mode_nvfp4"].astype(bool),
        inputs["row_even"],
        inputs["row_odd"],
        inputs["scale_even"],
        inputs["scale_odd"],
        scaling=setup.config.scaling,
    )
    words = {
        name: pack_fields(inputs[name], 4 if name.startswith("row") else 8) for name in inputs if name != "mode_nvfp4"
    }
    sample = cover(
        "weight_encoder",
        {"mode": ENCODER_MODES, "even": SCALE_RELATIONS, "odd": SCALE_RELATIONS},
        [("mode", "even", "odd")],
    )
    compared = nonzero = 0
    for k in range(setup.rows):
        mode = int(inputs["mode_nvfp4"][k])
        w, scale = await setup.run({"mode_nvfp4": mode, **{name: integer(octets[k]) for name, octets in words.items()}})
        assert w == integer(pack_fields(expected_w[k : k + 1], 5)), f"row {k}: w is {w:#x}"
        assert scale == integer(pack_fields(expected_scale[k : k + 1], 8)), f"row {k}: w_scale is {scale:#x}"
        compared += 1
        nonzero += bool((expected_w[k] != 0b11100).any())
        relation = {}
        for name in ("even", "odd"):
            first, second = (int(byte) & 0x7F for byte in inputs[f"scale_{name}"][k, :2])
            relation[name] = SCALE_RELATIONS[(first > second) - (first < second) + 1]
        sample(mode=ENCODER_MODES[mode], **relation)
    assert compared == setup.rows > 0
    assert 2 * nonzero > compared
    coverage_goals_met("weight_encoder", cocotb.log.info)
