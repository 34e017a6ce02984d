"""Precision policy: traces worked by hand, an independent reference in exact fractions, fixed point against both, limits of every parameter."""

import itertools
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.policy import FixedPolicy, Policy, PolicyConfig, PolicyFormat, PolicySettings, to_fixed
from model.policy_replay import read_trace, replay

TRACE = Path(__file__).parents[1] / "data/policy_smollm2.csv"
BOTH = [Policy, FixedPolicy]


def run(policy, phase, entropy, numbers):
    """Precisions of the layers of a step, and of the one that would follow."""
    return [policy.reset_step(phase, entropy), *(policy.observe(layer, x) for layer, x in enumerate(numbers))]


def warm(policy, entropy=0.5):
    """Four samples of decode with mean 0.5, σ 0.25 (in L_A), after which rules are active."""
    assert run(policy, "decode", entropy, [9, 0.25, 0.75, 0.25, 0.75])[-1] == policy.config.decode_level
    return policy


@pytest.mark.parametrize("kind", BOTH)
def test_prefill_runs_at_the_top_up_to_its_spike_and_goes_down_after_it(kind):
    # Samples 1 to 4 have mean 0.5 and σ 0.25: 1.25 is no spike, 1.26 and more is one.
    policy = kind()
    quiet = [9, 0.25, 0.75, 0.25, 0.75]
    assert run(policy, "prefill", None, [*quiet, 1.25, 0.1, 0.1, 0.1]) == [6] * 10
    assert not policy.spike
    after = run(policy, "prefill", None, [*quiet, 1.375, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1])
    #       layer 0  1  2  3  4  5  6  7  8  9 10 11
    assert after == [6, 6, 6, 6, 6, 6, 6, 6, 4, 4, 2, 2, 2]
    assert policy.spike


@pytest.mark.parametrize("kind", BOTH)
def test_prefill_without_a_spike_stays_at_the_top(kind):
    assert run(kind(), "prefill", None, [9] + [0.5, 0.25] * 30 + [0.01] * 30) == [6] * 92


@pytest.mark.parametrize("kind", BOTH)
def test_a_drop_is_no_spike(kind):
    policy = kind()
    run(policy, "prefill", None, [9, 100, 101, 100, 101, 1, 1, 1, 1])
    assert not policy.spike


@pytest.mark.parametrize("kind", BOTH)
def test_prefill_rises_again_and_each_prefill_looks_for_its_own_spike(kind):
    policy = kind()
    numbers = [9, 0.25, 0.75, 0.25, 0.75, 2, *[0.1] * 4, *[5.0] * 2, *[50.0] * 3]
    expected = [6] * 8 + [4, 4, 2, 2, 4, 4, 6, 6]
    assert run(policy, "prefill", None, numbers) == expected
    assert run(policy, "prefill", None, numbers) == expected


@pytest.mark.parametrize("kind", BOTH)
def test_nothing_is_decided_before_four_samples_and_layer_0_is_none(kind):
    # Layers 1 to 4 would make a run below the mean of the layers before; only layers 5 and 6 count.
    numbers = [9, 0.9, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05]
    assert run(kind(), "decode", 0.0, numbers) == [4, 4, 4, 4, 4, 4, 4, 2, 2]
    policy = warm(kind(), 0.0)
    # A layer 0 far above the mean neither counts nor moves it.
    assert run(policy, "decode", 0.0, [1000.0, 0.4, 0.4]) == [4, 4, 4, 2]


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    ("entropy", "numbers", "expected"),
    [
        # High entropy: up after β = 2, down after α = 4; saturates at both ends.
        (0.5, [9, *[2.0, 3.0, 4.0, 5.0, 6.0]], [4, 4, 4, 6, 6, 6, 6]),
        (0.5, [9, *[0.2] * 9], [4, 4, 4, 4, 4, 2, 2, 2, 2, 2, 2]),
        # Low entropy: up after α = 4, down after β = 2.
        (0.05, [9, *[2.0, 3.0, 4.0, 5.0, 6.0]], [4, 4, 4, 4, 4, 6, 6]),
        (0.05, [9, *[0.2] * 5], [4, 4, 4, 2, 2, 2, 2]),
        # The threshold belongs to high entropy.
        (0.1, [9, 2.0, 3.0, 4.0], [4, 4, 4, 6, 6]),
        (0.0999, [9, 2.0, 3.0, 4.0], [4, 4, 4, 4, 4]),
        # Another side starts the count again.
        (0.5, [9, 2.0, 0.1, 3.0, 4.0], [4, 4, 4, 4, 4, 6]),
    ],
)
def test_decode_by_hand(kind, entropy, numbers, expected):
    # Samples of equal steps: with the same entropy throughout, G_E does not move a sample from its side.
    assert run(warm(kind(), entropy), "decode", entropy, numbers) == expected


