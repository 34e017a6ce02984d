# amaranth: UnusedElaboratable=no
"""Policy unit: every decision, and the cycle it comes in, as the fixed-point model's, on random, adversarial and recorded traces."""

import functools
import inspect
from pathlib import Path

import numpy as np
import pytest
from amaranth.sim import Simulator

import hdl.policy
from hdl.build import generate
from hdl.lib.verilog import to_verilog
from hdl.policy import ActivityToFixed, PolicyUnit
from model.policy import FixedPolicy, PolicyConfig, PolicyFormat, PolicySettings, to_fixed
from model.policy_replay import read_trace
from sim.harness import BulkHarness
from tests.hdl.simulate import evaluate

TRACE = Path(__file__).parents[1] / "data/policy_smollm2.csv"
SMALL = PolicyFormat(integer_bits=2, fraction_bits=4, count_bits=3, level_slots=4)
SPECIAL = [
    0,
    1,
    1 << 31,
    0x7F800000,
    0xFF800000,
    0x7FC00000,
    0x7F800001,
    0xBF800000,
    0x80000001,
    0x7F7FFFFF,
    0x00800000,
]


def pattern(number):
    return int(np.float32(number).view(np.uint32))


def configurations(rng, form):
    """Parameters that the unit can hold, a quarter of them mostly the defaults."""
    levels = [(2, 4, 6), (2, 4, 6, 8), (1, 3, 4, 31), (4, 5), (4,)][rng.integers(5)]
    most = 2 ** (form.count_bits - 1) + 1
    given = {"levels": levels, "first_samples": int(rng.integers(1, min(most, 6) + 1))}
    if rng.integers(4):
        given |= {name: int(rng.integers(1, 6)) for name in ("n_p", "alpha", "beta")}
        given |= {
            "prefill_level": levels[rng.integers(len(levels))],
            "tau": float(rng.integers(0, 11)) / 10,
            "activity_weight": [0.0, 0.5, 0.65, 0.9, 1.0][rng.integers(5)],
            "sigma_factor": float(rng.integers(0, 64)) / 8,
            "band": float(rng.integers(0, 12)) / 8,
        }
    return PolicyConfig(**given)


def activities(rng, form, layers):
    """Binary32 patterns of a step: around one number, or few different ones, walks, spikes, and now and then what is no good number."""
    unit = 2.0**-form.fraction_bits
    base = float(rng.integers(0, 2 ** (form.activity_bits - 2))) * unit
    kind = rng.integers(5)
    numbers = {
        0: lambda: base + rng.integers(0, 3, layers) * unit,
        1: lambda: rng.choice([base, base + unit, base * 1.5], layers),
        2: lambda: np.abs(base + np.cumsum(rng.normal(0, max(base, unit) / 8, layers))),
        3: lambda: rng.lognormal(-1, 1.5, layers),
        4: lambda: np.full(layers, base),
    }[int(kind)]()
    if rng.integers(2):
        numbers[rng.integers(layers)] *= 2.0 ** rng.integers(0, 6)
    patterns = numbers.astype(np.float32).view(np.uint32).astype(np.int64)
    strange = rng.random(layers) < 0.05
    patterns[strange] = rng.choice(SPECIAL, strange.sum())
    return patterns.tolist()


def requests(rng, form, count, most_layers=12):
    """Events of ``count`` requests: (settings, kind, value), where kind is clear, step or activity."""
    events = []
    for _ in range(count):
        config = configurations(rng, form)
        settings = PolicySettings.of(config, form).packed(form)
        events.append((config, settings, "clear", 0))
        layers = int(rng.integers(1, most_layers + 1))
        for step in range(int(rng.integers(1, 5))):
            decode = int(step > 0 or rng.integers(4) == 0) and int(rng.integers(5) > 0)
            near = int(config.tau * 2**form.fraction_bits) + int(rng.integers(-1, 2))
            entropy = [near, int(rng.integers(0, 2**form.fraction_bits + 1))][rng.integers(2)]
            entropy = min(max(entropy, 0), 2**form.fraction_bits)
            events.append((config, settings, "step", decode << form.entropy_bits | entropy))
            events += [(config, settings, "activity", bits) for bits in activities(rng, form, layers)]
    return events


def expected(events, form):
    """What the outputs are after each event, by the model: valid, precision, level, spike, status."""
    policy, rows = None, []
    for config, _, kind, value in events:
        if kind == "clear":
            policy = FixedPolicy(config, form)
            rows.append((0, None, None, 0, 0))
            continue
        if kind == "step":
            phase = ("prefill", "decode")[value >> form.entropy_bits]
            entropy = (value & 2**form.entropy_bits - 1) / 2**form.fraction_bits
            policy.reset_step(phase, entropy if phase == "decode" else None)
            layer = 0
        else:
            policy.observe_bits(layer, value)
            layer += 1
        status = policy.invalid << 1 | policy.saturated
        rows.append((1, policy.precision, policy.config.levels.index(policy.precision), int(policy.spike), status))
    return rows


