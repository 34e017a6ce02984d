"""A small register map with every kind of field, for tests."""

from model.registers import Enumerator, Field, Register, RegisterMap

MODES = (
    Enumerator("slow", 0, "saves power"),
    Enumerator("fast", 1, "a | b"),
    Enumerator("idle", 5, "does nothing"),
)

DEMO = RegisterMap(
    "demo",
    "a demonstration of every kind of field",
    (
        Register("identity", 0x00, "what this is", (Field("version", 0, 32, "ro", "version of the hardware"),)),
        Register(
            "control",
            0x04,
            "what to do",
            (
                Field("start", 0, 1, "w1p", "starts a run"),
                Field("mode", 6, 3, "rw", "how to run, across two bytes", reset=5, enumerators=MODES),
                Field("kick", 16, 2, "w1p", "wakes parts"),
            ),
        ),
        Register(
            "status",
            0x08,
            "what happened",
            (Field("events", 0, 2, "w1c", "done, error", reset=2), Field("level", 8, 8, "ro", "fill level")),
        ),
        Register("mask", 0x0C, "which events interrupt", (Field("events", 0, 2, "rw", "ones let pass"),)),
        Register("address", 0x20, "where to look", (Field("word", 0, 32, "rw", "byte address", reset=0x12345678),)),
    ),
)
