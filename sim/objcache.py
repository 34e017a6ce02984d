"""``OBJCACHE`` of Verilator's makefile: compiles Verilator's own run-time library once instead of once per design.

It is called with a whole compiler command, and looks only at those that compile a ``verilated*.cpp`` of the tool; every other command just
runs. The object depends on the tool and on the command's flags, which do not name the design. ``SIM_OBJCACHE`` is the folder of the objects
and ``SIM_OBJCACHE_VERSION`` the tool's version.
"""

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


def main(command: Sequence[str]) -> int:
    """Run a compiler command, or copy the object that it would make; returns its exit status."""
    folder = os.environ.get("SIM_OBJCACHE")
    source = Path(command[-1])
    if not folder or "-o" not in command or not (source.name.startswith("verilated") and source.suffix == ".cpp"):
        return subprocess.run(command, check=False).returncode
    target = command[command.index("-o") + 1]
    parts = [os.environ.get("SIM_OBJCACHE_VERSION", ""), *(word for word in command if word != target)]
    kept = Path(folder) / f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:24]}.o"
    noted = kept.with_suffix(".size")
    if not _whole(kept, noted):
        status = subprocess.run(command, check=False).returncode
        if status:
            return status
        kept.parent.mkdir(parents=True, exist_ok=True)
        # The rename makes the object appear whole, whoever else compiles it at the same time.
        handle, partial = tempfile.mkstemp(dir=kept.parent)
        os.close(handle)
        shutil.copyfile(target, partial)
        Path(partial).replace(kept)
        noted.write_text(str(kept.stat().st_size))
        return 0
    shutil.copyfile(kept, target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
