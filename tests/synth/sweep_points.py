"""Point functions that take milliseconds, where worker processes can import them."""

import os
import time
from pathlib import Path


def counted(point):
    """Square of ``i``, noted with the process in the file that ``LOG`` names."""
    with Path(os.environ["LOG"]).open("a") as log:
        log.write(f"{point['i']} {os.getpid()}\n")
    time.sleep(float(os.environ.get("SECONDS", "0")))
    return {"square": point["i"] ** 2, "half": point["i"] / 2, "even": point["i"] % 2 == 0}


def square(point):
    return {"square": point["i"] ** 2, "name": f"{point['kind']} {point['i']}"}


def picky(point):
    """Refuses 1, fails with 2."""
    if point["i"] == 1:
        raise ValueError("i must not be 1")
    if point["i"] == 2:
        raise KeyError("two")
    return {"square": point["i"] ** 2}


if __name__ == "__main__":
    import sys

    from synth.points import grid, run

    run(counted, grid({"i": range(int(sys.argv[2]))}), Path(sys.argv[1]), jobs=2)
