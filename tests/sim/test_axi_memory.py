"""The fast memory harness, with a block that copies bytes by the DMA engines; broken blocks and memories are noticed."""

import re

import numpy as np
import pytest

import sim.axi_memory
from hdl.dma import ReadDma
from hdl.lib.verilog import to_verilog
from model.dma import DmaConfig, DmaStatus, bursts
from sim.axi_memory import BusError, Command, ErrorRange, MemoryHarness, Timing, harness_verilog, memory_verilog
from sim.design import generated
from sim.runner import available_simulators

SECOND = "icarus" if "icarus" in available_simulators() else "verilator"
PARAMETERS = {"data_width": 64, "address_width": 32, "max_burst": 8, "outstanding": 4}
CONFIG = DmaConfig(**PARAMETERS)
BASE = 0x12000
SIZE = 1 << 15

# Registers: 0 source, 4 destination, 8 bytes, which starts; 12 reads {end of the write, end of the read} and takes the interrupt away.
COPIER = """\
module copier(input wire clk, input wire rst, output reg irq,
    input wire [3:0] s_axi_awaddr, input wire s_axi_awvalid, output wire s_axi_awready,
    input wire [31:0] s_axi_wdata, input wire [3:0] s_axi_wstrb, input wire s_axi_wvalid, output wire s_axi_wready,
    output wire [1:0] s_axi_bresp, output reg s_axi_bvalid, input wire s_axi_bready,
    input wire [3:0] s_axi_araddr, input wire s_axi_arvalid, output wire s_axi_arready,
    output reg [31:0] s_axi_rdata, output wire [1:0] s_axi_rresp, output reg s_axi_rvalid, input wire s_axi_rready,
    PORTS);
    reg [31:0] source, target, size;
    reg start_read, start_write;
    reg [1:0] ended;
    reg [3:0] result;
    wire [1:0] read_end, write_end;
    wire read_ready, write_ready, word_valid, word_ready, read_done, write_done;
    wire [64:0] word;
    assign s_axi_awready = s_axi_awvalid && s_axi_wvalid && !s_axi_bvalid;
    assign s_axi_wready = s_axi_awready;
    assign s_axi_arready = !s_axi_rvalid;
    assign s_axi_bresp = 0;
    assign s_axi_rresp = 0;
    read_dma reader(.clk(clk), .rst(rst), .request__payload({size[20:0], source}), .request__valid(start_read),
        .request__ready(read_ready), .word__payload(word), .word__valid(word_valid), .word__ready(word_ready),
        .done__payload(read_end), .done__valid(read_done), .done__ready(1'b1), READ);
    write_dma writer(.clk(clk), .rst(rst), .request__payload({size[20:0], target}), .request__valid(start_write),
        .request__ready(write_ready), .word__payload(word[63:0]), .word__valid(word_valid), .word__ready(word_ready),
        .done__payload(write_end), .done__valid(write_done), .done__ready(1'b1), WRITE);
    always @(posedge clk) if (rst) begin
        s_axi_bvalid <= 0; s_axi_rvalid <= 0; irq <= 0; start_read <= 0; start_write <= 0; ended <= 0; result <= 0;
    end else begin
        if (s_axi_bready) s_axi_bvalid <= 0;
        if (s_axi_rready) s_axi_rvalid <= 0;
        if (read_ready) start_read <= 0;
        if (write_ready) start_write <= 0;
        if (read_done) begin ended[0] <= 1; result[1:0] <= read_end; end
        if (write_done) begin ended[1] <= 1; result[3:2] <= write_end; end
        if (ended == 3) begin irq <= 1; ended <= 0; end
        if (s_axi_awready) begin
            s_axi_bvalid <= 1;
            case (s_axi_awaddr)
                0: source <= s_axi_wdata;
                4: target <= s_axi_wdata;
                default: begin size <= s_axi_wdata; start_read <= 1; start_write <= 1; end
            endcase
        end
        if (s_axi_arvalid && s_axi_arready) begin
            s_axi_rvalid <= 1; s_axi_rdata <= result; irq <= 0;
        end
    end
endmodule
"""


