"""The paper's experiments on the accelerator, figures 13, 15 and 33, beside what this model says, and where the difference comes from."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from model.perf.constants import constant
from model.perf.estimate import Estimate, estimate
from model.perf.hardware import DATAPATHS, PAPER, Hardware
from model.perf.language_model import read_model
from model.perf.workload import Mix

__all__ = ["FIGURE_13", "FIGURE_15", "FIGURE_33", "bound", "figures", "needed"]

Row = dict[str, Any]

MIX = "15/45/40"
"""The paper's shares for DS-Llama-70B (table 4). It states none for the other two models; they get the same here."""
NVFP4 = "0/100/0"
PROMPT, OUTPUT = 8192, 16384
"""Tokens in and out: those of the paper's figure 8. It states none for its figures of the accelerator."""

MODELS = {"llama-3-70b": "DS-Llama-70B", "qwen3-8b": "Qwen3-8B", "minimax-m2": "MiniMax-M2.7"}
FIGURE_13: dict[str, dict[int, dict[str, float | None]]] = {
    "llama-3-70b": {
        1: {"latency": 0.44, "energy": 0.77, "energy AutoFP2-only": 2.23},
        8: {"latency": 0.50, "energy": 0.79, "energy AutoFP2-only": 2.37},
    },
    "qwen3-8b": {
        1: {"latency": 0.51, "energy": 0.85, "energy AutoFP2-only": 2.42},
        8: {"latency": 0.59, "energy": 0.87, "energy AutoFP2-only": 2.52},
    },
    "minimax-m2": {
        1: {"latency": 0.59, "energy": 0.93, "energy AutoFP2-only": 2.58},
        # A bar's label that the text of the paper does not hold; its slowest speed-up is 1.6.
        8: {"latency": None, "energy": 0.93, "energy AutoFP2-only": 2.60},
    },
}
"""By model and batch, normalised to NVFP4-only at the same accuracy. Labels of latency stand in the order of the bars, which is how they are assigned."""
LATENCY_AUTOFP2 = "1.72 to 2.30"
"""The labels of AutoFP2-only's latency that can be read; which bar has which cannot."""
PREFILL = "1.3 to 1.8"
DENSITY = {"autoematic": 5.46, "nvfp4": 3.23, "autofp2": 6.16}
"""TOPS/mm² in 3 nm."""
FIGURE_15: dict[str, tuple[float | None, float | None]] = {
    "15/45/40": (0.92, 1.09),
    "0/60/40": (None, 1.24),
    "0/100/0": (0.99, 1.09),
    "20/80/0": (1.05, 1.07),
    "60/40/0": (1.17, 0.91),
    "100/0/0": (1.36, 0.66),
}
"""Performance by area and energy per operation by shares of layers, normalised to NVFP4-only at 4 bits; one label cannot be read."""
MIX_33 = "30/60/10"
FIGURE_33: dict[str, str] = {"latency": "0.86 to 0.88", "prefill": "1.7 to 2.0", "energy": "1.13"}

AREA = 1.011
"""The paper's area of the accelerator by that of NVFP4-only."""


def bound(mix: Mix, share: float = 1.0) -> float:
    """Return the largest speed-up over NVFP4-only that a mix allows, if nothing but computing takes time.

    Layers at 2 bits take half the time, those at 6 bits save the extension of K, by ``share`` of its groups.

    Examples
    --------
    >>> round(bound(Mix.of("15/45/40")), 3)
    1.514
    """
    two, four, six = mix.prefill.tolist()
    return float((two + four + six * (1 + share)) / (two / 2 + four + six))


def needed(mix: Mix, speedup: float) -> float:
    """Return how often NVFP4-only would have to run a layer of 6 bits for such a speed-up, if nothing but computing takes time.

    Examples
    --------
    >>> round(needed(Mix.of("15/45/40"), 1 / 0.44), 2)
    3.76
    """
    two, four, six = mix.prefill.tolist()
    return float((speedup * (two / 2 + four + six) - two - four) / six)


def _alone(hardware: Hardware) -> Hardware:
    """Return hardware for which memory takes no time; in ``rtl`` the loader takes it, and nothing is left out."""
    return replace(hardware, bandwidth_gb=1e12)


@cache
def _run(model: str, hardware: Hardware, datapath: str, mix: str, batch: int) -> Estimate:
    return estimate(read_model(model), hardware, DATAPATHS[datapath], Mix.of(mix), PROMPT, OUTPUT, batch)


