"""Memories that become cells instead of flip-flops."""

import json

from synth.memories import Memory, extract, stubs


def cell(writes, clocked, reads=1, width=8):
    connections = {"RD_ADDR": [2] * 4 * reads, "RD_DATA": [3] * width * reads, "WR_DATA": [4] * width * writes}
    ports = connections if writes else {"RD_ADDR": connections["RD_ADDR"], "RD_DATA": connections["RD_DATA"]}
    numbers = {"WIDTH": width, "SIZE": 12, "RD_PORTS": reads, "WR_PORTS": writes, "RD_CLK_ENABLE": clocked}
    return {
        "type": "$mem_v2",
        "parameters": {name: f"{value:032b}" for name, value in numbers.items()} | {"INIT": "x"},
        "attributes": {"src": "somewhere"},
        "port_directions": {port: "output" if port == "RD_DATA" else "input" for port in ports},
        "connections": ports,
    }


def test_what_is_written_becomes_an_instance():
    cells = {"a": cell(1, 1), "b": cell(1, 1), "c": cell(2, 1, reads=2), "d": cell(0, 0), "e": {"type": "$add"}}
    text, memories = extract(json.dumps({"modules": {"top": {"cells": cells}}}))
    kinds = {name: each["type"] for name, each in json.loads(text)["modules"]["top"]["cells"].items()}
    assert kinds == {
        "a": "memory_12x8_1r1w",
        "b": "memory_12x8_1r1w",
        "c": "memory_12x8_2r2w_unclocked",
        "d": "$mem_v2",
        "e": "$add",
    }
    ports = {"RD_ADDR": 4, "RD_DATA": 8, "WR_DATA": 8}
    assert memories["memory_12x8_1r1w"] == Memory("memory_12x8_1r1w", 8, 12, 1, 1, True, ports)
    assert [memory.bits for memory in memories.values()] == [96, 96]
    assert not memories["memory_12x8_2r2w_unclocked"].clocked
    assert stubs(memories).splitlines()[0] == (
        "(* blackbox *) module memory_12x8_1r1w(input [3:0] RD_ADDR, output [7:0] RD_DATA, input [7:0] WR_DATA); endmodule"
    )
