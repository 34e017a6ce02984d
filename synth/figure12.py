"""Figure 12 of the paper: what the area of accelerator and vector MAC consists of, the paper's shares beside ours."""

import re
from collections.abc import Sequence
from typing import cast

from synth.libraries import LibertyFiles, prepare
from synth.points import Row
from synth.stat import Area
from synth.yosys import measure

__all__ = ["ACCELERATOR", "accelerator_areas", "accelerator_rows", "vmac_parts", "vmac_rows"]

ACCELERATOR = "accelerator rows=16 columns=16 ppu=true"

VMAC_PARTS = {
    "digits": "multiply and trees",
    "products": "multiply and trees",
    "refinement": "refinement lanes and tree",
    "gate": "refinement lanes and tree",
    "reduction": "mode-dependent reduction",
    "scaler": "scaling",
    "accumulator": "accumulation",
    "": "registers and control",
}
"""Parts of a vMAC by how the names of its modules start; the last is the top's own."""
PAPER_VMAC = {"refinement lanes and tree": 0.123, "mode-dependent reduction": 0.067}

BIT = 1.5
"""Assumed area of a bit of SRAM with its share of the periphery, in gate equivalents."""

_PREFIX = "part: "


def vmac_parts(area: Area) -> Row:
    """Return the areas of the parts of a hierarchical vector MAC, by ``part: NAME``."""
    top = area.modules[area.top]
    parts = {VMAC_PARTS[""]: top.area}
    for child, count in top.children.items():
        stem = re.sub(r"[_\d]+$", "", child.removeprefix(f"{area.top}_"))
        part = next((part for start, part in VMAC_PARTS.items() if stem.startswith(start)), VMAC_PARTS[""])
        parts[part] = parts.get(part, 0.0) + count * area.modules[child].total
    return {f"{_PREFIX}{name}": round(value, 4) for name, value in parts.items()}


def vmac_rows(rows: Sequence[Row], library: str, *designs: str) -> list[Row]:
    """Return the parts of the first design with those of the others beside them, and the paper's shares of the first."""
    chosen = {str(row["design"]): row for row in rows if (row["library"], row["shape"]) == (library, "hierarchical")}
    parts = [key for key in dict.fromkeys(key for name in designs for key in chosen[name]) if key.startswith(_PREFIX)]
    first = chosen[designs[0]]
    whole = cast(float, first["area"])
    found: list[Row] = []
    for key in parts:
        name = key.removeprefix(_PREFIX)
        area = cast(float, first.get(key) or 0.0)
        row: Row = {
            "part": name,
            "area": area,
            "share": round(area / whole, 4),
            "paper": PAPER_VMAC.get(name),
        }
        found.append(row | {f"area of {other}": chosen[other].get(key) for other in designs[1:]})
    return found


_VMACS, _ELEMENTS = "vector MACs", "processing elements, the rest"
_CONTROL = "registers, descriptors, loader, DMA"
ACCELERATOR_PARTS = {
    r"^pe_vmac": _VMACS,
    r"_encoder": "weight encoders",
    r"^pe": _ELEMENTS,
    r"post_output|policy": "post-processing and policy",
    r"engine|_bank": "buses and banks",
    r"_output": "output",
}
"""Parts of an accelerator by the names of modules, the first that fits; another module belongs to the part of its parent."""
PAPER_ACCELERATOR = {
    _VMACS: 0.036,
    "weight encoders": 0.004,
    _ELEMENTS: 0.168,
    _CONTROL: 0.030,
    "post-processing and policy": 0.012,
    "memory of buses and banks": 0.75,
}
"""Of the whole; the paper's buffers include their memory, and its control may be inside the processing elements."""


def _part(name: str, parent: str) -> str:
    return next((part for pattern, part in ACCELERATOR_PARTS.items() if re.search(pattern, name)), parent)


def accelerator_areas(verilog: str, top: str, liberty: LibertyFiles, tool: str | None) -> Row:
    """Return areas of an accelerator's logic and bits of its memories, by part."""
    area = measure(verilog, top, liberty=liberty, hierarchical=True, tool=tool)
    nand2 = prepare(liberty).library.nand2_area
    parts: dict[str, float] = {}
    bits: dict[str, int] = {}

    def visit(name: str, times: int, part: str) -> None:
        module = area.modules[name]
        parts[part] = parts.get(part, 0.0) + times * module.area
        for memory, count in module.memories.items():
            bits[part] = bits.get(part, 0) + times * count * area.memories[memory].bits
        for child, count in module.children.items():
            visit(child, times * count, _part(child.removeprefix(f"{top}_"), part))

    visit(top, 1, _CONTROL)
    return {
        "area": round(area.total, 2),
        "registers": round(area.sequential, 2),
        "gate_equivalents": round(area.total / nand2, 1) if nand2 else None,
        **{f"{_PREFIX}{name}": round(value, 2) for name, value in sorted(parts.items())},
        **{f"bits: {name}": value for name, value in sorted(bits.items())},
    }


def accelerator_rows(rows: Sequence[Row], library: str) -> list[Row]:
    """Return the parts of the accelerator, logic in the library's unit and memories at :data:`BIT` gate equivalents a bit, with the paper's shares."""
    row = next(row for row in rows if (row["library"], row["shape"]) == (library, "accelerator"))
    logic = {key.removeprefix(_PREFIX): cast(float, value) for key, value in row.items() if key.startswith(_PREFIX)}
    bits = {key.removeprefix("bits: "): cast(int, value) for key, value in row.items() if key.startswith("bits: ")}
    unit = cast(float, row["area"]) / cast(float, row["gate_equivalents"])
    areas = logic | {f"memory of {name}": count * BIT * unit for name, count in bits.items()}
    whole, macs = sum(areas.values()), logic[_VMACS]
    found: list[Row] = []
    for name, area in sorted(areas.items(), key=lambda item: -item[1]):
        paper = PAPER_ACCELERATOR.get(name)
        found.append(
            {
                "group": "memories" if name.startswith("memory") else "logic",
                "part": name,
                "bits": bits.get(name.removeprefix("memory of ")) if name.startswith("memory") else None,
                "area": round(area, 1),
                "share": round(area / whole, 4),
                "paper": paper,
                "to_vmacs": round(area / macs, 3),
                "paper_to_vmacs": None if paper is None else round(paper / PAPER_ACCELERATOR[_VMACS], 3),
            }
        )
    return found