def copier():
    """Verilog of all parts, and the description of the whole."""
    designs = {name: generated(name, **PARAMETERS) for name in ("read_dma", "write_dma")}
    ports = [p for d in designs.values() for p in d.sidecar["ports"] if p["name"].startswith("m_axi_")]
    declared = ", ".join(f"{p['direction']} wire [{p['width'] - 1}:0] {p['name']}" for p in ports)
    read, write = (
        ", ".join(f".{p['name']}({p['name']})" for p in d.sidecar["ports"] if p["name"].startswith("m_axi_"))
        for d in designs.values()
    )
    text = COPIER.replace("PORTS", declared).replace("READ)", read + ")").replace("WRITE)", write + ")")
    lite = {"awaddr": 4, "awvalid": 1, "awready": 1, "wdata": 32, "wstrb": 4, "wvalid": 1, "wready": 1, "bresp": 2}
    lite |= {"bvalid": 1, "bready": 1, "araddr": 4, "arvalid": 1, "arready": 1, "rdata": 32, "rresp": 2}
    lite |= {"rvalid": 1, "rready": 1}
    ports += [{"name": f"s_axi_{name}", "width": width} for name, width in lite.items()]
    ports += [{"name": name, "width": 1} for name in ("clk", "rst", "irq")]
    sources = {"copier.v": text, **{f"{name}.v": design.verilog for name, design in designs.items()}}
    return sources, {"top": "copier", "ports": ports}


@pytest.fixture(scope="module")
def harness():
    return MemoryHarness(*copier(), size=SIZE)


def copy(source, target, size):
    return [
        *(Command.write(4 * n, value) for n, value in enumerate((source, target, size))),
        Command.interrupt(20_000),
        Command.dump(),
        Command.read(12),
        Command.interrupt(100, 0),
    ]


def ends(run):
    """How reads and writes ended, in order."""
    found = [event.data for event in run.events if event.operation == 2]
    return [(DmaStatus(value & 3), DmaStatus(value >> 2)) for value in found]


def random_copies(rng, count):
    """Requests whose source and target do not overlap, since a copy does not wait for all reads before it writes."""
    found = []
    while len(found) < count:
        size = int(rng.choice([rng.integers(1, 20), rng.integers(1, 900)]))
        source, target = (int(at) for at in rng.integers(0, SIZE - size, 2))
        if source + size + 16 <= target or target + size + 16 <= source:
            found.append((source, target, size))
    return found


TIMINGS = [
    Timing(),
    Timing(40, 60),
    Timing(0, 0, 60),
    Timing(3, 9, {"ar": 250, "w": 200, "lite": 128}),
    Timing(7, 0, 200, seed=5),
]


def check_copies(harness, timing, count, seed):
    rng = np.random.default_rng(seed)
    octets = rng.integers(0, 256, SIZE, dtype=np.uint8)
    expected = octets.copy()
    copies = random_copies(rng, count)
    commands, read, written = [], 0, 0
    for source, target, size in copies:
        commands += copy(BASE + source, BASE + target, size)
        expected[target : target + size] = expected[source : source + size]
        read += sum(burst.beats for burst in bursts(CONFIG, BASE + source, size))
        written += sum(burst.beats for burst in bursts(CONFIG, BASE + target, size))
    run = harness.run(octets, commands, timing, BASE)
    assert ends(run) == [(DmaStatus.OK, DmaStatus.OK)] * count
    assert (run.memory == expected).all()
    assert (expected != octets).sum() > 10 * count
    # The dump is before the copy's registers are read, so the last beats are counted.
    assert (run.read_beats, run.write_beats) == (read, written)
    assert len(run.events) == 7 * count
    return run


@pytest.mark.parametrize("timing", TIMINGS, ids=range(len(TIMINGS)))
def test_copies_are_right_whatever_the_timing(harness, timing, seed):
    check_copies(harness, timing, 60, seed)


def test_second_simulator_agrees(seed):
    other = MemoryHarness(*copier(), simulator=SECOND, size=SIZE)
    for timing in TIMINGS[1:3]:
        check_copies(other, timing, 12, seed)


def test_cycles_are_the_same_in_both_simulators_and_stalls_cost_time(harness, seed):
    other = MemoryHarness(*copier(), simulator=SECOND, size=SIZE)
    runs = [check_copies(each, TIMINGS[2], 12, seed) for each in (harness, other)]
    assert runs[0].cycles == runs[1].cycles
    assert runs[0].events == runs[1].events
    fast = check_copies(harness, TIMINGS[0], 12, seed)
    assert runs[0].cycles > 1.1 * fast.cycles


