"""Pictures of estimates: bars of latency and energy, a roofline, and the time line of a layer."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from model.accelerator import Mode
from model.perf.constants import constant
from model.perf.estimate import ENERGIES, Cost, Estimate, cost
from model.perf.hardware import Datapath, Hardware
from model.perf.language_model import LanguageModel
from model.perf.workload import decode, prefill
from model.pictures import COLOURS, blank, stacks

__all__ = ["energy_bars", "latency_bars", "roofline", "timeline"]


def latency_bars(found: Sequence[Estimate]) -> Any:
    """Draw seconds of prefill and decode, a bar for each datapath."""
    values = {
        each.datapath.title: {phase.name: float(phase.total.seconds) for phase in (each.prefill, each.decode)}
        for each in found
    }
    return stacks(values, "Latency of a request", "seconds")


def energy_bars(found: Sequence[Estimate]) -> Any:
    """Draw joules by what they go to, memory left out, a bar for each datapath."""
    values = {
        each.datapath.title: dict(zip(ENERGIES[:-1], map(float, each.total.energy[:-1]), strict=True)) for each in found
    }
    return stacks(values, "Energy of a request on the chip", "joules")


def roofline(found: Sequence[Estimate]) -> Any:
    """Draw operations per second by operations per byte of memory: the bounds, and every product of both phases.

    Bounds are those of elements and memory, and in ``rtl`` what a loader can bring at most, one vector with masks and offsets in each cycle. Names
    stand at the products of the first datapath.
    """
    figure = blank(9.0, 5.6)
    axes = figure.subplots()
    hardware = found[0].hardware
    points: list[float] = []
    for index, each in enumerate(found):
        for phase, marker in ((each.prefill, "o"), (each.decode, "^")):
            intensity, rate = zip(*map(_place, phase.gemms.values()), strict=True)
            points += intensity
            label = f"{each.datapath.title}, {phase.name}"
            axes.plot(intensity, rate, marker, color=COLOURS[index % len(COLOURS)], alpha=0.6, label=label)
    first = [(name, one) for phase in (found[0].prefill, found[0].decode) for name, one in phase.gemms.items()]
    _label(axes, [name for name, _ in first], np.array([_place(one) for _, one in first]).T)
    x = np.geomspace(min(points) / 2, max(points) * 2, 100)
    for mode, style in ((Mode.AUTOFP2, "--"), (Mode.NVFP4, "-")):
        limit = np.minimum(x * hardware.bandwidth, 2 * hardware.peak(mode)) * 1e-12
        axes.plot(x, limit, style, color="black", linewidth=1, label=f"elements and memory, {mode.name}")
    if hardware.schedule == "rtl":
        octets = constant("bytes_per_vector") + constant("mask_bytes_per_vector") + constant("refined_per_vector")
        limit = x * octets * hardware.clock * hardware.accelerators * 1e-12
        top = 2e-12 * hardware.peak(Mode.AUTOFP2)
        axes.plot(
            x[limit <= top], limit[limit <= top], ":", color="black", linewidth=1, label="loader, a vector a cycle"
        )
    axes.set(xscale="log", yscale="log", xlabel="operations per byte of memory", ylabel="tera operations per second")
    axes.set_title("Roofline: every product")
    axes.grid(linewidth=0.3)
    axes.legend(fontsize=8)
    return figure


def _place(one: Cost) -> tuple[float, float]:
    """Return operations per byte, and tera operations per second."""
    return float(2 * one.macs / one.memory), float(2e-12 * one.macs / one.seconds)


def _label(axes: Any, names: Sequence[str], places: Any) -> None:
    """Write names beside marks, one label where marks nearly lie on each other."""
    cells: dict[tuple[int, ...], list[int]] = {}
    for index, cell in enumerate(np.round(4 * np.log10(places)).astype(int).T.tolist()):
        cells.setdefault(tuple(cell), []).append(index)
    for marks in cells.values():
        text, place = ", ".join(dict.fromkeys(names[index] for index in marks)), places[:, marks].min(axis=1)
        axes.annotate(text, place, (-6, 4), textcoords="offset points", ha="right", fontsize=7)


def timeline(
    model: LanguageModel, hardware: Hardware, datapaths: Sequence[Datapath], prompt: int, batch: int, precision: int
) -> Any:
    """Draw what a layer does when, in prefill and in the first decode step, at some precision."""
    figure = blank(10.0, 2.4 + 0.9 * len(datapaths))
    from matplotlib import ticker

    axes = figure.subplots(2, 1)
    phases = {"prefill": prefill(model, prompt, batch), "decode": decode(model, np.array([prompt + 1.0]), batch)}
    names = list(dict.fromkeys(gemm.name for gemms in phases.values() for gemm in gemms if gemm.name != "head"))
    for place, (phase, gemms) in zip(axes, phases.items(), strict=True):
        for row, datapath in enumerate(datapaths):
            now = 0.0
            for gemm in gemms:
                if gemm.name == "head":
                    continue
                length = float(cost(hardware, datapath, precision, gemm).seconds.sum()) / gemm.layers
                colour = COLOURS[names.index(gemm.name) % len(COLOURS)]
                place.barh(row, length, 0.7, now, color=colour, label=gemm.name if row == 0 else None)
                now += length
        place.set_yticks(range(len(datapaths)), [each.title for each in datapaths])
        place.invert_yaxis()
        place.set(title=f"A layer at {precision} bits, {phase}", xlabel="time")
        place.xaxis.set_major_formatter(ticker.EngFormatter(unit="s"))
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 8), fontsize=8, frameon=False)
    return figure
