// Control of the processing element, without vector MAC, mergers of records and memories. The proof assumes nothing of commands, operands, stalls, reset or clear.
module proof #(`PARAMETERS) (
  input clk, rst, clear, command_valid, weight_valid, activation_valid, result_ready,
  input [KV_BITS+N_BITS+M_BITS+REFINED:0] command,
  input [W_WIDTH-1:0] weight, some_weight,
  input [A_WIDTH-1:0] activation, some_activation,
  input [63:0] psum_o, some_sum0, some_sum1,
  input [2:0] vmac_status,
  input [1:0] overlap, dropped,
  input [1:0][RECORD-1:0] record
);
  wire command_ready, weight_ready, activation_ready, result_valid, busy, issue, active, bank, short, drain_bank, out_bank, out_last;
  wire emptied, valid_i, mode_i, refine_i, tile_mode, tile_refine;
  wire [64:0] result;
  wire [63:0] psum_i;
  wire [4:0] status;
  wire [159:0] w_i;
  wire [127:0] a_i;
  wire [W_SCALES-1:0] w_scale_i;
  wire [15:0] a_scale_i;
  wire [1:0][19:0] w_records, a_records;
  wire [1:0][RECORD-1:0] record_i;
  wire [1:0] full, occupied;
  wire [KV_BITS+N_BITS+M_BITS-1:0] at, last;
  wire [A-1:0] address, drain_address;
  wire [2*A-1:0] lengths;
  wire [3:0] recent;
  wire [2:0] valid_3;
  wire [3:0] first_4;
  wire [4:0] ends_5, bank_5;
  wire [5*A-1:0] address_5;
  wire [W:0] w_level;
  wire [V:0] a_level;
  wire w_read, w_free, a_read, a_free, w_wen, w_ren, a_wen, a_ren;
  wire [W-1:0] w_waddr, w_raddr;
  wire [V-1:0] a_waddr, a_raddr;
  wire [W_WIDTH-1:0] w_wdata;
  wire [A_WIDTH-1:0] a_wdata;
  wire [1:0] read_en, write_en;
  wire [1:0][A-1:0] read_addr, write_addr;
  wire [1:0][63:0] write_data;

  // The vector MAC: valid_o is valid_i four cycles later unless reset, sums may be anything.
  reg v2 = 0, v3 = 0, v4 = 0, v5 = 0;
  always @(posedge clk) {v2, v3, v4, v5} <= rst || emptied ? 4'd0 : {valid_i, v2, v3, v4};

  // Memories, of each of which one place is known and the others read as anything: what is read stays until the next read.
  (* anyconst *) reg s_bank;
  (* anyconst *) reg [A-1:0] s_address;
  (* anyconst *) reg [W-1:0] s_weight;
  (* anyconst *) reg [V-1:0] s_activation;
  reg [63:0] value;
  reg [W_WIDTH-1:0] w_value, w_data;
  reg [A_WIDTH-1:0] a_value, a_data;
  reg [1:0][63:0] data;
  always @(posedge clk) begin
    if (read_en[0]) data[0] <= !s_bank && read_addr[0] == s_address ? value : some_sum0;
    if (read_en[1]) data[1] <= s_bank && read_addr[1] == s_address ? value : some_sum1;
    if (write_en[s_bank] && write_addr[s_bank] == s_address) value <= write_data[s_bank];
    if (w_ren) w_data <= w_raddr == s_weight ? w_value : some_weight;
    if (a_ren) a_data <= a_raddr == s_activation ? a_value : some_activation;
    if (w_wen && w_waddr == s_weight) w_value <= w_wdata;
    if (a_wen && a_waddr == s_activation) a_value <= a_wdata;
  end

  dut dut(.clk(clk), .rst(rst), .clear(clear), .command__valid(command_valid), .command__ready(command_ready), .command__payload(command),
    .weight__valid(weight_valid), .weight__ready(weight_ready), .weight__payload(weight),
    .activation__valid(activation_valid), .activation__ready(activation_ready), .activation__payload(activation),
    .result__valid(result_valid), .result__ready(result_ready), .result__payload(result), .busy(busy), .status(status),
`ifdef REFINE
    .vmac0_refine_en(refine_i), .vmac0_refine(record_i),
    .records0_weight(w_records[0]), .records0_activation(a_records[0]), .records0_record(record[0]),
    .records0_overlap(overlap[0]), .records0_dropped(dropped[0]),
    .records1_weight(w_records[1]), .records1_activation(a_records[1]), .records1_record(record[1]),
    .records1_overlap(overlap[1]), .records1_dropped(dropped[1]),
`endif
    .vmac0_valid_i(valid_i), .vmac0_mode_nvfp4(mode_i), .vmac0_w(w_i), .vmac0_w_scale(w_scale_i), .vmac0_a(a_i), .vmac0_a_scale(a_scale_i),
    .vmac0_valid_o(v5), .vmac0_psum_o(psum_o), .vmac0_psum_i(psum_i), .vmac0_status(vmac_status),
    .p_active(active), .p_bank(bank), .p_at(at), .p_last(last), .p_address(address), .p_short(short), .p_nvfp4(tile_mode),
    .p_refine_en(tile_refine), .p_recent(recent), .p_full(full), .p_lengths(lengths), .p_occupied(occupied), .p_drain_bank(drain_bank),
    .p_drain_address(drain_address), .p_out_bank(out_bank), .p_out_last(out_last), .p_issue(issue), .p_clear(emptied), .p_valid(valid_3),
    .p_first(first_4), .p_ends(ends_5), .p_to_bank(bank_5), .p_to(address_5), .p_weights_level(w_level), .p_weights_read(w_read),
    .p_weights_free(w_free), .p_activations_level(a_level), .p_activations_read(a_read), .p_activations_free(a_free),
    .memory0_read_en(read_en[0]), .memory0_read_addr(read_addr[0]), .memory0_data(data[0]),
    .memory0_write_en(write_en[0]), .memory0_write_addr(write_addr[0]), .memory0_write_data(write_data[0]),
    .memory1_read_en(read_en[1]), .memory1_read_addr(read_addr[1]), .memory1_data(data[1]),
    .memory1_write_en(write_en[1]), .memory1_write_addr(write_addr[1]), .memory1_write_data(write_data[1]),
    .memory2_read_en(w_ren), .memory2_read_addr(w_raddr), .memory2_data(w_data),
    .memory2_write_en(w_wen), .memory2_write_addr(w_waddr), .memory2_write_data(w_wdata),
    .memory3_read_en(a_ren), .memory3_read_addr(a_raddr), .memory3_data(a_data),
    .memory3_write_en(a_wen), .memory3_write_addr(a_waddr), .memory3_write_data(a_wdata));
