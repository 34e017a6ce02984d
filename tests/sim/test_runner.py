"""The runner: cache, locks, time limits, seeds, waveforms, and tools found without an active environment."""

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sim import objcache, runner
from sim.runner import (
    SimulationError,
    available_simulators,
    build_bulk,
    build_cocotb,
    bulk_command,
    cached_folder,
    run_cocotb,
    run_command,
    with_loops,
)

SIMULATORS = available_simulators()
COUNTER = """\
module counter(input clk, input rst, output reg [7:0] count);
    always @(posedge clk) count <= rst ? 8'd0 : count + 8'd1;
endmodule
"""
BENCH = "tests.sim.counter_bench"
COUNTER_PORTS = ("clk", "rst", "count")


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOEMATIC_SIM_BUILD", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_verilator_is_the_default_and_present():
    assert SIMULATORS[0] == "verilator"
    assert runner.find_simulator().name == "verilator"


@pytest.mark.parametrize("simulator", SIMULATORS)
def test_cocotb_passes_fails_and_times_out(simulator):
    build = build_cocotb({"counter.v": COUNTER}, "counter", COUNTER_PORTS, simulator)
    log = run_cocotb(build, BENCH, seed=77)
    assert "1 cocotb tests, 0 failed" in log
    assert "Seeding Python random module with 77" in log
    with pytest.raises(SimulationError, match=r"counter_bench failed with SEED=78"):
        run_cocotb(build, BENCH, seed=78, environment={"WRONG": "1"})
    started = time.monotonic()
    with pytest.raises(SimulationError, match=r"ran longer than 4 s"):
        run_cocotb(build, BENCH, seed=79, environment={"HANG": "1"}, timeout=4)
    assert time.monotonic() - started < 60
    with pytest.raises(SimulationError, match=r"no_such_bench"):
        run_cocotb(build, "no_such_bench", seed=80)


@pytest.mark.parametrize("simulator", SIMULATORS[1:] or SIMULATORS)
def test_waves_leave_a_file(simulator, own_cache):
    build = build_cocotb({"counter.v": COUNTER}, "counter", COUNTER_PORTS, simulator, waves=True)
    run_cocotb(build, BENCH, seed=1)
    dumps = [*own_cache.glob("runs/*/dump.*")]
    assert dumps
    assert all(path.stat().st_size > 100 for path in dumps)


def test_builds_are_found_again_and_keyed_by_everything():
    one = build_bulk({"h.v": "module harness(input clk); endmodule\n"})
    before = one.directory.stat().st_mtime_ns
    assert build_bulk({"h.v": "module harness(input clk); endmodule\n"}) == one
    assert one.directory.stat().st_mtime_ns == before
    assert build_bulk({"h.v": "module harness(input clk); wire a; endmodule\n"}).directory != one.directory
    assert build_bulk({"h.v": "module harness(input clk); endmodule\n"}, optimise="-O0").directory != one.directory


def test_memories_of_zeros_are_set_by_a_loop_and_others_word_by_word(tmp_path):
    def memory(name, words):
        lines = "".join(f"    {name}[{at}] = 8'h{word:02x};\n" for at, word in enumerate(words))
        return f"  reg [7:0] {name} [{len(words) - 1}:0];\n  initial begin\n{lines}  end\n"

    zeros, others = memory("m", [0] * 70), memory("k", [0, 0, 3]) + memory("l", [1, 0])
    found = with_loops(zeros + others)
    assert found.endswith(others)
    assert "for (at = 0; at < 70; at = at + 1) m[at] = 8'h00;\n" in found
    assert "m[0] =" not in found
    # Verilator starts registers at random: only what is set is 0.
    words = ", ".join(["m[0]", "m[1]", "m[69]", *(f"k[{at}]" for at in range(3)), "l[0]", "l[1]"])
    show = f'  always @(posedge clk) begin $display("%0d %0d %0d %0d %0d %0d %0d %0d", {words}); $finish; end\n'
    build = build_bulk({"h.v": f"module harness(input clk);\n{zeros}{others}{show}endmodule\n"})
    log = run_command(bulk_command(build), tmp_path, build.simulator.environment, 60)
    assert "0 0 0 0 0 3 1 0" in log.splitlines()


def test_a_failed_build_leaves_nothing(own_cache):
    with pytest.raises(SimulationError, match=r"verilator.*ended with status"):
        build_bulk({"h.v": "module harness(input clk; endmodule\n"})
    assert not [path for path in (own_cache / "builds").iterdir() if path.is_dir()]


