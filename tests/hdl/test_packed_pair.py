"""The pair decoder against the model, for all 32 patterns."""

from amaranth.hdl import Cat, Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from hdl.packed_pair import PackedPair
from model.packed_pair import NVFP4_PAIRS, unpack
from tests.hdl.simulate import evaluate


class Decoder(wiring.Component):
    pair: In(PackedPair)
    q0: Out(3)
    q1: Out(3)
    weight: Out(5)
    binade: Out(3)

    def elaborate(self, platform):
        m = Module()
        m.d.comb += [
            self.q0.eq(Cat(*self.pair.q0()[:3])),
            self.q1.eq(Cat(*self.pair.q1()[:3])),
            self.weight.eq(Cat(self.pair.weight_doubled_magnitude(), self.pair.weight_negative())),
            self.binade.eq(Cat(*self.pair.weight_binade())),
        ]
        return m


def digit(bits):
    single, double, negative = bits & 1, bits >> 1 & 1, bits >> 2
    assert not (single and double)
    return (single + 2 * double) * (-1 if negative else 1)


def test_digits_of_every_pattern_and_weights_of_every_nvfp4_pair():
    results = evaluate(Decoder(), [{"pair": pair} for pair in range(32)], ["q0", "q1", "weight", "binade"])
    q0, q1 = unpack(range(32))
    compared = 0
    for pair, (bits0, bits1, weight, binade) in enumerate(results):
        assert (digit(bits0), digit(bits1)) == (q0[pair], q1[pair])
        # F0 must be ignored where both digits are zero, so those patterns count as the weight 0 too.
        if pair in NVFP4_PAIRS or pair >> 2 == 0b111:
            doubled = 5 * int(q0[pair]) + 2 * int(q1[pair])
            assert weight & 15 == abs(doubled)
            assert not doubled or bool(weight >> 4) == (doubled < 0)
            assert binade == (4 if abs(doubled) >= 8 else 2 if abs(doubled) >= 4 else 1)
            compared += 1
    assert compared == 18