`ifndef REFINE
  assign refine_i = 0;
`endif

  // Names of parts. Index 0 is the vector that is issued now, s the one that was issued s cycles ago.
  wire [M_BITS-1:0] at_m = at[0 +: M_BITS], last_m = last[0 +: M_BITS], c_m = command[0 +: M_BITS];
  wire [N_BITS-1:0] at_n = at[M_BITS +: N_BITS], last_n = last[M_BITS +: N_BITS], c_n = command[M_BITS +: N_BITS];
  wire [KV_BITS-1:0] at_kv = at[M_BITS+N_BITS +: KV_BITS], last_kv = last[M_BITS+N_BITS +: KV_BITS];
  wire [KV_BITS-1:0] c_kv = command[M_BITS+N_BITS +: KV_BITS];
  wire c_mode = command[M_BITS+N_BITS+KV_BITS], c_refine = REFINED && command[M_BITS+N_BITS+KV_BITS+REFINED];
  wire [5:0] v = {v5, v4, valid_3, 1'b0}, ends = {ends_5, 1'b0}, in_bank = {bank_5, bank}, first = {1'b0, first_4, at_kv == 0};
  wire [5:0][A-1:0] to = {address_5, address};

  // What the contract takes for a good command.
  wire [M_BITS+N_BITS-1:0] product = c_m * c_n;
  wire good = c_m != 0 && c_m <= MAX_M && c_n != 0 && product <= WORDS && c_kv != 0 && c_kv <= MAX_KV && !(c_refine && !c_mode);
  wire taken = command_valid && command_ready, starts = taken && good, leaves = result_valid && result_ready;

  // A read of an accumulator is for the vector issued three cycles ago, or it drains.
  wire [1:0] computes = {v[3] && !first[3] && in_bank[3], v[3] && !first[3] && !in_bank[3]}, drains = read_en & ~computes;

  // What happened so far. Tiles take banks in turn.
  reg next_bank = 0, r_bank = 0, was_bad = 0, was_overlap = 0, was_dropped = 0;
  reg [1:0] in_use = 0, mode, refine;
  reg [1:0][A:0] words = {2{{{A{1'b0}}, 1'b1}}};
  reg [1:0][KV_BITS-1:0] depth;
  reg [1:0][WORDS-1:0] written = 0, fetched = 0;
  // Results that have left of the tile whose turn it is, vectors issued of this tile for the known accumulator, places of the oldest entries.
  reg [A-1:0] r_count = 0;
  reg [KV_BITS-1:0] summed = 0;
  reg [W-1:0] w_head = 0;
  reg [V-1:0] a_head = 0;
  genvar i, j, x;
  integer b;
  always @(posedge clk) begin
    was_bad <= taken && !good || was_bad && !emptied;
    was_overlap <= (valid_i && refine_i && overlap != 0 || was_overlap) && !emptied;
    was_dropped <= (valid_i && refine_i && dropped != 0 || was_dropped) && !emptied;
    if (w_free) w_head <= w_head + 1;
    if (a_free) a_head <= a_head + 1;
    for (b = 0; b < 2; b = b + 1) begin
      if (write_en[b]) written[b][write_addr[b]] <= 1;
      if (drains[b]) fetched[b][read_addr[b]] <= 1;
    end
    if (issue && bank == s_bank && address == s_address) summed <= summed + 1;
    if (leaves) begin
      r_count <= r_count == words[r_bank] - 1 ? 0 : r_count + 1;
      if (r_count == words[r_bank] - 1) begin r_bank <= !r_bank; in_use[r_bank] <= 0; end
    end
    if (starts) begin
      next_bank <= !next_bank; in_use[next_bank] <= 1;
      words[next_bank] <= product; depth[next_bank] <= c_kv; mode[next_bank] <= c_mode; refine[next_bank] <= c_refine;
      written[next_bank] <= 0; fetched[next_bank] <= 0;
      if (next_bank == s_bank) summed <= 0;
    end
    if (rst) begin
      next_bank <= 0; r_bank <= 0; in_use <= 0; r_count <= 0; summed <= 0; w_head <= 0; a_head <= 0; was_bad <= 0; was_overlap <= 0; was_dropped <= 0;
    end
  end

  // Streams: a result stays until it is taken.
  reg waits = 0;
  reg [64:0] waited;
  always @(posedge clk) begin
    waits <= result_valid && !result_ready && !rst;
    waited <= result;
  end
  always @* if (waits) begin
    stays: assert (result_valid);
    stable: assert (result == waited);
  end

  // Buffers: the next entry goes behind the last one; the weight that is read is the oldest; the activation that is read is number at_m
  // from the oldest, or the oldest itself while they leave.
  wire [V-1:0] position = !active || at_n == last_n ? 0 : at_m;
  always @* begin
    w_fits: assert (w_level <= W_DEPTH);
    a_fits: assert (a_level <= A_DEPTH);
    w_takes: assert (w_wen == (weight_valid && weight_ready) && weight_ready == (w_level < W_DEPTH));
    a_takes: assert (a_wen == (activation_valid && activation_ready) && activation_ready == (a_level < A_DEPTH));
    if (w_free) w_underflow: assert (w_level != 0);
    if (a_free) a_underflow: assert (a_level != 0);
    if (w_read) w_empty: assert (w_level != 0);
    if (a_read) a_empty: assert (a_level > position);
    w_behind: assert (w_waddr == w_head + w_level[W-1:0]);
    a_behind: assert (a_waddr == a_head + a_level[V-1:0]);
    w_reads: assert (w_raddr == w_head && w_ren == w_read);
    a_reads: assert (a_raddr == a_head + position && a_ren == a_read);
    // Every vector reads an activation, the first of a pass a weight. A weight leaves when it is read, an activation in the last pass.
    w_use: assert (w_read == (issue && at_m == 0) && w_free == w_read);
    a_use: assert (a_read == issue && a_free == (issue && at_n == last_n));
    w_in: assert (w_wdata == weight);
    a_in: assert (a_wdata == activation);
    w_out: assert ({w_scale_i, w_i} == w_data[159+W_SCALES:0]);
    a_out: assert ({a_scale_i, a_i} == a_data[143:0]);
`ifdef REFINE
    w_recorded: assert (w_records == w_data[W_WIDTH-1 -: 40]);
    a_recorded: assert (a_records == a_data[A_WIDTH-1 -: 40]);
    merged: assert (record_i == record);
`endif
    if (valid_i) in_its_mode: assert (mode_i == mode[in_bank[1]] && (!REFINED || refine_i == refine[in_bank[1]]));
  end

  // Accumulators.
  generate for (i = 0; i < 2; i = i + 1) begin
    wire [A-1:0] r = read_addr[i], w = write_addr[i];
    wire [WORDS-1:0] all = (1 << words[i]) - 1;
    always @* begin
      if (computes[i]) begin
        assert (read_en[i] && r == to[3] && in_use[i] && written[i][r]);
        // Nothing is on its way to what is fetched.
        for (b = 4; b < 6; b = b + 1) assert (!(v[b] && in_bank[b] == i && to[b] == r));
      end
      if (v[3] && first[3] && in_bank[3] == i) assert (!written[i][to[3]]);
      if (drains[i]) begin
        assert (in_use[i] && r < words[i] && !fetched[i][r]);
        assert (written[i] == all);
        assert (!(active && bank == i));
        for (b = 1; b < 6; b = b + 1) assert (!(v[b] && in_bank[b] == i));
        if (i == s_bank && r == s_address) assert (summed == depth[i]);
      end
      if (write_en[i]) assert (in_use[i] && w < words[i] && fetched[i] == 0);
    end
  end endgenerate
  wire sum_in = v[4] && in_bank[4] == s_bank && to[4] == s_address;
  always @* begin
    if (v[4] && first[4]) from_zero: assert (psum_i == 0);
    if (sum_in && !first[4]) from_before: assert (psum_i == value);
    writes: assert (write_en == {v[5] && in_bank[5], v[5] && !in_bank[5]});
    if (v[5]) to_its_place: assert (write_addr[in_bank[5]] == to[5] && write_data[in_bank[5]] == psum_o);
    if (emptied) nothing_lost: assert (!v[5:1] && !busy);
  end

  // Commands and results.
  always @* begin
    if (!busy) accepts: assert (command_ready);
    if (starts) in_a_free_bank: assert (!in_use[next_bank]);
    works: assert (busy == (in_use != 0));
    reports: assert (status == {was_bad, was_dropped, was_overlap, vmac_status[2:1]});
    if (result_valid) begin
      of_a_tile: assert (in_use[r_bank]);
      last_only: assert (result[64] == (r_count == words[r_bank] - 1));
      if (r_bank == s_bank && r_count == s_address) its_sum: assert (result[63:0] == value);
    end
  end

  // Progress: from one issue, start of a tile or departure of a result to the next, no more than BOUND cycles pass in which the element is
  // busy but does not wait for a stream: for a result to be taken, or for an operand that it lacks.
  wire w_lacks = active && at_m == 0 && w_level == 0;
  wire a_lacks = active && a_level <= (at_n == last_n ? 0 : at_m);
  wire stalled = result_valid && !result_ready || w_lacks && !weight_valid || a_lacks && !activation_valid;
  reg [IDLE_BITS-1:0] idle = 0;
  always @(posedge clk)
    if (rst || !busy || issue || leaves || starts) idle <= 0;
    else if (!stalled) idle <= idle + 1;
  always @* begin
    progress: assert (idle <= BOUND);
    // What it waits for, it is ready to take.
    if (w_lacks) w_welcome: assert (weight_ready);
    if (a_lacks) a_welcome: assert (activation_ready);
  end

`ifdef TILE
  // To find a known bug sooner.
  always @* assume (!rst && !clear && weight_valid && activation_valid && `TILE);
`endif
`ifdef INVARIANTS
  // What makes all this inductive. First the tile that is issued.
  always @* begin
    assert (bank == !next_bank && occupied == in_use);
    assert ({v2, v3} == {v[2], v[3]});
    assert (recent == {to[2][0], v[2], to[1][0], v[1]});
    assert (words[0] >= 1 && words[0] <= WORDS && words[1] >= 1 && words[1] <= WORDS);
    if (active) begin
      assert (in_use[bank] && tile_mode == mode[bank] && (!REFINED || tile_refine == refine[bank]));
      assert (last_m < MAX_M && (last_m + 1) * (last_n + 1) == words[bank] && last_kv + 1 == depth[bank] && last_kv < MAX_KV);
      assert (at_m <= last_m && at_n <= last_n && at_kv <= last_kv && address == at_n * (last_m + 1) + at_m);
      assert (short == (words[bank] < 3));
      if (s_bank == bank && s_address < words[bank]) assert (summed == at_kv + (s_address < address));
    end else assert (address == 0);
  end
  // A bank in use is computed, on its way, full or at its last result: one of them.
  generate for (i = 0; i < 2; i = i + 1) begin
    wire computed = active && bank == i;
    wire [5:0] ended = ends & (i ? in_bank : ~in_bank);
    wire at_last = result_valid && out_last && out_bank == i;
    wire [WORDS-1:0] all = (1 << words[i]) - 1;
    always @* begin
      assert ($countones({computed, ended, full[i], at_last}) == in_use[i]);
      if (full[i]) assert (lengths[A*i +: A] == words[i] - 1);
      if (full[i] || at_last) assert (written[i] == all);
      if (in_use[i]) assert ((written[i] & ~all) == 0);
      if (!computed && in_use[i] && s_bank == i && s_address < words[i]) assert (summed == depth[i]);
      if (in_use[i] && !at_last)
        for (b = 0; b < WORDS; b = b + 1) assert (fetched[i][b] == (full[i] && drain_bank == i && b < drain_address));
    end
    // What was issued for is written or on its way.
    for (x = 0; x < WORDS; x = x + 1) begin
      wire [5:1] coming;
      for (j = 1; j < 6; j = j + 1) assign coming[j] = v[j] && in_bank[j] == i && to[j] == x;
      always @* if (in_use[i] && x < words[i])
        assert ((written[i][x] || coming != 0) == (!computed || at_kv != 0 || x < address));
    end
  end
  // Vectors on their way, in their order.
  for (i = 1; i < 6; i = i + 1) begin
    wire [A-1:0] follows = to[i] == words[in_bank[i]] - 1 ? 0 : to[i] + 1;
    wire [5:0] younger, same;
    for (j = 0; j < 6; j = j + 1) begin
      assign younger[j] = j < i && (j == 0 ? active : v[j]) && in_bank[j] == in_bank[i];
      assign same[j] = j > i && v[j] && in_bank[j] == in_bank[i] && to[j] == to[i];
    end
    always @* begin
      if (ends[i]) assert (v[i] && younger == 0 && to[i] == words[in_bank[i]] - 1);
      if (v[i]) begin
        assert (in_use[in_bank[i]] && !full[in_bank[i]] && to[i] < words[in_bank[i]]);
        assert (!(result_valid && out_bank == in_bank[i]));
        if (younger[4]) assert (to[4] == follows);
        else if (younger[3]) assert (to[3] == follows);
        else if (younger[2]) assert (to[2] == follows);
        else if (younger[1]) assert (to[1] == follows);
        else if (younger[0]) assert (to[0] == follows);
        if (i < 5) assert (first[i] == (!written[in_bank[i]][to[i]] && same == 0));
        for (b = i + 1; b < 6 && b < i + 3; b = b + 1) assert (!same[b]);
        // The older tile is ahead, and drains first.
        if (in_bank[i] != bank && in_use[bank]) assert (drain_bank == in_bank[i] && !full[bank]);
        for (b = 1; b < i; b = b + 1) if (v[b] && in_bank[b] != in_bank[i]) assert (in_bank[b] == bank);
        assert (idle < i);
      end
    end
  end endgenerate
  // The drain.
  wire [1:0] left = in_use & ~(result_valid && out_last ? (out_bank ? 2'b10 : 2'b01) : 2'b00);
  always @* begin
    assert (drain_bank == ($countones(left) == 1 ? bank : !bank));
    if ($countones(left) == 1) assert (left[bank]);
    if (full[!drain_bank]) assert (full[drain_bank]);
    if (drain_address != 0) assert (full[drain_bank] && drain_address < words[drain_bank]);
    if (result_valid) begin
      assert (out_bank == r_bank && out_last == (r_count == words[r_bank] - 1) && fetched[r_bank][r_count]);
      assert (out_last ? drain_address == 0 && drain_bank == !r_bank : drain_address == r_count + 1 && drain_bank == r_bank && full[r_bank]);
      if (r_bank == s_bank && r_count == s_address) assert (data[s_bank] == value);
    end else assert (drain_address == r_count && drain_bank == r_bank);
    if (sum_in && !first[4]) assert (data[s_bank] == value);
    if (active) assert (idle == 0 || at_m != 0 || w_level != 0);
    if (active) assert (idle <= a_level || !a_lacks && idle <= 2);
    if (full != 0 && !result_valid) assert (idle <= 5);
  end
`endif
endmodule
