"""``OBJCACHE`` of Verilator's makefile: compiles Verilator's own run-time library and its main header once instead of once per design.

It is called with a whole compiler command. The object of a ``verilated*.cpp`` of the tool is kept; every other C++ source gets a precompiled
``verilated.h``, which is most of a small source's time. Both depend on the tool and on the command's flags, which do not name the design.
``SIM_OBJCACHE`` is the folder where they are and ``SIM_OBJCACHE_VERSION`` the tool's version.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

__all__ = ["main"]


def _whole(kept: Path, noted: Path) -> bool:
    """Say whether an object is there, as long as it was when it was kept."""
    try:
        return kept.stat().st_size == int(noted.read_text())
    except (OSError, ValueError):
        return False


def _key(words: Sequence[str]) -> str:
    return hashlib.sha256(chr(0).join([os.environ.get("SIM_OBJCACHE_VERSION", ""), *words]).encode()).hexdigest()[:24]


def _keep(made: Path, kept: Path, noted: Path) -> None:
    """Copy a file into the cache; the rename makes it appear whole, whoever else makes it at the same time."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=kept.parent)
    os.close(handle)
    shutil.copyfile(made, partial)
    size = made.stat().st_size
    Path(partial).replace(kept)
    noted.write_text(str(size))


def _header_flags(command: Sequence[str]) -> list[str] | None:
    """Return the flags to precompile ``verilated.h`` with for a command; None if the command is no such one or has a precompiled header."""
    include = os.environ.get("VERILATOR_ROOT", "") + "/include"
    if "-c" not in command or "-o" not in command or {"-include", "-x"} & set(command) or f"-I{include}" not in command:
        return None
    at = command.index("-o")
    # Where a design's own files are matters to nothing in this header, nor which file lists what was included.
    flags = [*command[:at], *command[at + 2 : -1]]
    return [
        word
        for word in flags
        if word not in ("-c", "-MMD", "-MP") and (word[:2] != "-I" or word.startswith(f"-I{include}"))
    ]


def _precompile(flags: Sequence[str], header: Path) -> bool:
    """Make a precompiled ``verilated.h`` unless it is there; says whether it is there."""
    kept, noted = header.with_suffix(".h.gch"), header.with_suffix(".size")
    if _whole(kept, noted):
        return True
    header.parent.mkdir(parents=True, exist_ok=True)
    with header.with_suffix(".lock").open("w") as lock, tempfile.TemporaryDirectory() as place:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _whole(kept, noted):
            header.write_text('#include "verilated.h"\n', encoding="utf-8")
            made = Path(place) / kept.name
            command = [*flags, "-x", "c++-header", "-o", str(made), str(header)]
            if subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode:
                return False
            _keep(made, kept, noted)
    return True


def _with_header(command: Sequence[str], folder: Path) -> int:
    """Compile a source with the precompiled header, or as it is if that does not work; returns the exit status."""
    flags = _header_flags(command)
    if flags is not None:
        header = folder / _key(sorted(flags)) / "verilated_first.h"
        if _precompile(flags, header):
            with_header = [*command[:-1], "-include", str(header), command[-1]]
            if subprocess.run(with_header, stderr=subprocess.DEVNULL, check=False).returncode == 0:
                return 0
    return subprocess.run(command, check=False).returncode


def main(command: Sequence[str]) -> int:
    """Run a compiler command, or copy the object that it would make; returns its exit status."""
    folder = os.environ.get("SIM_OBJCACHE")
    source = Path(command[-1])
    if not folder or "-o" not in command or source.suffix != ".cpp":
        return subprocess.run(command, check=False).returncode
    if not source.name.startswith("verilated"):
        return _with_header(command, Path(folder))
    target = command[command.index("-o") + 1]
    kept = Path(folder) / f"{_key([word for word in command if word != target])}.o"
    noted = kept.with_suffix(".size")
    if not _whole(kept, noted):
        status = subprocess.run(command, check=False).returncode
        if status == 0:
            _keep(Path(target), kept, noted)
        return status
    shutil.copyfile(kept, target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