@pytest.mark.parametrize("kind", BOTH)
def test_a_sample_equal_to_the_mean_is_on_neither_side(kind):
    policy = warm(kind())
    # 0.5 is the mean; it breaks the run, and keeps the mean where it is.
    assert run(policy, "decode", 0.5, [9, 0.5, 0.75, 0.25, 0.5, 0.5]) == [4] * 7


@pytest.mark.parametrize("kind", BOTH)
def test_a_band_makes_small_deviations_count_for_nothing(kind):
    # σ is 0.25 · 0.7; within ±1 σ of the mean nothing happens, with the edge.
    policy = warm(kind(PolicyConfig(band=1.0)))
    assert run(policy, "decode", 0.5, [9, 0.75, 0.72, 0.28]) == [4] * 5
    policy = warm(kind(PolicyConfig(band=1.0)))
    assert run(policy, "decode", 0.5, [9, 0.9, 1.4]) == [4, 4, 4, 6]
    policy = warm(kind(PolicyConfig(band=2.0)))
    assert run(policy, "decode", 0.5, [9, 0.9, 1.4]) == [4] * 4


@pytest.mark.parametrize("kind", BOTH)
def test_entropy_of_another_step_moves_the_metric(kind):
    # 0.7·0.5 + 0.3·1.0 is above the mean of steps with entropy 0.5, the same activity at 0.5 equals it.
    assert run(warm(kind()), "decode", 1.0, [9, 0.5, 0.5]) == [4, 4, 4, 6]
    assert run(warm(kind()), "decode", 0.5, [9, 0.5, 0.5]) == [4, 4, 4, 4]


@pytest.mark.parametrize("kind", BOTH)
def test_counters_start_again_with_a_step_and_with_a_change(kind):
    policy = warm(kind(PolicyConfig(levels=(2, 4, 6, 8))))
    assert run(policy, "decode", 0.5, [9, 2.0]) == [4, 4, 4]
    assert run(policy, "decode", 0.5, [9, 3.0, 4.0, 5.0, 6.0, 7.0]) == [4, 4, 4, 6, 6, 8, 8]


@pytest.mark.parametrize("kind", BOTH)
def test_four_levels_begin_prefill_at_the_highest(kind):
    config = PolicyConfig(levels=(2, 4, 6, 8))
    numbers = [9, 0.25, 0.75, 0.25, 0.75, 2, *[0.1] * 8]
    assert run(kind(config), "prefill", None, numbers) == [8] * 8 + [6, 6, 4, 4, 2, 2, 2]
    held = PolicyConfig(levels=(2, 4, 6, 8), prefill_level=6)
    assert run(kind(held), "prefill", None, numbers)[:9] == [6] * 8 + [4]


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_models_of_fewer_layers_than_counters(kind, layers):
    policy = kind()
    assert set(run(policy, "prefill", None, [1.0] * layers)) == {6}
    for step in range(50):
        # Runs never span two steps: a model of three layers has two samples in each.
        seen = set(run(policy, "decode", 0.5, [9, 1 + step, 2 + step][:layers])[:layers])
        assert seen == {4}


