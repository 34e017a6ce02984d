"""Pictures of estimates: bars of latency and energy, a roofline, and the time line of a layer."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from model.accelerator import Mode
from model.perf.estimate import ENERGIES, Estimate, cost
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
    """Draw operations per second by operations per byte of memory: the bounds, and every product of both phases."""
    figure = blank(9.0, 5.6)
    axes = figure.subplots()
    hardware = found[0].hardware
    points: list[float] = []
    for index, each in enumerate(found):
        for phase, marker in ((each.prefill, "o"), (each.decode, "^")):
            costs = phase.gemms.values()
            intensity = [float(2 * one.macs / one.memory) for one in costs]
            points += intensity
            rate = [float(2e-12 * one.macs / one.seconds) for one in costs]
            label = f"{each.datapath.title}, {phase.name}"
            axes.plot(intensity, rate, marker, color=COLOURS[index % len(COLOURS)], alpha=0.6, label=label)
    x = np.geomspace(min(points) / 2, max(points) * 2, 100)
    for mode, style in ((Mode.AUTOFP2, "--"), (Mode.NVFP4, "-")):
        limit = np.minimum(x * hardware.bandwidth, 2 * hardware.peak(mode)) * 1e-12
        axes.plot(x, limit, style, color="black", linewidth=1, label=f"bound, {mode.name}")
    axes.set(xscale="log", yscale="log", xlabel="operations per byte of memory", ylabel="tera operations per second")
    axes.set_title("Roofline: every product")
    axes.grid(linewidth=0.3)
    axes.legend(fontsize=8)
    return figure


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
    figure.legend(handles, labels, loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    return figure
