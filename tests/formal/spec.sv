// The number formats as functions, from their definitions and not from the hardware.
package spec;
  // Twice an E2M1 value.
  function automatic signed [4:0] doubled(input [3:0] code);
    reg signed [4:0] magnitude;
    begin
      magnitude = code[2:1] == 0 ? {4'b0, code[0]} : {3'b001, code[0]} << (code[2:1] - 1);
      doubled = code[3] ? -magnitude : magnitude;
    end
  endfunction

  // A digit in two bits: +1, +2, -1, -2.
  function automatic signed [2:0] digit(input [1:0] code);
    case (code)
      2'd0: digit = 3'sd1;
      2'd1: digit = 3'sd2;
      2'd2: digit = -3'sd1;
      2'd3: digit = -3'sd2;
    endcase
  endfunction

  // Digits of a packed pair {E, F1, F0}: F1 of an escaped pair says which of them are zero.
  function automatic signed [2:0] digit0(input [4:0] pair);
    digit0 = pair[4] && pair[2] ? 3'sd0 : digit(pair[1:0]);
  endfunction

  function automatic signed [2:0] digit1(input [4:0] pair);
    digit1 = !pair[4] ? digit(pair[3:2]) : pair[3] ? 3'sd0 : digit(pair[1:0]);
  endfunction

  // The one way to write two digits.
  function automatic [4:0] packed_pair(input signed [2:0] q0, input signed [2:0] q1);
    reg [1:0] f0, f1;
    begin
      f0 = {q0 < 0, q0 == 2 || q0 == -2};
      f1 = {q1 < 0, q1 == 2 || q1 == -2};
      if (q0 != 0 && q1 != 0) packed_pair = {1'b0, f1, f0};
      else if (q0 != 0) packed_pair = {3'b110, f0};
      else if (q1 != 0) packed_pair = {3'b101, f1};
      else packed_pair = 5'b11100;
    end
  endfunction

  // An E4M3 scale without its sign, in units of 2**-9, and its parts.
  function automatic [3:0] significand(input [6:0] scale);
    significand = scale[6:3] == 0 ? {1'b0, scale[2:0]} : {1'b1, scale[2:0]};
  endfunction

  function automatic [3:0] exponent(input [6:0] scale);
    exponent = scale[6:3] == 0 ? 4'd1 : scale[6:3];
  endfunction

  function automatic [17:0] scale_value(input [6:0] scale);
    scale_value = {14'b0, significand(scale)} << (exponent(scale) - 1);
  endfunction

  // Magnitude of the AutoFP2 digit of a code whose group has scale B, under the larger scale B_p of its pair of groups.
  function automatic [1:0] pair_digit(input [2:0] magnitude_code, input [6:0] own, input [6:0] other);
    reg [6:0] pair;
    reg [21:0] twice, bound;
    begin
      pair = own > other ? own : other;
      twice = {17'b0, doubled({1'b0, magnitude_code})} * {4'b0, scale_value(own)};
      bound = {4'b0, scale_value(pair)};
      // Equal scales: the plain remap, which matters when both are zero.
      if (own == pair) pair_digit = magnitude_code < 2 ? 2'd0 : magnitude_code < 6 ? 2'd1 : 2'd2;
      else if (twice < 2 * bound) pair_digit = 2'd0;
      else if (twice >= 7 * bound) pair_digit = 2'd2;
      else pair_digit = 2'd1;
    end
  endfunction
endpackage
