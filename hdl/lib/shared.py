"""One Verilog module for many instances: built and converted once, however often it is used.

Amaranth converts every submodule anew, which for hundreds of equal ones takes minutes and gigabytes.
"""

from collections.abc import Callable
from typing import Any

from amaranth.hdl import ClockSignal, Elaboratable, Instance, Module, ResetSignal
from amaranth.lib import wiring
from amaranth.lib.wiring import In

__all__ = ["Shared", "Unit", "VerilogPlatform"]


class VerilogPlatform:
    """Collects the units that instances refer to while a design is converted to Verilog.

    Attributes
    ----------
    units : dict
        Module name to unit.
    """

    def __init__(self) -> None:
        self.units: dict[str, Unit] = {}

    def add(self, unit: "Unit") -> None:
        """Note that a module is needed.

        Raises
        ------
        ValueError
            Another unit has the same name.
        """
        if self.units.setdefault(unit.name, unit) is not unit:
            raise ValueError(f"name must belong to one unit, not to two: {unit.name!r}")


class Unit:
    """A design unit: all its instances are the same module.

    Parameters
    ----------
    make : callable
        Gives a new component each time, always of one kind, in domain ``sync``.
    name : str
        Name of its module.
    """

    def __init__(self, make: Callable[[], wiring.Component], name: str):
        self._make = make
        self._first: wiring.Component | None = None
        self.name = name
        self.signature = self.take().signature

    def take(self) -> wiring.Component:
        """Return a component: the same until :meth:`keep` is called, so that looking at one does not waste one."""
        if self._first is None:
            self._first = self._make()
        return self._first

    def keep(self) -> wiring.Component:
        """Return a component that nobody else will get."""
        component, self._first = self.take(), None
        return component


class Shared(wiring.Component):
    """An instance of a unit: in Verilog of its module, everywhere else of the component itself.

    Members
    -------
    As the component's.
    """

    def __init__(self, unit: Unit):
        self._unit = unit
        super().__init__(unit.signature)

    def elaborate(self, platform: object) -> Elaboratable:
        """Build the instance, or the component."""
        if isinstance(platform, VerilogPlatform):
            platform.add(self._unit)
            ports: dict[str, Any] = {"i_clk": ClockSignal(), "i_rst": ResetSignal()}
            for path, member, value in self.signature.flatten(self):
                prefix = "i" if member.flow == In else "o"
                ports[f"{prefix}_{'__'.join(map(str, path))}"] = getattr(value, "as_value", lambda value=value: value)()
            return Instance(self._unit.name, **ports)
        m = Module()
        m.submodules.component = component = self._unit.keep()
        wiring.connect(m, wiring.flipped(self), component)
        return m
