"""Deterministic Verilog from an Amaranth component: one module per distinct design unit, no paths, no dates."""

import contextlib
import gc
import re
import subprocess
from collections.abc import Iterator

from amaranth.back import rtlil
from amaranth.lib import wiring

from hdl.lib.shared import VerilogPlatform
from hdl.lib.toolchain import use_yosys, yosys_command
from model.command import CommandError

__all__ = ["VerilogError", "lint_unused", "to_verilog"]

_MODULE = re.compile(r"^(?:attribute [^\n]*\n)*module \\(\S+)\n.*?^end\n", re.MULTILINE | re.DOTALL)
_CELL = re.compile(r"^(  cell \\)(\S+)( )", re.MULTILINE)
_LINT_UNUSED = re.compile(
    r'^  attribute \\lint_unused "([^"]*)"\n(?:  attribute .*\n)*  wire [^\n]*?\\(\S+)$', re.MULTILINE
)
_DECLARED = re.compile(r"^  (?:input|output|wire|reg)\b(?: signed)?(?: \[[^]]*\])? (\S+)")
# The reset of domain "sync", and that of any other.
_RESET = r"\\(?:\w+_)?rst\b"
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


# Operators whose result has the width of its operands, and comparisons, whose operands have one width.
_RESET_PORT = re.compile(rf"  wire width 1 input \d+ +{_RESET}$")
_RESET_PIN = re.compile(rf"    connect {_RESET} ")
_SAME_WIDTH = ("add", "sub", "mul", "and", "or", "xor", "xnor")
_COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")

_WIDEN = "\n".join(
    f"""(* techmap_celltype = "${kind}" *)
module _widen_{kind} (A, B, Y);
  parameter A_SIGNED = 0; parameter B_SIGNED = 0; parameter A_WIDTH = 1; parameter B_WIDTH = 1; parameter Y_WIDTH = 1;
  localparam W = {"Y_WIDTH" if kind in _SAME_WIDTH else "A_WIDTH > B_WIDTH ? A_WIDTH : B_WIDTH"};
  input [A_WIDTH-1:0] A; input [B_WIDTH-1:0] B; output [Y_WIDTH-1:0] Y;
  wire _TECHMAP_FAIL_ = A_WIDTH == W && B_WIDTH == W;
  wire [W-1:0] a; wire [W-1:0] b;
  // Amaranth's constant 0 has no bits.
  if (A_WIDTH == 0) assign a = 0;
  else \\$pos #(.A_SIGNED(A_SIGNED), .A_WIDTH(A_WIDTH), .Y_WIDTH(W)) wide_a (.A(A), .Y(a));
  if (B_WIDTH == 0) assign b = 0;
  else \\$pos #(.A_SIGNED(B_SIGNED), .A_WIDTH(B_WIDTH), .Y_WIDTH(W)) wide_b (.A(B), .Y(b));
  \\${kind} #(.A_SIGNED(A_SIGNED), .B_SIGNED(B_SIGNED), .A_WIDTH(W), .B_WIDTH(W), .Y_WIDTH(Y_WIDTH))
    _TECHMAP_REPLACE_ (.A(a), .B(b), .Y(Y));
endmodule"""
    for kind in (*_SAME_WIDTH, *_COMPARED)
)
# A logical operator on a vector is one on whether any bit is set.
_WIDEN += """
(* techmap_celltype = "$logic_not" *)
module _widen_logic_not (A, Y);
  parameter A_SIGNED = 0; parameter A_WIDTH = 1; parameter Y_WIDTH = 1;
  input [A_WIDTH-1:0] A; output [Y_WIDTH-1:0] Y;
  wire _TECHMAP_FAIL_ = A_WIDTH == 1;
  wire any;
  \\$reduce_or #(.A_SIGNED(0), .A_WIDTH(A_WIDTH), .Y_WIDTH(1)) reduce (.A(A), .Y(any));
  \\$logic_not #(.A_SIGNED(0), .A_WIDTH(1), .Y_WIDTH(Y_WIDTH)) _TECHMAP_REPLACE_ (.A(any), .Y(Y));
endmodule"""


_HEADER = """\
/* verilator lint_off DECLFILENAME */ // submodules stand in the file of their block
/* verilator lint_off PROCASSINIT */ // registers have a power-up value, so that simulation starts without X
"""


def lint_unused(reason: str) -> dict[str, str]:
    """Return attributes for a signal some of whose bits are meant to be unused; the Verilog switches that warning off for it alone."""
    return {"lint_unused": reason}


class VerilogError(CommandError):
    """Yosys could not write the Verilog; says why."""


def to_verilog(component: wiring.Component, name: str, *, sources: bool = False) -> str:
    """Return the Verilog of ``component`` and its submodules.

    Identical submodules become one module, and processes become plain assignments and clocked blocks: an ``always @*`` with constant
    arms would never run in an event-driven simulator.

    Parameters
    ----------
    component : wiring.Component
    name : str
        Name of the top module; submodules are called after it.
    sources : bool
        Keep ``src`` attributes, which hold paths of this machine.

    Raises
    ------
    ValueError
        ``name`` is not a plain Verilog identifier.
    VerilogError
        Yosys failed.
    """
    if not _WORD.fullmatch(name):
        raise ValueError(f"name must be a Verilog identifier, not {name!r}")
    written: dict[str, str] = {}
    waiting: dict[str, wiring.Component] = {name: component}
    platform = VerilogPlatform()
    while waiting:
        module, unit = waiting.popitem()
        written[module] = _unit(unit, module, platform, sources=sources)
        waiting |= {module: unit.take() for module, unit in platform.units.items() if module not in written}
    rest = (text for module, text in sorted(written.items()) if module != name)
    return _HEADER + "\n".join([written[name], *rest])


