"""Proofs, by induction: bursts keep AXI's rules, offers stay, bursts on their way are counted right, every request ends exactly once."""

import sys

import pytest
from amaranth.hdl import Array, Elaboratable, Fragment, Module, Signal, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

import hdl.dma
from hdl.dma import ReadDma, WriteDma
from hdl.lib.streams import StreamBuffer
from hdl.lib.verilog import to_verilog
from model.dma import DmaConfig
from tests.formal.prove import prove

CONFIG = DmaConfig(data_width=32, address_width=13, max_burst=4, outstanding=2)
DEPTH = CONFIG.outstanding + 1


class Queue(Elaboratable):
    """A shift register in place of the library's queue, so that its entries can be counted."""

    def __init__(self, *, width, depth):
        self.depth = depth
        self.places = Array(Signal(width, name=f"place{i}") for i in range(depth))
        self.level = Signal(range(depth + 1))
        self.w_data, self.w_en, self.w_rdy = Signal(width), Signal(), Signal()
        self.r_data, self.r_en, self.r_rdy = Signal(width), Signal(), Signal()

    def elaborate(self, platform):
        m = Module()
        writes, reads = self.w_en & self.w_rdy, self.r_en & self.r_rdy
        m.d.comb += [
            self.w_rdy.eq(self.level != self.depth),
            self.r_rdy.eq(self.level != 0),
            self.r_data.eq(self.places[0]),
        ]
        m.d.sync += self.level.eq(self.level + writes - reads)
        with m.If(reads):
            m.d.sync += [self.places[i].eq(self.places[i + 1]) for i in range(self.depth - 1)]
        for i in range(self.depth):
            with m.If(writes & (self.level - reads == i)):
                m.d.sync += self.places[i].eq(self.w_data)
        return m


class Watched(wiring.Component):
    """An engine whose inner signals are outputs ``p_…``; of buffer x they are ``p_x_front``, ``…_spare``, ``…_full`` (2 bits)."""

    def __init__(self, engine):
        found = {}

        def note(frame, event, _):
            owner = frame.f_locals.get("self")
            if event == "return" and frame.f_code.co_name == "elaborate":
                found[id(owner)] = (owner, dict(frame.f_locals))

        before = sys.getprofile()
        sys.setprofile(note)
        try:
            self._inner = Fragment.get(engine, None)
        finally:
            sys.setprofile(before)
        inside = found[id(engine)][1]
        probes = {name: inside[name] for name in ("outstanding", "busy", "code", "cut", "go", "final")}
        probes |= {name: inside[name] for name in ("unfinished", "issued", "take") if name in inside}
        for name in ("jobs", "entries"):
            if name in inside:
                probes |= {f"{name}_level": inside[name].level}
                probes |= {f"{name}_{i}": inside[name].places[i] for i in range(DEPTH)}
        probes["active"] = inside["splitter"].active
        names = {id(inside[name]): name for name in ("words", "ends", "beats", "answers") if name in inside}
        for owner, local in found.values():
            if isinstance(owner, StreamBuffer):
                name = names.get(id(owner), "address")
                probes |= {f"{name}_{part}": local[part] for part in ("front", "spare", "front_full", "spare_full")}
        self._probes = {f"p_{name}": Value.cast(value) for name, value in probes.items()}
        self._ports = {
            "__".join(path): (member, Value.cast(value)) for path, member, value in engine.signature.flatten(engine)
        }
        members = {name: (In if m.flow == In else Out)(len(value)) for name, (m, value) in self._ports.items()}
        super().__init__(members | {name: Out(len(value)) for name, value in self._probes.items()})

    def elaborate(self, platform):
        m = Module()
        m.submodules.engine = self._inner
        for name, (member, value) in self._ports.items():
            outside = getattr(self, name)
            m.d.comb += value.eq(outside) if member.flow == In else outside.eq(value)
        m.d.comb += [getattr(self, name).eq(value) for name, value in self._probes.items()]
        return m


