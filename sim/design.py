"""Verilog of the generator's blocks for simulation, generated once and cached."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from hdl.build import BLOCKS, Generated, generate
from hdl.lib.toolchain import tool_versions
from sim.runner import cached_folder, digest

__all__ = ["config_of", "generated"]


@cache
def _generator_sources() -> str:
    """Hash of everything that the generator's output depends on."""
    root = Path(__file__).resolve().parents[1]
    files = sorted([*root.glob("hdl/**/*.py"), *root.glob("model/**/*.py")])
    return digest({str(path.relative_to(root)): path.read_text(encoding="utf-8") for path in files})


def config_of(block: str, **parameters: Any) -> Any:
    """Return the model's configuration object of a block.

    Raises
    ------
    ValueError
        There is no such block.
    """
    if block not in BLOCKS:
        raise ValueError(f"block must be one of {', '.join(BLOCKS)}, not {block!r}")
    return BLOCKS[block].config(**parameters)


def generated(block: str, **parameters: Any) -> Generated:
    """Return what `hdl.build.generate` returns, from the cache if neither generator nor parameters changed."""
    config_of(block, **parameters)

    def fill(folder: Path) -> None:
        result = generate(block, **parameters)
        (folder / "block.v").write_text(result.verilog, encoding="utf-8", newline="\n")
        (folder / "block.json").write_text(json.dumps(result.sidecar), encoding="utf-8")

    folder = cached_folder("verilog", digest(block, parameters, _generator_sources(), tool_versions()), fill)
    sidecar = json.loads((folder / "block.json").read_text(encoding="utf-8"))
    return Generated((folder / "block.v").read_text(encoding="utf-8"), sidecar)