def _unit(component: wiring.Component, name: str, platform: VerilogPlatform, *, sources: bool) -> str:
    """Return the Verilog of one design unit, up to the instances of others, which go into ``platform``."""
    use_yosys()
    with _no_collection():
        converted = rtlil.convert(component, name=name, platform=platform, emit_src=sources)
    text = _shared(_without_idle_resets(converted), name)
    keep = "" if sources else "-remove src "
    reasons = {
        (module[1], name): reason
        for module in _MODULE.finditer(text)
        for reason, name in _LINT_UNUSED.findall(module[0])
    }
    attributes = (
        f"{keep}-remove lint_unused -remove generator -remove top -remove amaranth.hierarchy -remove amaranth.decoding"
    )
    script = (
        f"read_rtlil <<rtlil\n{text}\nrtlil\nproc -norom\npmuxtree\nmemory_collect\nopt_expr\nopt_clean -purge\n"
        # Cut operators to the bits that are used, then widen operands to their operator: no implicit extension or truncation is left.
        f"wreduce\nopt_clean -purge\nwreduce\nopt_clean -purge\ndesign -push\nread_verilog -icells <<map\n{_WIDEN}\nmap\ndesign -stash widen\ndesign -pop\n"
        f"techmap -autoproc -map %widen\nopt_clean -purge\nsplitnets -driver w:$*\nopt_clean -purge\n"
        f"attrmap {attributes}\nattrmap -modattr {attributes}\nwrite_verilog -norename\n"
    )
    done = subprocess.run([*yosys_command(), "-q", "-"], input=script, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        errors = [line for line in said if "ERROR:" in line] or said[-1:]
        raise VerilogError(f"yosys could not write {name}: {' '.join(errors)}")
    # The header names the Yosys version; the sidecar has that.
    body = re.sub(r"\A/\*.*?\*/\s*", "", done.stdout, flags=re.DOTALL)
    waived = "\n".join(_waived(body.splitlines(), reasons))
    return f"{waived.strip()}\n"


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector away: to look again and again at Amaranth's objects, which live to the end of a unit, takes half of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _waived(lines: list[str], reasons: dict[tuple[str, str], str]) -> Iterator[str]:
    """Put comments around the declarations of signals marked by :func:`lint_unused`, or of parts of them."""
    module, name = "", None
    for line in lines:
        if line.startswith("module "):
            module = line.removeprefix("module ").partition("(")[0]
        match = _DECLARED.match(line)
        declared = match[1] if match else None
        if name is not None and declared != name:
            yield "  /* verilator lint_on UNUSEDSIGNAL */"
            name = None
        # Yosys calls part of a split signal name[high:low].
        base = (module, declared.strip("\\;").partition("[")[0] if declared else "")
        if base in reasons and name is None:
            yield f"  /* verilator lint_off UNUSEDSIGNAL */ // {reasons[base]}"
            name = declared
        yield line


def _shared(text: str, top: str) -> str:
    """Merge modules that are the same but for their name, and make names plain identifiers."""
    modules = {match[1]: match[0] for match in _MODULE.finditer(text)}
    while True:
        first_with: dict[str, str] = {}
        merged: dict[str, str] = {}
        for module, body in modules.items():
            first = first_with.setdefault(body.replace(f"module \\{module}\n", "module\n", 1), module)
            if first != module:
                merged[module] = first
        if not merged:
            break
        modules = {module: _renamed(body, merged) for module, body in modules.items() if module not in merged}
    plain = {module: module.replace(".", "_") for module in modules}
    for module, given in plain.items():
        short = given.rstrip("0123456789_")
        if module != top and short not in plain.values():
            plain[module] = short
    return "\n".join(
        _renamed(body, plain).replace(f"module \\{module}\n", f"module \\{plain[module]}\n", 1)
        for module, body in modules.items()
    )


def _renamed(body: str, names: dict[str, str]) -> str:
    """Give the cells of a module new types."""
    return _CELL.sub(lambda cell: f"{cell[1]}{names.get(cell[2], cell[2])}{cell[3]}", body)


def _without_idle_resets(text: str) -> str:
    """Take the reset away from modules in which nothing is reset."""
    idle = {
        match[1]
        for match in _MODULE.finditer(text)
        if len(re.findall(_RESET, match[0])) == 1
        and re.search(rf"^  wire width 1 input \d+ +{_RESET}$", match[0], re.MULTILINE)
    }
    if not idle:
        return text
    kept = []
    in_idle = of_idle = False
    for line in text.splitlines(keepends=True):
        if line.startswith("module "):
            in_idle = line[len("module \\") :].rstrip() in idle
        elif line.startswith("  cell "):
            of_idle = line.split()[1].removeprefix("\\") in idle
        elif line == "  end\n":
            of_idle = False
        elif (in_idle and _RESET_PORT.match(line)) or (of_idle and _RESET_PIN.match(line)):
            continue
        kept.append(line)
    # What only handed its reset on is idle now.
    return _without_idle_resets("".join(kept))
