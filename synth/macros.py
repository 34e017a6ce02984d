"""Memories of emitted Verilog as modules of their own, which an SRAM macro can take the place of (docs/export.md)."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Memory", "Split", "split", "wrapper"]

# A memory as the generator writes it: one port that writes, one that reads a cycle later, contents of zeros at power-up.
_MEMORY = re.compile(
    r"""\ \ reg\ \[(?P<high>\d+):0\]\ (?P<name>\S+)\ \[(?P<last>\d+):0\];\n
(?:\ \ initial\ begin\n(?:\ \ \ \ (?P=name)\[\d+\]\ =\ \d+'[hd]0+;\n)+\ \ end\n)?
\ \ always\ @\(posedge\ clk\)\ begin\n
\ \ \ \ if\ \((?P<w_en>[^\n]+)\)\n
\ \ \ \ \ \ (?P=name)\[(?P<w_addr>[^\n]+)\]\ <=\ (?P<w_data>[^\n]+);\n
\ \ end\n
\ \ reg\ \[(?P=high):0\]\ (?P<register>_\d+_);\n
\ \ always\ @\(posedge\ clk\)\ begin\n
(?:\ \ \ \ if\ \((?P<r_en>[^\n]+)\)\ begin\n\ \ )?
\ \ \ \ (?P=register)\ <=\ (?P=name)\[(?P<r_addr>[^\n]+)\];\n
(?:\ \ \ \ end\n)?
\ \ end\n""",
    re.VERBOSE,
)
_ANY = re.compile(r"^  reg (?:\[\d+:\d+\] )?(\S+) \[\d+:\d+\];$", re.MULTILINE)
_MODULE = re.compile(r"^module (\S+?)\s*\(", re.MULTILINE)


@dataclass(frozen=True)
class Memory:
    """A memory with a write port and a read port on one clock.

    Attributes
    ----------
    module, name : str
        Where it is.
    depth, width : int
        Words, and bits of a word.
    """

    module: str
    name: str
    depth: int
    width: int

    @property
    def bits(self) -> int:
        """Bits that it holds."""
        return self.depth * self.width

    @property
    def wrapper(self) -> str:
        """Name of the module in its place."""
        return f"memory_{self.depth}x{self.width}"


@dataclass(frozen=True)
class Split:
    """Verilog with instances in place of memories.

    Attributes
    ----------
    verilog : str
    memories : list of Memory
        Those in modules of their own; a module that occurs often has its memory once here.
    kept : list of Memory
        Those that stay registers, because they are small.
    """

    verilog: str
    memories: list[Memory]
    kept: list[Memory]

    def wrappers(self) -> dict[str, Memory]:
        """Return a memory of each shape, by name of its module, largest first."""
        order = sorted(self.memories, key=lambda memory: (-memory.bits, memory.wrapper))
        return {memory.wrapper: memory for memory in order}


def split(verilog: str, smallest: int = 0) -> Split:
    """Put the memories of emitted Verilog into modules of their own, except those of fewer than ``smallest`` bits.

    Raises
    ------
    ValueError
        A memory is of another kind than the generator's, for example with contents at power-up.
    """
    modules = [(match.start(), match[1]) for match in _MODULE.finditer(verilog)]
    found: list[Memory] = []
    kept: list[Memory] = []
    seen: set[int] = set()

    def replaced(match: re.Match[str]) -> str:
        seen.add(match.start())
        module = [name for start, name in modules if start < match.start()][-1]
        memory = Memory(module, match["name"].removeprefix("\\"), int(match["last"]) + 1, int(match["high"]) + 1)
        if memory.bits < smallest:
            kept.append(memory)
            return match[0]
        found.append(memory)
        pins = {name: match[name] for name in ("w_en", "w_addr", "w_data")}
        pins |= {"r_en": match["r_en"] or "1'h1", "r_addr": match["r_addr"], "r_data": match["register"]}
        connections = ",\n".join(f"    .{pin}({source.strip()} )" for pin, source in pins.items())
        return (
            f"  wire [{match['high']}:0] {match['register']};\n"
            f"  {memory.wrapper} {match['name']} (\n    .clk(clk),\n{connections}\n  );\n"
        )

    text = _MEMORY.sub(replaced, verilog)
    for match in _ANY.finditer(verilog):
        if match.start() not in seen:
            module = [name for start, name in modules if start < match.start()][-1]
            raise ValueError(
                f"memory must have one port of each kind and no contents at power-up; {match[1]} in {module} differs"
            )
    return Split(text, found, kept)


def wrapper(memory: Memory) -> str:
    """Return the module in place of memories of a shape: a model of it in registers.

    A word that is read while it is written is undefined, as in most macros: in simulation it reads as the inverse of what
    was there, so that a test shows whether anything depends on it.
    """
    address = max((memory.depth - 1).bit_length(), 1)
    return f"""\
// {memory.depth} words of {memory.width} bits: a port that writes, a port that reads. While r_en is low, r_data stays.
module {memory.wrapper}(clk, w_en, w_addr, w_data, r_en, r_addr, r_data);
  input clk;
  input w_en;
  input [{address - 1}:0] w_addr;
  input [{memory.width - 1}:0] w_data;
  input r_en;
  input [{address - 1}:0] r_addr;
  output [{memory.width - 1}:0] r_data;
  reg [{memory.width - 1}:0] words [{memory.depth - 1}:0];
  reg [{memory.width - 1}:0] read;
  always @(posedge clk) begin
    if (w_en) words[w_addr] <= w_data;
`ifdef SYNTHESIS
    if (r_en) read <= words[r_addr];
`else
    // Undefined where a word is read and written at once: wrong on purpose.
    if (r_en) read <= w_en && w_addr == r_addr ? ~words[r_addr] : words[r_addr];
`endif
  end
  assign r_data = read;
endmodule
"""


def summary(memories: Sequence[Memory]) -> list[dict[str, str | int]]:
    """Return memories as JSON-like data."""
    return [
        {"module": each.module, "name": each.name, "wrapper": each.wrapper, "depth": each.depth, "width": each.width}
        for each in memories
    ]
