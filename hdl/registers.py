"""AXI4-Lite register bank generated from a register map, and a level interrupt (docs/registers.md)."""

import functools
import operator

from amaranth.hdl import Cat, Module, Mux, Signal, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Member, Out

from hdl.lib.axi import Axi4Lite, axi_meanings, flat_members
from hdl.lib.verilog import lint_unused
from model.registers import REGISTER_BYTES, Field, RegisterMap

__all__ = ["Interrupt", "RegisterBank"]

PREFIX = "s_axi"
OKAY, SLVERR = 0b00, 0b10
_LOW = (REGISTER_BYTES - 1).bit_length()


def _request(m: Module, valid: Value, ready: Signal, done: Value, payload: Value) -> Signal:
    """Take one request and hold its payload until ``done``; it is there while ``ready`` is 0."""
    held = Signal(len(payload), name=f"held_{ready.name}")
    with m.If(ready & valid):
        m.d.sync += [held.eq(payload), ready.eq(0)]
    with m.Elif(done):
        m.d.sync += ready.eq(1)
    return held


def _respond(m: Module, valid: Signal, ready: Value, start: Value) -> None:
    """Raise ``valid`` with ``start`` and hold it until it is taken."""
    with m.If(start):
        m.d.sync += valid.eq(1)
    with m.Elif(ready):
        m.d.sync += valid.eq(0)


def _free(valid: Value, ready: Value) -> Value:
    """Whether a response may be put out: there is none, or it leaves now."""
    return ~valid | ready


def _bit_mask(strobes: Value) -> Value:
    """Ones in the bits of strobed bytes."""
    return Cat(strobe.replicate(8) for strobe in strobes)


def _written(old: Value, data: Value, mask: Value) -> Value:
    """Value of a "rw" field behind a write."""
    return (old & ~mask) | (data & mask)


def _flagged(old: Value, cleared: Value, raised: Value) -> Value:
    """Value of a "w1c" field in the next cycle: setting wins."""
    return (old & ~cleared) | raised


def _is(value: Value, number: int) -> Value:
    """Compare; with 0 in a way that does not become a logical operator on a vector, of which linters warn."""
    return value == number if number else ~value.any()