def _fill_slowly(folder: Path) -> None:
    (folder / "one").write_text("1")
    time.sleep(0.3)
    (folder / "two").write_text(str(os.getpid()))


def _fetch(_: int) -> tuple[bool, str]:
    folder = cached_folder("shelf", "entry", _fill_slowly)
    return (folder / "one").exists(), (folder / "two").read_text()


@pytest.mark.usefixtures("own_cache")
def test_many_processes_share_one_build():
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        results = pool.map(_fetch, range(8), chunksize=1)
    assert all(complete for complete, _ in results)
    assert len({owner for _, owner in results}) == 1


def test_a_crash_while_filling_is_cleaned_up(own_cache):
    def fill(folder: Path) -> None:
        (folder / "half").write_text("")
        raise KeyError("stop")

    with pytest.raises(KeyError):
        cached_folder("shelf", "entry", fill)
    assert not (own_cache / "shelf" / "entry").exists()
    assert (cached_folder("shelf", "entry", _fill_slowly) / "two").exists()


@pytest.mark.parametrize("damage", ["missing", "shorter", "no note"])
def test_a_damaged_entry_is_filled_anew(damage, own_cache):
    folder = cached_folder("shelf", "entry", _fill_slowly)
    damaged = folder / ("sizes.json" if damage == "no note" else "one")
    if damage == "shorter":
        damaged.write_text("")
    else:
        damaged.unlink()
    assert (cached_folder("shelf", "entry", _fill_slowly) / "one").read_text() == "1"

    def fill(folder: Path) -> None:
        raise AssertionError("an intact entry must not be filled")

    assert cached_folder("shelf", "entry", fill) == own_cache / "shelf" / "entry"


def test_white_space_in_the_build_folder_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOEMATIC_SIM_BUILD", str(tmp_path / "a b"))
    with pytest.raises(
        SimulationError, match=r"^Verilator builds need a path without white space, because of GNU make, not '.*a b'$"
    ):
        build_bulk({"harness.v": "module harness(input clk); endmodule\n"})


def test_a_build_folder_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AUTOEMATIC_SIM_BUILD", str(tmp_path / "file" / "sim"))
    with pytest.raises(
        OSError, match=r"AUTOEMATIC_SIM_BUILD .* must be one that can be written, not /.*/file/sim: Not a"
    ):
        cached_folder("shelf", "entry", _fill_slowly)
    with (
        pytest.raises(OSError, match=r"must be one that can be written, not /.*/file/sim: Not a"),
        runner.run_folder("run"),
    ):
        pass


@pytest.mark.usefixtures("own_cache")
def test_tools_that_builds_need_are_named(monkeypatch, tmp_path):
    with pytest.raises(OSError, match=r"^no_such_program does not start: No such file or directory$"):
        run_command(["no_such_program"], tmp_path)
    bare = runner.Simulator("verilator", "1", {"PATH": str(tmp_path)})
    monkeypatch.setattr(runner, "find_simulator", lambda _: bare)
    (tmp_path / "perl").write_text("")
    (tmp_path / "perl").chmod(0o755)
    message = r"^make and c\+\+ not found: Verilator needs perl, make and g\+\+ on PATH$"
    with pytest.raises(SimulationError, match=message):
        build_bulk({"h.v": "module harness(input clk); endmodule\n"})
    with pytest.raises(SimulationError, match=message):
        build_cocotb({"counter.v": COUNTER}, "counter", COUNTER_PORTS)


WITHOUT_COCOTB = """\
import importlib.metadata, sys

right = importlib.metadata.version
sys.modules.update(dict.fromkeys(("cocotb", "cocotb_coverage", "cocotbext", "cocotb_tools")))

def version(name):
    if name == "cocotb":
        raise importlib.metadata.PackageNotFoundError(name)
    return right(name)

importlib.metadata.version = version
import sim.accelerator, sim.real_input, sim.regress, synth.mutate
print(sim.regress.main(["pe-slots-1-small-fast"]), synth.mutate.main(["pe"]), sim.regress.main(["--vectors", "0"]))
"""


def test_commands_start_without_cocotb_and_say_where_it_is_needed():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_COCOTB],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert done.stdout == "2 1 2\n"
    assert done.stderr.splitlines() == [
        "sim.regress: cocotb was not found: this needs pip install -e '.[sim]'",
        "error: cocotb was not found: this needs pip install -e '.[sim]'",
        "sim.regress: --vectors must be positive, not 0",
    ]


