"""Control and engines in the stream player: sound netlists pass, faults in gates are caught, and no judge lets a wrong pin through."""

from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest

from sim.mutation import check_mutants
from sim.mutation_dma import EnginePlayer
from sim.mutation_pe import ElementPlayer
from sim.player import Script, player_verilog
from synth.mutate import mutated, prove

MUTANTS = 12
SMALL = {
    "pe": {"refinement": "none", "weight_entries": 2, "activation_entries": 4, "accumulators": 8},
    "read_dma": {"data_width": 32, "max_burst": 4},
    "write_dma": {"data_width": 32, "max_burst": 4},
}


@cache
def played(block, seed):
    """A small block as a netlist with faults, in the player, and a run of it without."""
    netlist = mutated(block, MUTANTS, parameters=SMALL[block])
    options = {"verilog": netlist.verilog, "optimise": "-O0", "plusargs": {"mutsel": netlist.width}}
    player = ElementPlayer(SMALL[block], **options) if block == "pe" else EnginePlayer(block, SMALL[block], **options)
    stimulus, data = player.stimuli(500, np.random.default_rng(seed))
    outputs = player.harness.run_packed(data, {"mutsel": 0})
    return SimpleNamespace(netlist=netlist, player=player, stimulus=stimulus, outputs=outputs)


@pytest.mark.parametrize("block", SMALL)
def test_most_faults_are_caught(block, seed):
    netlist = played(block, seed).netlist
    assert all(mutant.kind.startswith("$_") for mutant in netlist.mutants)
    numbers = range(1, MUTANTS + 1)
    caught = check_mutants(block, netlist.verilog, numbers, netlist.width, 3000, SMALL[block], seed=seed)
    missed = [netlist.mutants[number - 1] for number in numbers if not caught[number]]
    assert len(missed) <= MUTANTS // 3, missed
    first = min(number for number in numbers if caught[number])
    assert prove(netlist, netlist.mutants[first - 1]).startswith("differs at ")


TAMPERED = {
    "pe": ["result__payload", "result__valid", "command__ready", "weight__ready", "busy", "status"],
    "read_dma": [
        *("request__ready", "word__payload", "word__valid", "done__payload", "done__valid"),
        *("m_axi_araddr", "m_axi_arlen", "m_axi_arvalid", "m_axi_arburst", "m_axi_arcache"),
    ],
    "write_dma": [
        *("request__ready", "word__ready", "done__payload", "done__valid"),
        *("m_axi_awaddr", "m_axi_awlen", "m_axi_awvalid", "m_axi_awburst", "m_axi_awcache", "m_axi_bready"),
        *("m_axi_wdata", "m_axi_wstrb", "m_axi_wlast", "m_axi_wvalid"),
    ],
}


def companion(outputs, name):
    """The rows in which a pin counts: those of a handshake, for pins of streams and channels, or all."""
    for suffix in ("__payload", "__valid", "__ready"):
        if name.endswith(suffix):
            stream = name.removesuffix(suffix)
            return (outputs[f"{stream}__valid"] & outputs[f"{stream}__ready"]).astype(bool)
    if name.startswith("m_axi_"):
        channel = next(
            channel for channel in ("m_axi_ar", "m_axi_aw", "m_axi_r", "m_axi_w", "m_axi_b") if name.startswith(channel)
        )
        return (outputs[f"{channel}valid"] & outputs[f"{channel}ready"]).astype(bool)
    return np.ones(len(outputs[name]), bool)


@pytest.mark.parametrize("block", SMALL)
def test_gates_agree_with_the_model_and_one_wrong_bit_is_noticed(block, seed):
    run = played(block, seed)
    tally = run.player.check(run.stimulus, run.outputs)
    assert (tally.mismatches, tally.messages) == (0, [])
    assert tally.compared == tally.expected
    assert min(tally.expected.values()) > 0
    # The same once more, from memory.
    assert run.player.check(run.stimulus, run.outputs) == tally
    inside = np.zeros(len(run.outputs[TAMPERED[block][0]]), bool)
    for section in run.stimulus.sections:
        inside[section.first : section.first + section.rows] = True
    rng = np.random.default_rng(seed)
    for name in TAMPERED[block]:
        rows = np.flatnonzero(companion(run.outputs, name) & inside)
        for row in rng.choice(rows, 4):
            column = run.outputs[name].copy()
            column[row] ^= 1
            tally = run.player.check(run.stimulus, {**run.outputs, name: column})
            assert tally.mismatches == 1, f"{name} in row {row}"


@pytest.mark.parametrize("block", ["read_dma", "write_dma"])
def test_every_kind_of_end_comes(block, seed):
    player = played(block, seed).player
    stimulus, data = player.stimuli(4096, np.random.default_rng(seed))
    outputs = player.harness.run_packed(data, {"mutsel": 0})
    assert player.check(stimulus, outputs).messages == []
    ends = (outputs["done__valid"] & outputs["done__ready"]).astype(bool)
    assert set(outputs["done__payload"][ends].tolist()) == {0, 1, 2, 3}


def test_a_queue_offers_its_words_in_order_until_they_are_taken():
    text, sidecar = player_verilog(
        {
            "top": "both",
            "ports": [
                {"name": "clk", "direction": "input", "width": 1},
                {"name": "rst", "direction": "input", "width": 1},
                *(
                    {"name": f"x__{part}", "direction": "input", "width": w}
                    for part, w in (("payload", 4), ("valid", 1))
                ),
                {"name": "x__ready", "direction": "output", "width": 1},
            ],
        }
    )
    assert sidecar["top"] == "player"
    names = {port["name"]: port["direction"] for port in sidecar["ports"]}
    inputs = ("clk", "rst", "x__word", "x__push", "x__go")
    outputs = ("x__payload", "x__valid", "x__ready")
    assert names == dict.fromkeys(inputs, "input") | dict.fromkeys(outputs, "output")
    assert "both dut" in text


def test_rows_have_room_for_their_words():
    script = Script({"x__word": 12, "x__push": 1, "x__go": 1, "x__junk": 3}, np.random.default_rng(1))
    with pytest.raises(ValueError, match=r"^x must have at most 2 words, one a row, not 3$"):
        script.add(2, x=[1, 2, 3])
    script.add(3, x=[0xABC, 5], x__go=1)
    script.add(1, x__go=0)
    columns = script.columns()
    assert script.length == 4
    assert columns["x__word"].shape == (4, 2)
    assert columns["x__word"][:2].tolist() == [[0xBC, 0xA], [5, 0]]
    assert columns["x__word"][:, 1].max() < 16
    assert columns["x__push"].tolist() == [1, 1, 0, 0]
    assert columns["x__go"].tolist() == [1, 1, 1, 0]
    assert columns["x__junk"].max() < 8


@pytest.mark.parametrize(
    ("kind", "share"), [("never", 1), ("rarely", 0.9), ("often", 0.5), ("mostly", 0.1), ("bursts", 0.5)]
)
def test_ways_of_stalling(kind, share):
    going = Script({}, np.random.default_rng(3)).stalls(kind, 20_000)
    assert going.shape == (20_000,)
    assert abs(going.mean() - share) < 0.05
