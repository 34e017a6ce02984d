"""The command, from tensors to the table, on our own cells with power data put in."""

import re
from collections import Counter

import numpy as np
import pytest

from sim.design import config_of, generated
from sim.stimuli import AUTOFP2, AUTOFP6, NVFP4
from synth import energy
from synth.cells import outputs_of
from synth.liberty import GE
from synth.liberty_tree import library_group
from synth.netlist import mapped
from synth.power import energy as spent
from synth.workload import quiet, random_tensors, stream

UNITS = 'nom_voltage : 1; leakage_power_unit : "1nW"; '
CLOCK_PIN = 'direction : input; clock : true; capacitance : 1; internal_power () { power (scalar) { values ("2"); } }'
OUTPUT = 'internal_power () {{ related_pin : "{pins}"; power (scalar) {{ values ("1"); }} }}'


def powered():
    """Return our own library with a capacitance of 1 fF at each input, and 1 fJ for each change of an output and 2 fJ of a clock pin."""
    text = GE.read_text().replace("capacitive_load_unit (1, pf);", f"capacitive_load_unit (1, ff); {UNITS}")
    text = text.replace("direction : input; clock : true;", CLOCK_PIN)
    text = text.replace("direction : input; }", "direction : input; capacitance : 1; }")

    def cell(found):
        inputs = re.findall(r"pin \((\w+)\) \{ direction : input", found[0])
        clock = re.search(r"pin \((\w+)\) \{ direction : input; clock", found[0])
        pins = clock[1] if clock else " ".join(inputs)
        return re.sub(r'(function : "[^"]*"; )', lambda f: f[1] + OUTPUT.format(pins=pins), found[0])

    return re.sub(r"  cell \(.*?\n  \}\n", cell, text, flags=re.DOTALL)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    path = tmp_path_factory.mktemp("library") / "powered.lib"
    path.write_text(powered())
    return path


@pytest.fixture(scope="module")
def netlist(library):
    return mapped(generated("vmac").verilog, "vmac", liberty=library, hierarchical=True)


@pytest.fixture(scope="module")
def runs():
    config, latency = config_of("vmac"), generated("vmac").sidecar["latency"]
    tensors = random_tensors(16, 16, 96)
    made = {mode: stream("vmac", config, mode, *tensors, latency) for mode in (AUTOFP2, NVFP4, AUTOFP6)}
    made["zero"] = stream("vmac", config, NVFP4, *tensors, latency, zero_weights=True)
    made["idle"] = quiet(made[NVFP4], latency)
    return made


def test_every_part_is_still_that_should_be(library, netlist, runs):
    """Refinement lanes outside AutoFP6, lanes with zero digits, and everything while the inputs rest."""
    parts = energy.parts_of(netlist)
    assert {"lanes and trees", "accumulation", *energy.REFINEMENT} <= set(parts.values())
    head, gates = library_group(powered()), 0
    active, changes = {}, Counter()
    for name, run in runs.items():
        waves, compared = energy.simulated("vmac", netlist, run)
        assert compared == (1 if name == "idle" else len(run.stimulus) - 3)
        found = spent(netlist, waves, head, part_of=parts)
        assert found.nets == len(netlist.nets) > 5000
        for part in found.parts:
            cycle = found.per_cycle(1e9, part)
            active[name, part] = cycle["internal"] + cycle["switching"]
        toggles = waves.toggles()
        for instance in netlist.instances:
            for pin in outputs_of(netlist.cells[instance.kind]):
                changes[name, parts[instance.name]] += int(toggles[waves.row[instance.pins[pin]]])
        # The probes show what the library's functions give.
        values = {"0": np.uint64(0), "1": ~np.uint64(0)}
        for instance in netlist.instances if name == AUTOFP6 else ():
            if netlist.cells[instance.kind].first("ff") is None:
                pins = {
                    pin: values[bit] if isinstance(bit, str) else waves.now[waves.row[bit]]
                    for pin, bit in instance.pins.items()
                }
                for pin, function in outputs_of(netlist.cells[instance.kind]).items():
                    assert (function.of(pins) == pins[pin]).all()
                    gates += 1
    assert gates > 5000
    for part in set(parts.values()):
        assert active["idle", part] == 0
    for part in energy.REFINEMENT:
        for mode in (AUTOFP2, NVFP4):
            assert active[mode, part] < 0.25 * active[AUTOFP6, part]
            # The first gates behind the activations are in front of the selection.
            assert changes[mode, part] < 0.2 * changes[AUTOFP6, part]
    assert changes[NVFP4, "refinement records"] == changes[AUTOFP2, "refinement records"] == 0
    lanes = "lanes and trees"
    assert active["zero", lanes] < 0.4 * active[NVFP4, lanes]
    assert active[AUTOFP2, lanes] > 0


def test_a_library_without_power_is_refused_before_anything_runs(capsys):
    assert energy.main(["--liberty", "ge"]) == 1
    assert capsys.readouterr().err == "error: energy needs a Liberty file with internal_power; ge.lib has none\n"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--clock", "0"], "--clock must be positive, not 0"),
        (["--clock", "inf"], "--clock must be finite, not inf"),
        (["--rows", "0"], "--rows must be positive, not 0"),
        (["--picture", "energy.pdf"], "picture must end in .svg or .png, not energy.pdf"),
        (["--hand-off", f"{GE}/x"], f"output must be in a folder, which {GE}/x cannot be"),
        (["--wire", "-1"], "--wire must be at least 0 and finite, not -1"),
        (["--tensors", "random", "--rows", "8"], "--rows must be a positive multiple of 16, not 8"),
        (["--tensors", "real", "--depth", "608"], "--depth must be at most 576 for real tensors, not 608"),
        (["--tensors", "real", "--tokens", "1024"], "--tokens must be at most 557 for real tensors, not 1024"),
        (["--tensors", "random", "--depth", "33"], "--depth must be a positive multiple of 32, not 33"),
    ],
)
def test_wrong_arguments_are_one_line(library, monkeypatch, capsys, arguments, reason):
    monkeypatch.setattr(energy, "mapped", lambda *_, **__: pytest.fail("nothing must be mapped"))
    assert energy.main(["--liberty", str(library), *arguments]) == 1
    assert capsys.readouterr().err == f"error: {reason}\n"
