"""AXI signatures have the names and directions of the specification, as interfaces and as flat ports."""

import re

import pytest
from amaranth.hdl import Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from hdl.lib.axi import Axi4, Axi4Lite, FlatPorts, axi_meanings, flat_members
from hdl.lib.verilog import to_verilog

ADDRESS = {"id": 5, "addr": 40, "len": 8, "size": 3, "burst": 2, "lock": 1, "cache": 4, "prot": 3, "qos": 4, "valid": 1}
SENT = {
    **{f"{channel}{name}": width for channel in ("aw", "ar") for name, width in ADDRESS.items()},
    **{"wdata": 64, "wstrb": 8, "wlast": 1, "wvalid": 1, "bready": 1, "rready": 1},
}
RECEIVED = {
    **{"awready": 1, "wready": 1, "arready": 1, "bid": 5, "bresp": 2, "bvalid": 1},
    **{"rid": 5, "rdata": 64, "rresp": 2, "rlast": 1, "rvalid": 1},
}


def directions(signature, flow):
    return {name: member.shape for name, member in signature.members.items() if member.flow == flow}


def test_axi4_is_that_of_a_manager():
    signature = Axi4(40, 64, 5)
    assert directions(signature, Out) == SENT
    assert directions(signature, In) == RECEIVED
    halves = Axi4(40, 64, 5, write=False).members, Axi4(40, 64, 5, read=False).members
    assert {**dict(halves[0].items()), **dict(halves[1].items())} == dict(signature.members.items())


def test_axi4_lite_has_neither_bursts_nor_identifiers():
    names = {
        name
        for name in {**SENT, **RECEIVED}
        if not name.endswith(("id", "last", "len", "size", "burst", "lock", "cache", "qos"))
    }
    names |= {"awvalid", "wvalid", "bvalid", "arvalid", "rvalid"}
    assert set(Axi4Lite(12, 32).members) == names


class Through(wiring.Component):
    """A subordinate's port that is a manager's port."""

    def __init__(self):
        self._axi = Axi4Lite(12, 32)
        super().__init__(flat_members("s_axi", self._axi.flip()) | flat_members("m_axi", self._axi))

    def elaborate(self, platform):
        m = Module()
        wiring.connect(m, FlatPorts(self, "s_axi", self._axi.flip()), FlatPorts(self, "m_axi", self._axi))
        return m


def test_flat_ports_connect_as_interfaces_and_have_one_underscore():
    text = to_verilog(Through(), "through")
    wires = dict(re.findall(r"assign (\w+) = (\w+);", text))
    forth = {f"m_axi_{name}": f"s_axi_{name}" for name in directions(Axi4Lite(12, 32), Out)}
    back = {f"s_axi_{name}": f"m_axi_{name}" for name in directions(Axi4Lite(12, 32), In)}
    assert wires == forth | back


def test_every_port_has_a_meaning():
    meanings = axi_meanings("m_axi", Axi4())
    assert set(meanings) == set(flat_members("m_axi", Axi4()))
    assert meanings["m_axi_arlen"] == "AXI read address: beats of the burst, less one"
    assert meanings["m_axi_wstrb"] == "AXI write data: bytes of the data to write"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Axi4(address_width=65), "address_width must be from 1 to 64, not 65"),
        (lambda: Axi4(data_width=48), "data_width must be a power of two from 32 to 1024, not 48"),
        (lambda: Axi4(id_width=0), "id_width must be from 1 to 32, not 0"),
        (lambda: Axi4(read=False, write=False), "read or write must be True"),
        (lambda: Axi4Lite(data_width=128), "data_width must be a power of two from 32 to 64, not 128"),
        (lambda: Axi4Lite(address_width=0), "address_width must be from 1 to 64, not 0"),
    ],
)
def test_wrong_widths_are_named(make, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        make()


def test_signatures_show_their_parameters():
    assert repr(Axi4(32, 64, 2, write=False)) == "Axi4(32, 64, 2, read=True, write=False)"
    assert repr(Axi4Lite()) == "Axi4Lite(32, 32)"