def test_time_limit_kills_children_too(tmp_path):
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    started = time.monotonic()
    with pytest.raises(SimulationError, match=r"ran longer than 0\.5 s"):
        run_command([sys.executable, "-c", script], tmp_path, timeout=0.5)
    assert time.monotonic() - started < 20


def test_command_output_and_status(tmp_path):
    assert run_command([sys.executable, "-c", "print('hello')"], tmp_path, log=tmp_path / "log") == "hello\n"
    assert (tmp_path / "log").read_text() == "hello\n"
    with pytest.raises(SimulationError, match=r"ended with status 3\nbye"):
        run_command([sys.executable, "-c", "import sys; print('bye'); sys.exit(3)"], tmp_path)


def test_works_when_the_environment_is_not_active(monkeypatch, own_cache):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    monkeypatch.delenv("VERILATOR_ROOT", raising=False)
    runner._find.cache_clear()
    build = build_bulk({"h.v": "module harness(input clk); initial $finish; endmodule\n"})
    runner._find.cache_clear()
    run_command(runner.bulk_command(build), own_cache)


def test_seed_from_environment(monkeypatch):
    monkeypatch.delenv("SEED", raising=False)
    assert runner.seed_from_environment() == runner.DEFAULT_SEED
    assert runner.seed_from_environment(9) == 9
    monkeypatch.setenv("SEED", "123")
    assert runner.seed_from_environment() == 123
    monkeypatch.setenv("SEED", "-1")
    with pytest.raises(ValueError, match=r"^SEED must be a non-negative integer, not '-1'$"):
        runner.seed_from_environment()


def test_unknown_or_missing_simulator(monkeypatch):
    with pytest.raises(ValueError, match=r"^simulator must be one of verilator, icarus, not 'ghdl'$"):
        runner.find_simulator("ghdl")
    monkeypatch.setenv("PATH", "/nowhere")
    runner._find.cache_clear()
    with pytest.raises(
        SimulationError, match=r"^icarus was not found: install Icarus Verilog, so that iverilog is on PATH$"
    ):
        runner.find_simulator("icarus")
    runner._find.cache_clear()


@pytest.fixture
def compiling(tmp_path, monkeypatch):
    """Return a function that compiles a text through the compiler cache, beside a small ``verilated.h``, and returns the exit status."""
    include = tmp_path / "tool" / "include"
    include.mkdir(parents=True)
    (include / "verilated.h").write_text("inline int one() { return 1; }\n")
    monkeypatch.setenv("SIM_OBJCACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("VERILATOR_ROOT", str(tmp_path / "tool"))

    def compiled(text, flags=("-O1",)):
        source = tmp_path / "design.cpp"
        source.write_text(text)
        target = tmp_path / "design.o"
        target.unlink(missing_ok=True)
        status = objcache.main(["c++", "-I.", f"-I{include}", *flags, "-c", "-o", str(target), str(source)])
        assert target.exists() == (status == 0)
        return status

    return compiled


def test_the_header_is_precompiled_once_for_each_set_of_flags(compiling, tmp_path):
    def headers():
        return sorted((tmp_path / "cache").glob("*/*.gch"))

    text = '#include "verilated.h"\nint two() { return 2 * one(); }\n'
    assert compiling(text) == 0
    [first] = headers()
    made = first.stat().st_mtime_ns
    assert compiling(text) == 0
    assert (headers(), first.stat().st_mtime_ns) == ([first], made)
    assert compiling(text, ("-O0",)) == 0
    assert len(headers()) == 2
    # One that was cut off is made anew.
    first.write_bytes(b"")
    assert compiling(text) == 0
    assert first.stat().st_size > 1000


def test_a_source_that_is_wrong_fails_with_and_without_a_header(compiling, tmp_path, capfd):
    wrong = '#include "verilated.h"\nint two() { return 2 * three(); }\n'
    assert compiling(wrong) != 0
    assert capfd.readouterr().err.count("error:") == 1
    (tmp_path / "tool" / "include" / "verilated.h").write_text("no header\n")
    assert compiling(wrong, ("-O0",)) != 0
    assert "verilated.h" in capfd.readouterr().err
    assert compiling("int three() { return 3; }\n", ("-O0",)) == 0
