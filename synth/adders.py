"""Full-adder cells of a library in carry-save trees."""

import json
from collections.abc import Mapping
from itertools import count, product
from typing import Any

from synth import liberty as lib

__all__ = ["adder_techmap", "turn_adders"]

_NOT = "$_NOT_"


def adder_techmap(adder: lib.FullAdder, *, ripple: bool = False) -> str:
    """Return a techmap file that turns Yosys' ``$fa``, of which carry-save trees are made, into a library's full adders.

    Bits with a constant input stay gates, because a half adder needs only a part of the cell. With ``ripple`` all other adders become chains
    of full adders, the smallest and slowest there are.
    """
    ports = [f".{pin}({wire}[i])" for pin, wire in zip(adder.cell.inputs, "ABC", strict=True)]
    ports += [f".{adder.sum_pin}(s)", f".{adder.carry_pin}(c)"]
    trees = f"""\
(* techmap_celltype = "$fa" *)
module _80_full_adder (A, B, C, X, Y);
  parameter WIDTH = 1;
  (* force_downto *) input [WIDTH-1:0] A, B, C;
  (* force_downto *) output [WIDTH-1:0] X, Y;
  parameter [WIDTH-1:0] _TECHMAP_CONSTMSK_A_ = 0;
  parameter [WIDTH-1:0] _TECHMAP_CONSTMSK_B_ = 0;
  parameter [WIDTH-1:0] _TECHMAP_CONSTMSK_C_ = 0;
  genvar i;
  generate
    for (i = 0; i < WIDTH; i = i + 1) begin:bits
      if (_TECHMAP_CONSTMSK_A_[i] || _TECHMAP_CONSTMSK_B_[i] || _TECHMAP_CONSTMSK_C_[i]) begin:fewer
        assign Y[i] = A[i] ^ B[i] ^ C[i];
        assign X[i] = (A[i] & B[i]) | (C[i] & (A[i] | B[i]));
      end else begin:full
        wire s, c;
        \\{adder.cell.name} adder ({", ".join(ports)});
        assign Y[i] = {"~" * adder.sum_inverted}s, X[i] = {"~" * adder.carry_inverted}c;
      end
    end
  endgenerate
endmodule
"""
    return trees + _RIPPLE if ripple else trees


# A bit whose carry nobody needs, or with a constant input, stays gates; so does the lowest one without a carry, by the map of $fa.
_RIPPLE = """\
(* techmap_celltype = "$alu" *)
module _80_ripple_adder (A, B, CI, BI, X, Y, CO);
  parameter A_SIGNED = 0;
  parameter B_SIGNED = 0;
  parameter A_WIDTH = 1;
  parameter B_WIDTH = 1;
  parameter Y_WIDTH = 1;
  parameter [A_WIDTH-1:0] _TECHMAP_CONSTMSK_A_ = 0;
  parameter [B_WIDTH-1:0] _TECHMAP_CONSTMSK_B_ = 0;
  (* force_downto *) input [A_WIDTH-1:0] A;
  (* force_downto *) input [B_WIDTH-1:0] B;
  input CI, BI;
  (* force_downto *) output [Y_WIDTH-1:0] X, Y, CO;
  (* force_downto *) wire [Y_WIDTH-1:0] a, extended, b, c;
  \\$pos #(.A_SIGNED(A_SIGNED), .A_WIDTH(A_WIDTH), .Y_WIDTH(Y_WIDTH)) extend_a (.A(A), .Y(a));
  \\$pos #(.A_SIGNED(B_SIGNED), .A_WIDTH(B_WIDTH), .Y_WIDTH(Y_WIDTH)) extend_b (.A(B), .Y(extended));
  assign b = BI ? ~extended : extended;
  assign c = {CO, CI};
  assign X = a ^ b;
  genvar i;
  generate
    for (i = 0; i < Y_WIDTH; i = i + 1) begin:bits
      localparam constant_a = i < A_WIDTH ? _TECHMAP_CONSTMSK_A_[i] : !A_SIGNED || _TECHMAP_CONSTMSK_A_[A_WIDTH-1];
      localparam constant_b = i < B_WIDTH ? _TECHMAP_CONSTMSK_B_[i] : !B_SIGNED || _TECHMAP_CONSTMSK_B_[B_WIDTH-1];
      if (constant_a || constant_b || i == Y_WIDTH - 1) begin:fewer
        assign Y[i] = X[i] ^ c[i];
        assign CO[i] = (a[i] & b[i]) | (c[i] & (a[i] | b[i]));
      end else begin:full
        \\$fa #(.WIDTH(1)) adder (.A(a[i]), .B(b[i]), .C(c[i]), .Y(Y[i]), .X(CO[i]));
      end
    end
  endgenerate
endmodule
"""


