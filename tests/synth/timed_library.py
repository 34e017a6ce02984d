"""A library small enough to work out its delays by hand: linear tables, one of each kind of cell, and an inverting full adder."""

HEAD = """\
library (timed) {{
  delay_model : table_lookup;
  time_unit : "1{time}s";
  capacitive_load_unit (1, {load}f);
  lu_table_template (t) {{
    variable_1 : input_net_transition; variable_2 : total_output_net_capacitance;
    index_1 ("0, 10"); index_2 ("0, 4");
  }}
  lu_table_template (c) {{
    variable_1 : constrained_pin_transition; variable_2 : related_pin_transition;
    index_1 ("0, 10"); index_2 ("0, 10");
  }}
"""


def table(kind, base, slew, load, template="t"):
    """``base + slew · transition + load · capacitance`` at the corners of a table."""
    values = ", ".join(f'"{base + 10 * slew * i:g}, {base + 10 * slew * i + 4 * load:g}"' for i in (0, 1))
    return f"{kind} ({template}) {{ values ({values}); }}"


def timing(pin, base, sense, kind=""):
    """An arc of which a falling output is one slower; its slew is 2 and half the load."""
    tables = [table("cell_rise", base, 0.1, 1), table("cell_fall", base + 1, 0.1, 1)]
    tables += [table("rise_transition", 2, 0, 0.5), table("fall_transition", 2, 0, 0.5)]
    return f'timing () {{ related_pin : "{pin}"; {kind} timing_sense : {sense}; {" ".join(tables)} }}'


def cell(name, area, pins, outputs, base, sense="non_unate"):
    """A combinational cell."""
    inputs = "".join(f"pin ({pin}) {{ direction : input; capacitance : 1; }}\n" for pin in pins)
    for output, function in outputs.items():
        arcs = " ".join(timing(pin, base, sense) for pin in pins)
        inputs += f'pin ({output}) {{ direction : output; function : "{function}"; {arcs} }}\n'
    return f"cell ({name}) {{ area : {area};\n{inputs}}}\n"


SETUP = f'timing () {{ related_pin : "CK"; timing_type : setup_rising; {table("rise_constraint", 3, 0.5, 0, "c")} '
SETUP += f"{table('fall_constraint', 4, 0.5, 0, 'c')} }}"
FLIP_FLOP = f"""\
cell (DFF) {{ area : 5;
ff (IQ, IQN) {{ next_state : "D"; clocked_on : "CK"; }}
pin (CK) {{ direction : input; clock : true; capacitance : 1; }}
pin (D) {{ direction : input; capacitance : 2; {SETUP} }}
pin (Q) {{ direction : output; function : "IQ"; {timing("CK", 20, "non_unate", "timing_type : rising_edge;")} }}
}}
"""
ADDER = {"SN": "!(A ^ B ^ CI)", "CON": "!(A & B | CI & (A | B))"}


def library(time="p", load="f"):
    """Text of the library."""
    cells = [
        cell("INV", 1, "A", {"Y": "!A"}, 5, "negative_unate"),
        cell("BUF", 2, "A", {"Y": "A"}, 8, "positive_unate"),
        cell("NAND2", 2, "AB", {"Y": "!(A & B)"}, 7, "negative_unate"),
        cell("XOR2", 4, "AB", {"Y": "A ^ B"}, 11),
        cell("FA", 7, ["A", "B", "CI"], ADDER, 15),
        FLIP_FLOP,
    ]
    return "".join([HEAD.format(time=time, load=load), *cells, "}\n"])
