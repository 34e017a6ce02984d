"""Tile engine: banks of the global buffer, a weight encoder per column, and the array (paper, section 6.1 and figure 9; docs/tile_engine.md)."""

from typing import ClassVar

from amaranth.hdl import Cat, Const, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from hdl.array import Array
from hdl.collector import activation_entry, weight_entry
from hdl.lib.shared import Shared, Unit
from hdl.lib.streams import StreamBuffer
from hdl.lib.verilog import lint_unused
from hdl.pe import PeStatus, ResultWord, check_command, command_layout
from hdl.weight_encoder import WeightEncoder
from model.tile_engine import EngineConfig

__all__ = ["ActivationBank", "TileEngine", "WeightBank", "load_layout", "tile_layout"]


def load_layout(config: EngineConfig) -> data.StructLayout:
    """Return the layout of a word that is loaded: where it goes, and a stored row vector."""
    return data.StructLayout(
        {
            "entry": activation_entry(config.vmac),
            "address": max(config.activation_depth, config.weight_depth).bit_length() - 1,
            "odd": 1,
            "index": (max(config.rows, config.columns) - 1).bit_length(),
            "weight": 1,
        }
    )


def tile_layout(config: EngineConfig) -> data.StructLayout:
    """Return the layout of a tile's segment: the elements' command, where operands begin in all banks, and the K-vectors that lie there."""
    return data.StructLayout(
        {
            "command": command_layout(config.pe),
            "activation_base": config.activation_depth.bit_length() - 1,
            "weight_base": config.weight_depth.bit_length() - 1,
            "segment": config.max_kv.bit_length(),
        }
    )


class EngineStatus(data.Struct):
    """Sticky status: that of the elements, and a load beyond the banks."""

    elements: PeStatus
    bad_load: 1


def _pairs(size: data.View) -> Value:
    """Return the entries of a column's bank that a K-vector takes."""
    return Mux(size.mode_nvfp4, size.n[1:] + size.n[0], size.n)