@pytest.mark.parametrize("kind", BOTH)
def test_one_level_never_changes(kind):
    policy = kind(PolicyConfig(levels=(4,)))
    assert set(run(policy, "prefill", None, [9, 1, 2, 1, 2, 50, 1, 1, 1])) == {4}
    assert set(run(policy, "decode", 0.5, [9, 1, 2, 1, 2, 50, 60, 1, 1, 1, 1])) == {4}


def test_statistics_of_prefill_and_decode_are_apart_and_those_of_decode_go_on():
    policy = warm(Policy())
    run(policy, "prefill", None, [9, 100, 100, 100, 100])
    policy.reset_step("decode", 0.5)
    policy.observe(0, 9)
    policy.observe(1, 0.5)
    assert (policy.metric, policy.mean, policy.sigma) == pytest.approx((0.5, 0.5, 0.175))


def test_a_spike_layer_still_runs_at_the_top_as_do_two_layers_after_it():
    rows = replay(read_trace(TRACE), Policy())
    prefill = [row for row in rows if row.sample.phase == "prefill"]
    spikes = [
        r.sample.layer for r in prefill if r.mean is not None and r.sample.layer > 4 and r.metric > r.mean + 3 * r.sigma
    ]
    assert spikes[0] == 11
    assert [row.precision for row in prefill] == [6] * 14 + [4] * 2 + [2] * 14


# An independent reference: all samples kept, exact fractions, table 1 written out again.


def _beyond(x, samples, side, factor):
    """Whether ``side·(x − μ) > factor·σ``, squared to stay exact."""
    mu = sum(samples, Fraction(0)) / len(samples)
    variance = sum(((s - mu) ** 2 for s in samples), Fraction(0)) / len(samples)
    distance = side * (x - mu)
    return distance > 0 and distance**2 > Fraction(factor) ** 2 * variance


def reference(config, steps, lam):
    """Precisions before each layer and after the last of each step; ``steps`` are (phase, entropy, activities) in exact numbers."""
    decoded, out = [], []
    for phase, entropy, numbers in steps:
        samples = decoded if phase == "decode" else []
        bits = config.decode_level if phase == "decode" else (config.prefill_level or max(config.levels))
        high = phase == "decode" and entropy >= Fraction(config.tau)
        up, down = {
            ("prefill", False): (config.n_p, config.n_p),
            ("decode", True): (config.beta, config.alpha),
            ("decode", False): (config.alpha, config.beta),
        }[phase, high]
        active = phase == "decode"
        history = []
        trail = [bits]
        for layer, activity in enumerate(numbers):
            if layer == 0:
                trail.append(bits)
                continue
            x = Fraction(activity) if phase == "prefill" else lam * Fraction(activity) + (1 - lam) * entropy
            if len(samples) >= config.first_samples:
                if not active:
                    active = _beyond(x, samples, 1, config.sigma_factor)
                else:
                    side = _beyond(x, samples, 1, config.band) - _beyond(x, samples, -1, config.band)
                    history.append(side)
                    allowed = [b for b in config.levels if (b > bits if side > 0 else b < bits)]
                    for needed, towards, nearest in ((up, 1, min), (down, -1, max)):
                        if side == towards and history[-needed:] == [side] * needed and allowed:
                            bits = nearest(allowed)
                            history.clear()
                            break
            samples.append(x)
            trail.append(bits)
        out.append(trail)
    return out


@st.composite
def parameters(draw):
    levels = draw(st.sampled_from([(2, 4, 6), (2, 4, 6, 8), (4,), (3, 4, 16)]))
    return PolicyConfig(
        levels=levels,
        prefill_level=draw(st.sampled_from([None, *levels])),
        n_p=draw(st.integers(1, 4)),
        alpha=draw(st.integers(1, 5)),
        beta=draw(st.integers(1, 3)),
        tau=draw(st.sampled_from([0.125, 0.5, 0.0, 1.0])),
        activity_weight=draw(st.sampled_from([0.75, 0.5, 1.0, 0.0])),
        sigma_factor=draw(st.sampled_from([3.0, 1.5, 0.0])),
        band=draw(st.sampled_from([0.0, 0.5, 1.0])),
        first_samples=draw(st.integers(1, 5)),
    )


