"""Packages lean on each other in one direction only."""

import ast
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

SHARED = [
    *("model/formats.py", "model/block_scaled.py", "model/memory.py", "model/registers.py", "hdl/registers.py"),
    *("model/dma.py", "model/fp32.py", "hdl/dma.py", "sim/streams.py", "sim/bench_dma.py", "sim/axi_memory.py"),
    *("model/activation.py", "model/activity.py", "hdl/activation.py", "hdl/activity.py"),
    "sim/player.py",
    "model/frames.py",
    *("model/checkpoint.py", "model/tokenizer.py", "model/safetensors_file.py", "model/gguf_file.py"),
    "model/nvfp4_layouts.py",
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "hdl/lib").glob("*.py"))),
    *("sim/runner.py", "sim/harness.py", "sim/bench_common.py", "sim/bench_registers.py"),
    *("synth/__main__.py", "synth/yosys.py", "synth/stat.py", "synth/memories.py", "synth/adders.py"),
    *("synth/liberty.py", "synth/libraries.py", "synth/canonical.py", "synth/nldm.py", "synth/sta.py"),
    *("synth/opensta.py", "synth/points.py", "synth/pictures.py", "model/pictures.py", "model/command.py"),
    *("synth/macros.py", "synth/liberty_tree.py", "synth/cells.py", "synth/netlist.py"),
    *("synth/power.py", "synth/saif.py"),
]


def imported(path):
    names = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in names if name.partition(".")[0] in {"hdl", "model", "sim", "synth"}}


@pytest.mark.parametrize("path", SHARED)
def test_shared_modules_import_only_shared_modules(path):
    allowed = {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in SHARED} | {
        "hdl.lib",
        "model",
    }
    modules = {name for name in imported(path) if (ROOT / f"{name.replace('.', '/')}.py").exists()}
    assert modules <= allowed


@pytest.mark.parametrize("path", sorted(str(p.relative_to(ROOT)) for p in (ROOT / "model").rglob("*.py")))
def test_the_model_imports_only_the_model(path):
    assert {name.partition(".")[0] for name in imported(path)} <= {"model"}


@pytest.mark.parametrize("path", sorted(str(p.relative_to(ROOT)) for p in (ROOT / "hdl").rglob("*.py")))
def test_hardware_imports_only_hardware_and_model(path):
    assert {name.partition(".")[0] for name in imported(path)} <= {"hdl", "model"}


def test_the_picture_is_what_its_script_draws():
    spec = importlib.util.spec_from_file_location("datapath_svg", ROOT / "docs/datapath_svg.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs/datapath.svg").read_text() == module.picture()
