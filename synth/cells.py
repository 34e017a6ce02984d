"""Verilog models of library cells, generated from the functions in the Liberty file: gates, full adders and flip-flops."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from synth.liberty import LibertyError
from synth.liberty_tree import Group

__all__ = [
    "Expression",
    "Register",
    "inputs_of",
    "outputs_of",
    "parse",
    "register_of",
    "verilog_model",
    "verilog_models",
]

_TOKEN = re.compile(r"[A-Za-z_]\w*|\S")
_AND, _OR = ("&", "*"), ("|", "+")


@dataclass(frozen=True)
class Expression:
    """A Boolean function.

    Attributes
    ----------
    operator : str
        ``~``, ``&``, ``|`` or ``^``; for a pin its name, for a constant ``0`` or ``1``.
    operands : tuple of Expression
    """

    operator: str
    operands: "tuple[Expression, ...]" = ()

    @property
    def pins(self) -> set[str]:
        """Names of the pins that it reads."""
        if self.operands:
            return set().union(*(operand.pins for operand in self.operands))
        return set() if self.operator in "01" else {self.operator}

    @property
    def verilog(self) -> str:
        """The function in Verilog."""
        if not self.operands:
            return f"1'b{self.operator}" if self.operator in "01" else self.operator
        terms = [operand.verilog for operand in self.operands]
        return f"(~{terms[0]})" if self.operator == "~" else f"({f' {self.operator} '.join(terms)})"

    def of(self, values: Mapping[str, Any]) -> Any:
        """Return the value for these values of the pins; ``0`` and ``1`` are among them.

        Values are anything with ``~``, ``&``, ``|`` and ``^``, such as arrays of unsigned integers that hold a bit per cycle.
        """
        if not self.operands:
            return values[self.operator]
        first, *others = (operand.of(values) for operand in self.operands)
        if self.operator == "~":
            return ~first
        for other in others:
            first = first & other if self.operator == "&" else first | other if self.operator == "|" else first ^ other
        return first


def parse(function: str) -> Expression:
    """Read a function as Liberty files write it.

    By descending precedence: ``'`` and ``!``; ``^``; ``&``, ``*`` or nothing; ``|`` or ``+``.

    >>> parse("!(A B') + C").verilog
    '((~(A & (~B))) | C)'

    Raises
    ------
    LibertyError
        It is no such function.
    """
    tokens = _TOKEN.findall(function.replace('"', " "))

    def factor() -> Expression:
        token = tokens.pop(0)
        if token == "!":
            return Expression("~", (factor(),))
        if token == "(":
            value = disjunction()
            if tokens.pop(0) != ")":
                raise IndexError
        elif re.fullmatch(r"\w+", token):
            value = Expression(token)
        else:
            raise IndexError
        while tokens and tokens[0] == "'":
            tokens.pop(0)
            value = Expression("~", (value,))
        return value

    def exclusive() -> Expression:
        value = factor()
        while tokens and tokens[0] == "^":
            tokens.pop(0)
            value = Expression("^", (value, factor()))
        return value

    def conjunction() -> Expression:
        value = exclusive()
        while tokens and tokens[0] not in (*_OR, ")"):
            if tokens[0] in _AND:
                tokens.pop(0)
            value = Expression("&", (value, exclusive()))
        return value

    def disjunction() -> Expression:
        value = conjunction()
        while tokens and tokens[0] in _OR:
            tokens.pop(0)
            value = Expression("|", (value, conjunction()))
        return value

    try:
        value = disjunction()
        if tokens:
            raise IndexError
    except IndexError:
        raise LibertyError(
            f"a function must be Boolean, of pins, ! ' & * ^ | + and parentheses, not {function!r}"
        ) from None
    return value


@dataclass(frozen=True)
class Register:
    """A flip-flop's behaviour.

    Attributes
    ----------
    state, inverse : str
        Names that stand for the state and its inverse in the functions of the output pins.
    clock : str
        The clock pin.
    rising : bool
        Which of its edges counts.
    next_state : Expression
    clear, preset : Expression or None
        Asynchronous, active high.
    preset_wins : bool
        What happens if both are active.
    """

    state: str
    inverse: str
    clock: str
    rising: bool
    next_state: Expression
    clear: Expression | None
    preset: Expression | None
    preset_wins: bool


def _pins(cell: Group, direction: str) -> list[Group]:
    return [pin for pin in cell.all("pin") if pin.attributes.get("direction") == direction]


def inputs_of(cell: Group) -> list[str]:
    """Return the input pins of a cell."""
    return [pin.name for pin in _pins(cell, "input")]


def outputs_of(cell: Group) -> dict[str, Expression]:
    """Return the functions of the output pins of a cell.

    Raises
    ------
    LibertyError
        The cell is neither a gate nor a flip-flop.
    """
    for kind in ("latch", "latch_bank", "ff_bank", "statetable", "bus", "bundle"):
        if cell.first(kind) is not None:
            raise LibertyError(
                f"every cell of the netlist must be a gate or a flip-flop; {cell.name} has a {kind} group"
            )
    functions = {}
    for pin in _pins(cell, "output"):
        if "function" not in pin.attributes or "three_state" in pin.attributes:
            raise LibertyError(f"every output of a cell must have a plain function; {cell.name}.{pin.name} has none")
        functions[pin.name] = parse(pin.attributes["function"])
    return functions


def register_of(cell: Group) -> Register | None:
    """Return the behaviour of a flip-flop, or None for a gate.

    Raises
    ------
    LibertyError
        Its clock is not one pin or the inverse of one.
    """
    group = cell.first("ff")
    if group is None:
        return None
    clock = parse(group.attributes.get("clocked_on", "0"))
    rising = clock.operator != "~"
    pin = clock if rising else clock.operands[0]
    if pin.operands or pin.operator not in inputs_of(cell):
        raise LibertyError(f"clocked_on of a flip-flop must be a pin or its inverse; that of {cell.name} is neither")
    state, inverse = group.names[0], group.names[1] if len(group.names) > 1 else ""
    clear, preset = (parse(group.attributes[key]) if key in group.attributes else None for key in ("clear", "preset"))
    return Register(
        state,
        inverse,
        pin.operator,
        rising,
        parse(group.attributes["next_state"]),
        clear,
        preset,
        group.attributes.get("clear_preset_var1", "L").upper() == "H",
    )


def verilog_model(cell: Group) -> str:
    """Return a Verilog module that does what the Liberty file says of a cell, without delays.

    Raises
    ------
    LibertyError
        The cell is neither a gate nor a flip-flop.
    """
    outputs, register = outputs_of(cell), register_of(cell)
    ports = [*(f"input {pin}" for pin in inputs_of(cell)), *(f"output {pin}" for pin in outputs)]
    lines = [f"module {cell.name}({', '.join(ports)});"]
    if register is not None:
        lines.append(f"  reg {register.state};")
        if register.inverse:
            lines.append(f"  wire {register.inverse} = ~{register.state};")
        forced = [(name, "01"[name == "preset"]) for name in ("clear", "preset") if getattr(register, name) is not None]
        if register.preset_wins:
            forced.reverse()
        lines += [f"  wire {name}__ = {getattr(register, name).verilog};" for name, _ in forced]
        events = [
            f"{'pos' if register.rising else 'neg'}edge {register.clock}",
            *(f"posedge {name}__" for name, _ in forced),
        ]
        lines.append(f"  always @({' or '.join(events)})")
        lines += [f"    if ({name}__) {register.state} <= 1'b{value}; else" for name, value in forced]
        lines.append(f"    {register.state} <= {register.next_state.verilog};")
    lines += [f"  assign {pin} = {function.verilog};" for pin, function in outputs.items()]
    return "\n".join([*lines, "endmodule", ""])


def verilog_models(cells: Mapping[str, Group]) -> str:
    """Return the modules of several cells."""
    return "\n".join(verilog_model(cell) for cell in cells.values())