def whole(low, high):
    """Multiples of 1/16, which every format holds."""
    return st.integers(low, high).map(lambda k: Fraction(k, 16))


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("prefill"), st.none(), st.lists(whole(1, 60), min_size=1, max_size=14)),
        st.tuples(st.just("decode"), whole(0, 16), st.lists(whole(1, 60), min_size=1, max_size=10)),
    ),
    min_size=1,
    max_size=6,
)


def played(policy, steps):
    return [
        run(policy, phase, None if entropy is None else float(entropy), map(float, numbers))
        for phase, entropy, numbers in steps
    ]


@settings(max_examples=150, deadline=None)
@given(parameters(), STEPS)
def test_fixed_point_equals_exact_fractions_as_long_as_no_sum_is_halved(config, steps):
    assert played(FixedPolicy(config), steps) == reference(config, steps, Fraction(config.activity_weight))


def test_float_equals_exact_fractions_on_random_traces(seed):
    rng = np.random.default_rng(seed)
    compared, seen = 0, set()
    for band in (0.0, 0.5):
        for _ in range(8):
            steps = [("prefill", None, rng.lognormal(-1, 0.6, 24).tolist())]
            steps[0][2][9] *= 20
            steps += [("decode", Fraction(float(rng.uniform())), rng.lognormal(-1, 0.6, 12).tolist()) for _ in range(4)]
            config = PolicyConfig(band=band, levels=(2, 4, 6, 8))
            trails = played(Policy(config), steps)
            assert trails == reference(config, steps, Fraction(0.7))
            compared += sum(map(len, trails))
            seen |= {bits for trail in trails for bits in trail}
    assert compared > 1000
    assert seen == {2, 4, 6, 8}


@settings(max_examples=60, deadline=None)
@given(parameters(), STEPS)
def test_precision_is_a_level_and_moves_by_one_at_most(config, steps):
    for trail in played(Policy(config), steps):
        places = [config.levels.index(bits) for bits in trail]
        assert all(abs(a - b) <= 1 for a, b in itertools.pairwise(places))


@pytest.mark.parametrize("band", [0.0, 0.5, 1.0])
def test_fixed_point_takes_every_decision_of_the_recorded_trace(band):
    samples = read_trace(TRACE)
    config = PolicyConfig(band=band)
    float_rows, fixed_rows = replay(samples, Policy(config)), replay(samples, FixedPolicy(config))
    assert [r.precision for r in float_rows] == [r.precision for r in fixed_rows]
    assert len(samples) == 9630
    metric = [(a.metric, b.metric) for a, b in zip(float_rows, fixed_rows, strict=True) if a.metric is not None]
    assert max(abs(a - b) for a, b in metric) < 2.0**-16


def test_fixed_point_parts_from_float_only_where_a_sum_is_halved(seed):
    rng = np.random.default_rng(seed)
    wrong = {}
    for count_bits in (20, 8):
        policies = Policy(), FixedPolicy(form=PolicyFormat(count_bits=count_bits))
        wrong[count_bits] = 0
        for _ in range(150):
            entropy, numbers = float(rng.uniform()), rng.lognormal(-1, 0.5, 30).tolist()
            one, other = (run(policy, "decode", entropy, numbers) for policy in policies)
            wrong[count_bits] += sum(a != b for a, b in zip(one, other, strict=True))
    assert wrong[20] <= 5
    assert 20 < wrong[8] < 150 * 31 * 0.3


def test_halving_keeps_what_it_can():
    policy = FixedPolicy(
        form=PolicyFormat(integer_bits=4, fraction_bits=4, count_bits=2), config=PolicyConfig(first_samples=3)
    )
    policy.reset_step("prefill")
    policy.observe(0, 0)
    for layer, (x, mean) in enumerate([(1, None), (2, 1), (3, 1.5), (6, 2), (1, 3), (1, 7 / 3), (9, 2)], 1):
        policy.observe(layer, x)
        assert math.isnan(policy.mean) if mean is None else policy.mean == pytest.approx(mean)


