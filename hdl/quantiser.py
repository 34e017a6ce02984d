"""Quantiser: binary32 numbers to NVFP4 groups with refinements, a group per cycle (docs/ppu.md)."""

from collections.abc import Sequence
from typing import ClassVar

from amaranth.hdl import Cat, Const, Module, Mux, Signal, Value, signed
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from hdl.lib.arith import tree_sum
from hdl.lib.e2m1 import E2M1Code
from hdl.lib.fp32 import Float
from hdl.lib.scale import ScaleMagnitude
from hdl.lib.streams import StreamBuffer
from hdl.lib.verilog import lint_unused
from model.autofp6 import Step
from model.formats import E2M1, E4M3
from model.quantiser import ERROR_BITS, INTEGER, MIDPOINTS, POINT, RESIDUE
from model.vmac import GROUP, SUBGROUP, SUBGROUPS, check_choice

__all__ = ["Quantiser", "Selection", "group_layout", "pair_layout"]

_FRACTION, _BIAS = 23, 127
_MAGNITUDE = 31
_VALUE = INTEGER + POINT
_LEAST = 1 - E4M3.bias
_UNIT = E4M3.bias + E4M3.mantissa_bits

pair_layout = data.StructLayout({"numbers": data.ArrayLayout(Float, 2 * GROUP), "last": 1})
"""Two groups of a row, and whether they are the row's last."""

group_layout = data.StructLayout(
    {
        "codes": data.ArrayLayout(E2M1Code, GROUP),
        "scale": 8,
        "mask": SUBGROUPS,
        "offsets": data.ArrayLayout(2, GROUP),
        "last": 1,
    }
)
"""Codes and E4M3 byte of a group, its refined subgroups and the offsets of their elements, and whether it is the last of a row."""


def _largest(m: Module, values: Sequence[Value], name: str, most: int = 1) -> list[Value]:
    """Return the largest of unsigned values, by a tree, or ``most`` of which one is."""
    level = list(values)
    depth = 0
    while len(level) > most:
        best = []
        for i in range(0, len(level) - 1, 2):
            winner = Signal.like(level[i], name=f"{name}_{depth}_{i // 2}")
            m.d.comb += winner.eq(Mux(level[i] < level[i + 1], level[i + 1], level[i]))
            best.append(winner)
        level = best + level[len(level) & ~1 :]
        depth += 1
    return level


def _unpacked(magnitude: Value) -> tuple[Value, Value]:
    """Return significand and biased exponent of a number without its sign."""
    field, fraction = magnitude[_FRACTION:], magnitude[:_FRACTION]
    return Cat(fraction, field.any()), Cat(field[0] | ~field.any(), field[1:])


def _right(m: Module, value: Value, distance: Value, name: str) -> tuple[Value, Value]:
    """Shift to the right; return the rest and whether bits that are set were lost."""
    lost: Value = Const(0, 1)
    for step in range(len(distance)):
        moved = Signal(len(value), name=f"{name}_{step}")
        gone = value[: 1 << step].any()
        m.d.comb += moved.eq(Mux(distance[step], value >> (1 << step), value))
        value, lost = moved, lost | (distance[step] & gone)
    return value, lost