def _ratio(get: Callable[[Estimate], float], pair: tuple[Estimate, Estimate]) -> float:
    return round(get(pair[0]) / get(pair[1]), 4)


def _seconds(each: Estimate) -> float:
    return float(each.total.seconds)


def _prefill(each: Estimate) -> float:
    return float(each.prefill.total.seconds)


def _macs_energy(each: Estimate) -> float:
    """Joules of vector MACs that work."""
    return float(each.total.energy[0])


def _chip(each: Estimate) -> float:
    return each.chip_energy


def _row(what: str, paper: Any, ours: float, alone: float | None = None, **more: Any) -> Row:
    row: Row = {"what": what, "paper": paper, "ours": ours, "without memory": alone} | more
    row["difference"] = None if not isinstance(paper, float) else round(ours / paper - 1, 4)
    return row


def _figure_13(hardware: Hardware) -> list[Row]:
    rows: list[Row] = []
    for model, title in MODELS.items():
        for batch, paper in FIGURE_13[model].items():
            pair, alone, coarse = (
                (_run(model, each, name, MIX, batch), _run(model, each, "nvfp4", MIX, batch))
                for each, name in (
                    (hardware, "autoematic"),
                    (_alone(hardware), "autoematic"),
                    (hardware, "autofp2"),
                )
            )
            place = f"{title}, batch {batch}: "
            rows += [
                _row(f"{place}latency", paper["latency"], _ratio(_seconds, pair), _ratio(_seconds, alone)),
                _row(
                    f"{place}prefill, times faster",
                    PREFILL,
                    _ratio(_prefill, pair[::-1]),
                    _ratio(_prefill, alone[::-1]),
                ),
                _row(f"{place}energy of busy vector MACs", paper["energy"], _ratio(_macs_energy, pair)),
                _row(f"{place}energy of the chip", paper["energy"], _ratio(_chip, pair), _ratio(_chip, alone)),
                _row(f"{place}latency, AutoFP2-only", LATENCY_AUTOFP2, _ratio(_seconds, coarse)),
                _row(f"{place}energy, AutoFP2-only, busy", paper["energy AutoFP2-only"], _ratio(_macs_energy, coarse)),
            ]
    return rows


def _density(hardware: Hardware) -> list[Row]:
    """Operations by time and area: those that vector MACs run, by the shares of layers alone, and those that the model asks for, at batch 8."""
    base = _run("llama-3-70b", _alone(hardware), "nvfp4", MIX, 8)
    rows = []
    for name, mix in (("autoematic", MIX), ("autofp2", "100/0/0")):
        each = _run("llama-3-70b", _alone(hardware), name, MIX, 8)
        area = _area(hardware, "nvfp4") / _area(hardware, name)
        paper = round(DENSITY[name] / DENSITY["nvfp4"], 4)
        title = DATAPATHS[name].title
        running = round(bound(Mix.of(mix), 0.0) * area, 4)
        rows.append(_row(f"density, {title}, operations that run", paper, running))
        rows.append(_row(f"density, {title}, same accuracy", paper, round(_seconds(base) / _seconds(each) * area, 4)))
    return rows


def _area(hardware: Hardware, name: str) -> float:
    """Return the gate equivalents of an accelerator, memories included."""
    return sum(hardware.area(DATAPATHS[name]).values())


def _figure_15(hardware: Hardware) -> list[Row]:
    rows: list[Row] = []
    ours = _area(hardware, "autoematic"), _area(hardware, "nvfp4")
    for mix, (performance, energy) in FIGURE_15.items():
        for batch in (1, 8):
            pair, alone = (
                (_run("llama-3-70b", hw, "nvfp4", NVFP4, batch), _run("llama-3-70b", hw, "autoematic", mix, batch))
                for hw in (hardware, _alone(hardware))
            )
            by_area = [round(_ratio(_seconds, each) / AREA, 4) for each in (pair, alone)]
            place = f"{mix}, batch {batch}: "
            rows.append(_row(f"{place}performance by the paper's area", performance, *by_area))
            own = [round(_ratio(_seconds, each) * ours[1] / ours[0], 4) for each in (pair, alone)]
            rows.append(_row(f"{place}performance by our area", performance, *own))
            rows.append(_row(f"{place}energy of busy vector MACs", energy, _ratio(_macs_energy, pair[::-1])))
            rows.append(
                _row(f"{place}energy of the chip", energy, _ratio(_chip, pair[::-1]), _ratio(_chip, alone[::-1]))
            )
    return rows


