"""Constants of the performance model: values with what they come from, one file."""

import json
from functools import cache
from importlib import resources
from typing import Any

__all__ = ["KINDS", "constant", "constants"]

KINDS = ("measured", "assumed", "paper")
"""Where a constant comes from: a command of this project or a width of its hardware, our choice, the paper."""


@cache
def constants() -> dict[str, dict[str, Any]]:
    """Return the constants: by name ``value``, ``kind`` (one of :data:`KINDS`) and ``source``.

    Names end in the unit: ``fj`` femtojoule, ``ge`` gate equivalents.
    """
    text = (resources.files("model.perf") / "constants.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = json.loads(text)
    return found


def constant(name: str) -> float:
    """Return the value of a constant."""
    return float(constants()[name]["value"])