class RegisterBank(wiring.Component):
    """AXI4-Lite subordinate with the registers of a map.

    A request is answered two cycles after it is taken; each channel takes one every two cycles. Reads and writes are independent, and so are
    write addresses and write data. Every output is a register's, so there is no combinational path from an input to an output. What is
    written is there with ``bvalid``; a read sees the values of the cycle before ``rvalid``.

    Reads of an address without a register, writes to one and writes to a register of "ro" fields alone are answered with SLVERR, do
    nothing and read as 0; everything else is answered with OKAY. The two low address bits are ignored, all others are compared.
    Strobes are honoured in every kind of field.

    Parameters
    ----------
    table : RegisterMap
    address_width : int, optional
        Bits of the byte address; by default just enough for the map.

    Members
    -------
    s_axi_… : AXI4-Lite
        ``awprot`` and ``arprot`` are ignored.
    <register>_<field> : In(width) for "ro", else Out(width)
        Value of the field. "ro": read as it is. "rw" and "w1c": held. "w1p": ones for one cycle, with ``bvalid``.
    <register>_<field>_set : In(width)
        Bits of a "w1c" field to set.

    Raises
    ------
    TypeError, ValueError
        ``address_width`` is no integer, does not reach the whole map or is above 64; or a field's signal has the name of another member.
    """

    def __init__(self, table: RegisterMap, address_width: int | None = None):
        if not isinstance(table, RegisterMap):
            raise TypeError(f"table must be a RegisterMap, not {table!r}")
        width = table.address_width if address_width is None else address_width
        if not isinstance(width, int) or isinstance(width, bool):
            raise TypeError(f"address_width must be an integer, not {width!r}")
        if not table.address_width <= width <= 64:
            raise ValueError(f"address_width must be {table.address_width} to 64 for map {table.name}, not {width}")
        self._table = table
        self._address_width = width
        bus = Axi4Lite(width, 8 * REGISTER_BYTES).flip()
        members: dict[str, Member] = flat_members(PREFIX, bus)
        # Ready before there is a request, so that none waits for it.
        members |= {f"{PREFIX}_{channel}ready": Out(1, init=1) for channel in ("aw", "w", "ar")}
        self._meanings = axi_meanings(PREFIX, bus)
        for register in table.registers:
            for field in register.fields:
                name = f"{register.name}_{field.name}"
                parts = {name: In(field.width) if field.access == "ro" else Out(field.width, init=field.reset)}
                self._meanings[name] = f"{field.access}: {field.description}"
                if field.access == "w1c":
                    parts[f"{name}_set"] = In(field.width)
                    self._meanings[f"{name}_set"] = f"sets {name}"
                for part in parts:
                    if part in members or hasattr(type(self), part):
                        raise ValueError(
                            f"signals of map {table.name} must not have names of other members, not {part!r}"
                        )
                members |= parts
        super().__init__(members)

    @property
    def table(self) -> RegisterMap:
        """The register map."""
        return self._table

    @property
    def address_width(self) -> int:
        """Bits of the byte address."""
        return self._address_width

    @property
    def port_meanings(self) -> dict[str, str]:
        """What each member is, in one line."""
        return dict(self._meanings)

    def signal(self, register: str, field: str) -> Signal:
        """Return the member with a field's value.

        Raises
        ------
        KeyError
            There is no such register or field.
        """
        return getattr(self, f"{register}_{self._table[register][field].name}")

    def elaborate(self, platform: object) -> Module:
        """Build the channels and the fields."""
        m = Module()
        for name in ("awprot", "arprot"):
            getattr(self, f"{PREFIX}_{name}").attrs.update(lint_unused("protection is ignored"))
        for name in ("awaddr", "araddr"):
            getattr(self, f"{PREFIX}_{name}").attrs.update(lint_unused("a register is a whole word"))
        self._write(m)
        self._read(m)
        return m

    def _write(self, m: Module) -> None:
        write = Signal()
        address = _request(m, self.s_axi_awvalid, self.s_axi_awready, write, self.s_axi_awaddr[_LOW:])
        request = _request(m, self.s_axi_wvalid, self.s_axi_wready, write, Cat(self.s_axi_wdata, self.s_axi_wstrb))
        for signal in (self.s_axi_wdata, self.s_axi_wstrb, request):
            signal.attrs.update(lint_unused("not all bits of a word are fields"))
        data, mask = request[:32], _bit_mask(request[32:])
        m.d.comb += write.eq(~self.s_axi_awready & ~self.s_axi_wready & _free(self.s_axi_bvalid, self.s_axi_bready))
        _respond(m, self.s_axi_bvalid, self.s_axi_bready, write)
        chosen = {
            register.name: write & _is(address, register.offset >> _LOW)
            for register in self._table.registers
            if register.writable
        }
        for register in self._table.registers:
            for field in register.fields:
                if field.access != "ro":
                    self._write_field(m, register.name, field, chosen[register.name], data, mask)
        with m.If(write):
            m.d.sync += self.s_axi_bresp.eq(Mux(Cat(chosen.values()).any(), OKAY, SLVERR))

    def _write_field(self, m: Module, register: str, field: Field, chosen: Value, data: Value, mask: Value) -> None:
        bits = slice(field.position, field.position + field.width)
        value = self.signal(register, field.name)
        ones = data[bits] & mask[bits] & chosen.replicate(field.width)
        if field.access == "rw":
            with m.If(chosen):
                m.d.sync += value.eq(_written(value, data[bits], mask[bits]))
        elif field.access == "w1c":
            m.d.sync += value.eq(_flagged(value, ones, getattr(self, f"{register}_{field.name}_set")))
        elif field.access == "w1p":
            m.d.sync += value.eq(ones)

    def _read(self, m: Module) -> None:
        read = Signal()
        address = _request(m, self.s_axi_arvalid, self.s_axi_arready, read, self.s_axi_araddr[_LOW:])
        m.d.comb += read.eq(~self.s_axi_arready & _free(self.s_axi_rvalid, self.s_axi_rready))
        _respond(m, self.s_axi_rvalid, self.s_axi_rready, read)
        chosen, gated = [], []
        for register in self._table.registers:
            word = Signal(32, name=f"word_{register.name}")
            for field in register.fields:
                if field.access != "w1p":
                    bits = slice(field.position, field.position + field.width)
                    m.d.comb += word[bits].eq(self.signal(register.name, field.name))
            chosen.append(_is(address, register.offset >> _LOW))
            gated.append(word & chosen[-1].replicate(32))
        # One address chooses one word, so no priority is needed.
        with m.If(read):
            m.d.sync += [
                self.s_axi_rdata.eq(functools.reduce(operator.or_, gated)),
                self.s_axi_rresp.eq(Mux(Cat(chosen).any(), OKAY, SLVERR)),
            ]


class Interrupt(wiring.Component):
    """Level interrupt: high while any status bit is set whose mask bit is; one cycle after both.

    Parameters
    ----------
    width : int
        Sources, at least 1.

    Members
    -------
    status : In(width)
        "w1c" field.
    mask : In(width)
        "rw" field; 1 lets a source through.
    irq : Out(1)
        From a register.

    Raises
    ------
    TypeError, ValueError
        ``width`` is no positive integer.
    """

    def __init__(self, width: int):
        if not isinstance(width, int) or isinstance(width, bool):
            raise TypeError(f"width must be an integer, not {width!r}")
        if width < 1:
            raise ValueError(f"width must be at least 1, not {width}")
        super().__init__({"status": In(width), "mask": In(width), "irq": Out(1)})

    def elaborate(self, platform: object) -> Module:
        """Build the gate and its register."""
        m = Module()
        m.d.sync += self.irq.eq((self.status & self.mask).any())
        return m
