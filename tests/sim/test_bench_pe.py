"""The processing element's bench notices injected bugs, each by the right one of its checks."""

import types
from pathlib import Path

import pytest

import hdl.collector
import hdl.pe
from hdl.lib.verilog import to_verilog
from model.pe import PeConfig
from sim.regress import TileBench
from sim.runner import available_simulators

PARAMETERS = {"weight_entries": 4, "activation_entries": 8, "accumulators": 16}
TILES = 60
BUGS = {
    "no interlock": (hdl.pe, "hazard.eq(short & ", "hazard.eq(0 & ", "result is"),
    "one activation is not rewound": (
        hdl.pe,
        "rewind.eq(last_m & ~last_n)",
        "rewind.eq(last_m & ~last_n & ~first_m)",
        "result is",
    ),
    "bank freed one word early": (
        hdl.pe,
        "with m.If(self.result.ready & out_valid & out_last & (out_bank == i)):",
        "with m.If(drained & drain_ends & (drain_bank == i)):",
        "busy is 0",
    ),
    "results do not wait": (hdl.pe, "& (~out_valid | self.result.ready))", ")", "result: word"),
    "activations win": (
        hdl.collector,
        "kept.eq(w_mask[g] & w_within)",
        "kept.eq(w_mask[g] & ~a_mask[g] & w_within)",
        "result is",
    ),
}


def verilog_with(module, old, new):
    text = Path(module.__file__).read_text(encoding="utf-8")
    assert text.count(old) == 1
    edited = types.ModuleType("edited")
    exec(compile(text.replace(old, new), module.__file__, "exec"), edited.__dict__)
    with pytest.MonkeyPatch.context() as patch:
        if module is hdl.collector:
            patch.setattr(hdl.pe, "RecordMerger", edited.RecordMerger)
        element = hdl.pe if module is hdl.collector else edited
        return to_verilog(element.Pe(PeConfig(**PARAMETERS)), "pe")


@pytest.mark.parametrize("bug", BUGS)
def test_bugs_are_noticed(bug, seed):
    module, old, new, message = BUGS[bug]
    bench = TileBench(PARAMETERS, available_simulators()[-1], verilog=verilog_with(module, old, new))
    tally = bench.run_tiles(TILES, seed, bench.coverage())
    assert tally.mismatches == 1
    assert message in tally.messages[0]


def test_the_same_tiles_pass_without_a_bug(seed):
    bench = TileBench(PARAMETERS, available_simulators()[-1])
    tally = bench.run_tiles(TILES, seed, bench.coverage())
    assert tally.faults == []