def turn_adders(netlist: str, adder: lib.FullAdder) -> str:
    """Return a netlist with fewer inverters between full adders whose outputs are inverted.

    A full adder of inverted inputs gives inverted outputs, so one that takes the inverted outputs of another directly gives plain ones. Turning an
    adder moves the inverters from its outputs to its inputs; those between two adders of which one is turned cancel. Adders are turned, in the
    order of the netlist, while that leaves fewer inverters. Gates at the other ends take inverters in, so these count less.

    Parameters
    ----------
    netlist : str
        Canonical Yosys JSON, with inverters behind every adder's outputs.
    adder : FullAdder
        With both outputs inverted; for others there is nothing to gain.
    """
    if not (adder.sum_inverted and adder.carry_inverted):
        return netlist
    design = json.loads(netlist)
    for module in design["modules"].values():
        _turn(module, adder)
    return json.dumps(design)


def _turn(module: dict[str, Any], adder: lib.FullAdder) -> None:
    cells = module["cells"]
    adders = [name for name, cell in cells.items() if cell["type"] == adder.cell.name]
    if not adders:
        return
    inverters = {cell["connections"]["A"][0]: name for name, cell in cells.items() if cell["type"] == _NOT}
    # The plain net of each output is behind its inverter.
    source: dict[int, str] = {}
    plain: dict[str, dict[str, int]] = {name: {} for name in adders}
    for name in adders:
        for pin in (adder.sum_pin, adder.carry_pin):
            for bit in cells[name]["connections"].get(pin, []):
                if bit in inverters:
                    plain[name][pin] = cells[inverters[bit]]["connections"]["Y"][0]
                    source[plain[name][pin]] = name
    inputs = {name: [cells[name]["connections"][pin][0] for pin in adder.cell.inputs] for name in adders}
    neighbours: dict[str, list[str]] = {name: [] for name in adders}
    for name in adders:
        for bit in inputs[name]:
            if bit in source:
                neighbours[name].append(source[bit])
                neighbours[source[bit]].append(name)
    turned = [name for name, side in _two_sides(neighbours).items() if side]
    nets = (bit for cell in cells.values() for bits in cell["connections"].values() for bit in bits)
    fresh = count(1 + max(bit for bit in nets if isinstance(bit, int)))
    for name, pin in product(turned, (adder.sum_pin, adder.carry_pin)):
        for inverted in cells[name]["connections"].get(pin, []):
            # The cell drives the plain net now, and what used the inverted one has an inverter.
            bit = plain[name].get(pin) or next(fresh)
            cells[name]["connections"][pin] = [bit]
            cells[inverters.get(inverted, f"{name}_{pin}")] = _inverter(bit, inverted)
    opposite: dict[int | str, int] = {}
    for cell in cells.values():
        if cell["type"] == _NOT:
            (source_bit,), (target_bit,) = cell["connections"]["A"], cell["connections"]["Y"]
            opposite |= {source_bit: target_bit, target_bit: source_bit}
    for name, (position, pin) in product(turned, enumerate(adder.cell.inputs)):
        bit = inputs[name][position]
        if bit not in opposite:
            opposite[bit] = next(fresh)
            cells[f"{name}_{pin}"] = _inverter(bit, opposite[bit])
        cells[name]["connections"][pin] = [opposite[bit]]


def _inverter(source: int | str, target: int) -> dict[str, Any]:
    return {
        "hide_name": 1,
        "type": _NOT,
        "parameters": {},
        "attributes": {},
        "port_directions": {"A": "input", "Y": "output"},
        "connections": {"A": [source], "Y": [target]},
    }


def _two_sides(neighbours: Mapping[str, list[str]]) -> dict[str, bool]:
    """Put each node on one of two sides so that most of its neighbours are on the other: greedily, then by single moves."""
    side: dict[str, bool] = {}
    for name, others in neighbours.items():
        known = [side[other] for other in others if other in side]
        side[name] = 2 * sum(known) < len(known) if known else False
    moved = True
    while moved:
        moved = False
        for name, others in neighbours.items():
            if 2 * sum(side[other] == side[name] for other in others) > len(others):
                side[name] = not side[name]
                moved = True
    return side