COMMON = """
  reg past = 0;
  always @(posedge clk) past <= !rst;
  // Requests that were taken and have not ended, and bursts that a subordinate has taken and not answered.
  reg [7:0] owed = 0, open = 0;
  always @(posedge clk) begin
    owed <= rst ? 0 : owed + (request__valid && request__ready) - (done__valid && done__ready);
    open <= rst ? 0 : open + (A_valid && A_ready) - ANSWERED;
  end
  function within(input [18:0] burst);  // {beats less one, address in beats}
    within = burst[18:11] < 4 && burst[1:0] + burst[18:11] < 4;
  endfunction
  wire [1:0] address_count = p_address_front_full + p_address_spare_full;
  wire [1:0] ends_count = p_ends_front_full + p_ends_spare_full;
  always @* if (past) begin
    page: assert (!A_valid || A_addr[1:0] == 0 && A_addr >> 12 == (A_addr + 4 * (A_len + 1) - 1) >> 12);
    shape: assert (!A_valid || A_len < 4 && A_size == 2 && A_burst == 1 && A_id == 0);
    fronts: assert (!p_address_front_full || within(p_address_front));
    spares: assert (!p_address_spare_full || within(p_address_spare));
    order: assert ((p_address_front_full || !p_address_spare_full) && (p_ends_front_full || !p_ends_spare_full));
    limit: assert (p_outstanding <= 2 && p_jobs_level <= 3);
    no_more: assert (open <= 2 && owed <= 8);
  end
"""

STABLE = """
  reg {name}_stalled = 0;
  reg [{top}:0] {name}_last;
  always @(posedge clk) begin
    {name}_stalled <= !rst && {valid} && !{ready};
    {name}_last <= {payload};
  end
  always @* if (past) {name}_stays: assert (!{name}_stalled || {valid} && {payload} == {name}_last);
"""

READ = """
  // A subordinate that answers bursts that it has taken.
  always @* assume (!m_axi_rvalid || open != 0);
  wire [1:0] returned = (p_beats_front_full && p_beats_front[34]) + (p_beats_spare_full && p_beats_spare[34]);
  always @* if (past) begin
    ordered: assert (p_beats_front_full || !p_beats_spare_full);
    counted: assert (p_outstanding == open + address_count + returned);
    once: assert (owed == p_jobs_level + p_busy + ends_count);
    // A request that is given up has no more bursts to come, and none of a later one comes between.
    given_up: assert (!p_cut || p_busy && p_code[1] && !p_active && p_jobs_level == 0);
  end
  // The code of the end is that of the first error.
  reg [1:0] first = 0;
  always @(posedge clk) first <= rst || p_go && p_final ? 0 : first == 0 && p_go && TAKEN && p_beats_front[32 +: 2] > 1 ? p_beats_front[32 +: 2] : first;
  always @* if (past) reported: assert (first == (p_busy && p_code[1] ? p_code : 0));
"""

WRITE = """
  // A subordinate that answers bursts whose address and last data it has taken.
  reg [7:0] complete = 0;
  always @(posedge clk) complete <= rst ? 0 : complete + (m_axi_wvalid && m_axi_wready && m_axi_wlast) - ANSWERED;
  always @* assume (!m_axi_bvalid || open != 0 && complete != 0);
  wire [1:0] answers = p_answers_front_full + p_answers_spare_full;
  wire [1:0] lasts = (p_beats_front_full && m_axi_wlast) + (p_beats_spare_full && p_beats_spare[36]);
  wire [1:0] bus = (p_entries_level > 0 && p_entries_0[1]) + (p_entries_level > 1 && p_entries_1[1]) + (p_entries_level > 2 && p_entries_2[1]);
  wire [1:0] finals = (p_entries_level > 0 && p_entries_0[0]) + (p_entries_level > 1 && p_entries_1[0]) + (p_entries_level > 2 && p_entries_2[0]);
  always @* if (past) begin
    ordered: assert ((p_answers_front_full || !p_answers_spare_full) && (p_beats_front_full || !p_beats_spare_full));
    levels: assert (p_entries_level <= 3 && p_issued <= 2 && complete <= 2);
    counted: assert (p_outstanding == open + address_count + answers);
    awaited: assert (p_outstanding == bus);
    data: assert (p_outstanding == p_issued + lasts + complete + answers);
    ends_in_queue: assert (p_unfinished == finals);
    once: assert (owed == p_active + p_unfinished + ends_count);
  end
"""