def _figure_33(hardware: Hardware) -> list[Row]:
    rows: list[Row] = []
    for batch in (1, 8):
        pair, alone = (
            (_run("minimax-m2", hw, "autoematic", MIX_33, batch), _run("minimax-m2", hw, "nvfp4", NVFP4, batch))
            for hw in (hardware, _alone(hardware))
        )
        place = f"MiniMax-M2.7, batch {batch}: "
        rows += [
            _row(f"{place}latency", FIGURE_33["latency"], _ratio(_seconds, pair), _ratio(_seconds, alone)),
            _row(
                f"{place}prefill, times faster",
                FIGURE_33["prefill"],
                _ratio(_prefill, pair[::-1]),
                _ratio(_prefill, alone[::-1]),
            ),
            _row(f"{place}energy of busy vector MACs", 1.13, _ratio(_macs_energy, pair)),
            _row(f"{place}energy of the chip", 1.13, _ratio(_chip, pair), _ratio(_chip, alone)),
        ]
    return rows


def _explanations(hardware: Hardware) -> list[str]:
    mix, mix33 = Mix.of(MIX), Mix.of(MIX_33)
    area, base = (hardware.area(DATAPATHS[name]) for name in ("autoematic", "nvfp4"))
    equal = sum(area.values()) / (base["logic"] + area["memory"])
    return [
        f"Latency, figure 13: with {MIX} no schedule can be more than {bound(mix):.2f} times as fast as NVFP4-only, where each layer of 6 bits runs "
        f"twice; with the paper's own extension of K at batch 1, 0.49 (figure 32), {bound(mix, 0.49):.2f}. The paper's {1 / 0.44:.2f} would want "
        f"NVFP4-only to run each of them {needed(mix, 1 / 0.44):.1f} times, {1 / 0.50:.2f} {needed(mix, 2.0):.1f} times. Whatever the mix, a layer "
        "gains a factor of 2 at most. What else its baseline spends is not said.",
        "Memory: time of memory is added, as appendix G says, and is the same for 2 and 4 bits; extended layers bring (1 + share) times the bytes. "
        "The last column leaves it out. One row of activations uses one of 16 rows of elements, so decode at batch 1 takes as long as at batch 16.",
        f"Prefill, figure 33: with {MIX_33} in prefill too, {bound(mix33, 0.0):.2f} is the most, since NVFP4-only then runs every layer once; "
        "1.7 to 2.0 wants 82 to 100 % of a prefill's layers at 2 bits. The paper does not state the shares of its prefill.",
        "AutoFP2-only: two digits of a weight are two vector operations, so layers of 4 bits take NVFP4-only's time and no layer more than it. The "
        "paper's factors of 1.7 to 2.6 in latency and energy want about twice as many passes; how it makes 4 bits of 2-bit parts is not said. Its "
        "density of AutoFP2-only, 1.9 times NVFP4-only's, counts operations that run, not those that the model asks for.",
        "Energy: ours is that of ASAP7 gates without wires, and of bytes by assumed constants; the paper's is that of a whole layout in 3 nm. "
        "Vector MACs that work come within 0.05 of the paper's ratios for the mix that it states; waiting elements and buffers are the same for both "
        "and bring ratios nearer to 1, or apart where NVFP4-only waits longer.",
        f"Area: the paper's {AREA} is for an accelerator of which vector MACs are 3.6 %. Ours has vector MACs that are "
        f"{constant('vmac_ge') / constant('nvfp4_only_ge'):.3f} times NVFP4-only's: {equal:.3f} with the same memories. "
        "NVFP4-only needs no masks and offsets in banks and buffers; without them, as in the tables above, it is "
        f"{_area(hardware, 'autoematic') / _area(hardware, 'nvfp4'):.3f}.",
    ]


def figures(hardware: Hardware = PAPER, done: Callable[[str], None] = lambda name: None) -> dict[str, Any]:
    """Return the figures: ``tables``, rows by figure, ``explanations``, and the ``settings`` that they are for.

    ``done`` is called with the name of each table.
    """
    tables = {}
    for name, table in (
        ("figure 13", _figure_13),
        ("density", _density),
        ("figure 15", _figure_15),
        ("figure 33", _figure_33),
    ):
        tables[name] = table(hardware)
        done(name)
    settings = {"prompt": PROMPT, "output": OUTPUT, "mix": MIX, "mix of figure 33": MIX_33}
    return {
        "settings": settings | {"schedule": hardware.schedule},
        "tables": tables,
        "explanations": _explanations(hardware),
    }