class Selection(wiring.Component):
    """Choose the subgroups of largest error among those that are above a limit and free; combinational.

    Parameters
    ----------
    slots : int
        Subgroups that are refined at most, those of the weight included.

    Members
    -------
    enable : In(1)
    errors : In(ERROR_BITS), one per subgroup
    limit : In(ERROR_BITS)
    taken : In(4)
        Subgroups that the weight refines.
    chosen : Out(4)
        Never one that is taken, and never more than the slots that are left; of equal errors those of lower index.
    """

    def __init__(self, slots: int):
        self._slots = slots
        super().__init__(
            {
                "enable": In(1),
                "errors": In(ERROR_BITS).array(SUBGROUPS),
                "limit": In(ERROR_BITS),
                "taken": In(SUBGROUPS),
                "chosen": Out(SUBGROUPS),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Compare each with each, and count those that come before."""
        m = Module()
        errors = list(self.errors)
        passes = Signal(SUBGROUPS)
        m.d.comb += passes.eq(
            Cat(error > self.limit for error in errors) & ~self.taken & self.enable.replicate(SUBGROUPS)
        )
        beats = {(i, j): errors[i] >= errors[j] for i in range(SUBGROUPS) for j in range(i + 1, SUBGROUPS)}
        used = tree_sum(list(self.taken))
        for i in range(SUBGROUPS):
            before = [passes[j] & (~beats[i, j] if i < j else beats[j, i]) for j in range(SUBGROUPS) if j != i]
            m.d.comb += self.chosen[i].eq(passes[i] & (tree_sum(before) + used < self._slots))
        return m


class Quantiser(wiring.Component):
    """Turn pairs of groups into NVFP4 groups and choose what is refined, as `model.quantiser.quantise`.

    A group leaves per cycle, so a pair is taken every other one. What is set beside the streams must stay from a pair's offer until ``busy`` is 0.

    Parameters
    ----------
    slots : int
        Subgroups of a group that are refined at most, the weight's included; 1 to 4.
    step : {"fixed", "exponent"}
        How much an offset of 1 is.

    Attributes
    ----------
    latency : int
        Cycles from a pair's offer to its first group's.

    Members
    -------
    shared : In(1)
        One scale for both groups of a pair.
    refine : In(1)
        Choose refinements; a weight mask is then taken with each pair.
    threshold : In(Float)
        Errors above it are refined; the sign is not looked at.
    pair : In(stream of {numbers, last})
    weight_mask : In(stream of 8)
        Subgroups that the weight refines: of the first group in the low bits.
    group : Out(stream of {codes, scale, mask, offsets, last})
        Two for each pair; ``last`` is set on the second one of a row's last pair.
    nonfinite, clipped : Out(1)
        In the cycle in which a group enters a later stage: it has a number that is NaN or infinite; its scale would be above 448.
    busy : Out(1)
        Something was taken and is not on offer yet.

    Raises
    ------
    ValueError
        A parameter is out of range.
    """

    latency: ClassVar[int] = 11
    throughput: ClassVar[str] = "1 group per cycle"

    def __init__(self, slots: int = 2, step: Step = "fixed"):
        if not 1 <= slots <= SUBGROUPS:
            raise ValueError(f"slots must be from 1 to {SUBGROUPS}, not {slots}")
        check_choice("step", step, ("fixed", "exponent"))
        self._slots, self._step = slots, step
        super().__init__(
            {
                "shared": In(1),
                "refine": In(1),
                "threshold": In(Float),
                "pair": In(stream.Signature(pair_layout)),
                "weight_mask": In(stream.Signature(2 * SUBGROUPS)),
                "group": Out(stream.Signature(group_layout)),
                "nonfinite": Out(1),
                "clipped": Out(1),
                "busy": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Build the stages; all stop together when a group is not taken."""
        m = Module()
        m.submodules.buffer = buffer = StreamBuffer(group_layout)
        wiring.connect(m, buffer.output, wiring.flipped(self.group))
        enable = Signal()
        valid: list[Value] = []

        def register(name: str, *values: Value) -> list[Signal]:
            """Return registers that follow values from stage to stage."""
            registers = [Signal.like(value, name=f"{name}_{i}", reset_less=True) for i, value in enumerate(values)]
            with m.If(enable):
                m.d.sync += [after.eq(before) for after, before in zip(registers, values, strict=True)]
            return registers

        def follow(name: str) -> None:
            """Let the stage's valid bit follow."""
            full = Signal(name=f"{name}_full")
            with m.If(enable):
                m.d.sync += full.eq(valid[-1])
            valid.append(full)

        # A pair's groups follow each other without a gap, so that one can see the other.
        second, offered = Signal(), Signal()
        pair = self.pair.payload
        half = data.StructLayout({"numbers": data.ArrayLayout(Float, GROUP), "taken": SUBGROUPS, "last": 1})
        first, kept, current = Signal(half), Signal(half, reset_less=True), Signal(half)
        mask_byte = self.weight_mask.payload
        m.d.comb += [
            offered.eq(self.pair.valid & (~self.refine | self.weight_mask.valid)),
            self.pair.ready.eq(enable & ~second & offered),
            self.weight_mask.ready.eq(enable & ~second & offered & self.refine),
            first.taken.eq(mask_byte[:SUBGROUPS] & self.refine.replicate(SUBGROUPS)),
            current.eq(Mux(second, kept.as_value(), first.as_value())),
        ]
        m.d.comb += [first.numbers[i].eq(pair.numbers[i]) for i in range(GROUP)]
        with m.If(enable & ~second):
            m.d.sync += [
                kept.taken.eq(mask_byte[SUBGROUPS:] & self.refine.replicate(SUBGROUPS)),
                kept.last.eq(pair.last),
            ]
            m.d.sync += [kept.numbers[i].eq(pair.numbers[GROUP + i]) for i in range(GROUP)]
        with m.If(enable & (second | offered)):
            m.d.sync += second.eq(~second)
        valid.append(second | offered)
        numbers = list(current.numbers)
        unusual = [number.exponent.all() for number in numbers]
        # NaN and infinity are larger than every number and beyond every scale without being looked at.
        quarters = _largest(m, [number.as_value()[:_MAGNITUDE] for number in numbers], "larger", GROUP // 4)
        follow("taken")
        group, strange, taken, later, last, *quarters = register(
            "taken",
            Cat(*(number.as_value()[:_MAGNITUDE] for number in numbers), *(number.sign for number in numbers)),
            Cat(unusual).any(),
            current.taken,
            second,
            current.last,
            *quarters,
        )

        # The largest of a group, then of a pair: the first group sees that of the second one behind it.
        (behind,) = _largest(m, quarters, "largest")
        follow("group")
        group, strange, taken, later, last, own = register("group", group, strange, taken, later, last, behind)
        of_both = Signal(_MAGNITUDE, reset_less=True)
        largest = Signal(_MAGNITUDE)
        both = Mux(own < behind, behind, own)
        m.d.comb += largest.eq(Mux(self.shared, Mux(later, of_both, both), own))
        with m.If(enable):
            m.d.sync += of_both.eq(largest)
        follow("largest")
        group, strange, taken, last, largest = register("largest", group, strange, taken, last, largest)

        # The scale: in eighths of its binade, times six, is less than 96.
        significand, exponent = _unpacked(largest)
        low = _BIAS + 3 + _LEAST  # the binade of smaller ones is the least one
        binade = Signal(8)
        normal = Signal(len(exponent) + 1)
        distance = Signal(5)
        # How far the binade is above the least one; from the 16th on the scale is clamped anyway.
        m.d.comb += [
            normal.eq(exponent + significand[_FRACTION - 1 :].all()),
            binade.eq(Mux(normal > low, normal - low, 0)),
        ]
        m.d.comb += distance.eq(
            Mux(
                normal > low,
                _FRACTION - 6 + significand[_FRACTION - 1 :].all(),
                Mux(exponent < low - 14, 31, low + _FRACTION - 6 - exponent),
            )
        )
        sixfold, sticky = _right(m, significand, distance, "sixfold")
        follow("scaled")
        group, strange, taken, last, binade, sixfold, sticky = register(
            "scaled", group, strange, taken, last, binade, sixfold[:7], sticky
        )
        quotient, up, code = Signal(5), Signal(), Signal(12)
        with m.Switch(sixfold):
            for value in range(96):
                whole, rest = divmod(value, 6)
                with m.Case(value):
                    m.d.comb += [
                        quotient.eq(whole),
                        up.eq(1 if rest > 3 else (sticky | whole & 1) if rest == 3 else 0),
                    ]
        clipped = Signal()
        scale = Signal(7)
        m.d.comb += [
            code.eq((binade << E4M3.mantissa_bits) + quotient + up),
            clipped.eq(code > E4M3.max_code),
            scale.eq(Mux(clipped, E4M3.max_code, code)),
            self.nonfinite.eq(enable & valid[-1] & strange),
            self.clipped.eq(enable & valid[-1] & clipped),
        ]
        follow("scale")
        group, taken, last, scale = register("scale", group, taken, last, scale)

        # Elements and threshold in units of 2**(E - 10). What is beyond counts as the largest.
        view = ScaleMagnitude(scale)
        m_scale, e_scale = view.significand(), view.exponent()
        signs = group[_MAGNITUDE * GROUP :]
        values, losses = [], []
        for i in range(GROUP):
            significand, exponent = _unpacked(group[_MAGNITUDE * i :][:_MAGNITUDE])
            base = e_scale + (_BIAS - _UNIT + INTEGER - 1)
            beyond, gap = Signal(name=f"beyond_{i}"), Signal(signed(10), name=f"gap_{i}")
            distance = Signal(4, name=f"distance_{i}")
            m.d.comb += [
                gap.eq(base - exponent),
                beyond.eq(gap < 0),
                distance.eq(Mux(gap > 15, 15, gap[:4])),
            ]
            kept, lost = _right(m, significand[_FRACTION + 1 - _VALUE :], distance, f"value_{i}")
            values.append(kept | beyond.replicate(_VALUE))
            losses.append(lost | beyond | significand[: _FRACTION + 1 - _VALUE].any())
        Value.cast(self.threshold).attrs.update(lint_unused("thresholds have no sign"))
        significand, exponent = self.threshold.significand(), self.threshold.scale()
        left = Signal(signed(11))
        limit = Signal(ERROR_BITS)
        room_left = ERROR_BITS - _FRACTION - 1
        m.d.comb += left.eq(exponent - (_BIAS + _FRACTION) + 2 * (_UNIT + POINT) - (e_scale << 1))
        reach = Signal(5)
        m.d.comb += reach.eq(Mux(left < room_left - 31, 31, (room_left - left)[:5]))
        shifted, _ = _right(m, Cat(Const(0, room_left), significand), reach, "threshold")
        m.d.comb += limit.eq(Mux(left > room_left, (1 << ERROR_BITS) - 1, shifted))
        follow("value")
        signs, taken, last, scale, limit, losses, *values = register(
            "value", signs, taken, last, scale, limit, Cat(losses), *values
        )

        # Codes: how many middles an element is above.
        m_scale = ScaleMagnitude(scale).significand()
        middles = []
        for k, middle in enumerate(MIDPOINTS):
            scaled = Signal(INTEGER + 2, name=f"middle_{k}")
            m.d.comb += scaled.eq(m_scale * middle)
            middles.append(scaled)
        levels = []
        for i, value in enumerate(values):
            quarters, more = value[POINT - 2 :], losses[i] | value[: POINT - 2].any()
            above = []
            for code, middle in enumerate(middles):
                beaten = quarters >= middle
                above.append(beaten if code % 2 else beaten & (more | (quarters != middle)))
            level = Signal(3, name=f"level_{i}")
            # The middles rise, so the highest one that is below decides.
            with m.If(above[6]):
                m.d.comb += level.eq(7)
            for code in reversed(range(6)):
                with m.Elif(above[code]):
                    m.d.comb += level.eq(code + 1)
            levels.append(level)
        follow("code")
        signs, taken, last, scale, limit, losses, levels, *values = register(
            "code", signs, taken, last, scale, limit, losses, Cat(levels), *values
        )

        # What is left of elements, and which offset brings them nearest.
        m_scale = ScaleMagnitude(scale).significand()
        multiples = []
        for doubled in E2M1.magnitudes * 2:
            multiple = Signal(_VALUE, name=f"multiple_{int(doubled)}")
            m.d.comb += multiple.eq((m_scale * int(doubled)) << POINT - 1)
            multiples.append(multiple)
        halves = [m_scale << (POINT - 4 + k) for k in range(3)]
        residues, offset_codes = [], []
        for i, value in enumerate(values):
            level = levels[3 * i :][:3]
            base = Signal(_VALUE, name=f"base_{i}")
            rest = Signal(signed(_VALUE + 1), name=f"rest_{i}")
            residue = Signal(RESIDUE + POINT, name=f"residue_{i}")
            half = Signal(POINT + 2, name=f"half_{i}")
            with m.Switch(level):
                for k, multiple in enumerate(multiples):
                    with m.Case(k):
                        m.d.comb += base.eq(multiple)
                        m.d.comb += half.eq(halves[max((k >> 1) - 1, 0) if self._step == "exponent" else 0])
            absolute = Signal(_VALUE, name=f"absolute_{i}")
            m.d.comb += [
                rest.eq(value - base),
                absolute.eq(Mux(rest < 0, -rest, rest)),
                residue.eq(Mux(absolute[RESIDUE + POINT :].any(), (1 << RESIDUE + POINT) - 1, absolute)),
            ]
            residues.append(residue)
            lost, threefold = losses[i], half * 3
            over, under = (rest > half) | ((rest == half) & lost), rest < -half
            far_over, far_under = (rest > threefold) | ((rest == threefold) & lost), rest < -threefold
            # Offsets add to the signed value: 0, 1, -1 or -2.
            plus, minus, minus_two = (
                Mux(signs[i], under, over),
                Mux(signs[i], over, under),
                Mux(signs[i], far_over, far_under),
            )
            offset_codes.append(Cat(plus | (minus & ~minus_two), minus))
        follow("rest")
        signs, taken, last, scale, limit, levels, offsets, *residues = register(
            "rest", signs, taken, last, scale, limit, levels, Cat(offset_codes), *residues
        )

        squares = []
        for i, residue in enumerate(residues):
            square = Signal(2 * len(residue), name=f"square_{i}")
            m.d.comb += square.eq(residue * residue)
            squares.append(square)
        follow("square")
        signs, taken, last, scale, limit, levels, offsets, *squares = register(
            "square", signs, taken, last, scale, limit, levels, offsets, *squares
        )
        errors = []
        for g in range(SUBGROUPS):
            error = Signal(ERROR_BITS, name=f"error_{g}")
            m.d.comb += error.eq(tree_sum(squares[SUBGROUP * g : SUBGROUP * (g + 1)]))
            errors.append(error)
        follow("error")
        signs, taken, last, scale, limit, levels, offsets, *errors = register(
            "error", signs, taken, last, scale, limit, levels, offsets, *errors
        )

        live = scale.any()
        m.submodules.selection = selection = Selection(self._slots)
        chosen = selection.chosen
        m.d.comb += [
            selection.limit.eq(limit),
            selection.taken.eq(taken),
            selection.enable.eq(live & self.refine),
            *(port.eq(error) for port, error in zip(selection.errors, errors, strict=True)),
        ]
        output = buffer.input.payload
        m.d.comb += [
            buffer.input.valid.eq(valid[-1]),
            enable.eq(buffer.input.ready | ~valid[-1]),
            self.busy.eq(Cat(valid[1:]).any() | second),
            output.scale.eq(scale),
            output.mask.eq(chosen),
            output.last.eq(last),
        ]
        for i in range(GROUP):
            m.d.comb += [
                output.codes[i].as_value().eq(Cat(levels[3 * i :][:3], signs[i]) & live.replicate(4)),
                output.offsets[i].eq(offsets[2 * i :][:2] & chosen[i // SUBGROUP].replicate(2)),
            ]
        return m
