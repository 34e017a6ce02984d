"""Cuts blocks out of a design: their inputs become outputs of the whole, their outputs free inputs (assume-guarantee)."""

from amaranth.hdl import Fragment, Module, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

__all__ = ["Cut"]


class Cut(wiring.Component):
    """A component without some of its submodules.

    Parameters
    ----------
    component : Component
    monkeypatch : MonkeyPatch
        Puts stand-ins in place of the classes.
    cuts : dict
        Prefix to ``(module, class name)``: every object of the class that the component makes is cut; of the n-th, counted from 0 in the
        order in which they are made, member ``x`` is port ``<prefix><n>_x``, with its direction turned round.
    """

    def __init__(self, component, monkeypatch, cuts):
        self._made = []
        for prefix, (module, name) in cuts.items():
            monkeypatch.setattr(module, name, self._stand_in(prefix, getattr(module, name)))
        self._component = component
        self._inner = Fragment.get(component, None)
        members = {}
        for path, member, value in component.signature.flatten(component):
            members["__".join(map(str, path))] = (In if member.flow == In else Out)(len(Value.cast(value)))
        self._cut = {}
        for name, block in self._made:
            for path, member, value in block.signature.flatten(block):
                port = f"{name}_{path[0]}"
                self._cut[port] = (member.flow, value)
                members[port] = (Out if member.flow == In else In)(len(Value.cast(value)))
        super().__init__(members)

    def _stand_in(self, prefix, original):
        made = self._made

        class StandIn(original):
            def __init__(self, *arguments, **options):
                super().__init__(*arguments, **options)
                made.append((f"{prefix}{sum(name.startswith(prefix) for name, _ in made)}", self))

            def elaborate(self, platform):
                return Module()

        return StandIn

    def elaborate(self, platform):
        m = Module()
        m.submodules.inner = self._inner
        for path, member, value in self._component.signature.flatten(self._component):
            self._connect(m, getattr(self, "__".join(map(str, path))), value, member.flow)
        for name, (flow, value) in self._cut.items():
            self._connect(m, getattr(self, name), value, Out if flow == In else In)
        return m

    @staticmethod
    def _connect(m, port, value, flow):
        m.d.comb += Value.cast(value).eq(port) if flow == In else port.eq(Value.cast(value))
