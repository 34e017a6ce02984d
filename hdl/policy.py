"""Precision policy in hardware: statistics, rules and counters of one request (paper, section 3.1 and table 1; docs/policy.md)."""

from typing import ClassVar

from amaranth.hdl import Cat, Const, Module, Mux, Signal, Value, signed
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from hdl.lib.arith import gated, selected
from hdl.lib.fp32 import Float
from model.policy import EIGHTHS, FACTOR_BITS, LEVEL_BITS, RUN_BITS, WEIGHT_BITS, PolicyFormat

__all__ = ["ActivityToFixed", "PolicyStatus", "PolicyUnit", "settings_layout", "step_layout"]

_DOUBLINGS = 2 * EIGHTHS.bit_length() - 2
"""``EIGHTHS**2`` as a shift."""

_BIAS = 127


class PolicyStatus(data.Struct):
    """Sticky until ``clear``: an activity was beyond the integer bits; one was NaN or negative, and was left out."""

    saturated: 1
    invalid: 1


def settings_layout(form: PolicyFormat) -> data.StructLayout:
    """Return the layout of the settings, that of :attr:`model.policy.PolicyFormat.settings`."""
    table = data.ArrayLayout(LEVEL_BITS, form.level_slots)
    return data.StructLayout({**form.settings, "levels": table})


def step_layout(form: PolicyFormat) -> data.StructLayout:
    """Return the layout of the word that begins a step: the entropy in units of ``2**-fraction_bits``, and whether it is a decode step."""
    return data.StructLayout({"entropy": form.entropy_bits, "decode": 1})


