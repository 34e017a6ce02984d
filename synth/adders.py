"""Full-adder cells of a library in carry-save trees."""

from synth import liberty as lib

__all__ = ["adder_techmap"]


def adder_techmap(adder: lib.FullAdder) -> str:
    """Return a techmap file that turns Yosys' ``$fa``, of which carry-save trees are made, into a library's full adders.

    Bits with a constant input stay gates, because a half adder needs only a part of the cell.
    """
    ports = [f".{pin}({wire}[i])" for pin, wire in zip(adder.cell.inputs, "ABC", strict=True)]
    ports += [f".{adder.sum_pin}(s)", f".{adder.carry_pin}(c)"]
    return f"""\
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