def outcome(write, induction=True):
    engine = (WriteDma if write else ReadDma)(CONFIG)
    dut = Watched(engine)
    a, answer = ("aw", "b") if write else ("ar", "r")
    widths = {name: len(Value.cast(getattr(dut, name))) for name in dut.signature.members}
    flows = {name: member.flow for name, member in dut.signature.members.items()}
    inputs = [f"input [{widths[name] - 1}:0] {name}" for name in widths if flows[name] == In]
    wires = [f"  wire [{widths[name] - 1}:0] {name};" for name in widths if flows[name] == Out]
    connections = ", ".join(f".{name}({name})" for name in ("clk", "rst", *widths))
    answered = f"(m_axi_{answer}valid && m_axi_{answer}ready{'' if write else ' && m_axi_rlast'})"
    channels = {
        "address": (f"{{m_axi_{a}addr, m_axi_{a}len}}", f"m_axi_{a}", 21),
        "done": ("done__payload", "done__", 2),
        **({"w": ("{m_axi_wdata, m_axi_wstrb, m_axi_wlast}", "m_axi_w", 37)} if write else {}),
        **({} if write else {"word": ("word__payload", "word__", 33)}),
    }
    stable = "".join(
        STABLE.format(name=name, top=width - 1, payload=payload, valid=f"{prefix}valid", ready=f"{prefix}ready")
        for name, (payload, prefix, width) in channels.items()
    )
    body = COMMON + stable + (WRITE if write else READ)
    body = body.replace("A_", f"m_axi_{a}").replace("ANSWERED", answered).replace("TAKEN", "p_take")
    text = f"module proof(input clk, rst, {', '.join(inputs)});\n" + "\n".join(wires)
    text += f"\n  dut dut({connections});\n  initial assume (rst);\n{body}endmodule\n"
    sources = {"dut.v": to_verilog(dut, "dut"), "proof.sv": text}
    return prove("dma_write" if write else "dma_read", sources, cycles=3 if induction else 14, induction=induction)


@pytest.fixture(autouse=True)
def visible_queues(monkeypatch):
    monkeypatch.setattr(hdl.dma, "SyncFIFOBuffered", Queue)


@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
def test_bursts_offers_counts_and_ends_are_right_for_ever(write):
    assert outcome(write).failed == ()


class Hasty(StreamBuffer):
    """A buffer that puts new words in place of those that wait."""

    def elaborate(self, platform):
        m = Module()
        front, spare, front_full, spare_full = (Signal(s) for s in (self._shape, self._shape, 1, 1))
        m.d.comb += [self.output.payload.eq(front), self.output.valid.eq(front_full), self.input.ready.eq(1)]
        m.d.sync += [
            front_full.eq(self.input.valid | front_full & ~self.output.ready),
            spare.eq(front),
            spare_full.eq(0),
        ]
        with m.If(self.input.valid):
            m.d.sync += front.eq(self.input.payload)
        return m


class Leaky(Queue):
    """A queue that forgets what comes when it holds one."""

    def elaborate(self, platform):
        m = Module()
        m.submodules.queue = queue = Queue(width=len(self.w_data), depth=self.depth)
        m.d.comb += [
            queue.w_data.eq(self.w_data),
            queue.w_en.eq(self.w_en & (queue.level != 1)),
            queue.r_en.eq(self.r_en),
            *(getattr(self, name).eq(getattr(queue, name)) for name in ("w_rdy", "r_data", "r_rdy", "level")),
            *(mine.eq(its) for mine, its in zip(self.places, queue.places, strict=True)),
        ]
        return m


def crossing_pages(patch):
    patch.setattr(DmaConfig, "block_beats", 8)


def hasty_buffers(patch):
    patch.setattr(hdl.dma, "StreamBuffer", Hasty)


def leaky_queues(patch):
    patch.setattr(hdl.dma, "SyncFIFOBuffered", Leaky)


def returns_uncounted(patch):
    right = hdl.dma._Engine._outstanding
    patch.setattr(hdl.dma._Engine, "_outstanding", lambda self, m, starts, ends: right(self, m, starts & ~ends, ends))


@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
@pytest.mark.parametrize(
    ("bug", "caught"),
    [
        (crossing_pages, {"page", "shape", "fronts", "spares"}),
        (hasty_buffers, {"address_stays", "done_stays", "w_stays", "word_stays", "counted", "once"}),
        (leaky_queues, {"once", "awaited", "ends_in_queue"}),
        (returns_uncounted, {"counted", "awaited", "data"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_bug_is_caught(bug, caught, write, monkeypatch):
    bug(monkeypatch)
    found = outcome(write, induction=False)
    assert not found.holds
    assert caught & set(found.failed)