@functools.cache
def harness(form):
    ports = generate("policy", **vars(form)).sidecar["ports"]
    return bulk(PolicyUnit(form), ports)


def bulk(unit, ports):
    return BulkHarness({"policy.v": to_verilog(unit, "policy")}, {"top": "policy", "ports": ports})


def differing(block, events, form):
    """Run events through the Verilog; return the first few that differ, and how many decisions were compared."""
    latency = PolicyUnit(form).latency
    kinds = np.array([kind for _, _, kind, _ in events])
    takes = np.where(kinds == "activity", latency, 1)
    # Other settings come a cycle later than they could.
    held = takes + (np.append(kinds[1:], "") == "clear")
    starts = np.cumsum(held) - held
    rows = int(held.sum()) + 1
    numbers = np.array([value for _, _, _, value in events], np.int64)

    def pulse(kind):
        column = np.zeros(rows, np.int64)
        column[starts[kinds == kind]] = 1
        return column

    def payload(kind):
        # Noise between the words: what is not offered must not matter.
        column = np.random.default_rng(1).integers(0, 2 if kind == "step" else 2**32, rows)
        column[starts[kinds == kind]] = numbers[kinds == kind]
        return column

    width = sum(form.settings.values())
    size = -(-width // 8)
    words = {settings: settings.to_bytes(size, "little") for _, settings, _, _ in events}
    table = np.frombuffer(b"".join(words[settings] for _, settings, _, _ in events), np.uint8).reshape(-1, size)
    columns = {
        "rst": (np.arange(rows) == 0).astype(np.int64),
        "settings": np.concatenate([np.repeat(table, held, axis=0), table[-1:]]),
        "clear": pulse("clear"),
        "step__valid": pulse("step"),
        "step__payload": payload("step"),
        "activity__valid": pulse("activity"),
        "activity__payload": payload("activity"),
    }
    got = block.run(columns)
    names = ("valid", "precision", "level", "spike", "status")
    # Outputs of row n follow the inputs of row n - 1.
    after = np.stack([np.asarray(got[name], np.int64)[starts + takes] for name in names], 1)
    before = np.asarray(got["valid"])
    wrong = []
    for k, (row, wanted) in enumerate(zip(after.tolist(), expected(events, form), strict=True)):
        early = before[starts[k] + 1 : starts[k] + takes[k]].any()
        if early or any(w is not None and r != w for r, w in zip(row, wanted, strict=True)):
            wrong.append((k, events[k], row, wanted))
    return wrong[:3], int((kinds == "activity").sum())


@pytest.mark.parametrize(
    ("form", "count", "layers"),
    [
        (SMALL, 600, 12),
        (PolicyFormat(), 60, 34),
        (PolicyFormat(integer_bits=12, fraction_bits=14, count_bits=4, level_slots=5), 60, 16),
    ],
    ids=["small", "default", "wide"],
)
def test_hardware_decides_like_the_model_in_the_same_cycle(form, count, layers, seed):
    rng = np.random.default_rng(seed)
    events = requests(rng, form, count, layers)
    wrong, compared = differing(harness(form), events, form)
    assert wrong == []
    assert compared > 5 * count


def test_hardware_decides_like_the_model_on_a_recorded_trace():
    form, config = PolicyFormat(), PolicyConfig()
    settings = PolicySettings.of(config, form).packed(form)
    events = [(config, settings, "clear", 0)]
    for sample in read_trace(TRACE):
        if sample.layer == 0:
            decode = int(sample.phase == "decode")
            entropy = int((sample.entropy or 0) * 2**form.fraction_bits)
            events.append((config, settings, "step", decode << form.entropy_bits | entropy))
        events.append((config, settings, "activity", pattern(sample.activity)))
    wrong, compared = differing(harness(form), events, form)
    assert wrong == []
    assert compared == 30 * 321
    spikes = [row[3] for row in expected(events[:32], form)]
    assert spikes == [0] * 13 + [1] * 19


@pytest.mark.parametrize(
    "form",
    [SMALL, PolicyFormat(), PolicyFormat(1, 1, 2, 2), PolicyFormat(32, 24), PolicyFormat(3, 21), PolicyFormat(16, 3)],
)
def test_conversion_equals_the_model(form, seed):
    rng = np.random.default_rng(seed)
    edges = [
        pattern(2.0**e) + d
        for e in (-form.fraction_bits, 1 - form.fraction_bits, 0, form.integer_bits)
        for d in (-1, 0, 1)
    ]
    drawn = rng.integers(0, 2**32, 60).tolist()
    near = [
        (int(e) << 23) + int(f) for e, f in zip(rng.integers(90, 165, 300), rng.integers(0, 2**23, 300), strict=True)
    ]
    numbers = [*SPECIAL, *edges, *drawn, *near]
    results = evaluate(
        ActivityToFixed(form), [{"number": number} for number in numbers], ["fixed", "saturated", "invalid"]
    )
    for number, (fixed, saturated, invalid) in zip(numbers, results, strict=True):
        wanted = to_fixed(form, number)
        assert invalid == (wanted is None)
        if wanted is not None:
            assert fixed == wanted
            assert saturated == ((number & 0x7FFFFFFF) >= pattern(2.0**form.integer_bits))


def first_difference(unit, events, rng):
    """Run events in Amaranth's simulator with pauses, words that wait, and requests that end in mid-work; return the first one that differs, or None."""
    form = unit.form
    simulator = Simulator(unit)
    found = []

    async def settle(ctx, condition):
        for _ in range(3 * unit.latency):
            if ctx.get(condition):
                return
            await ctx.tick()
        raise TimeoutError

    async def bench(ctx):
        offered = False
        for k, (event, wanted) in enumerate(zip(events, expected(events, form), strict=True)):
            _, settings, kind, value = event
            if not offered and rng.integers(4) == 0:
                for _ in range(rng.integers(3)):
                    await ctx.tick()
            offered = False
            if kind == "clear":
                ctx.set(unit.settings.as_value(), settings)
                ctx.set(unit.clear, 1)
                await ctx.tick()
                ctx.set(unit.clear, 0)
            else:
                port = getattr(unit, kind)
                ctx.set(port.payload.as_value(), value)
                ctx.set(port.valid, 1)
                follows = events[k + 1] if k + 1 < len(events) else (None, None, "", 0)
                if kind == "activity" and follows[2] == "step" and rng.integers(2):
                    ctx.set(unit.step.payload.as_value(), follows[3])
                    ctx.set(unit.step.valid, 1)
                    offered = True
                await settle(ctx, port.ready)
                await ctx.tick()
                ctx.set(port.valid, 0)
                if follows[2] == "clear" and rng.integers(2):
                    for _ in range(rng.integers(unit.latency)):
                        await ctx.tick()
                    continue
                # An activity that comes too early waits.
                if follows[2] == "activity" and rng.integers(2):
                    ctx.set(unit.activity.payload.as_value(), follows[3])
                    ctx.set(unit.activity.valid, 1)
                    offered = True
                await settle(ctx, unit.valid)
            got = [ctx.get(x) for x in (unit.valid, unit.precision, unit.level, unit.spike, unit.status.as_value())]
            if any(w is not None and g != w for g, w in zip(got, wanted, strict=True)):
                found.append((k, event, got, wanted))
                return

    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()
    return found[0] if found else None


def test_words_wait_and_requests_end_in_mid_work(seed):
    rng = np.random.default_rng(seed)
    events = requests(rng, SMALL, 15, 8)
    assert first_difference(PolicyUnit(SMALL), events, rng) is None


BUGS = {
    "halving is forgotten": ("now.squares >> now.count[-1]", "now.squares"),
    "a step keeps the run": (
        """                run.eq(0),
                self.level""",
        """                self.level""",
    ),
    "layer 0 is a sample": ("~to_fixed.invalid & ~layer_zero", "~to_fixed.invalid"),
    "NaN is a sample": ("~to_fixed.invalid & ~layer_zero", "~layer_zero"),
    "prefill goes on with old statistics": ("~step.decode):", "0):"),
    "alpha and beta the wrong way round": ("above == high", "above != high"),
    "a tie is beyond": ("beyond.eq(acc[-1])", "beyond.eq(acc[-1] | ~acc.any())"),
    "a spike below the mean": ("self.spike.eq(beyond & above)", "self.spike.eq(beyond)"),
    "the run survives a change": ("run.eq(0)\n\n", "run.eq(following)\n\n"),
    "decided a sample late": ("now.count >= settings", "now.count > settings"),
    "no bound at the bottom": ("self.level - self.level.any()", "self.level - 1"),
    "the entropy's threshold is excluded": ("step.entropy >= settings.tau", "step.entropy > settings.tau"),
    "metric without entropy": ("gated(settings.entropy_weight, decode)", "zero"),
    "a request keeps statistics": ("[statistics.eq(0) for statistics in stored]", "[stored[0].eq(0)]"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_bugs_are_caught(bug):
    before, after = BUGS[bug]
    text = inspect.getsource(PolicyUnit)
    assert text.count(before) == 1
    scope = dict(vars(hdl.policy))
    exec(text.replace(before, after), scope)
    rng = np.random.default_rng(0)
    assert first_difference(scope["PolicyUnit"](SMALL), requests(rng, SMALL, 40, 8), rng) is not None