class PolicyUnit(wiring.Component):
    """Choose the next layer's precision from the activities of the layers before; every decision as :class:`model.policy.FixedPolicy`.

    A word of ``step`` begins a step, then each word of ``activity`` is the L_A of the next layer, layer 0 first. ``precision`` is that of the
    layer whose activity comes next, while ``valid`` is 1: from the cycle after a step was taken, and ``latency`` cycles after an activity was
    taken, whatever its value. No word is taken in between. If both are offered, an activity goes before a step.

    All products are made by one adder, a bit of the multiplier per cycle.

    Parameters
    ----------
    form : PolicyFormat

    Attributes
    ----------
    latency : int
        201 by default.

    Members
    -------
    settings : In(settings_layout)
        Unchanged from ``clear`` to the end of the request.
    clear : In(1)
        Ends the request: statistics, status and the step are forgotten. No word is taken in this cycle.
    step : In(stream of step_layout)
    activity : In(stream of Float)
    valid : Out(1)
    precision : Out(5)
    level : Out(index)
        Place of ``precision`` in the table of levels.
    spike : Out(1)
        This prefill's spike has been seen.
    status : Out(PolicyStatus)
    """

    throughput: ClassVar[str] = "1 activity per latency"
    port_meanings: ClassVar[dict[str, str]] = {
        "settings": "parameters of the policy, unchanged during a request",
        "clear": "forgets the request: statistics, step and status",
        "step__payload": "{decode step, entropy of the step before}",
        "step__valid": "a step begins",
        "step__ready": "the step is taken",
        "activity__payload": "L_A of the layer that has run, binary32",
        "activity__valid": "an activity is offered",
        "activity__ready": "the activity is taken",
        "valid": "precision is that of the next layer",
        "precision": "bits of the next layer",
        "level": "place of precision in the table of levels",
        "spike": "the spike of this prefill has been seen",
        "status": "sticky until reset or clear: {invalid, saturated}",
    }

    def __init__(self, form: PolicyFormat | None = None):
        self._form = form = form or PolicyFormat()
        super().__init__(
            {
                "settings": In(settings_layout(form)),
                "clear": In(1),
                "step": In(stream.Signature(step_layout(form))),
                "activity": In(stream.Signature(Float)),
                "valid": Out(1),
                "precision": Out(LEVEL_BITS),
                "level": Out(form.index_bits),
                "spike": Out(1),
                "status": Out(PolicyStatus),
            }
        )

    @property
    def form(self) -> PolicyFormat:
        """The widths that this component was built with."""
        return self._form

    @property
    def _rounds(self) -> tuple[int, ...]:
        """Bits of the multiplier in each product."""
        form = self._form
        x, total, count = form.metric_bits, form.metric_bits + form.count_bits, form.count_bits + 1
        return (WEIGHT_BITS, WEIGHT_BITS, count, count, total, FACTOR_BITS, FACTOR_BITS, total, x)

    @property
    def latency(self) -> int:
        """Cycles from an activity that is taken to the precision that follows from it."""
        return sum(self._rounds) + len(self._rounds) + 1

    def elaborate(self, platform: object) -> Module:
        """Build conversion, statistics, multiplier and rules."""
        m = Module()
        form, settings, step = self._form, self.settings, self.step.payload
        total_bits = form.metric_bits + form.count_bits
        wide = 2 * total_bits + 2 * FACTOR_BITS
        m.submodules.to_fixed = to_fixed = ActivityToFixed(form)
        m.d.comb += to_fixed.number.eq(self.activity.payload)

        # Which word is taken.
        started, busy, taken, begins = (Signal(name=name) for name in ("started", "busy", "taken", "begins"))
        m.d.comb += [
            self.activity.ready.eq(started & ~busy & ~self.clear),
            self.step.ready.eq(~busy & ~self.clear & ~(started & self.activity.valid)),
            taken.eq(self.activity.valid & self.activity.ready),
            begins.eq(self.step.valid & self.step.ready),
            self.valid.eq(started & ~busy),
        ]

        # The step, and statistics of prefill and decode.
        decode, high, layer_zero = (Signal(name=name) for name in ("decode", "high", "layer_zero"))
        entropy = Signal(form.entropy_bits)
        layout = data.StructLayout(
            {"count": form.count_bits + 1, "total": total_bits, "squares": form.metric_bits + total_bits}
        )
        stored = [Signal(layout, name=name) for name in ("prefill", "decoded")]
        now = Signal(layout)
        m.d.comb += now.eq(Mux(decode, stored[1].as_value(), stored[0].as_value()))

        # One product after the other: acc ± multiplicand · multiplier, from the lowest bit of the multiplier up.
        acc = Signal(signed(wide + 1), reset_less=True)
        multiplicand = Signal(wide, reset_less=True)
        multiplier = Signal(total_bits, reset_less=True)
        minus = Signal(reset_less=True)
        product = Signal(range(len(self._rounds) + 1))
        left = Signal(range(max(self._rounds) + 1))
        metric = Signal(form.metric_bits, reset_less=True)
        distance = Signal(total_bits, reset_less=True)
        above, beyond, sample = (Signal(name=name, reset_less=True) for name in ("above", "beyond", "sample"))
        seeking = Signal()
        factor = Signal(FACTOR_BITS)
        m.d.comb += [
            seeking.eq(~decode & ~self.spike),
            factor.eq(Mux(seeking, settings.sigma_factor, settings.band)),
        ]

        def multiply(a: Value, b: Value, start: Value | None = None, *, subtract: bool = False) -> None:
            m.d.sync += [multiplicand.eq(a), multiplier.eq(b), minus.eq(subtract)]
            if start is not None:
                m.d.sync += acc.eq(start)

        zero = Const(0, 1)
        with m.If(left.any()):
            term = multiplicand & multiplier[0].replicate(wide)
            m.d.sync += [
                acc.eq(acc + (Cat(term, zero) ^ minus.replicate(wide + 1)).as_signed() + minus),
                multiplicand.eq(multiplicand << 1),
                multiplier.eq(multiplier >> 1),
                left.eq(left - 1),
            ]
        with m.Elif(busy):
            m.d.sync += product.eq(product + 1)
            with m.Switch(product):
                for number, bits in enumerate(self._rounds[1:], 1):
                    with m.Case(number):
                        m.d.sync += left.eq(bits)
            with m.Switch(product):
                with m.Case(1):
                    multiply(entropy, gated(settings.entropy_weight, decode))
                with m.Case(2):
                    # n·x − Σx, whose sign is the side of the mean.
                    m.d.sync += metric.eq(acc)
                    multiply(acc, now.count, -now.total)
                with m.Case(3):
                    # n²σ² = n·Σx² − (Σx)²
                    negative = acc[-1]
                    m.d.sync += [above.eq(~negative), distance.eq((acc ^ negative.replicate(wide + 1)) + negative)]
                    multiply(now.squares, now.count, zero)
                with m.Case(4):
                    multiply(now.total, now.total, subtract=True)
                with m.Case(5):
                    multiply(Mux(acc[-1], 0, acc), factor, zero)
                with m.Case(6):
                    multiply(acc, factor, zero)
                with m.Case(7):
                    # Beyond the multiple of σ if this becomes negative.
                    multiply(distance << _DOUBLINGS, distance, subtract=True)
                with m.Case(8):
                    m.d.sync += beyond.eq(acc[-1])
                    multiply(metric, metric, now.squares >> now.count[-1])
                with m.Case(9):
                    m.d.sync += [busy.eq(0), layer_zero.eq(0)]
                    with m.If(sample):
                        for phase, statistics in enumerate(stored):
                            with m.If(decode == phase):
                                m.d.sync += [
                                    statistics.count.eq((now.count >> now.count[-1]) + 1),
                                    statistics.total.eq((now.total >> now.count[-1]) + metric),
                                    statistics.squares.eq(acc),
                                ]
        with m.If(taken):
            m.d.sync += [
                busy.eq(1),
                product.eq(1),
                left.eq(self._rounds[0]),
                sample.eq(~to_fixed.invalid & ~layer_zero),
                self.status.eq(self.status.as_value() | Cat(to_fixed.saturated, to_fixed.invalid)),
            ]
            multiply(to_fixed.fixed, Mux(decode, settings.activity_weight, 1), zero)

        # Rules: a run of samples on one side of the mean moves the precision by a level.
        up, rule = (Signal(name=name) for name in ("up", "rule"))
        run, following, needed = (Signal(RUN_BITS, name=name) for name in ("run", "following", "needed"))
        moved = Signal.like(self.level)
        m.d.comb += [
            needed.eq(Mux(decode, Mux(above == high, settings.beta, settings.alpha), settings.n_p)),
            following.eq(Mux(above == up, run + ~run.all(), 1)),
            moved.eq(Mux(above, self.level + (self.level < settings.top), self.level - self.level.any())),
            rule.eq(
                busy & ~left.any() & (product == len(self._rounds)) & sample & (now.count >= settings.first_samples)
            ),
        ]
        with m.If(rule & seeking):
            m.d.sync += self.spike.eq(beyond & above)
        with m.Elif(rule):
            m.d.sync += [run.eq(gated(following, beyond)), up.eq(above)]
            with m.If(beyond & (following >= needed)):
                m.d.sync += self.level.eq(moved)
                with m.If(moved != self.level):
                    m.d.sync += run.eq(0)

        with m.If(begins):
            m.d.sync += [
                started.eq(1),
                decode.eq(step.decode),
                high.eq(step.entropy >= settings.tau),
                entropy.eq(step.entropy),
                layer_zero.eq(1),
                self.spike.eq(0),
                run.eq(0),
                self.level.eq(Mux(step.decode, settings.decode_first, settings.prefill_first)),
            ]
            with m.If(~step.decode):
                m.d.sync += stored[0].eq(0)
        with m.If(self.clear):
            m.d.sync += [started.eq(0), busy.eq(0), left.eq(0), self.spike.eq(0), self.status.eq(0)]
            m.d.sync += [statistics.eq(0) for statistics in stored]
        m.d.comb += self.precision.eq(selected(list(settings.levels), self.level))
        return m


