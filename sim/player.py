"""Stream player: ready/valid streams of a block played from the rows of the bulk harness, and recorded.

A row of the bulk harness cannot react to ``ready``, so a wrapper stands between: every input stream has a queue that rows fill, and offers
its words in order, each until it is taken; every output stream takes words in the rows that say so. What happened is in the outputs, and
`Recording` shows it to the monitors and scoreboards of the cocotb benches as if it were a simulator.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.harness import BulkHarness

__all__ = ["DEPTH_BITS", "WORTH", "Bus", "Player", "Recording", "Rows", "Script", "player_verilog", "stream_names"]

DEPTH_BITS = 15
"""Words that a queue holds, in powers of two."""
LONGEST_BURST = 40
WORTH = {"never": 1.0, "rarely": 1.2, "often": 2.2, "mostly": 11.0, "bursts": 2.4, "behind valid": 2.0}
"""Rows that a word takes by the way of stalling, a little more than on average."""
_SHARES = {"never": 0.0, "rarely": 0.1, "often": 0.5, "mostly": 0.9, "behind valid": 0.0}

Rows = dict[str, NDArray[Any]]


@dataclasses.dataclass(frozen=True)
class Bus:
    """What is behind ports that are not streams.

    Attributes
    ----------
    text : str
        Verilog inside the wrapper; it knows ``clk``, ``rst``, the block's ports and ``controls``.
    controls : dict of str to int
        Inputs of the wrapper that it needs, and their widths.
    driven : tuple of str
        Inputs of the block that it drives, as wires; they are recorded.
    """

    text: str = ""
    controls: Mapping[str, int] = dataclasses.field(default_factory=dict)
    driven: tuple[str, ...] = ()


def stream_names(sidecar: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of a block's input and output streams."""
    payloads = [port for port in sidecar["ports"] if port["name"].endswith("__payload")]
    inputs, outputs = (
        tuple(port["name"].removesuffix("__payload") for port in payloads if port["direction"] == direction)
        for direction in ("input", "output")
    )
    return inputs, outputs


def player_verilog(sidecar: Mapping[str, Any], bus: Bus | None = None) -> tuple[str, dict[str, Any]]:
    """Write the wrapper of a block.

    Parameters
    ----------
    sidecar : mapping
        Of the block: ``top`` and ``ports``.
    bus : Bus, optional

    Returns
    -------
    text : str
        The Verilog of module ``player``. Inputs of an input stream ``x``: ``x__word``, which ``x__push`` puts into its queue at the end of
        the row and which is the payload while nothing is offered; in rows with ``x__go`` it may begin to offer a word. Of an output
        stream: ``x__go``, ready; with ``x__behind`` only if a word was offered and not taken in the row before. In reset the queues are emptied.
    sidecar : dict
        ``top`` and ``ports`` of the wrapper. Every port of the block but ``clk`` and inputs that no stream or bus drives is an output.
    """
    bus = bus or Bus()
    inputs, outputs = stream_names(sidecar)
    ports = {port["name"]: port for port in sidecar["ports"] if port["name"] != "clk"}
    driven = {*bus.driven}
    driven |= {f"{name}__{part}" for name in inputs for part in ("payload", "valid")}
    driven |= {f"{name}__ready" for name in outputs}
    columns: dict[str, int] = {}
    for name, port in ports.items():
        if port["direction"] == "input" and name not in driven:
            columns[name] = port["width"]
    for name in inputs:
        columns |= {f"{name}__word": ports[f"{name}__payload"]["width"], f"{name}__push": 1, f"{name}__go": 1}
    for name in outputs:
        columns |= {f"{name}__go": 1, f"{name}__behind": 1}
    columns |= bus.controls
    recorded = {name: port["width"] for name, port in ports.items() if name not in columns}

    def declared(direction: str, widths: Mapping[str, int]) -> list[str]:
        return [f"    {direction} wire [{width - 1}:0] {name}" for name, width in widths.items()]

    lines = ["module player(", ",\n".join(["    input wire clk", *declared("input", columns)]) + ","]
    lines += [",\n".join(declared("output", recorded)), ");"]
    for name in inputs:
        last = columns[f"{name}__word"] - 1
        lines += [
            f"    reg [{last}:0] {name}__queue [0:{(1 << DEPTH_BITS) - 1}];",
            f"    reg [{DEPTH_BITS - 1}:0] {name}__in, {name}__out;",
            f"    reg {name}__offered;",
            f"    assign {name}__valid = ~rst & ({name}__offered | ({name}__go & {name}__in != {name}__out));",
            f"    assign {name}__payload = {name}__valid ? {name}__queue[{name}__out] : {name}__word;",
            "    always @(posedge clk) if (rst) begin",
            f"        {name}__in <= 0; {name}__out <= 0; {name}__offered <= 0;",
            "    end else begin",
            f"        if ({name}__push) {name}__queue[{name}__in] <= {name}__word;",
            f"        if ({name}__push) {name}__in <= {name}__in + 1'b1;",
            f"        if ({name}__valid & {name}__ready) {name}__out <= {name}__out + 1'b1;",
            f"        {name}__offered <= {name}__valid & ~{name}__ready;",
            "    end",
        ]
    for name in outputs:
        lines += [
            f"    reg {name}__waited;",
            f"    assign {name}__ready = {name}__go & (~{name}__behind | {name}__waited);",
            f"    always @(posedge clk) {name}__waited <= ~rst & {name}__valid & ~{name}__ready;",
        ]
    lines += [bus.text.rstrip()] if bus.text else []
    lines += [f"    \\{sidecar['top']} dut ("]
    lines += [",\n".join(f"        .{name}({name})" for name in ("clk", *ports)), "    );", "endmodule", ""]
    around = [
        {"name": name, "direction": direction, "width": width}
        for direction, widths in (("input", {"clk": 1, **columns}), ("output", recorded))
        for name, width in widths.items()
    ]
    return "\n".join(lines), {"top": "player", "ports": around}


