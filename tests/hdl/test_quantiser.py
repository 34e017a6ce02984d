# amaranth: UnusedElaboratable=no
"""Quantiser in hardware: every number of slots and both steps, stalls, latency and throughput, and errors put in."""

import inspect

import numpy as np
import pytest
from amaranth.sim import Simulator

import hdl.quantiser
from hdl.quantiser import Quantiser, group_layout
from model.quantiser import quantise
from tests.hdl.bulk import packed, unpacked
from tests.model.test_quantiser import groups_of_all_kinds

GROUP = [(16, 4), (1, 8), (1, 4), (16, 2), (1, 1)]
TAKEN = np.array([0, 0, 0, 1, 2, 8, 5, 12, 7, 15], np.uint8)


def simulated(dut, bits, taken, stall, rng, **settings):
    """Run pairs of groups through; returns group words, cycles of their offers, of the pairs', and what flags rose."""
    pairs = bits.reshape(-1, 32)
    last = rng.random(len(pairs)) < 0.3
    words = [int.from_bytes(row.tobytes(), "little") for row in packed([pairs, last], [32, 1])]
    masks = (taken[::2] | taken[1::2] << 4).tolist()
    results, taken_at, offered_at = [], [], []
    flags = set()
    state = {"cycle": 0}

    def feeding(port, values, note):
        async def feed(ctx):
            for value in values:
                while stall and rng.random() < stall:
                    await ctx.tick()
                ctx.set(port.payload.as_value() if hasattr(port.payload, "as_value") else port.payload, value)
                ctx.set(port.valid, 1)
                note.append(state["cycle"])
                while not (await ctx.tick().sample(port.ready))[-1]:
                    pass
                ctx.set(port.valid, 0)

        return feed

    async def take(ctx):
        for name, value in settings.items():
            port = getattr(dut, name)
            ctx.set(port.as_value() if hasattr(port, "as_value") else port, int(value))
        seen = None
        while len(results) < 2 * len(pairs):
            ctx.set(dut.group.ready, int(not stall or rng.random() >= stall))
            word = ctx.get(dut.group.payload.as_value())
            valid, ready = ctx.get(dut.group.valid), ctx.get(dut.group.ready)
            if seen is not None:
                assert valid
                assert word == seen
            elif valid:
                offered_at.append(state["cycle"])
            seen = word if valid and not ready else None
            if valid and ready:
                results.append(word)
            flags.update(name for name in ("nonfinite", "clipped") if ctx.get(getattr(dut, name)))
            await ctx.tick()
            state["cycle"] += 1
            assert state["cycle"] < 40 * len(pairs) + 100
        assert not ctx.get(dut.busy)

    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(take)
    simulator.add_testbench(feeding(dut.pair, words, taken_at), background=True)
    if settings.get("refine"):
        simulator.add_testbench(feeding(dut.weight_mask, masks, []), background=True)
    simulator.run()
    octets = np.array([list(word.to_bytes((group_layout.size + 7) // 8, "little")) for word in results], np.uint8)
    return unpacked(octets, GROUP), last, offered_at, taken_at, flags


def compare(got, last, bits, taken, slots, step, shared=0, refine=0, threshold=0):
    codes, scales, masks, offsets, ends = got
    model = quantise(
        bits, shared=bool(shared), refine=bool(refine), threshold=threshold, weight_masks=taken, slots=slots, step=step
    )
    same = [
        (codes == model.codes).all(),
        (scales[:, 0] == model.scales).all(),
        (masks[:, 0] == model.masks).all(),
        (offsets == (model.offsets & 3)).all(),
        (ends[::2, 0] == 0).all() and (ends[1::2, 0] == last).all(),
    ]
    return all(same), model


def some_groups(rng, count):
    bits = groups_of_all_kinds(rng, max(count // 8, 4))
    bits = rng.permutation(bits)[:count]
    return bits, rng.choice(TAKEN, len(bits))


@pytest.mark.parametrize(
    ("slots", "step", "stall", "shared"),
    [(1, "exponent", 0.3, 0), (2, "fixed", 0.0, 1), (3, "fixed", 0.0, 1), (4, "exponent", 0.3, 0)],
)
def test_groups_are_the_model_s(slots, step, stall, shared, seed):
    rng = np.random.default_rng([seed, slots])
    bits, taken = some_groups(rng, 160)
    threshold = int(np.float32(0.01).view(np.uint32))
    settings = {"shared": shared, "refine": 1, "threshold": threshold}
    got, last, offered, _, flags = simulated(Quantiser(slots, step), bits, taken, stall, rng, **settings)
    same, model = compare(got, last, bits, taken, slots, step, **settings)
    assert same
    assert model.masks.any()
    assert flags == {name for name in ("nonfinite", "clipped") if getattr(model, name).any()}
    if not stall:
        # A group per cycle, from the first on.
        assert np.diff(offered).tolist() == [1] * (len(bits) - 1)
        assert offered[0] == Quantiser.latency


def test_nothing_is_refined_and_no_mask_taken_without_refine(seed):
    rng = np.random.default_rng(seed)
    bits, taken = some_groups(rng, 48)
    got, last, *_ = simulated(Quantiser(), bits, taken, 0.0, rng)
    assert compare(got, last, bits, taken, 2, "fixed")[0]
    assert not got[2].any()


# Those of the selection are in the proofs.
BUGS = {
    "ties of codes go up": ("(more | (quarters != middle))", "1"),
    "ties of codes go down": ("beaten if code % 2 else", "beaten & (more | (quarters != middle)) if code % 2 else"),
    "what was cut is forgotten": ("more = value[POINT - 2 :], losses[i] |", "more = value[POINT - 2 :],"),
    "ties of scales go up": ("(sticky | whole & 1) if rest == 3", "1 if rest == 3"),
    "the scale is not clamped": ("scale.eq(Mux(clipped, E4M3.max_code, code))", "scale.eq(code)"),
    "subnormal scales": ("Mux(normal > low, normal - low, 0)", "normal - low"),
    "groups do not share": ("Mux(later, of_both, both)", "Mux(later, own, both)"),
    "the first of a pair does not look back": ("both = Mux(own < behind, behind, own)", "both = own"),
    "beyond the largest": ("kept | beyond.replicate(_VALUE)", "kept"),
    "a zero scale": ("Cat(levels[3 * i :][:3], signs[i]) & live.replicate(4)", "Cat(levels[3 * i :][:3], signs[i])"),
    "a tie of offsets": ("far_over, far_under = (rest > threefold) |", "far_over, far_under = (rest >= threefold) |"),
    "offsets of negative numbers": ("Mux(signs[i], under, over)", "over"),
    "the threshold is not moved": ("- (e_scale << 1))", "- 14)"),
    "groups do not wait (stall)": ("enable.eq(buffer.input.ready | ~valid[-1])", "enable.eq(1)"),
    "masks change sides": ("first.taken.eq(mask_byte[:SUBGROUPS]", "first.taken.eq(mask_byte[SUBGROUPS:]"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_bugs_are_caught(bug):
    before, after = BUGS[bug]
    text = inspect.getsource(hdl.quantiser)
    assert text.count(before) == 1
    scope = {}
    exec(text.replace(before, after), scope)
    rng = np.random.default_rng(7)
    bits = groups_of_all_kinds(rng, 6)
    # Equal errors, and errors that are the threshold.
    bits[:6, :] = np.tile(np.array([6, 1.125, 2.125, 3.25] * 4, np.float32).view(np.uint32), (6, 1))
    bits[6:8] = np.array([6] + [1.25] * 15, np.float32).view(np.uint32)
    # A tie of the scale above an even one, a subnormal scale, a scale of 0.
    for k, largest in enumerate((6.375, 0.03, 0.005)):
        bits[8 + k] = np.array([largest] + [largest / 3] * 15, np.float32).view(np.uint32)
    taken = rng.choice(TAKEN, len(bits))
    taken[:8] = 0
    threshold = int(np.float32(0.25).view(np.uint32)) if "threshold" in bug else 0
    settings = {"shared": int("share" in bug or "pair" in bug), "refine": 1, "threshold": threshold}
    try:
        got, last, *_ = simulated(scope["Quantiser"](), bits, taken, 0.5 * ("stall" in bug), rng, **settings)
    except AssertionError:
        # Groups are missing.
        assert "stall" in bug
        return
    assert not compare(got, last, bits, taken, 2, "fixed", **settings)[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"slots": 0}, "slots must be from 1 to 4, not 0"),
        ({"step": "big"}, "step must be one of fixed, exponent, not 'big'"),
    ],
)
def test_bad_parameters_are_named(settings, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        Quantiser(**settings)
