"""Flattening of mapped netlists, their simulation, and proofs about them."""

import dataclasses
import json

import numpy as np
import pytest

from model.weight_encoder import encode
from sim.design import generated
from sim.harness import unpack_fields
from synth import equivalence, gatesim
from synth.liberty import GE
from synth.netlist import flattened, mapped

BLOCK = "weight_encoder"


@pytest.fixture(scope="module")
def encoder():
    return mapped(generated(BLOCK).verilog, BLOCK)


@pytest.fixture(scope="module")
def faulty(encoder):
    """The same with a NAND that is a NOR."""
    instances = list(encoder.instances)
    k = [k for k, instance in enumerate(instances) if instance.kind == "NAND2"][3]
    instances[k] = dataclasses.replace(instances[k], kind="NOR2")
    return dataclasses.replace(encoder, instances=instances)


def port(direction, *bits):
    return {"direction": direction, "bits": list(bits)}


def cell(kind, **pins):
    return {"type": kind, "connections": {pin: list(bits) for pin, bits in pins.items()}}


def module(ports, cells, **attributes):
    return {"attributes": attributes, "ports": ports, "cells": cells, "netnames": {}}


def test_ports_that_are_one_net_or_constant_inside_are_joined():
    """An output that passes an input on, two outputs of one net, and constant outputs, through two levels."""
    inner = module(
        {"a": port("input", 2), "through": port("output", 2), "y": port("output", 3, 3), "k": port("output", "1", "x")},
        {"g": cell("INV", A=[2], Y=[3])},
    )
    middle = module(
        {"a": port("input", 9), "o": port("output", 10, 11, 12, 13, 14)},
        {"i": cell("inner", a=[9], through=[10], y=[11, 12], k=[13, 14])},
    )
    top = module(
        {"a": port("input", 2), "o": port("output", 3, 4, 5, 6, 7)},
        {"m": cell("middle", a=[2], o=[3, 4, 5, 6, 7]), "g": cell("NAND2", A=[3], B=[6])},
    )
    black = module({}, {}, blackbox="1")
    text = json.dumps({"modules": {"top": top, "middle": middle, "inner": inner, "INV": black}})
    netlist = flattened(text, "top", GE.read_text())
    inverter, nand = netlist.instances
    assert (inverter.kind, inverter.part, nand.kind, nand.part) == ("INV", "middle", "NAND2", "")
    assert inverter.pins["A"] == 2
    assert nand.pins["A"] == 2
    assert nand.pins["B"] == "1"
    assert netlist.ports["o"] == ("output", [2, inverter.pins["Y"], inverter.pins["Y"], "1", "0"])
    # An output that nobody reads is a net too.
    assert netlist.nets == sorted({2, inverter.pins["Y"], nand.pins["Y"]})
    assert "  assign o = {1'b0, 1'b1, n" in netlist.verilog()


def test_netlists_equal_the_model(encoder):
    result = gatesim.check(BLOCK, "ge", encoder, 2000)
    assert result.faults == []
    assert min(result.tally.compared.values()) >= 2000
    assert sum(result.cells.values()) == len(encoder.instances) > 1000


def test_a_wrong_gate_is_noticed(faulty):
    result = gatesim.check(BLOCK, "ge", faulty, 2000)
    assert "rows differ" in result.faults[0]


def test_too_few_vectors_are_a_fault(encoder):
    tally = gatesim.Tally({"AutoFP2": 5, "NVFP4": 10}, {"AutoFP2": 5, "NVFP4": 10}, 15)
    result = gatesim.Result(BLOCK, "ge", {}, 10, tally)
    assert result.faults == ["fewer than 10 vectors compared: {'AutoFP2': 5}"]


def test_encoder_netlist_and_source_are_equivalent(encoder):
    verdict = equivalence.compared(generated(BLOCK).verilog, encoder)
    assert verdict.equal
    assert verdict.clauses > 1000


def test_a_wrong_gate_has_a_counter_example_that_the_model_confirms(faulty):
    verdict = equivalence.compared(generated(BLOCK).verilog, faulty)
    assert not verdict.equal

    def fields(name, width, count):
        octets = np.frombuffer(verdict.inputs[name].to_bytes(16, "little"), np.uint8)[None]
        return unpack_fields(octets, width, count).astype(np.uint8)

    operands = [fields(name, 4, 32) for name in ("row_even", "row_odd")]
    scales = [fields(name, 8, 2) for name in ("scale_even", "scale_odd")]
    pairs, pair_scales = encode(np.array([verdict.inputs["mode_nvfp4"] == 1]), *operands, *scales)
    right = {"w": (pairs[0], 5), "w_scale": (pair_scales[0], 8)}
    assert verdict.outputs
    for name, (gold, gate) in verdict.outputs.items():
        values, width = right[name]
        assert gold == sum(int(value) << width * k for k, value in enumerate(values)) != gate


@pytest.mark.parametrize(
    ("main", "arguments", "reason"),
    [
        (gatesim.main, ["pe"], "BLOCK must be one of vmac, vmac_nvfp4, vmac_autofp2, weight_encoder, not 'pe'"),
        (gatesim.main, ["--vectors", "0"], "--vectors must be positive, not 0"),
        (gatesim.main, ["--seed", "-1"], "--seed must not be negative, not -1"),
        (equivalence.main, [BLOCK, "--timeout", "0"], "--timeout must be positive, not 0"),
        (equivalence.main, ["nothing.v"], "design must be one of vmac, vmac_nvfp4, vmac_autofp2, weight_encoder, pe"),
        (equivalence.main, [BLOCK, "--liberty", "nothing.lib"], "nothing.lib"),
    ],
)
def test_wrong_arguments_are_one_line(main, arguments, reason, capsys):
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert reason in error
    assert error.count("\n") == 1