@pytest.mark.parametrize(
    ("number", "fixed"),
    [
        (0.0, 0),
        (-0.0, 0),
        (2.0**-16, 1),
        (np.nextafter(np.float32(2.0**-16), np.float32(0)), 0),
        (1e-45, 0),
        (1.99999, 131071),
        (255.99997, 0xFFFFFE),
        (256.0, 0xFFFFFF),
        (3e38, 0xFFFFFF),
        (np.inf, 0xFFFFFF),
        (np.nan, None),
        (-1e-45, None),
        (-np.inf, None),
    ],
)
def test_conversion_by_hand(number, fixed):
    assert to_fixed(PolicyFormat(fraction_bits=16), int(np.float32(number).view(np.uint32))) == fixed


@settings(max_examples=200, deadline=None)
@given(
    st.floats(0, 2.0**127, width=32),
    st.integers(1, 32),
    st.integers(1, 24),
)
def test_conversion_cuts_off_and_saturates(number, integer_bits, fraction_bits):
    form = PolicyFormat(integer_bits, fraction_bits)
    wanted = min(math.floor(Fraction(number) * 2**fraction_bits), 2 ** (integer_bits + fraction_bits) - 1)
    assert to_fixed(form, int(np.float32(number).view(np.uint32))) == wanted


def test_strange_numbers_leave_a_request_as_it_was_but_for_its_status():
    policy, other = FixedPolicy(), FixedPolicy()
    one, nan, minus, infinity = 0x3F800000, 0x7FC00000, 0xBF800000, 0x7F800000
    policy.reset_step("prefill")
    other.reset_step("prefill")
    for layer, bits in enumerate([nan, one, one, nan, minus, one, one]):
        policy.observe_bits(layer, bits)
    for layer, bits in enumerate([one, one, one, one, one]):
        other.observe_bits(layer, bits)
    assert (policy.mean, policy.sigma) == (other.mean, other.sigma) == (1, 0)
    assert (policy.invalid, policy.saturated, policy.spike) == (True, False, False)
    policy.observe_bits(7, infinity)
    assert (policy.saturated, policy.spike, policy.metric) == (True, True, pytest.approx(256, abs=1e-4))


