"""Every configuration against the golden model, bit for bit, with full coverage: what ``python -m sim.regress`` runs."""

import pytest

from sim.regress import CASES, regress
from sim.runner import available_simulators


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_hardware_equals_model_with_full_coverage(case, seed):
    report = regress(case, seed=seed)
    assert report.faults == []
    assert report.coverage.share == 1
    if case.name == "vmac-slots":
        assert min(report.tally.compared[mode] for mode in ("AutoFP2", "NVFP4", "AutoFP6")) >= 1_000_000


@pytest.mark.parametrize("simulator", [name for name in available_simulators() if name != "verilator"])
@pytest.mark.parametrize("name", ["vmac-slots", "vmac_nvfp4", "vmac_autofp2-pair", "weight_encoder-pair"])
def test_the_same_bench_passes_on_the_other_simulator(name, simulator, seed):
    report = regress(CASES[name], vectors=2_000, seed=seed, simulator=simulator)
    assert report.faults == []
    assert sum(report.tally.compared.values()) >= 2_000


@pytest.mark.parametrize("simulator", [name for name in available_simulators() if name != "verilator"])
def test_tiles_pass_on_the_other_simulator(simulator, seed):
    report = regress(CASES["pe-slots-1-small-fast"], vectors=3, seed=seed, simulator=simulator)
    assert report.faults == []
    assert min(report.tally.compared.values()) >= 3
