"""Output-stationary array of processing elements with multicast buses and drain chains (paper, section 6.1 and figure 9; docs/array.md)."""

from typing import ClassVar

from amaranth.hdl import Cat, Module, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from hdl.collector import activation_entry, weight_entry
from hdl.lib.shared import Shared, Unit
from hdl.lib.streams import StreamBuffer, multicast
from hdl.pe import Pe, PeStatus, ResultWord, command_layout
from model.array import ArrayConfig

__all__ = ["Array", "DrainNode"]


class DrainNode(wiring.Component):
    """A link of a drain chain: a tile of its own element, then everything from the link behind it, in turn.

    Members
    -------
    own : In(stream of ResultWord)
    behind : In(stream of ResultWord)
        ``last`` marks the end of all tiles of the links behind, and so does that of the output.
    output : Out(stream of ResultWord)
        Registered; latency 1.
    """

    own: In(stream.Signature(ResultWord))
    behind: In(stream.Signature(ResultWord))
    output: Out(stream.Signature(ResultWord))

    def elaborate(self, platform: object) -> Module:
        """Build the switch and its buffer."""
        m = Module()
        m.submodules.buffer = buffer = StreamBuffer(ResultWord)
        wiring.connect(m, buffer.output, wiring.flipped(self.output))
        passing = Signal()
        for chosen, source in enumerate((self.own, self.behind)):
            with m.If(passing == chosen):
                m.d.comb += [
                    buffer.input.valid.eq(source.valid),
                    buffer.input.payload.psum.eq(source.payload.psum),
                    buffer.input.payload.last.eq(source.payload.last if chosen else 0),
                    source.ready.eq(buffer.input.ready),
                ]
                with m.If(source.valid & source.ready & source.payload.last):
                    m.d.sync += passing.eq(~passing)
        return m


class Array(wiring.Component):
    """Rows × columns of processing elements that run the same command on tiles of their own.

    Element (r, c) multiplies the activations of row bus r with the weights of column bus c. Results of a column leave by its chain:
    row 0's tile, then row 1's, and so on; ``last`` marks the last word of the last row.

    Parameters
    ----------
    config : ArrayConfig

    Members
    -------
    command : In(stream of command)
        Taken by all elements at once.
    weight : In(stream of weight entry), one per column
    activation : In(stream of activation entry), one per row
    result : Out(stream of ResultWord), one per column
    clear : In(1)
        Clears the status; only while ``busy`` is 0.
    busy : Out(1)
        An element is busy or results have not left.
    status : Out(PeStatus)
        What any element says.
    """

    throughput: ClassVar[str] = "rows x columns vectors per cycle; 1 result per column and cycle"
    port_meanings: ClassVar[dict[str, str]] = {
        **Pe.port_meanings,
        "weight__payload": "weight vector of a column: {records, scales, packed pairs}; records per block {offsets 1, offsets 0, mask}",
        "activation__payload": "activation vector of a row: {records, scales, E2M1 codes}; records per block {offsets 1, offsets 0, mask}",
        "result__payload": "{last of the last row's tile, 64-bit sum}; {odd row, even row} in AutoFP2 mode",
        "busy": "an element is busy or results have not left",
        "status": "sticky until reset or clear, of any element: {bad_command, dropped, overlap, nan_scale, saturated}",
    }

    def __init__(self, config: ArrayConfig | None = None):
        self._config = config = config or ArrayConfig()
        super().__init__(
            {
                "command": In(stream.Signature(command_layout(config.pe))),
                "weight": In(stream.Signature(weight_entry(config.pe.vmac))).array(config.columns),
                "activation": In(stream.Signature(activation_entry(config.pe.vmac))).array(config.rows),
                "result": Out(stream.Signature(ResultWord)).array(config.columns),
                "clear": In(1),
                "busy": Out(1),
                "status": Out(PeStatus),
            }
        )

    @property
    def config(self) -> ArrayConfig:
        """The configuration that this component was built with."""
        return self._config

    def elaborate(self, platform: object) -> Module:
        """Build elements, buses and chains."""
        m = Module()
        config = self._config
        pe = Unit(lambda: Pe(config.pe), "pe")
        elements = [[Shared(pe) for _ in range(config.columns)] for _ in range(config.rows)]
        for r, row in enumerate(elements):
            for c, element in enumerate(row):
                m.submodules[f"pe_{r}_{c}"] = element
                m.d.comb += element.clear.eq(self.clear & ~self.busy)
        flat = [element for row in elements for element in row]
        multicast(m, self.command, [element.command for element in flat])
        for r, row in enumerate(elements):
            multicast(m, self.activation[r], [element.activation for element in row])
        draining = []
        if config.rows > 1:
            drain = Unit(DrainNode, "drain_node")
        for c in range(config.columns):
            column = [row[c] for row in elements]
            multicast(m, self.weight[c], [element.weight for element in column])
            behind = column[-1].result
            for r in reversed(range(config.rows - 1)):
                node = Shared(drain)
                m.submodules[f"drain_{r}_{c}"] = node
                wiring.connect(m, column[r].result, node.own)
                wiring.connect(m, behind, node.behind)
                behind = node.output
                draining.append(behind.valid)
            wiring.connect(m, behind, wiring.flipped(self.result[c]))
        m.d.comb += self.busy.eq(Cat(element.busy for element in flat).any() | Cat(draining).any())
        statuses = [element.status.as_value() for element in flat]
        m.d.comb += self.status.as_value().eq(
            Cat(Cat(status[bit] for status in statuses).any() for bit in range(len(statuses[0])))
        )
        return m
