"""``python -m synth COMMAND``: one entry to the synthesis commands; each is also a module of its own, ``python -m synth.COMMAND``."""

import importlib
import importlib.util
import sys
from collections.abc import Sequence

__all__ = ["COMMANDS", "available", "main"]

COMMANDS = {
    "area": "area of a block or of any Verilog, module by module",
    "timing": "critical path and maximum clock",
    "report": "areas of all blocks, ratios, goals; the same for several libraries",
    "gatesim": "netlists against the golden model, vector by vector",
    "equivalence": "netlist against Verilog, for all inputs",
    "energy": "energy per MAC from gate-level simulation",
    "targets": "the vMAC in every flow, beside its goals",
    "compare": "paper and ours side by side, ratios, charts",
    "sweep": "parameters x libraries x clocks",
    "fpga": "bitstream of a processing element for a board",
    "export": "hand-off to OpenROAD-flow-scripts or LibreLane",
    "mutate": "faults in the gates, and how many the regression catches",
}
"""Commands in the order of the help text. A command exists when its module does."""


def available() -> dict[str, str]:
    """Return the commands whose modules are there, with a line about each."""
    return {name: text for name, text in COMMANDS.items() if importlib.util.find_spec(f"synth.{name}")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    commands = available()
    usage = "usage: python -m synth COMMAND ...; --help after a command has its options"
    if given and given[0] in commands:
        return int(importlib.import_module(f"synth.{given[0]}").main(given[1:]))
    if given and given[0] in ("-h", "--help"):
        print("\n".join([usage, "", *(f"  {name:11} {text}" for name, text in commands.items())]))
        return 0
    got = repr(given[0]) if given else "nothing"
    print(f"error: command must be one of {', '.join(commands)}, not {got}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
