"""The model's cycles beside those that were counted in RTL simulation."""

import json
from importlib import resources
from typing import Any

from model.accelerator import AcceleratorConfig, Mode
from model.perf.gemm_cycles import rtl_cycles
from model.tiling import REFINED

__all__ = ["calibration", "recorded"]

_MODES = {"AutoFP2": Mode.AUTOFP2, "NVFP4": Mode.NVFP4, "AutoFP6": Mode.AUTOFP6}


def recorded() -> dict[str, Any]:
    """Return what was recorded: ``tables``, each with its ``command``, the parameters of the accelerator's ``array``, and ``rows``."""
    found: dict[str, Any] = json.loads((resources.files("model.perf") / "rtl_cycles.json").read_text(encoding="utf-8"))
    return found


def _refined(given: float | list[float]) -> float | tuple[float, ...]:
    return tuple(given) if isinstance(given, list) else given


def calibration() -> list[dict[str, Any]]:
    """Return a row for each recorded product: ``command``, sizes, mode, ``counted`` and ``model`` cycles, and ``difference``."""
    found = recorded()
    rows = []
    for table in found["tables"]:
        config = AcceleratorConfig(**table["array"])
        for row in table["rows"]:
            refined = _refined(row.get("a_refined", REFINED)), _refined(row.get("w_refined", REFINED))
            sizes = row["m"], row["n"], row["k"]
            cycles, _ = rtl_cycles(config, _MODES[row["mode"]], *sizes, refined=refined)
            rows.append(
                {
                    "command": table["command"],
                    "elements": f"{config.rows} × {config.columns}",
                    "product": row.get("name", "") or " × ".join(map(str, sizes)),
                    "mode": row["mode"],
                    "counted": row["cycles"],
                    "model": cycles,
                    "difference": round(cycles / row["cycles"] - 1, 5),
                }
            )
    return rows
