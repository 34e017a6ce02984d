"""Precision policy at run time: which precision the next layer runs at (paper, section 3.1 and table 1; docs/policy.md)."""

import math
import sys
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, Protocol

import numpy as np

from model.signals import generation_entropy, layer_activity
from model.vmac import check_integer

__all__ = [
    "EIGHTHS",
    "FACTOR_BITS",
    "LARGEST",
    "LEVEL_BITS",
    "PHASES",
    "RUN_BITS",
    "WEIGHT_BITS",
    "FixedPolicy",
    "Phase",
    "Policy",
    "PolicyConfig",
    "PolicyFormat",
    "PolicySettings",
    "generation_entropy",
    "layer_activity",
    "to_fixed",
]

Phase = Literal["prefill", "decode"]

PHASES = ("prefill", "decode")
LARGEST = float(np.finfo(np.float32).max)
_FRACTION, _EXPONENT_MAX, _BIAS = 23, 255, 127

EIGHTHS = 8
"""Multiples of σ are whole eighths in hardware."""

LEVEL_BITS, RUN_BITS, WEIGHT_BITS, FACTOR_BITS = 5, 4, 5, 6
"""Bits of a precision, of what is counted in layers, of a weight and of a multiple of σ in the settings."""


def _check_number(name: str, value: object, low: float, high: float, rule: str) -> None:
    if not isinstance(value, int | float | np.integer | np.floating) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, not {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{name} must be {rule}, not {value}")


@dataclass(frozen=True)
class PolicyConfig:
    """Parameters of the policy; the defaults are the paper's.

    Attributes
    ----------
    levels : tuple of int
        Precisions in bits, positive and ascending.
    prefill_level : int or None
        Precision of a prefill up to its spike, a level; None is the highest.
    decode_level : int
        Precision that each decode step begins with, a level.
    n_p : int
        Layers in a row on one side of the mean that change the precision in prefill.
    alpha, beta : int
        The same in decode: the precision rises after ``beta`` and falls after ``alpha`` layers in a step of high entropy, and the other way
        round in one of low entropy.
    tau : float
        Entropy, 0 to 1, from which on a step counts as one of high entropy.
    activity_weight : float
        λ_D, 0 to 1: ``M_D = λ_D·L_A + (1 − λ_D)·G_E``. In prefill ``M_P = L_A``.
    sigma_factor : float
        The spike is more than so many standard deviations above the mean.
    band : float
        So many standard deviations around the mean count as neither side.
    first_samples : int
        Earlier samples without which nothing is decided.

    Raises
    ------
    TypeError, ValueError
        A parameter is of the wrong kind or outside its range.

    Examples
    --------
    >>> PolicyConfig(levels=(2, 4, 6, 8)).first("prefill")
    8
    """

    levels: tuple[int, ...] = (2, 4, 6)
    prefill_level: int | None = None
    decode_level: int = 4
    n_p: int = 2
    alpha: int = 4
    beta: int = 2
    tau: float = 0.10
    activity_weight: float = 0.7
    sigma_factor: float = 3.0
    band: float = 0.0
    first_samples: int = 4

    def __post_init__(self) -> None:
        if not isinstance(self.levels, tuple | list):
            raise TypeError(f"levels must be a tuple of integers, not {self.levels!r}")
        object.__setattr__(self, "levels", tuple(self.levels))
        for level in self.levels:
            check_integer("levels", level)
        listed = ", ".join(map(str, self.levels)) or "none"
        if (
            not self.levels
            or self.levels[0] < 1
            or any(a >= b for a, b in zip(self.levels, self.levels[1:], strict=False))
        ):
            raise ValueError(f"levels must be positive and ascending, not {listed}")
        for name in ("n_p", "alpha", "beta", "first_samples"):
            value = getattr(self, name)
            check_integer(name, value)
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        for name in ("prefill_level", "decode_level"):
            value = getattr(self, name)
            if value is None and name == "prefill_level":
                continue
            check_integer(name, value)
            if value not in self.levels:
                raise ValueError(f"{name} must be one of the levels {listed}, not {value}")
        for name in ("tau", "activity_weight"):
            _check_number(name, getattr(self, name), 0, 1, "from 0 to 1")
        for name in ("sigma_factor", "band"):
            _check_number(name, getattr(self, name), 0, 1e6, "from 0 to 1000000")

    def first(self, phase: Phase) -> int:
        """Return the precision of a step's first layer."""
        if phase == "decode":
            return self.decode_level
        return self.levels[-1] if self.prefill_level is None else self.prefill_level


@dataclass(frozen=True)
class PolicyFormat:
    """Widths of the policy unit, for model and hardware alike.

    Attributes
    ----------
    integer_bits : int
        Bits of L_A above the point; what is larger saturates. 1 to 32.
    fraction_bits : int
        Bits of L_A and G_E below the point; what is smaller is cut off. 1 to 24.
    count_bits : int
        Samples that statistics hold, as a power of two: when there are ``2**count_bits``, count and sums are halved. 2 to 24.
    level_slots : int
        Entries of the table of levels, 2 to 16.

    Raises
    ------
    TypeError, ValueError
        A parameter is of the wrong kind or outside its range.
    """

    integer_bits: int = 8
    fraction_bits: int = 20
    count_bits: int = 20
    level_slots: int = 4

    def __post_init__(self) -> None:
        for name, low, high in (
            ("integer_bits", 1, 32),
            ("fraction_bits", 1, 24),
            ("count_bits", 2, 24),
            ("level_slots", 2, 16),
        ):
            value = getattr(self, name)
            check_integer(name, value)
            if not low <= value <= high:
                raise ValueError(f"{name} must be from {low} to {high}, not {value}")

    @property
    def activity_bits(self) -> int:
        """Bits of L_A."""
        return self.integer_bits + self.fraction_bits

    @property
    def entropy_bits(self) -> int:
        """Bits of G_E, which may be 1."""
        return self.fraction_bits + 1

    @property
    def metric_bits(self) -> int:
        """Bits of the weighted sum of both, whatever the weights are."""
        most = 2**self.activity_bits + 2**self.entropy_bits - 2
        return ((2**WEIGHT_BITS - 1) * most).bit_length()

    @property
    def index_bits(self) -> int:
        """Bits of a place in the table of levels."""
        return (self.level_slots - 1).bit_length()

    @property
    def settings(self) -> dict[str, int]:
        """Widths of the fields of the unit's settings, from bit 0 up; ``levels`` has ``level_slots`` entries."""
        return {
            "levels": LEVEL_BITS * self.level_slots,
            "top": self.index_bits,
            "prefill_first": self.index_bits,
            "decode_first": self.index_bits,
            "n_p": RUN_BITS,
            "alpha": RUN_BITS,
            "beta": RUN_BITS,
            "first_samples": RUN_BITS,
            "activity_weight": WEIGHT_BITS,
            "entropy_weight": WEIGHT_BITS,
            "sigma_factor": FACTOR_BITS,
            "band": FACTOR_BITS,
            "tau": self.entropy_bits,
        }


@dataclass(frozen=True)
class PolicySettings:
    """A `PolicyConfig` as the integers that the unit takes; of `PolicyFormat.settings` each field.

    Attributes
    ----------
    levels : tuple of int
        All entries of the table; those that are not used repeat the highest.
    top, prefill_first, decode_first : int
        Places in the table.
    n_p, alpha, beta, first_samples : int
    activity_weight, entropy_weight : int
        Their ratio is λ_D to 1 − λ_D.
    sigma_factor, band : int
        In eighths.
    tau : int
        In units of ``2**-fraction_bits``, cut off as G_E is.
    """

    levels: tuple[int, ...]
    top: int
    prefill_first: int
    decode_first: int
    n_p: int
    alpha: int
    beta: int
    first_samples: int
    activity_weight: int
    entropy_weight: int
    sigma_factor: int
    band: int
    tau: int

    @classmethod
    def of(cls, config: PolicyConfig, form: PolicyFormat) -> "PolicySettings":
        """Return the integers of ``config``.

        Raises
        ------
        ValueError
            The unit cannot hold a parameter exactly; ``tau`` alone is cut off.

        Examples
        --------
        >>> settings = PolicySettings.of(PolicyConfig(), PolicyFormat())
        >>> settings.levels, settings.activity_weight, settings.entropy_weight, settings.sigma_factor, settings.tau
        ((2, 4, 6, 6), 7, 3, 24, 104857)
        """
        levels = config.levels
        if len(levels) > form.level_slots:
            raise ValueError(f"levels must be at most {form.level_slots} for the unit, not {len(levels)}")
        if levels[-1] >= 2**LEVEL_BITS:
            raise ValueError(f"levels must be at most {2**LEVEL_BITS - 1} bits for the unit, not {levels[-1]}")
        most = 2**RUN_BITS - 1
        for name in ("n_p", "alpha", "beta", "first_samples"):
            if getattr(config, name) > most:
                raise ValueError(f"{name} must be at most {most} for the unit, not {getattr(config, name)}")
        kept = 2 ** (form.count_bits - 1) + 1
        if config.first_samples > kept:
            raise ValueError(
                f"first_samples must be at most {kept}, what halving leaves the unit, not {config.first_samples}"
            )
        ratio = Fraction(config.activity_weight).limit_denominator(2**WEIGHT_BITS - 1)
        if abs(float(ratio) - config.activity_weight) > 1e-9:
            raise ValueError(
                f"activity_weight must be a fraction with a denominator of at most {2**WEIGHT_BITS - 1} for the unit, "
                f"not {config.activity_weight}"
            )
        eighths = {}
        for name in ("sigma_factor", "band"):
            value = getattr(config, name) * EIGHTHS
            if value != int(value) or value >= 2**FACTOR_BITS:
                high = (2**FACTOR_BITS - 1) / EIGHTHS
                raise ValueError(
                    f"{name} must be a multiple of 1/{EIGHTHS} up to {high} for the unit, not {getattr(config, name)}"
                )
            eighths[name] = int(value)
        return cls(
            levels=levels + (levels[-1],) * (form.level_slots - len(levels)),
            top=len(levels) - 1,
            prefill_first=levels.index(config.first("prefill")),
            decode_first=levels.index(config.decode_level),
            n_p=config.n_p,
            alpha=config.alpha,
            beta=config.beta,
            first_samples=config.first_samples,
            activity_weight=ratio.numerator,
            entropy_weight=ratio.denominator - ratio.numerator,
            tau=math.floor(config.tau * 2**form.fraction_bits),
            **eighths,
        )

    def packed(self, form: PolicyFormat) -> int:
        """Return the fields as one integer, as the unit's port takes them."""
        word, place = 0, 0
        for name, width in form.settings.items():
            value = getattr(self, name)
            if name == "levels":
                value = sum(level << LEVEL_BITS * k for k, level in enumerate(value))
            word |= value << place
            place += width
        return word


def to_fixed(form: PolicyFormat, bits: int) -> int | None:
    """Turn L_A into the unit's fixed point: ``floor(L_A · 2**fraction_bits)``, saturated.

    Parameters
    ----------
    form : PolicyFormat
    bits : int
        Pattern of a binary32 number.

    Returns
    -------
    int or None
        Of ``activity_bits`` bits; infinity saturates as well. None if the number is NaN or negative; −0 is 0.

    Examples
    --------
    >>> [to_fixed(PolicyFormat(), bits) for bits in (0x3F800000, 0x35800000, 0x357FFFFF, 0x7F800000, 0x7FC00000)]
    [1048576, 1, 0, 268435455, None]
    """
    exponent, fraction = bits >> _FRACTION & _EXPONENT_MAX, bits & 2**_FRACTION - 1
    negative = bits >> 31 and bits & 0x7FFFFFFF
    if negative or (exponent == _EXPONENT_MAX and fraction):
        return None
    significand = fraction | (exponent > 0) << _FRACTION
    shift = max(exponent, 1) - _BIAS - _FRACTION + form.fraction_bits
    most = 2**form.activity_bits - 1
    return min(significand << shift if shift >= 0 else significand >> -shift, most)


class _Statistics(Protocol):
    count: int

    def add(self, x: Any) -> None: ...
    def beyond(self, x: Any, side: int, factor: Any) -> bool: ...
    @property
    def mean(self) -> float: ...
    @property
    def sigma(self) -> float: ...


class _Welford:
    """Running mean and population standard deviation in float64."""

    def __init__(self) -> None:
        self.count, self._mean, self._squares = 0, 0.0, 0.0

    def add(self, x: float) -> None:
        self.count += 1
        delta = x - self._mean
        self._mean += delta / self.count
        self._squares += delta * (x - self._mean)

    def beyond(self, x: float, side: int, factor: float) -> bool:
        """Whether ``x`` is more than ``factor`` σ above (side 1) or below (side −1) the mean."""
        return side * (x - self._mean) > factor * self.sigma

    @property
    def mean(self) -> float:
        return self._mean

    @property
    def sigma(self) -> float:
        return math.sqrt(self._squares / self.count) if self.count else 0.0


class _Sums:
    """Count, sum and sum of squares as integers; comparisons multiply instead of dividing."""

    def __init__(self, count_bits: int) -> None:
        self._most = 2**count_bits
        self.count, self.total, self.squares = 0, 0, 0

    def add(self, x: int) -> None:
        if self.count == self._most:
            self.count, self.total, self.squares = self.count >> 1, self.total >> 1, self.squares >> 1
        self.count += 1
        self.total += x
        self.squares += x * x

    @property
    def _spread(self) -> int:
        """``n²σ²``; halving can leave it a little below 0."""
        return max(self.count * self.squares - self.total**2, 0)

    def beyond(self, x: int, side: int, factor: int) -> bool:
        distance = side * (self.count * x - self.total)
        return distance > 0 and EIGHTHS**2 * distance**2 > factor**2 * self._spread

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    @property
    def sigma(self) -> float:
        return math.sqrt(self._spread) / self.count if self.count else 0.0


class Policy:
    """The policy of one request, in float64.

    A step is a prefill or a decode step. Each begins with `reset_step`; then `observe` takes the layers' activities in order and says what the
    next layer runs at. Statistics hold the samples of the layers before, without any layer 0. A prefill begins its own; those of decode go on
    from step to step.

    Parameters
    ----------
    config : PolicyConfig, optional

    Attributes
    ----------
    precision : int
        Bits of the next layer.
    metric, mean, sigma : float
        Last metric, and mean and standard deviation that it was compared with; NaN of layer 0, and before there are samples.
    spike : bool
        This prefill's spike has been seen.

    Examples
    --------
    >>> policy = Policy()
    >>> policy.reset_step("prefill")
    6
    >>> [policy.observe(layer, x) for layer, x in enumerate([9, 0.3, 0.2, 0.3, 0.2, 5.0, 0.1, 0.1, 0.1, 0.1])]
    [6, 6, 6, 6, 6, 6, 6, 4, 4, 2]
    """

    def __init__(self, config: PolicyConfig | None = None) -> None:
        self.config = config or PolicyConfig()
        self._levels = self.config.levels
        self._phase: Phase | None = None
        self._statistics: dict[str, _Statistics] = {phase: self._new_statistics() for phase in PHASES}
        self._factors: dict[str, Any] = {"sigma": self.config.sigma_factor, "band": self.config.band}
        self._begin("prefill", None)
        self._phase = None

    def reset_step(self, phase: Phase, entropy: float | None = None) -> int:
        """Begin a step.

        Parameters
        ----------
        phase : {"prefill", "decode"}
        entropy : float, optional
            G_E of the step before, 0 to 1; in decode only, and required there.

        Returns
        -------
        int
            Precision of layer 0.

        Raises
        ------
        TypeError, ValueError
            ``phase`` is no phase, or ``entropy`` does not belong to it or is out of range.
        """
        if phase not in PHASES:
            raise ValueError(f"phase must be one of {', '.join(PHASES)}, not {phase!r}")
        if phase == "prefill":
            if entropy is not None:
                raise ValueError(f"entropy must be None in prefill, not {entropy}")
        else:
            _check_number("entropy", entropy, 0, 1, "from 0 to 1")
        return self._begin(phase, entropy)

    def _begin(self, phase: Phase, entropy: float | None) -> int:
        self._phase, self._layer, self.spike = phase, -1, False
        if phase == "prefill":
            self._statistics[phase] = self._new_statistics()
            up = down = self.config.n_p
        else:
            high = self._set_entropy(entropy or 0)
            up, down = (self.config.beta, self.config.alpha) if high else (self.config.alpha, self.config.beta)
        self._needed = {1: up, -1: down}
        self._level = self._levels.index(self.config.first(phase))
        self._side = self._run = 0
        self.metric = self.mean = self.sigma = math.nan
        return self.precision

    @property
    def precision(self) -> int:
        """Bits of the next layer."""
        return self._levels[self._level]

    def observe(self, layer: int, activity: float) -> int:
        """Take the metric of a layer that has run.

        Parameters
        ----------
        layer : int
            Above those observed in this step; layer 0 is no sample.
        activity : float
            L_A, from 0 to the largest binary32 number. The policy adds G_E itself.

        Returns
        -------
        int
            Precision of the next layer.

        Raises
        ------
        TypeError, ValueError
            No step has begun, the layer is out of order, or the activity out of range.
        """
        _check_number("activity", activity, 0, LARGEST, "finite and at least 0")
        self._advance(layer)
        if layer:
            self._sample(self._metric(float(activity)))
        return self.precision

    def _advance(self, layer: int) -> None:
        check_integer("layer", layer)
        if self._phase is None:
            raise ValueError("reset_step must come before observe")
        if layer <= self._layer:
            raise ValueError(f"layer must be above {self._layer}, the last of this step, not {layer}")
        self._layer = layer

    def _sample(self, x: Any) -> None:
        statistics = self._statistics[self._phase or "prefill"]
        self.metric = x / self._unit
        self.mean = statistics.mean / self._unit if statistics.count else math.nan
        self.sigma = statistics.sigma / self._unit if statistics.count else math.nan
        if statistics.count >= self.config.first_samples:
            if self._phase == "prefill" and not self.spike:
                self.spike = statistics.beyond(x, 1, self._factors["sigma"])
            else:
                self._count(next((side for side in (1, -1) if statistics.beyond(x, side, self._factors["band"])), 0))
        statistics.add(x)

    def _count(self, side: int) -> None:
        self._run = (self._run + 1 if side == self._side else 1) if side else 0
        self._side = side
        if side and self._run >= self._needed[side]:
            level = min(max(self._level + side, 0), len(self._levels) - 1)
            if level != self._level:
                self._level, self._run = level, 0

    # What the fixed-point policy does in its own way.

    def _new_statistics(self) -> _Statistics:
        return _Welford()

    def _set_entropy(self, entropy: float) -> bool:
        self._entropy = entropy
        return entropy >= self.config.tau

    def _metric(self, activity: float) -> float:
        weight = self.config.activity_weight
        return activity if self._phase == "prefill" else weight * activity + (1 - weight) * self._entropy

    @property
    def _unit(self) -> float:
        return 1.0


class FixedPolicy(Policy):
    """The policy in the integers of the policy unit, which takes every decision like this one.

    Used as `Policy`; L_A is rounded to binary32, as the post-processing unit delivers it, then both signals are cut off to ``fraction_bits``.

    Parameters
    ----------
    config : PolicyConfig, optional
    form : PolicyFormat, optional

    Attributes
    ----------
    saturated, invalid : bool
        Since the request began: an activity was beyond ``integer_bits`` bits; one was NaN or negative, and was left out.

    Raises
    ------
    ValueError
        The unit cannot hold a parameter.
    """

    def __init__(self, config: PolicyConfig | None = None, form: PolicyFormat | None = None) -> None:
        self.form = form or PolicyFormat()
        self.settings = PolicySettings.of(config or PolicyConfig(), self.form)
        super().__init__(config)
        self._factors = {"sigma": self.settings.sigma_factor, "band": self.settings.band}
        self.saturated = self.invalid = False

    def observe(self, layer: int, activity: float) -> int:
        """Take the metric of a layer, as `Policy.observe`."""
        _check_number("activity", activity, 0, LARGEST, "finite and at least 0")
        return self.observe_bits(layer, int(np.float32(activity).view(np.uint32)))

    def observe_bits(self, layer: int, bits: int) -> int:
        """Take L_A as any binary32 pattern: infinity saturates; NaN and negative numbers change nothing but ``invalid``."""
        self._advance(layer)
        fixed = to_fixed(self.form, bits)
        self.invalid |= fixed is None
        self.saturated |= fixed is not None and (bits & 0x7FFFFFFF) >> _FRACTION >= _BIAS + self.form.integer_bits
        if layer and fixed is not None:
            self._sample(self._weighted(fixed))
        return self.precision

    def _new_statistics(self) -> _Statistics:
        return _Sums(self.form.count_bits)

    def _set_entropy(self, entropy: float) -> bool:
        self._fixed_entropy = math.floor(entropy * 2**self.form.fraction_bits)
        return self._fixed_entropy >= self.settings.tau

    def _weighted(self, activity: int) -> int:
        if self._phase == "prefill":
            return activity
        return self.settings.activity_weight * activity + self.settings.entropy_weight * self._fixed_entropy

    @property
    def _unit(self) -> float:
        parts = self.settings.activity_weight + self.settings.entropy_weight
        return 2.0**self.form.fraction_bits * (1 if self._phase == "prefill" else parts)


if __name__ == "__main__":
    from model.policy_replay import main

    sys.exit(main())
