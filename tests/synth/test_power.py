"""Energy of small netlists, against sums made event by event."""

import numpy as np
import pytest

from synth.liberty import LibertyError
from synth.liberty_tree import cell_groups, library_group
from synth.netlist import FlatNetlist, Instance
from synth.power import Table, Units, Waveforms, energy

TEXT = """
library (tiny) {
  capacitive_load_unit (2, ff);
  leakage_power_unit : "10nW";
  nom_voltage : 2;
  power_lut_template (e) {
    variable_1 : input_transition_time; variable_2 : total_output_net_capacitance; index_1 ("1, 3, 9"); index_2 ("0, 10");
  }
  cell (INV) { area : 1;
    leakage_power () { value : 4; when : "A"; } leakage_power () { value : 1; when : "!A"; }
    pin (A) { direction : input; capacitance : 3; }
    pin (Y) { direction : output; function : "!A"; internal_power () { related_pin : "A";
      rise_power (e) { values ("1, 3", "5, 7", "9, 9"); } fall_power (scalar) { values ("10"); } } }
  }
  cell (NAND2) { area : 1; cell_leakage_power : 6;
    pin (A) { direction : input; capacitance : 1;
      internal_power () { when : "!B"; rise_power (scalar) { values ("0.5"); } fall_power (scalar) { values ("0.25"); } } }
    pin (B) { direction : input; rise_capacitance : 1; fall_capacitance : 3; }
    pin (Y) { direction : output; function : "!(A B)";
      internal_power () { related_pin : "A"; power (scalar) { values ("2"); } }
      internal_power () { related_pin : "B"; power (scalar) { values ("4"); } } }
  }
  cell (DFF) { area : 5;
    ff (IQ, IQN) { clocked_on : "CK"; next_state : "D"; }
    pin (CK) { direction : input; clock : true; capacitance : 1.5;
      internal_power () { rise_power (scalar) { values ("3"); } fall_power (scalar) { values ("5"); } }
      internal_power () { when : "D Q"; rise_power (scalar) { values ("1"); } fall_power (scalar) { values ("2"); } } }
    pin (D) { direction : input; capacitance : 2;
      internal_power () { when : "CK"; power (scalar) { values ("0.5"); } } internal_power () { when : "!CK"; power (scalar) { values ("1"); } } }
    pin (Q) { direction : output; function : "IQ"; internal_power () { related_pin : "CK";
      rise_power (scalar) { values ("7"); } fall_power (scalar) { values ("9"); } } }
  }
}
"""
CLK, A, B, Q, N, Y = range(2, 8)
CYCLES = 192
WIRE = 0.5


@pytest.fixture(scope="module")
def netlist():
    """A register, a NAND of it with an input, and an inverter behind."""
    instances = [
        Instance("u0", "DFF", {"CK": CLK, "D": A, "Q": Q}, "memory"),
        Instance("u1", "NAND2", {"A": Q, "B": B, "Y": N}, "logic"),
        Instance("u2", "INV", {"A": N, "Y": Y}, "logic"),
    ]
    ports = {"clk": ("input", [CLK]), "a": ("input", [A]), "b": ("input", [B]), "y": ("output", [Y])}
    return FlatNetlist("top", ports, instances, cell_groups(TEXT, ["INV", "NAND2", "DFF"]))


@pytest.fixture(scope="module")
def values():
    rng = np.random.default_rng(3)
    a, b = rng.integers(0, 2, (2, CYCLES + 5))
    q = np.concatenate([[0], a[:-1]])
    return {CLK: 0 * a, A: a, B: b, Q: q, N: 1 - q * b, Y: q * b}


def probed(netlist, values):
    """What the simulator would give for the probes."""
    return {"probe0": sum(values[net].astype(np.uint64) << np.uint64(k) for k, net in enumerate(netlist.nets))}


def expected(values, start):
    """Return sums over the cycles by part and kind, in the library's units; leakage too, per cycle."""
    sums = dict.fromkeys(
        [(part, kind) for part in ("memory", "logic") for kind in ("leakage", "clock", "internal", "switching")], 0.0
    )
    volt = 2.0
    load = {N: 3 + WIRE, Y: 0.0}
    for t in range(start, start + CYCLES):
        now, old = ({net: int(v[at]) for net, v in values.items()} for at in (t, t - 1))
        changed = {net: now[net] != old[net] for net in now}
        sums["memory", "leakage"] += 0
        sums["logic", "leakage"] += 6 + (4 if now[N] else 1)
        sums["memory", "clock"] += (1 + 2 if now[A] and now[Q] else 3 + 5) + 2 * 0.5 * (1.5 + WIRE) * volt**2
        sums["memory", "internal"] += 0.75 * changed[A] + (7 if now[Q] else 9) * changed[Q]
        sums["memory", "switching"] += 0.5 * (2 + WIRE) * volt**2 * changed[A]
        for net, pin in ((Q, 1), (B, 2), (N, 3)):
            sums["logic", "switching"] += 0.5 * (pin + WIRE) * volt**2 * changed[net]
        if changed[Q] and not now[B] and not old[B]:
            sums["logic", "internal"] += 0.5 if now[Q] else 0.25
        if changed[Y]:
            # A transition a third up the table: 3.
            sums["logic", "internal"] += 5 + 2 * load[Y] / 10 if now[Y] else 10
    # The NAND's changes are priced at the mean over its causes, in this run.
    causes = {2: 0, 4: 0}
    for t in range(start, start + CYCLES):
        if values[N][t] != values[N][t - 1]:
            causes[2] += int(values[Q][t] != values[Q][t - 1])
            causes[4] += int(values[B][t] != values[B][t - 1])
    mean = sum(price * count for price, count in causes.items()) / sum(causes.values())
    toggles = int((values[N][start : start + CYCLES] != values[N][start - 1 : start + CYCLES - 1]).sum())
    sums["logic", "internal"] += mean * toggles
    return sums


