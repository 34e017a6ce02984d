"""``python -m hdl.build``: Verilog of any block, with a JSON sidecar that describes it."""

import argparse
import dataclasses
import json
import re
import sys
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amaranth.lib import wiring

from hdl.accelerator import Accelerator
from hdl.array import Array
from hdl.dma import ReadDma, WriteDma
from hdl.lib.toolchain import tool_versions
from hdl.lib.verilog import VerilogError, to_verilog
from hdl.pe import Pe
from hdl.policy import PolicyUnit
from hdl.ppu import Ppu
from hdl.tile_engine import TileEngine
from hdl.uart_pe import UartPe
from hdl.vmac import Vmac
from hdl.vmac_autofp2 import VmacAutoFp2
from hdl.vmac_nvfp4 import VmacNvfp4
from hdl.weight_encoder import WeightEncoder
from model.accelerator import AcceleratorConfig, registers_of
from model.array import ArrayConfig
from model.dma import DmaConfig
from model.pe import PeConfig
from model.policy import PolicyFormat
from model.ppu import PpuConfig
from model.registers import RegisterMap, emit
from model.tile_engine import EngineConfig
from model.uart_pe import UartPeConfig
from model.vmac import VmacConfig
from model.vmac_autofp2 import AutoFp2Config
from model.vmac_nvfp4 import Nvfp4Config
from model.weight_encoder import WeightEncoderConfig

__all__ = ["BLOCKS", "Block", "Generated", "generate", "main", "parse_parameters"]


@dataclass(frozen=True)
class Block:
    """A block that can be generated.

    Attributes
    ----------
    name : str
        Also the name of its Verilog module.
    component : type
        Takes one argument, the configuration.
    config : type
        A frozen dataclass with a default for every parameter.
    summary : str
        One line.
    registers : callable, optional
        Gives the registers of a configuration that a driver sees; written as Markdown, C header and JSON beside the Verilog.
    """

    name: str
    component: type[wiring.Component]
    config: type
    summary: str
    registers: Callable[[Any], RegisterMap] | None = None

    def parameters(self) -> dict[str, Any]:
        """Names and defaults of the parameters."""
        return {field.name: field.default for field in dataclasses.fields(self.config)}

    def build(self, config: object) -> wiring.Component:
        """Return the component for ``config``, an object of type :attr:`config`."""
        return self.component(config)


@dataclass(frozen=True)
class Generated:
    """Verilog text of a block and its description, ready to be written as JSON."""

    verilog: str
    sidecar: dict[str, Any]


BLOCKS = {
    block.name: block
    for block in (
        Block("vmac", Vmac, VmacConfig, "AutoEMatic vector MAC: AutoFP2, NVFP4 and AutoFP6"),
        Block("vmac_nvfp4", VmacNvfp4, Nvfp4Config, "baseline: NVFP4-only vector MAC"),
        Block("vmac_autofp2", VmacAutoFp2, AutoFp2Config, "baseline: AutoFP2-only vector MAC"),
        Block("weight_encoder", WeightEncoder, WeightEncoderConfig, "NVFP4 codes to packed pairs of AutoFP2 digits"),
        Block("pe", Pe, PeConfig, "processing element: operand buffers, schedule, vector MAC, accumulators"),
        Block("uart_pe", UartPe, UartPeConfig, "processing element behind a serial line, for FPGA boards"),
        Block("array", Array, ArrayConfig, "array of processing elements with multicast buses and drain chains"),
        Block("tile_engine", TileEngine, EngineConfig, "array with the banks and weight encoders that feed it"),
        Block(
            "accelerator",
            Accelerator,
            AcceleratorConfig,
            "matrix products from memory to memory, over AXI",
            registers_of,
        ),
        Block(
            "policy", PolicyUnit, PolicyFormat, "precision of the next layer from the activities of the layers before"
        ),
        Block("ppu", Ppu, PpuConfig, "post-processing: sums to binary32, activation, residual, NVFP4 groups, signals"),
        Block("read_dma", ReadDma, DmaConfig, "AXI4 manager: bytes at any address to a stream of words"),
        Block("write_dma", WriteDma, DmaConfig, "AXI4 manager: a stream of words to bytes at any address"),
    )
}
"""Every block by name."""

_CLOCK_PORTS = {"clk": "clock, rising edge", "rst": "synchronous reset, active high"}


def generate(name: str, *, sources: bool = False, **parameters: object) -> Generated:
    """Generate block ``name``.

    Parameters
    ----------
    name : str
        A key of :data:`BLOCKS`.
    sources : bool
        Keep source paths in the Verilog.
    **parameters
        Fields of the block's configuration.

    Raises
    ------
    ValueError, TypeError
        Unknown block, unknown parameter, or a value outside its range.
    """
    if name not in BLOCKS:
        raise ValueError(f"block must be one of {', '.join(BLOCKS)}, not {name!r}")
    block = BLOCKS[name]
    unknown = sorted(set(parameters) - set(block.parameters()))
    if unknown:
        raise ValueError(f"parameter of {name} must be one of {', '.join(block.parameters())}, not {unknown[0]!r}")
    config = block.config(**parameters)
    component = block.build(config)
    verilog = to_verilog(component, name, sources=sources)
    return Generated(verilog, _sidecar(block, config, component, verilog))


