"""Deterministic Verilog from an Amaranth component: one module per distinct design unit, no paths, no dates."""

import re
import subprocess

from amaranth.back import rtlil
from amaranth.lib import wiring

from hdl.lib.toolchain import use_yosys, yosys_command

__all__ = ["VerilogError", "to_verilog"]

_MODULE = re.compile(r"^(?:attribute [^\n]*\n)*module \\(\S+)\n.*?^end\n", re.MULTILINE | re.DOTALL)
_CELL = re.compile(r"^(  cell \\)(\S+)( )", re.MULTILINE)
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class VerilogError(RuntimeError):
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
    use_yosys()
    text = _shared(rtlil.convert(component, name=name, emit_src=sources), name)
    keep = "" if sources else "-remove src "
    attributes = f"{keep}-remove generator -remove top -remove amaranth.hierarchy -remove amaranth.decoding"
    script = (
        f"read_rtlil <<rtlil\n{text}\nrtlil\nproc -norom\nmemory_collect\nopt_expr\nopt_clean -purge\n"
        f"attrmap {attributes}\nattrmap -modattr {attributes}\nwrite_verilog -norename\n"
    )
    done = subprocess.run([*yosys_command(), "-q", "-"], input=script, capture_output=True, text=True, check=False)
    if done.returncode:
        raise VerilogError(f"yosys could not write {name}: {(done.stderr or done.stdout).strip().splitlines()[-1:]}")
    # The header names the Yosys version; the sidecar has that.
    body = re.sub(r"\A/\*.*?\*/\s*", "", done.stdout, flags=re.DOTALL)
    return f"{body.strip()}\n"


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
        modules = {
            module: _CELL.sub(lambda cell: f"{cell[1]}{merged.get(cell[2], cell[2])}{cell[3]}", body)
            for module, body in modules.items()
            if module not in merged
        }
    plain = {module: module.replace(".", "_") for module in modules}
    for module, given in plain.items():
        short = given.rstrip("0123456789_")
        if module != top and short not in plain.values():
            plain[module] = short
    return "\n".join(
        _CELL.sub(lambda cell: f"{cell[1]}{plain.get(cell[2], cell[2])}{cell[3]}", body).replace(
            f"module \\{module}\n", f"module \\{plain[module]}\n", 1
        )
        for module, body in modules.items()
    )
