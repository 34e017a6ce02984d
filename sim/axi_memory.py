"""Memory behind AXI4 in Verilog, and a harness that plays register accesses to a block and lets it work on that memory, with no Python in between.

The memory knows INCR bursts of full-width beats, which is all that the DMA engines use, and watches that they keep the rules of the bus. Any
accelerator with ports ``m_axi_…``, ``s_axi_…`` and ``irq`` fits the harness. docs/driver.md describes it.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.harness import simulate
from sim.runner import build_bulk, run_folder

__all__ = [
    "CHANNELS",
    "BusError",
    "Command",
    "ErrorRange",
    "Event",
    "MemoryHarness",
    "Run",
    "Timing",
    "connections",
    "harness_verilog",
    "memory_verilog",
    "plusargs",
    "read_dump",
    "write_image",
]

CHANNELS = ("ar", "r", "aw", "w", "b")
"""Channels of the memory that stall."""
RANGES = 32
"""Most ranges that answer errors."""
REQUESTS = 64
"""Bursts of each direction that the memory holds; a power of two."""
WORDS = 512
"""Beats of write data that wait in the memory; a power of two."""
RESET = 8
"""Cycles of reset."""
WATCHED = ("aw", "w", "ar")


class BusError(RuntimeError):
    """The block broke a rule of the bus, did not do in time what was waited for, or the simulation gave no answer."""


@dataclasses.dataclass(frozen=True)
class ErrorRange:
    """Addresses that answer an error.

    Attributes
    ----------
    first, end : int
        First address, and the one behind the last. A beat fails if its first byte is inside.
    response : int
        2 is SLVERR, 3 is DECERR.
    reads, writes : bool
        Which accesses fail.
    """

    first: int
    end: int
    response: int
    reads: bool = True
    writes: bool = True


@dataclasses.dataclass(frozen=True)
class Timing:
    """How a memory and the manager of the registers behave.

    Attributes
    ----------
    read_latency, write_latency : int
        Cycles that the memory adds between a burst's address and its first data, or before its data are written and answered.
    stalls : int or mapping of str to int
        Chance that a channel of `CHANNELS`, or ``"lite"`` for those of the registers, stands still in a cycle, in 1/256; 0 to 255; one
        number is for all of them.
    seed : int
        Of the stalls and of data where there are none.
    errors : tuple of ErrorRange

    Raises
    ------
    ValueError
        A number is outside its range, or there is no such channel.
    """

    read_latency: int = 0
    write_latency: int = 0
    stalls: int | Mapping[str, int] = 0
    seed: int = 1
    errors: tuple[ErrorRange, ...] = ()

    def __post_init__(self) -> None:
        for name in ("read_latency", "write_latency"):
            if not 0 <= getattr(self, name) < 1 << 20:
                raise ValueError(f"{name} must be from 0 to 2^20 - 1, not {getattr(self, name)}")
        for name, chance in self.chances.items():
            if name not in (*CHANNELS, "lite"):
                raise ValueError(f"stalls must be of {', '.join(CHANNELS)} or lite, not of {name!r}")
            if not 0 <= chance <= 255:
                raise ValueError(f"stalls must be from 0 to 255, not {chance} of {name}")
        if len(self.errors) > RANGES:
            raise ValueError(f"errors must be at most {RANGES}, not {len(self.errors)}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, not {self.seed}")

    @property
    def chances(self) -> dict[str, int]:
        """Chance of every channel that has one."""
        if isinstance(self.stalls, int):
            return dict.fromkeys((*CHANNELS, "lite"), self.stalls)
        return dict(self.stalls)


def memory_verilog(data_width: int, address_width: int, id_width: int, size: int) -> str:
    """Write module ``axi_memory``: subordinate ports ``axi_…`` with the names of AXI4, ``dump``, which writes the memory to a file, and ``faults``.

    Its behaviour comes from the plusargs of `plusargs`. Addresses outside ``size`` bytes from the plusarg ``base`` on answer DECERR. Data are
    written just before the response, so whoever looks before it finds the old bytes; where data are not valid they are random.

    Parameters
    ----------
    data_width, address_width, id_width : int
        In bits; the first a power of two from 32 to 1024.
    size : int
        In bytes, a multiple of a beat.

    Raises
    ------
    ValueError
        ``size`` is no multiple of a beat.
    """
    beat = data_width // 8
    if size < beat or size % beat:
        raise ValueError(f"size must be a positive multiple of {beat}, not {size}")
    stalls = "\n".join(f'        stall_{c} = 0; got = $value$plusargs("stall_{c}=%d", stall_{c});' for c in CHANNELS)
    checks = []
    payloads = {
        "aw": "{axi_awid, axi_awaddr, axi_awlen, axi_awsize, axi_awburst}",
        "ar": "{axi_arid, axi_araddr, axi_arlen, axi_arsize, axi_arburst}",
        "w": "{axi_wdata, axi_wstrb, axi_wlast}",
    }
    for name in WATCHED:
        checks.append(f"""
        if ((^axi_{name}valid) === 1'bx) begin
            $display("AXI {name}valid is unknown in cycle %0d", cycle); fault = fault + 1;
        end
        if (held_{name}) begin
            if (axi_{name}valid !== 1'b1) begin
                $display("AXI {name}valid fell before {name}ready in cycle %0d", cycle); fault = fault + 1;
            end else if (kept_{name} !== {payloads[name]}) begin
                $display("AXI {name} changed while it waited in cycle %0d", cycle); fault = fault + 1;
            end
        end
        if (axi_{name}valid && (^{payloads[name]}) === 1'bx) begin
            $display("AXI {name} is unknown in cycle %0d", cycle); fault = fault + 1;
        end
        held_{name} <= axi_{name}valid && !axi_{name}ready;
        kept_{name} <= {payloads[name]};""")
    for name in ("aw", "ar"):
        checks.append(f"""
        if (axi_{name}valid && axi_{name}ready) begin
            if (axi_{name}burst != 2'd1 || axi_{name}size != SIZE || axi_{name}addr % BYTES != 0) begin
                $display("AXI {name} must ask for INCR bursts of whole aligned beats in cycle %0d", cycle); fault = fault + 1;
            end
            if ((axi_{name}addr & 4095) + (axi_{name}len + 1) * BYTES > 4096) begin
                $display("AXI {name} leaves its page in cycle %0d: %h, %0d beats", cycle, axi_{name}addr, axi_{name}len + 1);
                fault = fault + 1;
            end
        end""")
    widths = {"aw": id_width + address_width + 13, "ar": id_width + address_width + 13, "w": data_width + beat + 1}
    held = "\n".join(f"    reg held_{n} = 0; reg [{widths[n] - 1}:0] kept_{n};" for n in WATCHED)
    return f"""\
module axi_memory(
    input wire clk, input wire rst, input wire dump,
    input wire [{id_width - 1}:0] axi_awid, input wire [{address_width - 1}:0] axi_awaddr, input wire [7:0] axi_awlen,
    input wire [2:0] axi_awsize, input wire [1:0] axi_awburst, input wire axi_awvalid, output reg axi_awready,
    input wire [{data_width - 1}:0] axi_wdata, input wire [{beat - 1}:0] axi_wstrb, input wire axi_wlast,
    input wire axi_wvalid, output reg axi_wready,
    output reg [{id_width - 1}:0] axi_bid, output reg [1:0] axi_bresp, output reg axi_bvalid, input wire axi_bready,
    input wire [{id_width - 1}:0] axi_arid, input wire [{address_width - 1}:0] axi_araddr, input wire [7:0] axi_arlen,
    input wire [2:0] axi_arsize, input wire [1:0] axi_arburst, input wire axi_arvalid, output reg axi_arready,
    output reg [{id_width - 1}:0] axi_rid, output reg [{data_width - 1}:0] axi_rdata, output reg [1:0] axi_rresp,
    output reg axi_rlast, output reg axi_rvalid, input wire axi_rready,
    output reg [31:0] faults, output reg [63:0] read_beats, output reg [63:0] write_beats
);
    localparam BYTES = {beat};
    localparam SIZE = {beat.bit_length() - 1};
    localparam COUNT = {size // beat};
    reg [{data_width - 1}:0] mem [0:COUNT - 1];
    reg [8191:0] name;
    reg [63:0] base, first, beats, random, cycle;
    reg [31:0] read_latency, write_latency, stall_ar, stall_r, stall_aw, stall_w, stall_b, seed;
    integer got, file, place, ranges, lane;
    reg [63:0] error_first [0:{RANGES - 1}];
    reg [63:0] error_end [0:{RANGES - 1}];
    reg [1:0] error_response [0:{RANGES - 1}];
    reg [1:0] error_kinds [0:{RANGES - 1}];
{held}
    reg [31:0] fault;

    reg [{address_width - 1}:0] ar_addr [0:{REQUESTS - 1}];
    reg [7:0] ar_len [0:{REQUESTS - 1}];
    reg [{id_width - 1}:0] ar_id [0:{REQUESTS - 1}];
    reg [63:0] ar_due [0:{REQUESTS - 1}];
    reg [31:0] ar_in, ar_out;
    reg [7:0] r_beat;
    reg [{address_width - 1}:0] aw_addr [0:{REQUESTS - 1}];
    reg [7:0] aw_len [0:{REQUESTS - 1}];
    reg [{id_width - 1}:0] aw_id [0:{REQUESTS - 1}];
    reg [63:0] aw_due [0:{REQUESTS - 1}];
    reg [31:0] aw_in, aw_out;
    reg [7:0] w_beat;
    reg [1:0] w_response;
    reg [{data_width - 1}:0] w_data [0:{WORDS - 1}];
    reg [{beat - 1}:0] w_strb [0:{WORDS - 1}];
    reg w_last [0:{WORDS - 1}];
    reg [31:0] w_in, w_out;
    reg [{id_width - 1}:0] b_id [0:{REQUESTS - 1}];
    reg [1:0] b_response [0:{REQUESTS - 1}];
    reg [31:0] b_in, b_out;
    reg [63:0] address;
    reg [1:0] response;
    reg [{data_width - 1}:0] word;

    function [1:0] answer(input [63:0] at, input writing);
        integer i;
        begin
            answer = at < base || at - base >= COUNT * BYTES ? 2'd3 : 2'd0;
            for (i = 0; i < {RANGES}; i = i + 1)
                if (i < ranges && at >= error_first[i] && at < error_end[i] && error_kinds[i][writing] && error_response[i] > answer)
                    answer = error_response[i];
        end
    endfunction

    initial begin
        base = 0; got = $value$plusargs("base=%h", base);
        first = 0; got = $value$plusargs("dump_first=%d", first);
        beats = 0; got = $value$plusargs("dump_beats=%d", beats);
        read_latency = 0; got = $value$plusargs("read_latency=%d", read_latency);
        write_latency = 0; got = $value$plusargs("write_latency=%d", write_latency);
{stalls}
        seed = 1; got = $value$plusargs("seed=%d", seed);
        random = {{seed + 32'd1, ~seed}};
        cycle = 0; fault = 0; faults = 0; read_beats = 0; write_beats = 0; ranges = 0;
        if ($value$plusargs("image=%s", name)) begin
            file = $fopen(name, "rb");
            if (file == 0) begin
                $display("AXI cannot open the image"); $finish;
            end
            got = $fread(mem, file);
            $fclose(file);
        end
        if ($value$plusargs("errors=%s", name)) begin
            file = $fopen(name, "r");
            got = 4;
            while (got == 4) begin
                got = $fscanf(file, "%h %h %h %h\\n", error_first[ranges], error_end[ranges], error_response[ranges], error_kinds[ranges]);
                if (got == 4) ranges = ranges + 1;
            end
            $fclose(file);
        end
    end

    always @(posedge clk) begin
        cycle <= cycle + 1;
        // xorshift: 64 fresh bits in every cycle.
        random = random ^ (random << 13);
        random = random ^ (random >> 7);
        random = random ^ (random << 17);
        if (dump) begin
            got = $value$plusargs("dump=%s", name);
            file = $fopen(name, "wb");
            for (place = 0; place < beats; place = place + 1) $fwrite(file, "%u", mem[first + place]);
            $fclose(file);
        end
        if (rst) begin
            axi_awready <= 0; axi_wready <= 0; axi_bvalid <= 0; axi_arready <= 0; axi_rvalid <= 0;
            ar_in = 0; ar_out = 0; aw_in = 0; aw_out = 0; w_in = 0; w_out = 0; b_in = 0; b_out = 0;
            r_beat = 0; w_beat = 0; w_response = 0;
{chr(10).join(f"            held_{n} <= 0;" for n in WATCHED)}
        end else begin
{"".join(checks)}
        faults <= fault;
        if (axi_arvalid && axi_arready) begin
            ar_addr[ar_in % {REQUESTS}] = axi_araddr; ar_len[ar_in % {REQUESTS}] = axi_arlen;
            ar_id[ar_in % {REQUESTS}] = axi_arid; ar_due[ar_in % {REQUESTS}] = cycle + read_latency;
            ar_in = ar_in + 1;
        end
        axi_arready <= random[7:0] >= stall_ar && ar_in - ar_out < {REQUESTS - 1};
        if (axi_rvalid && axi_rready) read_beats <= read_beats + 1;
        if (!axi_rvalid || axi_rready) begin
            axi_rvalid <= 0;
            axi_rdata <= {{{data_width // 32}{{random[63:32]}}}};
            axi_rresp <= random[1:0]; axi_rlast <= random[2];
            if (ar_in != ar_out && cycle >= ar_due[ar_out % {REQUESTS}] && random[15:8] >= stall_r) begin
                address = ar_addr[ar_out % {REQUESTS}] + r_beat * BYTES;
                response = answer(address, 1'b0);
                axi_rvalid <= 1; axi_rresp <= response; axi_rid <= ar_id[ar_out % {REQUESTS}];
                if (response == 0) axi_rdata <= mem[(address - base) >> SIZE];
                axi_rlast <= r_beat == ar_len[ar_out % {REQUESTS}];
                if (r_beat == ar_len[ar_out % {REQUESTS}]) begin
                    r_beat = 0; ar_out = ar_out + 1;
                end else r_beat = r_beat + 1;
            end
        end
        if (axi_awvalid && axi_awready) begin
            aw_addr[aw_in % {REQUESTS}] = axi_awaddr; aw_len[aw_in % {REQUESTS}] = axi_awlen;
            aw_id[aw_in % {REQUESTS}] = axi_awid; aw_due[aw_in % {REQUESTS}] = cycle + write_latency;
            aw_in = aw_in + 1;
        end
        axi_awready <= random[23:16] >= stall_aw && aw_in - b_out < {REQUESTS - 1};
        if (axi_wvalid && axi_wready) begin
            w_data[w_in % {WORDS}] = axi_wdata; w_strb[w_in % {WORDS}] = axi_wstrb; w_last[w_in % {WORDS}] = axi_wlast;
            w_in = w_in + 1;
            write_beats <= write_beats + 1;
        end
        axi_wready <= random[31:24] >= stall_w && w_in - w_out < {WORDS - 1};
        if (aw_in != aw_out && w_in != w_out && cycle >= aw_due[aw_out % {REQUESTS}]) begin
            address = aw_addr[aw_out % {REQUESTS}] + w_beat * BYTES;
            response = answer(address, 1'b1);
            if (response > w_response) w_response = response;
            if (response == 0) begin
                word = mem[(address - base) >> SIZE];
                for (lane = 0; lane < BYTES; lane = lane + 1)
                    if (w_strb[w_out % {WORDS}][lane]) word[8 * lane +: 8] = w_data[w_out % {WORDS}][8 * lane +: 8];
                mem[(address - base) >> SIZE] = word;
            end
            if (w_last[w_out % {WORDS}] != (w_beat == aw_len[aw_out % {REQUESTS}])) begin
                $display("AXI wlast is wrong in the burst to %h", aw_addr[aw_out % {REQUESTS}]); fault = fault + 1;
            end
            w_out = w_out + 1;
            if (w_beat == aw_len[aw_out % {REQUESTS}]) begin
                b_id[b_in % {REQUESTS}] = aw_id[aw_out % {REQUESTS}]; b_response[b_in % {REQUESTS}] = w_response;
                b_in = b_in + 1; aw_out = aw_out + 1; w_beat = 0; w_response = 0;
            end else w_beat = w_beat + 1;
        end
        if (!axi_bvalid || axi_bready) begin
            axi_bvalid <= 0; axi_bresp <= random[41:40];
            if (b_in != b_out && random[39:32] >= stall_b) begin
                axi_bvalid <= 1; axi_bresp <= b_response[b_out % {REQUESTS}]; axi_bid <= b_id[b_out % {REQUESTS}];
                b_out = b_out + 1;
            end
        end
        end
    end
endmodule
"""


_BUS = {
    "aw": ("id", "addr", "len", "size", "burst", "valid", "ready"),
    "w": ("data", "strb", "last", "valid", "ready"),
    "b": ("id", "resp", "valid", "ready"),
    "ar": ("id", "addr", "len", "size", "burst", "valid", "ready"),
    "r": ("id", "data", "resp", "last", "valid", "ready"),
}
_LITE = {"aw": ("addr",), "w": ("data", "strb"), "b": ("resp",), "ar": ("addr",), "r": ("data", "resp")}


def connections(data_width: int, address_width: int, id_width: int, prefixes: Mapping[str, str]) -> tuple[str, str]:
    """Return wires for the channels of a bus and the connections of the memory to them.

    Parameters
    ----------
    data_width, address_width, id_width : int
    prefixes : mapping of str to str
        From the channels that there are, such as ``"ar"``, to the prefix of their wires, such as ``"m_axi_"``. The other channels of the
        memory see nothing.
    """
    widths = {
        "id": id_width,
        "addr": address_width,
        "len": 8,
        "size": 3,
        "burst": 2,
        "data": data_width,
        "strb": data_width // 8,
    }
    widths |= {"last": 1, "valid": 1, "ready": 1, "resp": 2}
    wires, connected = [], []
    for channel, fields in _BUS.items():
        for field in fields:
            if channel in prefixes:
                name = f"{prefixes[channel]}{channel}{field}"
                wires.append(f"    wire [{widths[field] - 1}:0] {name};")
                connected.append(f".axi_{channel}{field}({name})")
            elif (field == "ready") == (channel in ("b", "r")) and (field == "ready" or channel not in ("b", "r")):
                connected.append(f".axi_{channel}{field}({widths[field]}'d0)")
    return "\n".join(wires), ", ".join(connected)


def harness_verilog(sidecar: Mapping[str, Any], size: int) -> str:
    """Write module ``harness`` around a block with ports ``clk``, ``rst``, ``s_axi_…``, ``m_axi_…`` and ``irq``, and the memory.

    The plusarg ``script`` names a file of lines of three hexadecimal numbers, see `Command`; what happens goes to the file ``log``.

    Parameters
    ----------
    sidecar : mapping
        ``top`` and ``ports`` of the block.
    size : int
        Bytes of the memory.

    Raises
    ------
    ValueError
        The block has other ports.
    """
    widths = {port["name"]: port["width"] for port in sidecar["ports"]}
    others = sorted(n for n in widths if not n.startswith(("s_axi_", "m_axi_")) and n not in ("clk", "rst", "irq"))
    if others or "s_axi_awaddr" not in widths or "m_axi_rdata" not in widths or "m_axi_wdata" not in widths:
        raise ValueError(f"the block must have ports clk, rst, s_axi_*, m_axi_* and irq alone, not {', '.join(widths)}")
    bus = widths["m_axi_rdata"], widths["m_axi_araddr"], widths["m_axi_arid"]
    wires, memory = connections(*bus, dict.fromkeys(_BUS, "m_axi_"))
    declared = {f"m_axi_{channel}{field}" for channel, fields in _BUS.items() for field in fields}
    lines = [
        wires,
        *(f"    wire [{widths[n] - 1}:0] {n};" for n in widths if n.startswith("m_axi_") and n not in declared),
    ]
    for channel, fields in _LITE.items():
        back = channel in ("b", "r")
        for field in (*fields, "valid", "ready"):
            kind = "wire" if back != (field == "ready") else "reg"
            lines.append(f"    {kind} [{widths[f's_axi_{channel}{field}'] - 1}:0] s_axi_{channel}{field};")
    lines += [f"    reg [{widths[n] - 1}:0] {n} = 0;" for n in ("s_axi_awprot", "s_axi_arprot") if n in widths]
    ports = ", ".join(f".{name}({name})" for name in widths)
    return f"""\
module harness(input wire clk);
{chr(10).join(lines)}
    reg rst, dump;
    wire irq;
    wire [31:0] faults;
    wire [63:0] read_beats, write_beats;
    {sidecar["top"]} dut ({ports});
    axi_memory memory (.clk(clk), .rst(rst), .dump(dump), .faults(faults), .read_beats(read_beats), .write_beats(write_beats), {memory});
    reg [8191:0] name;
    reg [63:0] cycle, limit, since, operation, x, y, random;
    reg [31:0] stall, seed, fault;
    integer script, log, got;
    reg waiting, ended, aw_left, w_left, ar_left, b_held, r_held;
    reg [1:0] b_kept;
    reg [33:0] r_kept;

    initial begin
        rst = 1; dump = 0; cycle = 0; since = 0; operation = 0; x = 0; y = 0; fault = 0;
        waiting = 0; ended = 0; aw_left = 0; w_left = 0; ar_left = 0; b_held = 0; r_held = 0;
        s_axi_awvalid = 0; s_axi_wvalid = 0; s_axi_arvalid = 0; s_axi_bready = 0; s_axi_rready = 0;
        s_axi_awaddr = 0; s_axi_araddr = 0; s_axi_wdata = 0; s_axi_wstrb = 0;
        limit = 0; got = $value$plusargs("limit=%d", limit);
        stall = 0; got = $value$plusargs("stall_lite=%d", stall);
        seed = 1; got = $value$plusargs("seed=%d", seed);
        random = {{~seed, seed + 32'd77}};
        got = $value$plusargs("script=%s", name); script = $fopen(name, "r");
        got = $value$plusargs("log=%s", name); log = $fopen(name, "w");
        if (script == 0 || log == 0) begin
            $display("AXI cannot open script and log"); $finish;
        end
`ifdef WAVES
        got = $value$plusargs("waves=%s", name);
        $dumpfile(name); $dumpvars(0, harness);
`endif
    end

    always @(posedge clk) begin
        cycle <= cycle + 1;
        random = random ^ (random << 13);
        random = random ^ (random >> 7);
        random = random ^ (random << 17);
        rst <= cycle < {RESET};
        dump <= 0;
        if (!rst) begin
            if (^{{s_axi_bvalid, s_axi_rvalid, s_axi_awready, s_axi_wready, s_axi_arready, irq}} === 1'bx) begin
                $display("AXI register port or irq is unknown in cycle %0d", cycle); fault = fault + 1;
            end
            if (b_held && (s_axi_bvalid !== 1'b1 || s_axi_bresp !== b_kept)) begin
                $display("AXI register answer to a write changed while it waited in cycle %0d", cycle); fault = fault + 1;
            end
            if (r_held && (s_axi_rvalid !== 1'b1 || {{s_axi_rresp, s_axi_rdata}} !== r_kept)) begin
                $display("AXI register answer to a read changed while it waited in cycle %0d", cycle); fault = fault + 1;
            end
            b_held <= s_axi_bvalid && !s_axi_bready; b_kept <= s_axi_bresp;
            r_held <= s_axi_rvalid && !s_axi_rready; r_kept <= {{s_axi_rresp, s_axi_rdata}};
            if (s_axi_awvalid && s_axi_awready) s_axi_awvalid <= 0;
            if (s_axi_wvalid && s_axi_wready) s_axi_wvalid <= 0;
            if (s_axi_arvalid && s_axi_arready) s_axi_arvalid <= 0;
            s_axi_bready <= random[31:24] >= stall;
            s_axi_rready <= random[39:32] >= stall;
            if (aw_left && random[7:0] >= stall) begin
                s_axi_awvalid <= 1; s_axi_awaddr <= x; aw_left = 0;
            end
            if (w_left && random[15:8] >= stall) begin
                s_axi_wvalid <= 1; s_axi_wdata <= y; s_axi_wstrb <= 4'hf; w_left = 0;
            end
            if (ar_left && random[23:16] >= stall) begin
                s_axi_arvalid <= 1; s_axi_araddr <= x; ar_left = 0;
            end
            if (waiting) case (operation)
                1: if (s_axi_bvalid && s_axi_bready) begin
                    $fwrite(log, "1 %h %h %h %0d\\n", x, y, s_axi_bresp, cycle); waiting = 0;
                end
                2: if (s_axi_rvalid && s_axi_rready) begin
                    $fwrite(log, "2 %h %h %h %0d\\n", x, s_axi_rdata, s_axi_rresp, cycle); waiting = 0;
                end
                3: if (irq == y[0]) begin
                    $fwrite(log, "3 %h %h 0 %0d\\n", x, y, cycle); waiting = 0;
                end else if (cycle - since > x) begin
                    $fwrite(log, "f 3 0 0 %0d\\n", cycle); waiting = 0; ended = 1;
                end
                default: if (cycle - since >= x) waiting = 0;
            endcase
            if (!waiting && !ended) begin
                got = $fscanf(script, "%h %h %h\\n", operation, x, y);
                since = cycle; waiting = 1;
                if (got != 3 || operation == 0) ended = 1;
                case (operation)
                    1: begin
                        aw_left = 1; w_left = 1;
                    end
                    2: ar_left = 1;
                    5: begin
                        dump <= 1; $fwrite(log, "5 0 0 0 %0d\\n", cycle);
                    end
                    default: ;
                endcase
            end
            if (faults + fault != 0) ended = 1;
            if (cycle > limit && !ended) begin
                $fwrite(log, "f 0 0 0 %0d\\n", cycle); ended = 1;
            end
            if (ended && !dump) begin
                $fwrite(log, "0 %h %h %h %0d\\n", faults + fault, read_beats, write_beats, cycle);
                $fclose(log);
                $finish;
            end
        end
    end
endmodule
"""


@dataclasses.dataclass(frozen=True)
class Command:
    """A line of a script.

    Attributes
    ----------
    operation : int
        0 end; 1 write register ``x`` with ``y``; 2 read register ``x``; 3 wait at most ``x`` cycles until ``irq`` is ``y``; 4 wait ``x``
        cycles; 5 write the memory to the dump file.
    x, y : int
    """

    operation: int
    x: int = 0
    y: int = 0

    @classmethod
    def write(cls, address: int, data: int) -> "Command":
        """Write a register."""
        return cls(1, address, data)

    @classmethod
    def read(cls, address: int) -> "Command":
        """Read a register."""
        return cls(2, address)

    @classmethod
    def interrupt(cls, limit: int, level: int = 1) -> "Command":
        """Wait until the interrupt has a level; it is an error if it takes longer than ``limit`` cycles."""
        return cls(3, limit, level)

    @classmethod
    def idle(cls, cycles: int) -> "Command":
        """Do nothing for a while."""
        return cls(4, cycles)

    @classmethod
    def dump(cls) -> "Command":
        """Take the memory as it is now; only the last one counts."""
        return cls(5)


@dataclasses.dataclass(frozen=True)
class Event:
    """What came of a command: its operation, its ``x``, what was read or written, the bus's response, and the cycle."""

    operation: int
    x: int
    data: int
    response: int
    cycle: int


@dataclasses.dataclass(frozen=True)
class Run:
    """What came of a run.

    Attributes
    ----------
    memory : ndarray of uint8
        The bytes at the dump.
    events : list of Event
        One per command that was carried out, but for idling.
    cycles : int
        When it ended, from the start of the simulation.
    read_beats, write_beats : int
        Beats that the block read and wrote.
    """

    memory: NDArray[np.uint8]
    events: list[Event]
    cycles: int
    read_beats: int
    write_beats: int


def write_image(path: Path, octets: NDArray[np.uint8], beat: int) -> None:
    """Write bytes as the memory loads them: ``$fread`` fills a word from its most significant byte."""
    padded = np.zeros(-(-len(octets) // beat) * beat, np.uint8)
    padded[: len(octets)] = octets
    padded.reshape(-1, beat)[:, ::-1].tofile(path)


def read_dump(path: Path, beats: int, beat: int) -> NDArray[np.uint8]:
    """Read the file of a dump.

    Raises
    ------
    BusError
        There is none, or it is too short.
    """
    octets = np.fromfile(path, np.uint8) if path.exists() else np.zeros(0, np.uint8)
    if len(octets) != beats * beat:
        raise BusError(f"the dump must have {beats * beat} bytes, not {len(octets)}")
    return octets


def plusargs(folder: Path, timing: Timing, base: int, octets: NDArray[np.uint8], beat: int) -> list[str]:
    """Write image and errors into a folder and return the words for the memory."""
    image, errors = folder / "image.bin", folder / "errors.txt"
    write_image(image, octets, beat)
    errors.write_text(
        "".join(f"{e.first:x} {e.end:x} {e.response:x} {2 * e.writes + e.reads:x}\n" for e in timing.errors)
    )
    words = [f"+base={base:x}", f"+image={image}", f"+errors={errors}", f"+seed={timing.seed & 0x3FFFFFFF}"]
    words += [f"+read_latency={timing.read_latency}", f"+write_latency={timing.write_latency}"]
    words += [f"+dump={folder / 'dump.bin'}", "+dump_first=0", f"+dump_beats={-(-len(octets) // beat)}"]
    return words + [f"+stall_{channel}={chance}" for channel, chance in timing.chances.items()]


class MemoryHarness:
    """A block behind the harness, compiled once.

    Parameters
    ----------
    sources : mapping of str to str
        File name to Verilog text of the block.
    sidecar : mapping
        Its description.
    simulator : str
        ``"verilator"`` or ``"icarus"``.
    size : int
        Bytes of the memory.
    waves : bool
        Record every run; the path is printed.
    units : sequence of str
        Modules of the block that are compiled once each, see :func:`sim.runner.build_bulk`.

    Raises
    ------
    SimulationError
        The simulator is missing or rejects the block.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        sidecar: Mapping[str, Any],
        simulator: str = "verilator",
        size: int = 1 << 24,
        waves: bool = False,
        units: Sequence[str] = (),
    ) -> None:
        widths = {port["name"]: port["width"] for port in sidecar["ports"]}
        top = harness_verilog(sidecar, size)
        memory = memory_verilog(widths["m_axi_rdata"], widths["m_axi_araddr"], widths["m_axi_arid"], size)
        self.size = size
        self.beat = widths["m_axi_rdata"] // 8
        self._build = build_bulk({**sources, "harness.v": top, "axi_memory.v": memory}, simulator, waves, units=units)

    def run(
        self,
        octets: NDArray[np.uint8],
        commands: Iterable[Command],
        timing: Timing | None = None,
        base: int = 0,
        limit: int | None = None,
        timeout: float = 3600.0,
    ) -> Run:
        """Reset the block, play a script, and return what the memory holds at its dump.

        Parameters
        ----------
        octets : ndarray of uint8
            What the memory holds at first, from ``base`` on.
        commands : iterable of Command
            One of them `Command.dump`.
        timing : Timing, optional
        base : int
            Address of the first byte.
        limit : int, optional
            Most cycles of the whole run; by default what the commands may take.
        timeout : float
            Most seconds.

        Raises
        ------
        ValueError
            The memory is too small.
        BusError
            Rules were broken, an interrupt did not come, or a limit was reached; the message has the first lines that say so.
        SimulationError
            The simulation failed.
        """
        if len(octets) > self.size:
            raise ValueError(f"octets must be at most the memory's {self.size}, not {len(octets)}")
        timing = timing or Timing()
        commands = list(commands)
        if limit is None:
            limit = sum(c.x + 1 for c in commands if c.operation in (3, 4)) + 1000 * (len(commands) + 1)
        with run_folder("memory", keep=self._build.waves) as folder:
            script, log = folder / "script.txt", folder / "log.txt"
            script.write_text("".join(f"{c.operation:x} {c.x:x} {c.y:x}\n" for c in commands) + "0 0 0\n")
            words = [
                *plusargs(folder, timing, base, octets, self.beat),
                f"+script={script}",
                f"+log={log}",
                f"+limit={limit}",
            ]
            output = simulate(self._build, folder, words, timeout, timing.seed % 1000 + 1)
            lines = [line.split() for line in log.read_text().splitlines()]
            broken = [line for line in output.splitlines() if line.startswith("AXI ")]
            if broken:
                raise BusError("; ".join(broken[:5]))
            for line in lines:
                if line[0] == "f":
                    reason = (
                        "the interrupt did not come in time"
                        if line[1] == "3"
                        else f"the run was longer than {limit} cycles"
                    )
                    raise BusError(f"{reason}, in cycle {line[4]}")
            if not lines or lines[-1][0] != "0":
                raise BusError(f"the simulation gave no end\n{output}")
            memory = read_dump(folder / "dump.bin", -(-len(octets) // self.beat), self.beat)[: len(octets)]
        *events, end = lines
        for event in events:
            if "x" in event[2].lower():
                raise BusError(f"register {event[1]} gave unknown bits in cycle {event[4]}")
        if int(end[1], 16):
            raise BusError(f"{int(end[1], 16)} rules of the bus were broken\n{output}")
        return Run(
            memory,
            [
                Event(int(n, 16), int(x, 16), int(data, 16), int(response, 16), int(cycle))
                for n, x, data, response, cycle in events
            ],
            int(end[4]),
            int(end[2], 16),
            int(end[3], 16),
        )