def test_energy_is_the_sum_over_all_events(netlist, values):
    start = 3
    waves = Waveforms.of(netlist, probed(netlist, values), start, CYCLES)
    found = energy(netlist, waves, library_group(TEXT), wire=WIRE)
    assert (found.cycles, found.nets) == (CYCLES, 6)
    compared = 0
    for (part, kind), total in expected(values, start).items():
        unit = 10e-9 if kind == "leakage" else 2e-15
        assert found.spent[part, kind] == pytest.approx(total / CYCLES * unit)
        compared += total > 0
    assert compared == 6
    cycle = found.per_cycle(1e9)
    assert cycle["leakage"] == pytest.approx(found.spent["logic", "leakage"] / 1e9)
    assert sum(found.per_cycle(1e9, part)["internal"] for part in found.parts) == pytest.approx(cycle["internal"])


def test_toggles_are_counted(netlist, values):
    waves = Waveforms.of(netlist, probed(netlist, values), 1, CYCLES)
    counted = dict(zip(netlist.nets, waves.toggles(), strict=True))
    assert counted == {net: int((v[1 : CYCLES + 1] != v[:CYCLES]).sum()) for net, v in values.items()}
    assert counted[Y] > 20


def test_a_net_without_waveform_is_refused(netlist, values):
    waves = Waveforms.of(netlist, probed(netlist, values), 1, 64)
    waves.row.pop(N)
    with pytest.raises(ValueError, match="every net must have a waveform, 1 of 6 have none"):
        energy(netlist, waves, library_group(TEXT))


@pytest.mark.parametrize(("start", "cycles"), [(0, 64), (1, 65), (1, 0), (1, 256)])
def test_windows_are_inside_the_run(netlist, values, start, cycles):
    with pytest.raises(ValueError, match="cycles"):
        Waveforms.of(netlist, probed(netlist, values), start, cycles)


def test_clocks_that_go_to_gates_are_refused(netlist, values):
    gated = [*netlist.instances, Instance("u3", "INV", {"A": CLK}, "")]
    waves = Waveforms.of(netlist, probed(netlist, values), 1, 64)
    with pytest.raises(LibertyError, match="the clock must go to flip-flops alone; it goes to INV"):
        energy(FlatNetlist("top", netlist.ports, gated, netlist.cells), waves, library_group(TEXT))


def test_tables_are_linear_between_and_beyond_their_points():
    library = library_group(TEXT)
    rise = next(cell_groups(TEXT, ["INV"])["INV"].groups[-1].all("internal_power")).first("rise_power")
    table = Table.of(rise, library)
    assert table.at(2.0, np.array([0, 5, 20])).tolist() == [3, 4, 7]
    rise.attributes |= {"index_1": '"0, 10"', "index_2": '"1, 3, 9"', "values": '"1, 5, 9", "3, 7, 9"'}
    library.first("power_lut_template").attributes.update(
        variable_1="total_output_net_capacitance", variable_2="input_net_transition"
    )
    assert Table.of(rise, library).at(2.0, np.array([0, 5, 20])).tolist() == [3, 4, 7]


@pytest.mark.parametrize(
    ("attributes", "units"),
    [
        ({"nom_voltage": "0.7", "capacitive_load_unit": "1,ff", "leakage_power_unit": "1pW"}, (0.7, 1e-15, 1e-12)),
        ({"nom_voltage": "1.8", "capacitive_load_unit": '1.0, "pf"', "leakage_power_unit": "1nW"}, (1.8, 1e-12, 1e-9)),
        ({"nom_voltage": "0.7", "capacitive_load_unit": "1, pf", "leakage_power_unit": "100uW"}, (0.7, 1e-12, 1e-4)),
    ],
)
def test_units(attributes, units):
    library = library_group(TEXT)
    library.attributes.clear()
    library.attributes.update(attributes)
    found = Units.of(library)
    assert (found.voltage, found.capacitance, found.leakage) == pytest.approx(units)
    del library.attributes["nom_voltage"]
    with pytest.raises(LibertyError, match="nom_voltage"):
        Units.of(library)
