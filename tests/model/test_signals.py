"""Signals of the policy against plain float64 formulas, and their limits."""

import math

import numpy as np
import pytest

from model.signals import generation_entropy, layer_activity


def test_frobenius_and_mean_of_tokens_by_hand():
    before = np.array([[3.0, 4.0], [0.0, 10.0]])
    after = np.array([[3.0, 9.0], [0.0, 10.0]])
    assert layer_activity(before, after) == pytest.approx(5 / math.sqrt(125))
    assert layer_activity(before, after, "token_mean") == pytest.approx((5 / 5 + 0) / 2)


def test_one_token_has_one_activity(seed):
    rng = np.random.default_rng(seed)
    before, after = rng.standard_normal((2, 1, 64)).astype(np.float32)
    one, other = layer_activity(before, after), layer_activity(before, after, "token_mean")
    assert one == pytest.approx(other, rel=1e-12)
    wanted = np.linalg.norm(after.astype(float) - before) / np.linalg.norm(before.astype(float))
    assert one == pytest.approx(wanted, rel=1e-6)


def test_a_state_of_zeros_is_kept_from_infinity_by_epsilon():
    assert layer_activity([0.0, 0.0], [3.0, 4.0]) == pytest.approx(5e6)
    assert layer_activity([0.0, 0.0], [3.0, 4.0], epsilon=0.5) == 10
    assert layer_activity([0.0, 0.0], [0.0, 0.0]) == 0


def test_float32_states_that_float32_could_not_square():
    big = np.full(4, 1e30, np.float32)
    assert layer_activity(big, 2 * big) == pytest.approx(1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0], [1.0], "mean"), "form must be one of frobenius, token_mean, not 'mean'"),
        (([1.0], [1.0], "frobenius", 0.0), "epsilon must be positive and finite, not 0.0"),
        (([1.0], [1.0, 2.0]), "before and after must have one shape that is not empty, not (1,) and (2,)"),
        (([], []), "before and after must have one shape that is not empty, not (0,) and (0,)"),
        ((1.0, 1.0), "before and after must have one shape that is not empty, not () and ()"),
        (([1.0], [math.nan]), "after must be finite, not nan"),
        (([math.inf], [1.0]), "before must be finite, not inf"),
    ],
)
def test_activities_that_have_no_meaning(arguments, message):
    with pytest.raises(ValueError, match=r"must") as caught:
        layer_activity(*arguments)
    assert str(caught.value) == message


def test_entropy_is_that_of_the_softmax_over_the_largest(seed):
    logits = np.random.default_rng(seed).normal(0, 4, (50, 300))
    wanted = []
    for row in logits:
        top = np.sort(row)[-10:]
        p = np.exp(top - top.max()) / np.exp(top - top.max()).sum()
        wanted.append(-(p * np.log(p)).sum() / np.log(10))
    found = generation_entropy(logits)
    assert found.shape == (50,)
    np.testing.assert_allclose(found, wanted, rtol=1e-10)
    assert found.min() < 0.5 < found.max()


@pytest.mark.parametrize(
    ("logits", "top", "wanted"),
    [
        ([0.0, 0.0], 2, 1.0),
        ([0.0, -np.inf], 2, 0.0),
        ([1000.0, 0.0, 0.0], 3, 0.0),
        ([-1e308, -1e308], 2, 1.0),
        ([0.0, 0.0, -np.inf, -np.inf], 4, 0.5),
        ([math.log(3), 0.0, -50.0], 2, (2 * math.log(2) - 0.75 * math.log(3)) / math.log(2)),
    ],
)
def test_entropy_by_hand(logits, top, wanted):
    assert float(generation_entropy(logits, top)) == pytest.approx(wanted, abs=1e-12)


def test_entropy_does_not_depend_on_a_shift_and_stays_within_0_and_1(seed):
    logits = np.random.default_rng(seed).normal(0, 1e-9, (1000, 10))
    for shift in (0, 1e3, -1e3):
        found = generation_entropy(logits + shift)
        assert found.max() <= 1
        np.testing.assert_allclose(found, 1)


@pytest.mark.parametrize(
    ("logits", "top", "message"),
    [
        ([0.0] * 9, 10, "top must be from 2 to the vocabulary of 9, not 10"),
        ([0.0] * 9, 1, "top must be from 2 to the vocabulary of 9, not 1"),
        (0.0, 2, "top must be from 2 to the vocabulary of 0, not 2"),
        ([0.0, math.nan], 2, "logits must be below infinity, not nan"),
        ([0.0, math.inf], 2, "logits must be below infinity, not inf"),
        ([-math.inf] * 3, 2, "logits must hold a finite number for each token, not only -inf"),
    ],
)
def test_entropies_that_have_no_meaning(logits, top, message):
    with pytest.raises(ValueError, match=r"must") as caught:
        generation_entropy(logits, top)
    assert str(caught.value) == message