class ActivityToFixed(wiring.Component):
    """Turn L_A into fixed point, as :func:`model.policy.to_fixed`; combinational.

    Parameters
    ----------
    form : PolicyFormat

    Members
    -------
    number : In(Float)
    fixed : Out(activity_bits)
        Cut off below, saturated above.
    saturated : Out(1)
    invalid : Out(1)
        NaN or negative; then the others are of no use.
    """

    def __init__(self, form: PolicyFormat):
        self._form = form
        super().__init__(
            {"number": In(Float), "fixed": Out(form.activity_bits), "saturated": Out(1), "invalid": Out(1)}
        )

    def elaborate(self, platform: object) -> Module:
        """Build the shifter: to the right, from where the largest exponent puts the number."""
        m = Module()
        number, width = self.number, self._form.activity_bits
        largest = _BIAS + self._form.integer_bits - 1
        significand = number.significand()
        room = width - len(significand)
        aligned = significand << room if room >= 0 else significand >> -room
        special = number.exponent.all()
        shift = Signal(8)
        m.d.comb += [
            self.invalid.eq(
                (special & number.fraction.any()) | (number.sign & (number.exponent.any() | number.fraction.any()))
            ),
            self.saturated.eq(~self.invalid & (number.exponent > largest)),
            shift.eq(largest - number.scale()),
            self.fixed.eq(Mux(number.exponent > largest, 2**width - 1, aligned >> shift)),
        ]
        return m
