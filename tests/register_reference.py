"""What a register bank must do, cycle by cycle, from the table alone; knows only its pins."""

OKAY, SLVERR = 0, 2


def signal_names(table, *accesses):
    return {
        f"{r.name}_{f.name}": (r, f) for r in table.registers for f in r.fields if not accesses or f.access in accesses
    }


def input_names(table):
    """Return the hardware's inputs and their widths."""
    names = {name: f.width for name, (_, f) in signal_names(table, "ro").items()}
    return names | {f"{name}_set": f.width for name, (_, f) in signal_names(table, "w1c").items()}


def output_names(table):
    return {name: f.width for name, (_, f) in signal_names(table, "rw", "w1c", "w1p").items()}


class Reference:
    """Follows the pins of a bank from reset on and complains about the first that is wrong."""

    def __init__(self, table):
        self.table = table
        self.values = {name: f.reset for name, (_, f) in signal_names(table, "rw", "w1c").items()}
        self.words = {r.offset: r for r in table.registers}
        self.held = {"aw": None, "w": None, "ar": None}
        self.before = None
        self.cycle = 0
        self.writes = self.reads = self.errors = 0

    def look(self, pins):
        """Compare the pins of the next cycle; raises AssertionError."""
        before = self.before
        fresh = {c: pins[f"s_axi_{c}valid"] and not (before and self._waits(before, c)) for c in ("b", "r")}
        if before:
            for channel, payload in (("b", ("resp",)), ("r", ("data", "resp"))):
                if self._waits(before, channel):
                    assert pins[f"s_axi_{channel}valid"], f"{channel}valid fell before it was taken"
                    for part in payload:
                        name = f"s_axi_{channel}{part}"
                        assert pins[name] == before[name], f"{name} changed before it was taken"
            assert fresh["b"] == self._due(before, "b", "aw", "w"), f"cycle {self.cycle}: write response"
            assert fresh["r"] == self._due(before, "r", "ar"), f"cycle {self.cycle}: read response"
        else:
            assert not fresh["b"]
            assert not fresh["r"]
        if fresh["r"]:
            # Before the write: a read sees the values of the cycle before.
            expected = self._word(before)
            assert (pins["s_axi_rdata"], pins["s_axi_rresp"]) == expected, f"cycle {self.cycle}: {self.held['ar']:#x}"
            self.held["ar"] = None
            self.reads += 1
        self._step(pins, before, fresh["b"])
        for channel, payload in (("aw", ("addr",)), ("w", ("data", "strb")), ("ar", ("addr",))):
            if pins[f"s_axi_{channel}valid"] and pins[f"s_axi_{channel}ready"]:
                assert self.held[channel] is None, f"{channel} took a request before the last was answered"
                parts = tuple(pins[f"s_axi_{channel}{part}"] for part in payload)
                self.held[channel] = parts if channel == "w" else parts[0] & ~3
            else:
                assert pins[f"s_axi_{channel}ready"] == (self.held[channel] is None), f"{channel}ready"
        self.before = pins
        self.cycle += 1

    @staticmethod
    def _waits(pins, channel):
        return pins[f"s_axi_{channel}valid"] and not pins[f"s_axi_{channel}ready"]

    def _due(self, before, answer, *requests):
        """Whether an answer must come: the requests were there a cycle ago, and the answer's place was free."""
        there = all(
            self.held[c] is not None and not (before[f"s_axi_{c}valid"] and before[f"s_axi_{c}ready"]) for c in requests
        )
        return int(there and not self._waits(before, answer))

    def _word(self, before):
        register = self.words.get(self.held["ar"])
        if register is None:
            self.errors += 1
            return 0, SLVERR
        word = 0
        for field in register.fields:
            name = f"{register.name}_{field.name}"
            value = {"ro": before.get(name), "w1p": 0}.get(field.access, self.values.get(name))
            word += value << field.position
        return word, OKAY

    def _step(self, pins, before, written):
        ones, register = 0, None
        if written:
            register = self.words.get(self.held["aw"])
            data, strobes = self.held["w"]
            mask = sum(0xFF << 8 * byte for byte in range(4) if strobes >> byte & 1)
            self.held["aw"] = self.held["w"] = None
            good = register is not None and any(f.access != "ro" for f in register.fields)
            assert pins["s_axi_bresp"] == (OKAY if good else SLVERR), f"cycle {self.cycle}: bresp"
            self.writes += 1
            self.errors += not good
        for name, (owner, field) in signal_names(self.table, "rw", "w1c", "w1p").items():
            here = written and owner is register
            bits = (mask if here else 0) >> field.position & (1 << field.width) - 1
            ones = (data if here else 0) >> field.position & bits
            if field.access == "rw":
                self.values[name] = self.values[name] & ~bits | ones
            elif field.access == "w1c":
                self.values[name] = self.values[name] & ~ones | (before[f"{name}_set"] if before else 0)
            expected = ones if field.access == "w1p" else self.values[name]
            assert pins[name] == expected, f"cycle {self.cycle}: {name} is {pins[name]:#x}, not {expected:#x}"
