"""What the README points to exists, and what it tells to run runs."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from sim.design import generated

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text()
LINKS = re.findall(r"\]\(([^)#]+)\)", TEXT)
MODULES = sorted(set(re.findall(r"python -m ((?:hdl|model|sim|synth)\.\w+)", TEXT)))


def test_links_and_files_exist():
    local = [link for link in LINKS if not link.startswith("http")]
    named = re.findall(r"`((?:sim|synth|model|hdl)/\w+\.py)`", TEXT)
    assert len(local) > 3
    assert [name for name in [*local, *named] if not (ROOT / name).exists()] == []


def test_pages_that_the_code_refers_to_exist():
    sources = [path for package in ("hdl", "model", "sim", "synth") for path in (ROOT / package).rglob("*.py")]
    named = {page for path in sources for page in re.findall(r"docs/[\w-]+\.md", path.read_text())}
    assert len(named) > 4
    assert sorted(page for page in named if not (ROOT / page).exists()) == []


@pytest.mark.parametrize("module", MODULES)
def test_named_command_exists(module):
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage:")


def test_first_command_writes_verilog_of_every_block(tmp_path):
    command = next(line for line in TEXT.splitlines() if line.endswith("hdl.build all")).rpartition(" && ")[2]
    arguments = shlex.split(command)[1:]
    done = subprocess.run(
        [sys.executable, *arguments, "-o", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    blocks = re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE)
    assert {path.stem for path in tmp_path.glob("*.v")} == set(blocks)
    # Simulations take the same text from their cache.
    assert [name for name in blocks if (tmp_path / f"{name}.v").read_text() != generated(name).verilog] == []


def test_example_prints_what_it_says(capsys):
    [example] = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    shape, _, cycles = capsys.readouterr().out.strip().rpartition(" ")
    assert shape == "(8, 48)"
    assert int(cycles) > 100