def test_beats_come_every_cycle(harness):
    octets = np.zeros(SIZE, np.uint8)

    def cycles(timing):
        events = harness.run(octets, copy(BASE, BASE + SIZE // 2, 8192), timing, BASE).events
        return events[3].cycle - events[2].cycle

    assert cycles(Timing()) < 1024 + 60
    assert cycles(Timing(read_latency=500)) > 1024 + 500
    assert cycles(Timing(write_latency=500)) > 1024 + 500
    assert cycles(Timing(stalls={"r": 128})) > 1.8 * 1024


def test_errors_come_where_they_were_asked_for(harness, seed):
    rng = np.random.default_rng(seed)
    octets = rng.integers(0, 256, SIZE, dtype=np.uint8)
    ranges = (
        ErrorRange(BASE + 0x1000, BASE + 0x1008, 2),
        ErrorRange(BASE + 0x2000, BASE + 0x2008, 3, writes=False),
        ErrorRange(BASE + 0x3000, BASE + 0x3008, 3, reads=False),
    )
    wanted = [
        (0x0F80, 0x5000, (DmaStatus.SLVERR, DmaStatus.OK)),
        (0x1F80, 0x5000, (DmaStatus.DECERR, DmaStatus.OK)),
        (0x2F80, 0x5000, (DmaStatus.OK, DmaStatus.OK)),
        (0x6000, 0x0F80, (DmaStatus.OK, DmaStatus.SLVERR)),
        (0x6000, 0x1F80, (DmaStatus.OK, DmaStatus.OK)),
        (0x6000, 0x2F80, (DmaStatus.OK, DmaStatus.DECERR)),
        (SIZE - 0x40, 0x5000, (DmaStatus.DECERR, DmaStatus.OK)),
        (0x6000, SIZE - 0x40, (DmaStatus.OK, DmaStatus.DECERR)),
        (-0x100, 0x5000, (DmaStatus.DECERR, DmaStatus.OK)),
    ]
    commands = [c for source, target, _ in wanted for c in copy(BASE + source, BASE + target, 0x100)]
    run = harness.run(octets, commands, Timing(errors=ranges), BASE)
    assert ends(run) == [end for _, _, end in wanted]
    assert (run.memory[0x1000:0x1008] == octets[0x1000:0x1008]).all()
    assert (run.memory[0x3000:0x3008] == octets[0x3000:0x3008]).all()
    assert (run.memory[0x0F80:0x1000] == octets[0x6000:0x6080]).all()


WAIT = " reg [1:0] gap = 0; always @(posedge clk) gap <= gap + 1;\n    reg [31:0] source"
BLOCKS_THAT_ARE_WRONG = {
    "last beat": (
        {
            ".m_axi_wlast(m_axi_wlast)": ".m_axi_wlast()",
            "reg [31:0] source": "assign m_axi_wlast = 0; reg [31:0] source",
        },
        "AXI wlast is wrong",
    ),
    "kind of burst": (
        {
            ".m_axi_arburst(m_axi_arburst)": ".m_axi_arburst()",
            "reg [31:0] source": "assign m_axi_arburst = 0; reg [31:0] source",
        },
        "INCR bursts of whole aligned beats",
    ),
    "address falls": (
        {
            ".m_axi_arvalid(m_axi_arvalid)": ".m_axi_arvalid(offer)",
            "reg [31:0] source": "wire offer; assign m_axi_arvalid = offer && gap != 0;" + WAIT,
        },
        "AXI arvalid fell before arready",
    ),
    "data change": (
        {
            ".m_axi_wstrb(m_axi_wstrb)": ".m_axi_wstrb(strobe)",
            "reg [31:0] source": "wire [7:0] strobe; assign m_axi_wstrb = strobe & ~gap;" + WAIT,
        },
        "AXI w changed while it waited",
    ),
    "no interrupt": ({"begin irq <= 1;": "begin"}, "the interrupt did not come in time"),
    "register answer": ({"if (s_axi_rready) s_axi_rvalid": "s_axi_rvalid"}, "register answer to a read changed"),
    "unknown": ({".m_axi_awburst(m_axi_awburst)": ".m_axi_awburst()"}, "AXI aw is unknown"),
}
LONG = copy(BASE + 0x104, BASE + 0x2003, 0x403)


def replaced(text, changes):
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize("bug", BLOCKS_THAT_ARE_WRONG)
def test_blocks_that_break_rules_are_noticed(bug):
    changes, message = BLOCKS_THAT_ARE_WRONG[bug]
    sources, sidecar = copier()
    sources["copier.v"] = replaced(sources["copier.v"], changes)
    harness = MemoryHarness(sources, sidecar, SECOND, SIZE)
    timing = Timing(20, 20, {"ar": 200, "aw": 200, "w": 200, "lite": 200})
    with pytest.raises(BusError, match=message):
        harness.run(np.zeros(SIZE, np.uint8), LONG * 6, timing, BASE)


def test_an_engine_that_crosses_pages_is_noticed(monkeypatch):
    monkeypatch.setattr(DmaConfig, "block_beats", 2048)
    sources, sidecar = copier()
    sources["read_dma.v"] = to_verilog(ReadDma(CONFIG), "read_dma")
    harness = MemoryHarness(sources, sidecar, SECOND, SIZE)
    with pytest.raises(BusError, match="AXI ar leaves its page"):
        harness.run(np.zeros(SIZE, np.uint8), copy(BASE + 0xF00, BASE + 0x4000, 0x400), None, BASE)


MEMORIES_THAT_ARE_WRONG = {
    "a strobe is dropped": {"lane < BYTES; lane": "lane < BYTES - 1; lane"},
    "strobes are ignored": {"if (w_strb[w_out % 512][lane]) word": "word"},
    "a beat is read twice": {"address = ar_addr[ar_out % 64] + r_beat * BYTES": "address = ar_addr[ar_out % 64]"},
    "the first burst is forgotten": {
        "if (response == 0) begin\n                word": "if (aw_out && response == 0) begin\n word"
    },
}


@pytest.mark.parametrize("bug", MEMORIES_THAT_ARE_WRONG)
def test_memories_that_lose_something_are_noticed(bug, monkeypatch, seed):
    right = memory_verilog
    monkeypatch.setattr(
        sim.axi_memory, "memory_verilog", lambda *widths: replaced(right(*widths), MEMORIES_THAT_ARE_WRONG[bug])
    )
    with pytest.raises(AssertionError):
        check_copies(MemoryHarness(*copier(), simulator=SECOND, size=SIZE), Timing(), 12, seed)


def test_a_block_that_interrupts_before_the_answer_finds_old_bytes(seed):
    """The memory writes just before it answers, so that nobody can lean on bytes that were sent."""
    sources, sidecar = copier()
    early = {"if (ended == 3) begin": "if (word_valid && word_ready && word[64]) begin"}
    sources["copier.v"] = replaced(sources["copier.v"], early)
    with pytest.raises(AssertionError):
        check_copies(MemoryHarness(sources, sidecar, SECOND, SIZE), Timing(0, 30), 12, seed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"read_latency": -1}, "read_latency must be from 0 to 2^20 - 1, not -1"),
        ({"stalls": 256}, "stalls must be from 0 to 255, not 256 of ar"),
        ({"stalls": {"x": 1}}, "stalls must be of ar, r, aw, w, b or lite, not of 'x'"),
        ({"seed": -1}, "seed must not be negative, not -1"),
        ({"errors": (ErrorRange(0, 1, 2),) * 33}, "errors must be at most 32, not 33"),
    ],
)
def test_wrong_timings_are_refused(options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Timing(**options)


def test_wrong_sizes_and_blocks_are_refused(harness):
    with pytest.raises(ValueError, match=r"^size must be a positive multiple of 8, not 12$"):
        memory_verilog(64, 32, 1, 12)
    with pytest.raises(ValueError, match=f"^octets must be at most the memory's {SIZE}, not {SIZE + 1}$"):
        harness.run(np.zeros(SIZE + 1, np.uint8), [])
    with pytest.raises(ValueError, match=r"^the block must have ports clk, rst, s_axi_"):
        harness_verilog(generated("read_dma").sidecar, SIZE)
    with pytest.raises(BusError, match=r"^the run was longer than 100 cycles, in cycle 101$"):
        harness.run(np.zeros(64, np.uint8), [Command.idle(500)], limit=100)
    with pytest.raises(BusError, match=r"^the dump must have 64 bytes, not 0$"):
        harness.run(np.zeros(64, np.uint8), [Command.idle(5)])