class Script:
    """Rows in the making.

    Parameters
    ----------
    widths : mapping of str to int
        The wrapper's input columns.
    rng : numpy.random.Generator

    Attributes
    ----------
    length : int
        Rows so far.
    """

    def __init__(self, widths: Mapping[str, int], rng: np.random.Generator) -> None:
        self._widths = dict(widths)
        self._rng = rng
        self._parts: list[Rows] = []
        self.length = 0

    def stalls(self, kind: str, rows: int) -> NDArray[np.bool_]:
        """Return for so many rows whether a driver that stalls in a way of `sim.streams.STALLS` goes on."""
        if kind == "bursts":
            lengths = self._rng.integers(1, LONGEST_BURST + 1, 2 * rows)
            return np.repeat(np.arange(2 * rows) % 2 == 0, lengths)[:rows]
        return self._rng.random(rows) >= _SHARES[kind]

    def add(self, rows: int, **columns: int | NDArray[Any] | Sequence[int]) -> None:
        """Append rows: columns by name, for all of them or each; queues get ``<stream>=[words]``, one a row from the first on.

        Columns that are not named are 0, junk at random.

        Raises
        ------
        ValueError
            More words than rows.
        """
        part: Rows = {}
        for name, width in self._widths.items():
            size = -(-width // 8)
            if name.endswith(("__word", "__junk")):
                octets = self._rng.integers(0, 256, (rows, size), np.uint8)
                octets[:, -1] &= 0xFF >> size * 8 - width
                part[name] = octets
            else:
                part[name] = np.zeros(rows, np.uint64)
        for name, value in columns.items():
            if name in part:
                part[name] = np.broadcast_to(np.asarray(value, np.uint64), rows)
                continue
            words = list(value)  # type: ignore[arg-type]
            if len(words) > rows:
                raise ValueError(f"{name} must have at most {rows} words, one a row, not {len(words)}")
            octets = part[f"{name}__word"]
            size = octets.shape[1]
            octets[: len(words)] = np.frombuffer(
                b"".join(int(word).to_bytes(size, "little") for word in words), np.uint8
            ).reshape(-1, size)
            part[f"{name}__push"] = (np.arange(rows) < len(words)).astype(np.uint64)
        self._parts.append(part)
        self.length += rows

    def columns(self) -> Rows:
        """Return all rows, for `sim.harness.BulkHarness.pack`."""
        return {name: np.concatenate([part[name] for part in self._parts]) for name in self._widths}


class _Pin:
    """A pin of a recording, as the monitors read it."""

    def __init__(self, recording: "Recording", column: NDArray[Any], width: int) -> None:
        self._recording = recording
        self._width = width
        self._plain = [str(value) for value in column.tolist()] if width == 1 else None
        self._column = column

    @property
    def value(self) -> str:
        """The digits in the present row."""
        row = self._recording.row
        if self._plain is not None:
            return self._plain[row]
        value = self._column[row]
        number = int.from_bytes(value.tobytes(), "little") if self._column.ndim == 2 else int(value)
        return f"{number:0{self._width}b}"


class Recording:
    """Recorded outputs of the player that look like the block in a simulator: ``recording.pin.value`` are digits of the row ``row``.

    Parameters
    ----------
    outputs : mapping of str to ndarray
        From `sim.harness.BulkHarness`, and input columns that are to be seen.
    widths : mapping of str to int
        Bits of each.
    """

    def __init__(self, outputs: Mapping[str, NDArray[Any]], widths: Mapping[str, int]) -> None:
        self.row = 0
        for name, width in widths.items():
            setattr(self, name, _Pin(self, outputs[name], width))


class Player:
    """A block in the stream player in the bulk harness.

    Parameters
    ----------
    sidecar : mapping
        Of the block.
    verilog : str
    bus : Bus, optional
    simulator, optimise
        As for `sim.harness.BulkHarness`.
    plusargs : mapping of str to int, optional
        Further inputs of ``verilog`` that are set at the start of a simulation, and their widths.

    Attributes
    ----------
    harness : BulkHarness
    widths : dict of str to int
        Columns of the rows.
    recorded : dict of str to int
        Recorded ports.
    """

    def __init__(
        self,
        sidecar: Mapping[str, Any],
        verilog: str,
        bus: Bus | None = None,
        simulator: str = "verilator",
        optimise: str = "-O1",
        plusargs: Mapping[str, int] | None = None,
    ) -> None:
        plusargs = plusargs or {}
        extra = [{"name": name, "direction": "input", "width": width} for name, width in plusargs.items()]
        text, around = player_verilog({**sidecar, "ports": [*sidecar["ports"], *extra]}, bus)
        sources = {"block.v": verilog, "player.v": text}
        self.harness = BulkHarness(sources, around, simulator, None, tuple(plusargs), optimise=optimise)
        self.widths, self.recorded = (
            {
                port["name"]: int(port["width"])
                for port in around["ports"]
                if port["direction"] == direction and port["name"] not in {"clk", *plusargs}
            }
            for direction in ("input", "output")
        )

    def recording(
        self, outputs: Mapping[str, NDArray[Any]], inputs: Rows | None = None, seen: Iterable[str] = ()
    ) -> Recording:
        """Show outputs, and the input columns named ``seen``, to monitors."""
        shown = {name: (inputs or {})[name] for name in seen}
        return Recording({**outputs, **shown}, self.recorded | {name: self.widths[name] for name in shown})
