"""Memory-fed bulk harness: a row of a binary file per clock cycle in, a row out, and no Python in between.

The harness is generated from a block's port list (the sidecar of ``python -m hdl.build``), so it fits every block.
Row ``n`` drives the inputs from just after clock edge ``n`` to just after edge ``n + 1``; the outputs of row ``n``
are taken just before edge ``n + 1``. An output that follows an input combinationally is therefore in the same row,
and one behind ``L`` registers is ``L`` rows later. Reset is an input like any other. The format of the files is in
docs/simulation.md.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sim.runner import Build, build_bulk, bulk_command, run_command, run_folder

__all__ = ["BulkHarness", "Port", "Row", "harness_verilog", "pack_fields", "simulate", "unpack_fields"]

CLOCK = "clk"
FLAGS = "x"
UNKNOWN = "__x"


@dataclasses.dataclass(frozen=True)
class Port:
    """A port in a row: its name, its width in bits and the byte at which it starts."""

    name: str
    width: int
    offset: int

    @property
    def size(self) -> int:
        """Bytes in the row."""
        return -(-self.width // 8)


@dataclasses.dataclass(frozen=True)
class Row:
    """Where every port lies in a row; each starts at a byte, little-endian.

    Attributes
    ----------
    ports : tuple of Port
        In the order of the row.
    size : int
        Bytes of a row, a multiple of four.
    """

    ports: tuple[Port, ...]
    size: int

    @classmethod
    def of(cls, widths: Mapping[str, int]) -> "Row":
        """Lay out ports of the given widths, in their order."""
        ports = []
        offset = 0
        for name, width in widths.items():
            ports.append(Port(name, width, offset))
            offset += ports[-1].size
        return cls(tuple(ports), -(-max(offset, 1) // 4) * 4)


def pack_fields(values: np.ndarray, width: int) -> np.ndarray:
    """Pack equal fields into the bytes of a port, field 0 lowest.

    Parameters
    ----------
    values : ndarray of integers [N, fields]
        Fields of ``width`` bits, non-negative.
    width : int
        1 to 64.

    Returns
    -------
    ndarray of uint8 [N, ceil(fields * width / 8)]
        Little-endian, unused bits 0.

    Raises
    ------
    ValueError
        A field has more than ``width`` bits, or the width is out of range.
    """
    if not 1 <= width <= 64:
        raise ValueError(f"width must be from 1 to 64, not {width}")
    values = np.asarray(values)
    if values.ndim != 2:
        raise ValueError(f"values must be an array [N, fields], not of shape {values.shape}")
    if width < 64 and values.size and (int(values.min()) < 0 or int(values.max()) >> width):
        worst = int(values.max()) if int(values.max()) >> width else int(values.min())
        raise ValueError(f"values must fit {width} bits unsigned, not {worst}")
    rows, fields = values.shape
    if width % 8 == 0:
        octets = np.ascontiguousarray(values, dtype="<u8").view(np.uint8).reshape(rows, fields, 8)
        return np.ascontiguousarray(octets[:, :, : width // 8]).reshape(rows, fields * width // 8)
    together = next(n for n in (1, 2, 4, 8) if n * width % 8 == 0)
    if together * width > 64:
        bits = np.unpackbits(
            np.ascontiguousarray(values, dtype="<u8").view(np.uint8).reshape(rows, fields, 8), axis=2, bitorder="little"
        )
        return np.packbits(bits[:, :, :width].reshape(rows, fields * width), axis=1, bitorder="little")
    groups = -(-fields // together)
    words = np.zeros((rows, groups), np.uint64)
    for k in range(together):
        part = values[:, k::together].astype(np.uint64)
        words[:, : part.shape[1]] |= part << np.uint64(k * width)
    octets = words.view(np.uint8).reshape(rows, groups, 8)[:, :, : together * width // 8]
    return np.ascontiguousarray(octets).reshape(rows, groups * together * width // 8)[:, : -(-fields * width // 8)]


def unpack_fields(octets: np.ndarray, width: int, fields: int) -> np.ndarray:
    """Undo `pack_fields`: bytes [N, size] to uint64 [N, fields].

    Raises
    ------
    ValueError
        Fewer bytes than ``fields`` of ``width`` bits need.
    """
    if octets.shape[1] * 8 < width * fields:
        raise ValueError(f"octets must hold {fields} fields of {width} bits, not {octets.shape[1] * 8} bits")
    bits = np.unpackbits(np.ascontiguousarray(octets), axis=1, bitorder="little")[:, : width * fields].reshape(
        len(octets), fields, width
    )
    wide = np.zeros((len(octets), fields, 64), np.uint8)
    wide[:, :, :width] = bits
    return np.packbits(wide, axis=2, bitorder="little").view("<u8").reshape(len(octets), fields)


def _slice(name: str, offset: int, width: int) -> str:
    return f"{name}[{offset * 8 + width - 1}:{offset * 8}]"


def harness_verilog(
    sidecar: Mapping[str, Any], feedback: Mapping[str, str] | None = None, plusargs: Sequence[str] = ()
) -> tuple[str, Row, Row]:
    """Write the harness around one block.

    Parameters
    ----------
    sidecar : mapping
        ``top`` (name of the module) and ``ports`` (``name``, ``direction`` and ``width`` of each); the clock, if any,
        is ``clk``.
    feedback : mapping of str to str, optional
        Input port to the output port of the same width that may drive it: the input gets a further column,
        ``<input>__feedback``, and a row in which that is 1 takes the output instead of the file's value.
    plusargs : sequence of str, optional
        Input ports that are constant during a run and set by a plusarg of their name, up to 32 bits.

    Returns
    -------
    text : str
        The Verilog of module ``harness``, with the one port ``clk``.
    inputs, outputs : Row
        The layouts of the rows. The last output column, ``x``, has a bit per output that is 1 if any bit of it is
        unknown.

    Raises
    ------
    ValueError
        Ports that do not exist, or of wrong width, in ``feedback`` or ``plusargs``.
    """
    feedback = dict(feedback or {})
    inputs = {p["name"]: int(p["width"]) for p in sidecar["ports"] if p["direction"] == "input" and p["name"] != CLOCK}
    outputs = {p["name"]: int(p["width"]) for p in sidecar["ports"] if p["direction"] == "output"}
    clocked = any(p["name"] == CLOCK for p in sidecar["ports"])
    for target, source in feedback.items():
        if target not in inputs or source not in outputs or inputs[target] != outputs[source]:
            raise ValueError(f"feedback must name an input and an output of one width, not {target!r} and {source!r}")
    for name in plusargs:
        if name not in inputs or inputs[name] > 32:
            raise ValueError(f"plusargs must name inputs of up to 32 bits, not {name!r}")
    columns = {name: width for name, width in inputs.items() if name not in plusargs}
    columns.update({f"{name}__feedback": 1 for name in feedback})
    row_in = Row.of(columns)
    row_out = Row.of({**outputs, FLAGS: max(len(outputs), 1)})
    at = {port.name: port for port in row_in.ports}

    lines = ["module harness(input wire clk);"]
    lines += [f"    reg [{row_in.size * 8 - 1}:0] row;", f"    reg [{row_out.size * 8 - 1}:0] result;"]
    lines += ["    integer source, sink, got;", "    reg [8191:0] source_name, sink_name;", "    reg full;"]
    lines += [f"    wire [{width - 1}:0] \\{name} ;" for name, width in outputs.items()]
    lines += [f"    reg [{inputs[name] - 1}:0] \\{name} ;" for name in plusargs]
    connections = [".clk(clk)"] if clocked else []
    for name, width in inputs.items():
        value = f"\\{name} " if name in plusargs else _slice("row", at[name].offset, width)
        if name in feedback:
            value = f"(row[{at[f'{name}__feedback'].offset * 8}] ? \\{feedback[name]}  : {value})"
        connections.append(f".\\{name} ({value})")
    connections += [f".\\{name} (\\{name} )" for name in outputs]
    lines += [f"    \\{sidecar['top']} dut (", ",\n".join("        " + item for item in connections), "    );"]
    lines += ["    initial begin", "        full = 1'b0;"]
    for name in plusargs:
        lines += [f"        \\{name} = 0;", f'        got = $value$plusargs("{name}=%d", \\{name} );']
    lines += [
        '        got = $value$plusargs("source=%s", source_name);',
        '        got = $value$plusargs("sink=%s", sink_name);',
    ]
    lines += ['        source = $fopen(source_name, "rb");', '        sink = $fopen(sink_name, "wb");']
    lines += [
        "        if (source == 0 || sink == 0) begin",
        '            $display("HARNESS cannot open its files");',
        "            $finish;",
    ]
    lines += [
        "        end",
        "`ifdef WAVES",
        '        got = $value$plusargs("waves=%s", source_name);',
        "        $dumpfile(source_name);",
    ]
    lines += ["        $dumpvars(0, harness);", "`endif", "    end"]
    lines += [
        "    always @(negedge clk) begin",
        "        got = $fread(row, source);",
        f"        full = got == {row_in.size};",
    ]
    lines += [
        "        if (!full) begin",
        "            $fclose(sink);",
        "            $finish;",
        "        end",
        "    end",
    ]
    lines += ["    always @(posedge clk) if (full) begin", "        result = 0;"]
    for port in row_out.ports:
        if port.name != FLAGS:
            lines += [f"        {_slice('result', port.offset, port.width)} = \\{port.name} ;"]
    flags = row_out.ports[-1].offset * 8
    for k, name in enumerate(outputs):
        lines += [f"        result[{flags + k}] = (^\\{name} ) === 1'bx;"]
    lines += ['        $fwrite(sink, "%u", result);', "    end", "endmodule", ""]
    return "\n".join(lines), row_in, row_out


def simulate(build: Build, folder: Path, words: Sequence[str], timeout: float, seed: int = 1) -> str:
    """Run a compiled harness in a folder and return what it printed.

    Parameters
    ----------
    build : Build
        From `sim.runner.build_bulk`. If it records waveforms, their file is the plusarg ``waves``, and its path is printed.
    folder : Path
    words : sequence of str
        Further plusargs.
    timeout : float
        Wall-clock limit in seconds.
    seed : int
        Of what has no power-up value, with Verilator.

    Raises
    ------
    SimulationError
        The simulation failed or was too slow.
    """
    words = list(words)
    if build.simulator.name == "verilator":
        words += ["+verilator+rand+reset+2", f"+verilator+seed+{seed}"]
    if build.waves:
        words.append(f"+waves={folder / 'dump.vcd'}")
        print(f"waveforms: {folder / 'dump.vcd'}")
    return run_command([*bulk_command(build), *words], folder, build.simulator.environment, timeout)


class BulkHarness:
    """A block inside the harness, compiled once, to run any number of rows through.

    Parameters
    ----------
    sources : mapping of str to str
        File name to Verilog text of the block.
    sidecar : mapping
        As for `harness_verilog`.
    simulator : str
        ``"verilator"`` or ``"icarus"``.
    feedback, plusargs
        As for `harness_verilog`.
    waves : bool
        Record every run; the file stays in the run's folder, whose path is printed.
    optimise : str
        Flag of the C++ compiler, see `sim.runner.build_bulk`.

    Attributes
    ----------
    inputs, outputs : Row
        The layouts of the files.

    Raises
    ------
    SimulationError
        The simulator is missing or rejects the block.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        sidecar: Mapping[str, Any],
        simulator: str = "verilator",
        feedback: Mapping[str, str] | None = None,
        plusargs: Sequence[str] = (),
        waves: bool = False,
        optimise: str = "-O1",
    ) -> None:
        text, self.inputs, self.outputs = harness_verilog(sidecar, feedback, plusargs)
        self._plusargs = tuple(plusargs)
        self._build = build_bulk({**sources, "harness.v": text}, simulator, waves, optimise)

    @property
    def build(self) -> Build:
        """The compiled harness."""
        return self._build

    def pack(self, rows: Mapping[str, np.ndarray]) -> np.ndarray:
        """Lay the columns out as the file that the harness reads: uint8 [N, row bytes].

        Parameters
        ----------
        rows : mapping of str to ndarray
            Every input column: integers or booleans [N] for ports up to 64 bits, or uint8 [N, ceil(width / 8)]
            little-endian.

        Raises
        ------
        ValueError
            A column is missing, unknown, of another length or shape than the port needs, or has bits beyond the
            port's width.
        """
        expected = {port.name for port in self.inputs.ports}
        if set(rows) != expected:
            raise ValueError(f"rows must have exactly the columns {sorted(expected)}, not {sorted(rows)}")
        count = len(next(iter(rows.values())))
        data = np.zeros((count, self.inputs.size), np.uint8)
        # $fread fills from the most significant byte, so a row lies in the file back to front.
        row = data[:, ::-1]
        for port in self.inputs.ports:
            column = np.asarray(rows[port.name])
            if len(column) != count:
                raise ValueError(f"rows[{port.name!r}] must have {count} rows like the others, not {len(column)}")
            if column.ndim == 1 and port.width <= 64:
                column = pack_fields(column.reshape(count, 1), port.width)
            if column.dtype != np.uint8 or column.shape != (count, port.size):
                raise ValueError(
                    f"rows[{port.name!r}] must be uint8 of shape {(count, port.size)}, "
                    f"not {column.dtype} of {column.shape}"
                )
            spare = port.size * 8 - port.width
            if spare and count and int(column[:, -1].max()) >> (8 - spare):
                raise ValueError(
                    f"rows[{port.name!r}] must fit {port.width} bits, not {int(column[:, -1].max()):#x} in its top byte"
                )
            row[:, port.offset : port.offset + port.size] = column
        return data

    def run_packed(
        self, data: np.ndarray, plusargs: Mapping[str, int] | None = None, timeout: float = 900.0
    ) -> dict[str, np.ndarray]:
        """Simulate a file made by `pack`; everything else as `run`."""
        plusargs = dict(plusargs or {})
        if set(plusargs) != set(self._plusargs):
            raise ValueError(f"plusargs must set exactly {sorted(self._plusargs)}, not {sorted(plusargs)}")
        with run_folder("bulk", keep=self._build.waves) as folder:
            source, sink = folder / "source.bin", folder / "sink.bin"
            data.tofile(source)
            words = [f"+source={source}", f"+sink={sink}", *(f"+{name}={value}" for name, value in plusargs.items())]
            log = simulate(self._build, folder, words, timeout)
            raw = np.fromfile(sink, np.uint8)
        if raw.size != len(data) * self.outputs.size:
            raise ValueError(
                f"the simulation must write {len(data)} rows of {self.outputs.size} bytes, not {raw.size} bytes\n{log}"
            )
        table = raw.reshape(len(data), self.outputs.size)
        result: dict[str, np.ndarray] = {}
        for port in self.outputs.ports:
            octets = table[:, port.offset : port.offset + port.size]
            if port.name == FLAGS:
                names = [other.name for other in self.outputs.ports if other.name != FLAGS]
                bits = np.unpackbits(octets, axis=1, bitorder="little")
                result.update({name + UNKNOWN: bits[:, k].astype(bool) for k, name in enumerate(names)})
            elif port.width <= 64:
                wide = np.zeros((len(data), 8), np.uint8)
                wide[:, : port.size] = octets
                result[port.name] = wide.view("<u8").reshape(-1)
            else:
                result[port.name] = np.ascontiguousarray(octets)
        return result

    def run(
        self, rows: Mapping[str, np.ndarray], plusargs: Mapping[str, int] | None = None, timeout: float = 900.0
    ) -> dict[str, np.ndarray]:
        """Simulate rows from power-up and return the outputs of each.

        Parameters
        ----------
        rows : mapping of str to ndarray
            Every input column, see `pack`. The first rows should hold reset.
        plusargs : mapping of str to int, optional
            Values of the harness's plusarg ports.
        timeout : float
            Wall-clock limit in seconds.

        Returns
        -------
        dict of str to ndarray
            Every output port: uint64 [N], or uint8 [N, ceil(width / 8)] little-endian above 64 bits; and ``<port>__x``,
            bool [N]: a bit of the output is unknown (never with Verilator, which has two states).

        Raises
        ------
        SimulationError
            The simulation failed or was too slow.
        ValueError
            Wrong columns or plusargs.
        """
        return self.run_packed(self.pack(rows), plusargs, timeout)
