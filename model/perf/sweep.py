"""Estimates over parameters, for ``python -m synth.sweep --function model.perf.sweep:point`` (docs/performance-model.md)."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from model.accelerator import AcceleratorConfig
from model.perf.estimate import estimate
from model.perf.hardware import DATAPATHS, REFERENCE, Hardware
from model.perf.language_model import read_model
from model.perf.workload import Mix

__all__ = ["KNOBS", "hardware_of", "point"]

KNOBS: dict[str, Any] = {
    "config": "qwen3-8b",
    "datapath": "autoematic",
    "prompt": 1024,
    "output": 256,
    "batch": 1,
    "shares": "15/45/40",
    "decode_shares": None,
}
"""Parameters of a point beside those of the hardware, with their defaults."""

_HARDWARE = ("clock_mhz", "bandwidth_gb", "schedule", "overlap", "refined_share", "latency", "accelerators")
_CONFIG = tuple(field.name for field in fields(AcceleratorConfig))


def hardware_of(settings: Mapping[str, Any]) -> Hardware:
    """Return the reference hardware with some fields of :class:`Hardware` and of its configuration changed.

    Raises
    ------
    TypeError, ValueError
        There is no such parameter, or it has a wrong value.
    """
    for name in settings:
        if name not in _HARDWARE + _CONFIG:
            raise TypeError(f"parameter must be one of {', '.join((*KNOBS, *_HARDWARE, *_CONFIG))}, not {name!r}")
    config = {name: getattr(REFERENCE.config, name) for name in _CONFIG}
    config |= {name: value for name, value in settings.items() if name in _CONFIG}
    more = {name: value for name, value in settings.items() if name in _HARDWARE}
    return Hardware(AcceleratorConfig(**config), **more)


def point(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a request: those of `model.perf.estimate.Estimate.as_json` that are single numbers.

    Parameters
    ----------
    given : mapping
        :data:`KNOBS`, and fields of the hardware and its configuration; what is missing has its default.

    Raises
    ------
    OSError, TypeError, ValueError
        A parameter is wrong, or a size does not fit.
    """
    knobs = KNOBS | {name: value for name, value in given.items() if name in KNOBS}
    hardware = hardware_of({name: value for name, value in given.items() if name not in KNOBS})
    if knobs["datapath"] not in DATAPATHS:
        raise ValueError(f"datapath must be one of {', '.join(DATAPATHS)}, not {knobs['datapath']!r}")
    for name in ("prompt", "output", "batch"):
        if type(knobs[name]) is not int:
            raise TypeError(f"{name} must be an integer, not {knobs[name]!r}")
    found = estimate(
        read_model(str(knobs["config"])),
        hardware,
        DATAPATHS[knobs["datapath"]],
        Mix.of(*(str(knobs[name]) for name in ("shares", "decode_shares") if knobs[name] is not None)),
        *(knobs[name] for name in ("prompt", "output", "batch")),
    ).as_json()
    return {name: value for name, value in found.items() if isinstance(value, float)}