def test_huge_and_tiny_activities_and_thousands_of_steps():
    policy, fixed = Policy(), FixedPolicy()
    largest = float(np.finfo(np.float32).max)
    for step in range(3000):
        numbers = [largest, 1e-45, largest, 0.0][step % 4 :]
        for each in (policy, fixed):
            assert set(run(each, "decode", step % 2, numbers)) <= {2, 4, 6}
    run(policy, "decode", 0, [1, 1])
    assert 1e37 < policy.sigma < 1e39
    assert fixed.saturated


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"levels": ()}, ValueError, "levels must be positive and ascending, not none"),
        ({"levels": (4, 2)}, ValueError, "levels must be positive and ascending, not 4, 2"),
        ({"levels": (2, 2)}, ValueError, "levels must be positive and ascending, not 2, 2"),
        ({"levels": (0, 4)}, ValueError, "levels must be positive and ascending, not 0, 4"),
        ({"levels": 4}, TypeError, "levels must be a tuple of integers, not 4"),
        ({"levels": (2, 4.0)}, TypeError, "levels must be an integer, not 4.0"),
        ({"levels": (2, 6)}, ValueError, "decode_level must be one of the levels 2, 6, not 4"),
        ({"decode_level": 8}, ValueError, "decode_level must be one of the levels 2, 4, 6, not 8"),
        ({"prefill_level": 3}, ValueError, "prefill_level must be one of the levels 2, 4, 6, not 3"),
        ({"decode_level": None}, TypeError, "decode_level must be an integer, not None"),
        ({"n_p": 0}, ValueError, "n_p must be at least 1, not 0"),
        ({"alpha": -1}, ValueError, "alpha must be at least 1, not -1"),
        ({"beta": 1.5}, TypeError, "beta must be an integer, not 1.5"),
        ({"first_samples": True}, TypeError, "first_samples must be an integer, not True"),
        ({"tau": 1.1}, ValueError, "tau must be from 0 to 1, not 1.1"),
        ({"tau": math.nan}, ValueError, "tau must be from 0 to 1, not nan"),
        ({"activity_weight": -0.1}, ValueError, "activity_weight must be from 0 to 1, not -0.1"),
        ({"sigma_factor": -1}, ValueError, "sigma_factor must be from 0 to 1000000, not -1"),
        ({"band": math.inf}, ValueError, "band must be from 0 to 1000000, not inf"),
        ({"band": "1"}, TypeError, "band must be a number, not '1'"),
    ],
)
def test_parameters_out_of_range(given, error, message):
    with pytest.raises(error) as caught:
        PolicyConfig(**given)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("given", "form", "message"),
    [
        ({"levels": (1, 2, 3, 4, 5)}, {}, "levels must be at most 4 for the unit, not 5"),
        ({"levels": (4, 32)}, {}, "levels must be at most 31 bits for the unit, not 32"),
        ({"n_p": 16}, {}, "n_p must be at most 15 for the unit, not 16"),
        ({}, {"count_bits": 2}, "first_samples must be at most 3, what halving leaves the unit, not 4"),
        (
            {"activity_weight": 0.701},
            {},
            "activity_weight must be a fraction with a denominator of at most 31 for the unit, not 0.701",
        ),
        ({"band": 0.3}, {}, "band must be a multiple of 1/8 up to 7.875 for the unit, not 0.3"),
        ({"sigma_factor": 8.0}, {}, "sigma_factor must be a multiple of 1/8 up to 7.875 for the unit, not 8.0"),
    ],
)
def test_what_the_unit_cannot_hold(given, form, message):
    with pytest.raises(ValueError, match=r" for the unit, not | leaves the unit, not ") as caught:
        FixedPolicy(PolicyConfig(**given), PolicyFormat(**form))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"integer_bits": 0}, "integer_bits must be from 1 to 32, not 0"),
        ({"fraction_bits": 25}, "fraction_bits must be from 1 to 24, not 25"),
        ({"count_bits": 1}, "count_bits must be from 2 to 24, not 1"),
        ({"level_slots": 17}, "level_slots must be from 2 to 16, not 17"),
    ],
)
def test_formats_out_of_range(given, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        PolicyFormat(**given)


@pytest.mark.parametrize("kind", BOTH)
def test_misuse_is_refused(kind):
    policy = kind()
    with pytest.raises(ValueError, match=r"^reset_step must come before observe$"):
        policy.observe(0, 1.0)
    for phase, entropy, message in (
        ("decode", 1.5, "entropy must be from 0 to 1, not 1.5"),
        ("decode", math.nan, "entropy must be from 0 to 1, not nan"),
        ("prefill", 0.5, "entropy must be None in prefill, not 0.5"),
        ("train", None, "phase must be one of prefill, decode, not 'train'"),
    ):
        with pytest.raises(ValueError, match=f"^{message}$"):
            policy.reset_step(phase, entropy)
    with pytest.raises(TypeError, match=r"^entropy must be a number, not None$"):
        policy.reset_step("decode")
    policy.reset_step("decode", 0.5)
    for activity in (math.nan, math.inf, -1e-9, 1e39):
        with pytest.raises(
            ValueError, match=f"^activity must be finite and at least 0, not {activity}".replace("+", r"\+")
        ):
            policy.observe(0, activity)
    policy.observe(1, 1.0)
    with pytest.raises(ValueError, match=r"^layer must be above 1, the last of this step, not 1$"):
        policy.observe(1, 1.0)
    with pytest.raises(TypeError, match=r"^layer must be an integer, not 2.0$"):
        policy.observe(2.0, 1.0)


def test_settings_as_one_word():
    form = PolicyFormat()
    given = PolicySettings.of(PolicyConfig(), form)
    word = given.packed(form)
    assert word & 0x1F == 2
    assert word >> 5 & 0x1F == 4
    assert word >> 64 == given.tau
    assert sum(form.settings.values()) == 85
    assert word.bit_length() <= 85