def _sidecar(block: Block, config: Any, component: Any, verilog: str) -> dict[str, Any]:
    clocked = f"module {block.name}(" in verilog and " clk" in verilog.partition(");")[0].replace(",", " ").replace(
        "(", " "
    )
    ports = [
        {"name": p, "direction": "input", "width": 1, "meaning": text} for p, text in _CLOCK_PORTS.items() if clocked
    ]
    for path, member, value in component.signature.flatten(component):
        port = "__".join(map(str, path))
        ports.append(
            {
                "name": port,
                "direction": "input" if member.flow == wiring.In else "output",
                "width": len(getattr(value, "as_value", lambda value=value: value)()),
                # Ports of an array of streams share their meaning.
                "meaning": component.port_meanings["__".join(part for part in path if isinstance(part, str))],
            }
        )
    timing = {key: getattr(component, key) for key in ("latency", "psum_delay") if hasattr(component, key)}
    return {
        "block": block.name,
        "top": block.name,
        "parameters": dataclasses.asdict(config),
        "ports": ports,
        **timing,
        "throughput": component.throughput,
        "tools": tool_versions(),
    }


def settings_of(texts: Sequence[str], blocks: Sequence[Block]) -> dict[str, str]:
    """Return the values of ``NAME=VALUE`` texts, by name.

    Raises
    ------
    ValueError
        A text has no ``=``, or a name occurs twice or is no parameter of any block.
    """
    settings: dict[str, str] = {}
    known = sorted({parameter for block in blocks for parameter in block.parameters()})
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--set must be NAME=VALUE, not {text!r}")
        if name not in known:
            of = blocks[0].name if len(blocks) == 1 else "all"
            raise ValueError(f"parameter of {of} must be one of {', '.join(known)}, not {name!r}")
        if name in settings:
            raise ValueError(f"--set must name a parameter once, not {name!r} twice")
        settings[name] = value
    return settings


def parse_parameters(block: Block, settings: dict[str, str]) -> dict[str, Any]:
    """Turn ``name=value`` texts into the types of ``block``'s parameters.

    Raises
    ------
    ValueError
        A value is not of the parameter's type.
    """
    kinds = typing.get_type_hints(block.config)
    parsed: dict[str, Any] = {}
    for name, text in settings.items():
        if name not in block.parameters():
            continue
        kind = kinds[name]
        if kind is bool:
            if text not in ("true", "false"):
                raise ValueError(f"{name} must be true or false, not {text!r}")
            parsed[name] = text == "true"
        elif kind is int:
            if not re.fullmatch(r"-?[0-9]{1,18}", text):
                raise ValueError(f"{name} must be an integer of at most 18 digits, not {text[:40]!r}")
            parsed[name] = int(text)
        else:
            parsed[name] = text
    return parsed


def _describe(block: Block) -> str:
    kinds = typing.get_type_hints(block.config)
    lines = [f"{block.name}: {block.summary}"]
    for name, default in block.parameters().items():
        choices = typing.get_args(kinds[name])
        domain = "|".join(choices) if choices else kinds[name].__name__
        lines.append(f"    {name}={str(default).lower() if kinds[name] is bool else default}  ({domain})")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m hdl.build", description="Write Verilog and a JSON sidecar of one block or all."
    )
    parser.add_argument("block", nargs="?", help=f"{', '.join(BLOCKS)} or all")
    parser.add_argument("--list", action="store_true", help="list blocks and parameters")
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="parameters; with all, of the blocks that have them",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("build/verilog"),
        metavar="DIR",
        help="output folder (default: %(default)s)",
    )
    parser.add_argument("--sources", action="store_true", help="keep source paths in the Verilog")
    options = parser.parse_args(arguments)
    try:
        if options.list:
            print("\n".join(map(_describe, _chosen(options.block or "all"))))
        else:
            _write(options)
    except (ValueError, TypeError, VerilogError, OSError) as error:
        print(f"hdl.build: {error}", file=sys.stderr)
        return 2
    return 0


def _chosen(name: str) -> list[Block]:
    if name != "all" and name not in BLOCKS:
        raise ValueError(f"block must be one of {', '.join(BLOCKS)} or all, not {name!r}")
    return list(BLOCKS.values()) if name == "all" else [BLOCKS[name]]


def _write(options: argparse.Namespace) -> None:
    if options.block is None:
        raise ValueError(f"block must be given: {', '.join(BLOCKS)} or all")
    blocks = _chosen(options.block)
    settings = settings_of(options.set, blocks)
    # Every configuration is checked before anything is written.
    chosen = [(block, parse_parameters(block, settings)) for block in blocks]
    for block, parameters in chosen:
        block.config(**parameters)
    options.output.mkdir(parents=True, exist_ok=True)
    for block, parameters in chosen:
        generated = generate(block.name, sources=options.sources, **parameters)
        for suffix, text in (
            ("v", generated.verilog),
            ("json", json.dumps(generated.sidecar, indent=2, ensure_ascii=False) + "\n"),
        ):
            (options.output / f"{block.name}.{suffix}").write_text(text, encoding="utf-8", newline="\n")
        if block.registers is not None:
            emit(block.registers(block.config(**parameters)), options.output)
        print(f"{options.output / block.name}.v  {dataclasses.asdict(block.config(**parameters))}")


if __name__ == "__main__":
    sys.exit(main())