class ActivationBank(wiring.Component):
    """Bank of a row: sends a tile's activation vectors in the order in which they are stored, 1 per cycle.

    Members
    -------
    write : In(1)
    write_address, write_entry : In
    request : In(stream of base, count of vectors per K-vector, count of K-vectors)
    entry : Out(stream of activation entry)
    busy : Out(1)
    """

    def __init__(self, config: EngineConfig):
        self._config = config
        address = config.activation_depth.bit_length() - 1
        entry = activation_entry(config.vmac)
        self._request = data.StructLayout(
            {"base": address, "m": config.max_m.bit_length(), "kv": config.max_kv.bit_length()}
        )
        super().__init__(
            {
                "write": In(1),
                "write_address": In(address),
                "write_entry": In(entry),
                "request": In(stream.Signature(self._request)),
                "entry": Out(stream.Signature(entry)),
                "busy": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Build memory and sequence."""
        m = Module()
        m.submodules.memory = memory = Memory(
            shape=activation_entry(self._config.vmac), depth=self._config.activation_depth, init=[]
        )
        write, read = memory.write_port(), memory.read_port()
        m.d.comb += [write.en.eq(self.write), write.addr.eq(self.write_address), write.data.eq(self.write_entry)]

        tile = Signal(self._request)
        active, have = Signal(), Signal()
        vector, k = Signal.like(tile.m), Signal.like(tile.kv)
        go, ends = Signal(), Signal()
        m.d.comb += [
            self.request.ready.eq(~active),
            go.eq(active & (~have | self.entry.ready)),
            ends.eq((vector == tile.m) & (k == tile.kv)),
            read.en.eq(go),
            read.addr.eq(tile.base),
            self.entry.valid.eq(have),
            self.entry.payload.eq(read.data),
            self.busy.eq(active | have),
        ]
        with m.If(self.entry.ready):
            m.d.sync += have.eq(0)
        with m.If(go):
            m.d.sync += [have.eq(1), tile.base.eq(tile.base + 1), vector.eq(vector + 1), active.eq(~ends)]
            with m.If(vector == tile.m):
                m.d.sync += [vector.eq(1), k.eq(k + 1)]
        # Whether there is a request is known late, so it decides about one bit alone.
        with m.If(self.request.ready):
            m.d.sync += [active.eq(self.request.valid), tile.eq(self.request.payload), vector.eq(1), k.eq(1)]
        return m


class WeightBank(wiring.Component):
    """Bank of a column with its weight encoder: sends a tile's weight vectors as packed pairs, 1 per cycle.

    An address holds a vector of an even and of an odd row. In NVFP4 and AutoFP6 mode they go one after the other, and the last odd one
    of a K-vector stays if the number of vectors is odd; in AutoFP2 mode they go together.

    Members
    -------
    write : In(2)
        Even row, odd row.
    write_address, write_entry : In
    request : In(stream of base, count of vectors per K-vector, count of K-vectors, mode)
    entry : Out(stream of weight entry)
        Registered.
    busy : Out(1)
    """

    def __init__(self, config: EngineConfig):
        self._config = config
        address = config.weight_depth.bit_length() - 1
        self._request = data.StructLayout(
            {"base": address, "n": config.max_n.bit_length(), "kv": config.max_kv.bit_length(), "mode_nvfp4": 1}
        )
        super().__init__(
            {
                "write": In(2),
                "write_address": In(address),
                "write_entry": In(activation_entry(config.vmac)),
                "request": In(stream.Signature(self._request)),
                "entry": Out(stream.Signature(weight_entry(config.vmac))),
                "busy": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Build memories, sequence and encoder."""
        m = Module()
        config = self._config
        stored = activation_entry(config.vmac)
        tile = Signal(self._request)
        active, have, from_odd, nvfp4 = (Signal(name=n) for n in ("active", "have", "from_odd", "nvfp4"))
        vector, k = Signal.like(tile.n), Signal.like(tile.kv)
        go, last, moves = Signal(), Signal(), Signal()

        rows = []
        for i, name in enumerate(("even", "odd")):
            memory = Memory(shape=stored, depth=config.weight_depth, init=[])
            m.submodules[name] = memory
            write, read = memory.write_port(), memory.read_port()
            m.d.comb += [
                write.en.eq(self.write[i]),
                write.addr.eq(self.write_address),
                write.data.eq(self.write_entry),
                # In NVFP4 mode the odd row's vector waits at the port while the even row's goes.
                read.en.eq(go & (~tile.mode_nvfp4 | vector[0])),
                read.addr.eq(tile.base),
            ]
            rows.append(read.data)

        m.submodules.encoder = encoder = WeightEncoder(config.encoder)
        m.submodules.buffer = buffer = StreamBuffer(weight_entry(config.vmac))
        wiring.connect(m, buffer.output, wiring.flipped(self.entry))
        first = Signal(stored)
        # The plain remap of odd rows ignores mantissas.
        odd_codes = [
            Cat(Const(0, 1), code.as_value()[1:]) if config.scaling == "group" else code for code in rows[1].codes
        ]
        m.d.comb += [
            first.eq(Mux(from_odd, rows[1].as_value(), rows[0].as_value())),
            encoder.mode_nvfp4.eq(nvfp4),
            encoder.row_even.eq(first.codes),
            encoder.scale_even.eq(first.scales),
            *(target.eq(code) for target, code in zip(encoder.row_odd, odd_codes, strict=True)),
            encoder.scale_odd.eq(rows[1].scales),
            buffer.input.valid.eq(have),
            buffer.input.payload.codes.eq(encoder.w),
            buffer.input.payload.scales.eq(encoder.w_scale),
        ]
        if config.refinement != "none":
            m.d.comb += buffer.input.payload.records.eq(first.records)

        m.d.comb += [
            self.request.ready.eq(~active),
            go.eq(active & (~have | buffer.input.ready)),
            last.eq(vector == tile.n),
            moves.eq(~tile.mode_nvfp4 | ~vector[0] | last),
            self.busy.eq(active | have | self.entry.valid),
        ]
        with m.If(buffer.input.ready):
            m.d.sync += have.eq(0)
        with m.If(go):
            m.d.sync += [
                have.eq(1),
                nvfp4.eq(tile.mode_nvfp4),
                from_odd.eq(tile.mode_nvfp4 & ~vector[0]),
                tile.base.eq(tile.base + moves),
                vector.eq(Mux(last, 1, vector + 1)),
                k.eq(k + last),
                active.eq(~(last & (k == tile.kv))),
            ]
        with m.If(self.request.ready):
            m.d.sync += [active.eq(self.request.valid), tile.eq(self.request.payload), vector.eq(1), k.eq(1)]
        return m


class TileEngine(wiring.Component):
    """Array with the banks that feed it: runs tiles on operands that were loaded before.

    Row r's bank has the activations of bus r and column c's the weights of bus c, each in the order of use: K-vector by K-vector, within
    it row by row. Behind the end of a column's bank comes its beginning. A tile may be given while others run; banks send ahead as far as the
    elements have room.

    A tile may come in segments of its K-vectors, so that K is not limited by the banks. The command counts with the first, and holds
    until its K-vectors are complete. A segment is taken when the banks have sent the one before: its place may be loaded again then.

    Loading a place that a tile still needs is the user's fault and is not noticed.

    Parameters
    ----------
    config : EngineConfig

    Members
    -------
    load : In(stream of load word)
        Always ready; written at once, so a tile that is given in the next cycle gets it.
    tile : In(stream of tile)
        A command that elements would refuse, or a segment that is empty, longer than the K-vectors that are left, or does not fit a bank, is
        taken, sets ``bad_command`` and does nothing else.
    result : Out(stream of ResultWord), one per column
    clear : In(1)
        Clears the status; only while ``busy`` is 0.
    busy : Out(1)
    status : Out(EngineStatus)
    """

    throughput: ClassVar[str] = (
        "rows x columns vectors per cycle; 1 loaded vector per cycle; 1 result per column and cycle"
    )
    port_meanings: ClassVar[dict[str, str]] = {
        "load__payload": "stored row vector and its place: {weight bank, row or column, odd row, address, {records, scales, E2M1 codes}}",
        "load__valid": "a vector is offered",
        "load__ready": "always 1",
        "tile__payload": "segment of a tile to run: {K-vectors, weight base, activation base, {refine_en, mode_nvfp4, kv, n, m}}",
        "tile__valid": "a tile is offered",
        "tile__ready": "the tile is taken",
        "result__payload": "{last of the last row's tile, 64-bit sum}; {odd row, even row} in AutoFP2 mode",
        "result__valid": "a sum is offered",
        "result__ready": "the sum is taken",
        "clear": "clears the status, only while busy is 0",
        "busy": "a tile is running or results have not left",
        "status": "sticky until reset or clear: {bad_load, bad_command, dropped, overlap, nan_scale, saturated}",
    }

    def __init__(self, config: EngineConfig | None = None):
        self._config = config = config or EngineConfig()
        super().__init__(
            {
                "load": In(stream.Signature(load_layout(config))),
                "tile": In(stream.Signature(tile_layout(config))),
                "result": Out(stream.Signature(ResultWord)).array(config.columns),
                "clear": In(1),
                "busy": Out(1),
                "status": Out(EngineStatus),
            }
        )

    @property
    def config(self) -> EngineConfig:
        """The configuration that this component was built with."""
        return self._config

    def elaborate(self, platform: object) -> Module:
        """Build array, banks, the check of tiles and the write side."""
        m = Module()
        config = self._config
        m.submodules.array = array = Array(config.array)
        a_unit = Unit(lambda: ActivationBank(config), "activation_bank")
        w_unit = Unit(lambda: WeightBank(config), "weight_bank")
        a_banks, w_banks = [], []
        for r in range(config.rows):
            m.submodules[f"activations_{r}"] = bank = Shared(a_unit)
            wiring.connect(m, bank.entry, array.activation[r])
            a_banks.append(bank)
        for c in range(config.columns):
            m.submodules[f"weights_{c}"] = bank = Shared(w_unit)
            wiring.connect(m, bank.entry, array.weight[c])
            wiring.connect(m, array.result[c], wiring.flipped(self.result[c]))
            w_banks.append(bank)

        banks = [*a_banks, *w_banks]

        # Write side.
        load = self.load.payload
        depths = (config.activation_depth, config.weight_depth)
        hits: list[Signal] = []
        writing = self.load.valid
        m.d.comb += self.load.ready.eq(1)
        for kind, (side, depth) in enumerate(zip((a_banks, w_banks), depths, strict=True)):
            fits = load.address < depth if depth < max(depths) else Const(1, 1)
            for i, bank in enumerate(side):
                hit = Signal(name=f"{'aw'[kind]}_{i}_hit")
                m.d.comb += [
                    hit.eq(writing & (load.weight == kind) & (load.index == i if i else ~load.index.any()) & fits),
                    bank.write_address.eq(load.address),
                    bank.write_entry.eq(load.entry),
                    bank.write.eq(Cat(hit & ~load.odd, hit & load.odd) if kind else hit & ~load.odd),
                ]
                hits.append(hit if kind else hit & ~load.odd)

        # Tiles. Elements get their commands by way of a buffer, so that banks can send ahead.
        m.submodules.commands = commands = StreamBuffer(command_layout(config.pe), late_valid=True)
        wiring.connect(m, commands.output, array.command)
        tile = self.tile.payload
        _, refused = check_command(config.pe, tile.command)
        sizes = data.StructLayout({"m": len(tile.command.m), "n": len(tile.command.n), "mode_nvfp4": 1})
        given, held, size = Signal(sizes), Signal(sizes), Signal(sizes)
        # K-vectors that are left of the tile: those behind the last offer if it was taken, and whether there are any.
        before, behind = (Signal(len(tile.command.kv), name=name) for name in ("before", "behind"))
        left, most = Signal.like(before, name="left"), Signal.like(before, name="most")
        # ``begins`` is the opposite of ``continues``, in a register of its own because each has much to drive.
        took, continues, begins = Signal(), Signal(), Signal(init=1)
        pairs = Mux(continues, _pairs(held), _pairs(given))
        # Places are counted from the last one that is needed: beyond a bank are those with a higher bit, which no comparison has to find. None are
        # needed only of what is bad anyway. Of a segment longer than a bank, upper bits need not be multiplied.
        depths = config.activation_depth, config.weight_depth
        bits = max(len(tile.activation_base), len(size.m) + len(tile.segment)) + 1, len(pairs) + depths[1].bit_length()
        lasts = [
            Signal(width, name=f"last_{kind}", attrs=lint_unused("only whether it is beyond matters"))
            for kind, width in zip("aw", bits, strict=True)
        ]
        short, long = tile.segment[: depths[1].bit_length()], tile.segment[depths[1].bit_length() :].any()
        beyond = Cat(last[depth.bit_length() - 1 :].any() for last, depth in zip(lasts, depths, strict=True))
        offered, fits, bad, starts = Signal(), Signal(), Signal(), Signal()
        m.d.comb += [
            left.eq(Mux(took, behind, before)),
            *(given[name].eq(tile.command[name]) for name in sizes.members),
            size.eq(Mux(continues, held.as_value(), given.as_value())),
            most.eq(Mux(begins, tile.command.kv, left)),
            lasts[0].eq(tile.activation_base + size.m * tile.segment - 1),
            lasts[1].eq(pairs * short - 1),
            self.tile.ready.eq(Cat(bank.request.ready for bank in banks).all() & commands.input.ready),
            offered.eq(self.tile.valid & self.tile.ready),
            # What is known late comes last.
            fits.eq(~(begins & refused) & ~long & tile.segment.any() & (tile.segment <= most)),
            bad.eq(~fits | beyond.any()),
            starts.eq(offered & fits & ~beyond.any()),
            commands.input.valid.eq(offered & fits & begins & ~beyond.any()),
            commands.input.payload.eq(tile.command),
        ]
        m.d.sync += [took.eq(starts), before.eq(left), behind.eq(most - tile.segment)]
        with m.If(starts):
            m.d.sync += [continues.eq(most != tile.segment), begins.eq(most == tile.segment)]
        with m.If(begins):
            m.d.sync += held.eq(given)
        for bank in a_banks:
            request = bank.request.payload
            m.d.comb += [request.base.eq(tile.activation_base), request.m.eq(size.m)]
        for bank in w_banks:
            request = bank.request.payload
            m.d.comb += [
                request.base.eq(tile.weight_base),
                request.n.eq(size.n),
                request.mode_nvfp4.eq(size.mode_nvfp4),
            ]
        for bank in banks:
            m.d.comb += [bank.request.valid.eq(starts), bank.request.payload.kv.eq(tile.segment)]

        # Status.
        clear, refusals, bad_load = Signal(), Signal(), Signal()
        m.d.comb += [
            self.busy.eq(array.busy | Cat(bank.busy for bank in banks).any() | commands.output.valid | continues),
            clear.eq(self.clear & ~self.busy),
            array.clear.eq(clear),
            self.status.elements.eq(array.status),
            self.status.elements.bad_command.eq(array.status.bad_command | refusals),
            self.status.bad_load.eq(bad_load),
        ]
        with m.If(clear):
            m.d.sync += [refusals.eq(0), bad_load.eq(0)]
        with m.If(offered & bad):
            m.d.sync += refusals.eq(1)
        with m.If(self.load.valid & ~Cat(hits).any()):
            m.d.sync += bad_load.eq(1)
        return m
