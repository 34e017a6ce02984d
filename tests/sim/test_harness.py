"""The bulk harness against NumPy, on a block made to show every kind of port."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.harness import BulkHarness, Row, harness_verilog, pack_fields, unpack_fields
from sim.runner import available_simulators

SIMULATORS = available_simulators()
BLOCK = """\
module block(input clk, input rst, input valid_i, input [127:0] a, input [4:0] k, input [63:0] psum_i,
             input [7:0] mutsel, output reg valid_o, output reg [63:0] psum_o, output [70:0] wide, output reg never);
    assign wide = a[70:0] ^ {71{k[0]}};
    always @(posedge clk) begin
        valid_o <= valid_i & ~rst;
        psum_o <= psum_i + a[31:0] * k + mutsel;
        never <= rst ? never : k[0];
    end
endmodule
"""
PORTS = {"clk": 1, "rst": 1, "valid_i": 1, "a": 128, "k": 5, "psum_i": 64, "mutsel": 8}
OUTPUTS = {"valid_o": 1, "psum_o": 64, "wide": 71, "never": 1}
SIDECAR = {
    "top": "block",
    "ports": [{"name": name, "direction": "input", "width": width} for name, width in PORTS.items()]
    + [{"name": name, "direction": "output", "width": width} for name, width in OUTPUTS.items()],
}


def _rows(count, seed=1):
    rng = np.random.default_rng(seed)
    rows = {
        "rst": np.arange(count) < 2,
        "valid_i": rng.integers(0, 2, count),
        "a": rng.integers(0, 256, (count, 16), dtype=np.uint8),
        "k": rng.integers(0, 32, count),
        "psum_i": rng.integers(0, 2**64, count, dtype=np.uint64),
        "psum_i__feedback": rng.integers(0, 2, count),
    }
    rows["psum_i__feedback"][0] = 0
    return rows


@pytest.fixture(scope="module", params=SIMULATORS)
def harness(request):
    return BulkHarness({"block.v": BLOCK}, SIDECAR, request.param, {"psum_i": "psum_o"}, ["mutsel"])


@pytest.mark.parametrize("mutsel", [0, 200])
def test_rows_in_rows_out(harness, mutsel):
    count = 5000
    rows = _rows(count)
    result = harness.run(rows, {"mutsel": mutsel})
    added = np.where(rows["psum_i__feedback"] == 1, result["psum_o"], rows["psum_i"])
    a = rows["a"].view("<u4")[:, 0].astype(np.uint64)
    expected = added + a * rows["k"].astype(np.uint64) + np.uint64(mutsel)
    assert np.array_equal(result["psum_o"][1:], expected[:-1])
    assert np.array_equal(result["valid_o"][1:], (rows["valid_i"] * ~rows["rst"])[:-1])
    flipped = rows["a"][:, :9] ^ np.where(rows["k"] & 1, 255, 0).astype(np.uint8)[:, None]
    flipped[:, 8] &= 127
    assert np.array_equal(result["wide"], flipped)
    assert result["wide"].dtype == np.uint8


def test_unknown_bits_are_flagged(harness):
    result = harness.run(_rows(20), {"mutsel": 0})
    unknown = {name: result[f"{name}__x"].astype(int).tolist() for name in OUTPUTS}
    once = [int(harness.build.simulator.name == "icarus")]
    assert unknown["valid_o"] == unknown["psum_o"] == once + [0] * 19
    assert unknown["wide"] == [0] * 20
    assert unknown["never"] == once * 3 + [0] * 17


def test_waves(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("AUTOEMATIC_SIM_BUILD", str(tmp_path))
    simulator = SIMULATORS[-1]
    harness = BulkHarness({"block.v": BLOCK}, SIDECAR, simulator, {"psum_i": "psum_o"}, ["mutsel"], waves=True)
    harness.run(_rows(50), {"mutsel": 0})
    dump = capsys.readouterr().out.removeprefix("waveforms: ").strip()
    with open(dump) as text:
        assert "psum_o" in text.read()


INVERTER = {
    "top": "inv",
    "ports": [
        {"name": "i", "direction": "input", "width": 3},
        {"name": "o", "direction": "output", "width": 3},
    ],
}
INVERTER_SOURCES = {"inv.v": "module inv(input [2:0] i, output [2:0] o); assign o = ~i; endmodule\n"}


def test_combinational_block_needs_no_clock():
    result = BulkHarness(INVERTER_SOURCES, INVERTER, SIMULATORS[-1]).run({"i": np.arange(8)})
    assert np.array_equal(result["o"], 7 - np.arange(8))


def test_no_rows():
    assert BulkHarness(INVERTER_SOURCES, INVERTER, SIMULATORS[-1]).run({"i": np.arange(0)})["o"].shape == (0,)


def test_wrong_rows_are_named(harness):
    rows = _rows(10)
    with pytest.raises(ValueError, match=r"rows must have exactly the columns .*'psum_i__feedback'.*, not \['a'\]"):
        harness.pack({"a": rows["a"]})
    with pytest.raises(ValueError, match=r"^rows\['k'\] must have 10 rows like the others, not 9$"):
        harness.pack({**rows, "k": rows["k"][:9]})
    with pytest.raises(ValueError, match=r"^values must fit 5 bits unsigned, not 32$"):
        harness.pack({**rows, "k": np.full(10, 32)})
    with pytest.raises(ValueError, match=r"^rows\['k'\] must fit 5 bits, not 0x20 in its top byte$"):
        harness.pack({**rows, "k": np.full((10, 1), 32, np.uint8)})
    with pytest.raises(ValueError, match=r"^rows\['a'\] must be uint8 of shape \(10, 16\), not uint8 of \(10, 15\)$"):
        harness.pack({**rows, "a": rows["a"][:, :15]})
    with pytest.raises(ValueError, match=r"^plusargs must set exactly \['mutsel'\], not \[\]$"):
        harness.run(rows)


def test_wrong_feedback_and_plusargs():
    with pytest.raises(
        ValueError, match=r"^feedback must name an input and an output of one width, not 'a' and 'psum_o'$"
    ):
        harness_verilog(SIDECAR, {"a": "psum_o"})
    with pytest.raises(ValueError, match=r"^plusargs must name inputs of up to 32 bits, not 'a'$"):
        harness_verilog(SIDECAR, None, ["a"])


def test_row_layout():
    row = Row.of({"a": 1, "b": 9, "c": 64})
    assert [(port.offset, port.size) for port in row.ports] == [(0, 1), (1, 2), (3, 8)]
    assert row.size == 12


@given(st.integers(1, 64), st.integers(1, 9), st.integers(0, 5), st.integers(0, 2**32))
def test_pack_fields_round_trip(width, fields, rows, seed):
    values = np.random.default_rng(seed).integers(0, 2**width - 1, (rows, fields), dtype=np.uint64, endpoint=True)
    packed = pack_fields(values, width)
    assert packed.shape == (rows, -(-fields * width // 8))
    for got, row in zip(packed, values, strict=True):
        assert int.from_bytes(got.tobytes(), "little") == sum(int(v) << (k * width) for k, v in enumerate(row))
    assert np.array_equal(unpack_fields(packed, width, fields), values)


def test_pack_fields_errors():
    with pytest.raises(ValueError, match=r"^width must be from 1 to 64, not 65$"):
        pack_fields(np.zeros((1, 1), int), 65)
    with pytest.raises(ValueError, match=r"^values must be an array \[N, fields\], not of shape \(3,\)$"):
        pack_fields(np.zeros(3, int), 4)
    with pytest.raises(ValueError, match=r"^values must fit 4 bits unsigned, not -1$"):
        pack_fields(np.array([[-1]]), 4)
    with pytest.raises(ValueError, match=r"^octets must hold 3 fields of 4 bits, not 8 bits$"):
        unpack_fields(np.zeros((2, 1), np.uint8), 4, 3)
