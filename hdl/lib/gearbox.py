"""Gearbox: elements come so many at a time and leave so many at a time. Shared by every accelerator family."""

import math
from functools import reduce

from amaranth.hdl import Cat, Const, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from hdl.lib.arith import tree_sum

__all__ = ["Gearbox", "beat_layout", "packed_layout"]


def beat_layout(element_bits: int, elements: int) -> data.StructLayout:
    """Return the layout of what goes in: elements, how many of them count (looked at only with ``last``), the packet's last beat."""
    return data.StructLayout(
        {"elements": data.ArrayLayout(element_bits, elements), "count": elements.bit_length(), "last": 1}
    )


def packed_layout(element_bits: int, elements: int) -> data.StructLayout:
    """Return the layout of what comes out: a word of elements, element 0 lowest, and whether it is the packet's last."""
    return data.StructLayout({"word": data.ArrayLayout(element_bits, elements), "last": 1})


class Gearbox(wiring.Component):
    """Repack packets of elements from beats of ``elements_in`` into words of ``elements_out``; any two numbers.

    All beats of a packet are full but the last, of which the lowest ``count`` elements belong to it. Its last word is filled up with zeros, and
    the next packet starts with a new word; no cycle is lost in between. Latency 1. If words are taken at once, a beat goes in per cycle, or a
    word comes out per cycle if a beat makes more than one. Neither ``valid`` nor ``ready`` passes through.

    Parameters
    ----------
    element_bits, elements_in, elements_out : int
        From 1 on.

    Members
    -------
    input : In(stream of {elements, count, last})
        ``count`` is 1 to ``elements_in`` with ``last``, anything otherwise.
    output : Out(stream of {word, last})

    Raises
    ------
    ValueError
        A parameter is below 1.
    """

    def __init__(self, element_bits: int, elements_in: int, elements_out: int):
        sizes = {"element_bits": element_bits, "elements_in": elements_in, "elements_out": elements_out}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        self._bits, self._in, self._out = element_bits, elements_in, elements_out
        super().__init__(
            {
                "input": In(stream.Signature(beat_layout(element_bits, elements_in))),
                "output": Out(stream.Signature(packed_layout(element_bits, elements_out))),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Build the store. It counts in units of the elements that both sides have in common, and is 0 from ``level`` on."""
        m = Module()
        beat, packed = self.input.payload, self.output.payload
        size = math.gcd(self._in, self._out)
        units_in, units_out = self._in // size, self._out // size
        unit = size * self._bits + 1  # with a bit for the end of a packet
        # A beat must find room though the word in front of it has not left.
        most = units_out - 1 + min(units_in, units_out)
        places = most + units_in

        counts = [~beat.last | (beat.count > i if i else beat.count.any()) for i in range(self._in)]
        uses = counts[::size]
        ends = [beat.last & use & ~after for use, after in zip(uses, [*uses[1:], Const(0, 1)], strict=True)]
        elements = [beat.elements[i] & count.replicate(self._bits) for i, count in enumerate(counts)]
        chunks = [Cat(*elements[i * size : (i + 1) * size], end) for i, end in enumerate(ends)]

        # A packet that ends is filled up to a whole word, of which only the elements are stored.
        level = Signal(range(-(-places // units_out) * units_out + 1))
        total, filled = Signal.like(level), Signal.like(level)
        m.d.comb += total.eq(level + tree_sum(uses))
        whole = range(units_out, places + units_out, units_out)
        rounded = reduce(lambda above, words: Mux(total <= words, words, above), reversed(whole[:-1]), whole[-1])
        m.d.comb += filled.eq(Mux(beat.last, rounded, total))

        store, merged = Signal(places * unit), Signal(places * unit)
        shifted = Cat(*chunks, Const(0, (places - units_in) * unit))
        for step in range(most.bit_length()):
            moved = Signal(places * unit, name=f"moved_{step}")
            distance = min(unit << step, places * unit)
            m.d.comb += moved.eq(Mux(level[step], Cat(Const(0, distance), shifted)[: places * unit], shifted))
            shifted = moved
        accept, give = Signal(), Signal()
        after = Signal.like(level)
        m.d.comb += [
            self.input.ready.eq(level <= most),
            accept.eq(self.input.valid & self.input.ready),
            merged.eq(store | (shifted & accept.replicate(len(store)))),
            after.eq(Mux(accept, filled, level)),
            self.output.valid.eq(level >= units_out),
            give.eq(self.output.valid & self.output.ready),
        ]
        m.d.sync += [
            store.eq(Mux(give, merged >> unit * units_out, merged)),
            level.eq(Mux(give, after - units_out, after)),
        ]
        front = [store[i * unit : (i + 1) * unit] for i in range(units_out)]
        m.d.comb += [
            packed.word.eq(Cat(part[:-1] for part in front)),
            packed.last.eq(Cat(part[-1] for part in front).any()),
        ]
        return m
