"""AXI4 and AXI4-Lite as interfaces and as flat ports, with the signal names of the AMBA specification (ARM IHI 0022)."""

from typing import Any

from amaranth.hdl import Module, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Member, Out

__all__ = ["Axi4", "Axi4Lite", "FlatPorts", "axi_meanings", "axi_receive", "axi_send", "flat_members"]

_MEANINGS = {
    "id": "transaction identifier",
    "addr": "address of the first byte",
    "len": "beats of the burst, less one",
    "size": "bytes of a beat, as a power of two",
    "burst": "burst type: 1 is INCR",
    "lock": "exclusive access: never",
    "cache": "memory type: 3 is normal, not cached, bufferable",
    "prot": "protection: {instruction, not secure, privileged}",
    "qos": "quality of service: 0 is none",
    "data": "data, byte 0 lowest",
    "strb": "bytes of the data to write",
    "resp": "response: 0 is OKAY, 2 SLVERR, 3 DECERR",
    "last": "last beat of the burst",
    "valid": "the sender offers",
    "ready": "the receiver takes",
}
_CHANNELS = {
    "aw": "write address",
    "w": "write data",
    "b": "write response",
    "ar": "read address",
    "r": "read data",
}


class Axi4(wiring.Signature):
    """AXI4 from the manager's side, without the optional region and user signals.

    Parameters
    ----------
    address_width : int
        Bits of an address, 1 to 64.
    data_width : int
        Bits of a beat: a power of two from 32 to 1024.
    id_width : int
        Bits of an identifier, 1 to 32.
    read, write : bool
        Which channels there are: ``ar`` and ``r``, ``aw``, ``w`` and ``b``.

    Raises
    ------
    ValueError
        A width is outside its range, or there is no channel.
    """

    def __init__(
        self,
        address_width: int = 40,
        data_width: int = 128,
        id_width: int = 1,
        *,
        read: bool = True,
        write: bool = True,
    ):
        _check_range("address_width", address_width, 1, 64)
        _check_power("data_width", data_width, 32, 1024)
        _check_range("id_width", id_width, 1, 32)
        if not (read or write):
            raise ValueError("read or write must be True")
        self._widths = address_width, data_width, id_width, read, write
        identity = {"id": Out(id_width)}
        address = {
            **identity,
            **{"addr": Out(address_width), "len": Out(8), "size": Out(3), "burst": Out(2)},
            **{"lock": Out(1), "cache": Out(4), "prot": Out(3), "qos": Out(4)},
        }
        answer = {"id": In(id_width), "resp": In(2)}
        members: dict[str, Member] = {}
        if write:
            members |= _channel("aw", address)
            members |= _channel("w", {"data": Out(data_width), "strb": Out(data_width // 8), "last": Out(1)})
            members |= _channel("b", answer)
        if read:
            members |= _channel("ar", address)
            members |= _channel("r", {**answer, "data": In(data_width), "last": In(1)})
        super().__init__(members)

    def __repr__(self) -> str:
        address_width, data_width, id_width, read, write = self._widths
        return f"Axi4({address_width}, {data_width}, {id_width}, read={read}, write={write})"


class Axi4Lite(wiring.Signature):
    """AXI4-Lite from the manager's side.

    Parameters
    ----------
    address_width : int
        Bits of an address, 1 to 64.
    data_width : int
        32 or 64.

    Raises
    ------
    ValueError
        A width is outside its range.
    """

    def __init__(self, address_width: int = 32, data_width: int = 32):
        _check_range("address_width", address_width, 1, 64)
        _check_power("data_width", data_width, 32, 64)
        self._widths = address_width, data_width
        address = {"addr": Out(address_width), "prot": Out(3)}
        super().__init__(
            {
                **_channel("aw", address),
                **_channel("w", {"data": Out(data_width), "strb": Out(data_width // 8)}),
                **_channel("b", {"resp": In(2)}),
                **_channel("ar", address),
                **_channel("r", {"data": In(data_width), "resp": In(2)}),
            }
        )

    def __repr__(self) -> str:
        return f"Axi4Lite{self._widths}"


def _channel(prefix: str, fields: dict[str, Member]) -> dict[str, Member]:
    """Return the members of a channel; its valid goes the way of its fields."""
    forth = next(iter(fields.values())).flow
    handshake = {"valid": Member(forth, 1), "ready": Member(forth.flip(), 1)}
    return {f"{prefix}{name}": member for name, member in {**fields, **handshake}.items()}


def _check_range(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ValueError(f"{name} must be from {least} to {most}, not {value}")


def _check_power(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most or value & (value - 1):
        raise ValueError(f"{name} must be a power of two from {least} to {most}, not {value}")


def flat_members(prefix: str, signature: wiring.Signature) -> dict[str, Member]:
    """Return the members of an interface as those of a component, ``<prefix>_<name>``.

    A nested interface ``m_axi`` would give ports ``m_axi__araddr``; integrators expect ``m_axi_araddr``. For a subordinate pass the flipped
    signature.
    """
    return {f"{prefix}_{name}": member for name, member in signature.members.items()}


class FlatPorts:
    """The flat members of a component seen as one interface again, from inside of the component.

    ``wiring.connect(m, FlatPorts(self, "m_axi", signature), inner.axi)`` connects them to an inner manager.

    Parameters
    ----------
    component : Component
        Has members :func:`flat_members` of the prefix and the signature.
    prefix : str
    signature : Signature
        As seen from outside of the component.
    """

    def __init__(self, component: wiring.Component, prefix: str, signature: wiring.Signature):
        self.signature = signature.flip()
        for name in signature.members:
            setattr(self, name, getattr(component, f"{prefix}_{name}"))


def axi_meanings(prefix: str, signature: wiring.Signature) -> dict[str, str]:
    """Return what each flat port of an AXI interface means, for a generator's description."""
    meanings = {}
    for name in signature.members:
        channel = next(channel for channel in _CHANNELS if name.startswith(channel))
        meanings[f"{prefix}_{name}"] = f"AXI {_CHANNELS[channel]}: {_MEANINGS[name.removeprefix(channel)]}"
    return meanings


def axi_send(m: Module, source: stream.Interface, ports: Any, channel: str) -> None:
    """Send a stream by a channel: each field of its payload is the channel's signal of that name."""
    for field, _ in source.payload.shape():
        m.d.comb += getattr(ports, f"{channel}{field}").eq(source.payload[field])
    m.d.comb += [
        getattr(ports, f"{channel}valid").eq(source.valid),
        source.ready.eq(getattr(ports, f"{channel}ready")),
    ]


def axi_receive(m: Module, ports: Any, channel: str, target: stream.Interface) -> None:
    """Receive a channel as a stream: each field of its payload is the channel's signal of that name."""
    for field, _ in target.payload.shape():
        m.d.comb += target.payload[field].eq(getattr(ports, f"{channel}{field}"))
    ready: Signal = getattr(ports, f"{channel}ready")
    m.d.comb += [target.valid.eq(getattr(ports, f"{channel}valid")), ready.eq(target.ready)]
