"""Command lines: failures are a line, interruptions leave nothing running, files are whole or not there."""

import argparse
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from model.command import CommandError, Progress, check_outputs, command, positive, run_tool, write_files, write_json

ROOT = Path(__file__).resolve().parents[2]

SLOW = """
import sys
from concurrent.futures import ThreadPoolExecutor
from model.command import command, run_tool

# Its own child outlives a kill of the shell alone.
TOOL = ["sh", "-c", "sleep 60 & echo $! > $0; wait"]

@command(interrupted="interrupted; go on")
def main(arguments=None):
    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(lambda name: run_tool([*TOOL, name]), sys.argv[1:]):
            print(found)
    return 0

sys.exit(main())
"""


def fails(error):
    @command()
    def main(arguments=None):
        raise error

    return main


@pytest.mark.parametrize(
    "error", [CommandError("no"), ValueError("no"), TypeError("no"), OSError("no"), ModuleNotFoundError("no")]
)
def test_a_failure_is_one_line(error, capsys):
    assert fails(error)([]) == 1
    assert capsys.readouterr() == ("", "error: no\n")


def test_a_bug_keeps_its_traceback():
    with pytest.raises(KeyError):
        fails(KeyError("no"))([])


def test_prefix_status_and_result(capsys):
    assert command(prefix="model.x", status=2)(lambda arguments: int(arguments[0]))(["no"]) == 2
    assert capsys.readouterr().err.startswith("model.x: invalid literal")
    assert command()(lambda arguments: 7)(None) == 7


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_ends_all_tools_in_all_threads(number, status, tmp_path):
    names = [tmp_path / f"{k}.pid" for k in range(6)]
    with subprocess.Popen(
        [sys.executable, "-c", SLOW, *names], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        until = time.monotonic() + 30
        while not all(name.exists() and name.read_text() for name in names[:2]) and time.monotonic() < until:
            time.sleep(0.02)
        pids = [int(name.read_text()) for name in names[:2]]
        assert all(map(alive, pids))
        process.send_signal(number)
        assert process.communicate(timeout=30) == ("", "error: interrupted; go on\n")
    assert process.returncode == status
    until = time.monotonic() + 5
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(map(alive, pids))
    # What was still to come was not begun.
    assert not any(name.exists() for name in names[2:])


def test_signals_are_as_before_behind_a_command():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    command()(lambda arguments: 0)(None)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def printing(lines, redirect):
    text = f"from model.command import command\nimport sys\n@command()\ndef main(a=None):\n    print('x\\n' * {lines})\n    return 0\nsys.exit(main())"
    shell = f'"{sys.executable}" -c "$0" {redirect}'
    return subprocess.run(["bash", "-c", shell, text], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_reader_that_goes_away_is_no_error(lines):
    done = printing(lines, "| true; echo ${PIPESTATUS[0]}")
    assert (done.stdout, done.stderr) == ("141\n", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_full_disk_is_one_line(lines):
    done = printing(lines, "> /dev/full")
    assert (done.returncode, done.stderr) == (1, "error: [Errno 28] No space left on device\n")


def test_no_output_stream_at_all_is_no_error():
    done = printing(1, ">&-")
    assert (done.returncode, done.stderr) == (0, "")


def test_tools_give_their_status_and_end_in_time():
    assert run_tool(["sh", "-c", "exit 3"]) == 3
    with pytest.raises(subprocess.TimeoutExpired):
        run_tool(["sleep", "60"], 0.05)


def test_progress_counts_seconds(capsys):
    Progress()("12 cells")
    Progress(quiet=True)("13 cells")
    assert capsys.readouterr() == ("", "12 cells, 0 s\n")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"jobs": 0}, "--jobs must be positive, not 0"),
        ({"io_share": -0.5}, "--io-share must be positive, not -0.5"),
        ({"clock": [1.0, math.nan]}, "--clock must be positive, not nan"),
        ({"clock": math.inf}, "--clock must be finite, not inf"),
    ],
)
def test_numbers_that_make_no_sense_are_named(values, message):
    positive(argparse.Namespace(jobs=1, clock=[0.1, 2.0], none=None), "jobs", "clock", "none")
    with pytest.raises(ValueError, match=f"^{message}$"):
        positive(argparse.Namespace(**values), *values)


def test_files_are_written_together_or_not_at_all(tmp_path):
    first, second = tmp_path / "new" / "a.json", tmp_path / "b.bin"
    second.write_bytes(b"old")
    write_files({first: "ä\n", second: b"\0"})
    assert (first.read_bytes(), second.read_bytes()) == ("ä\n".encode(), b"\0")
    with pytest.raises(IsADirectoryError, match="output must be a file, not the folder "):
        write_files({first: "changed", tmp_path: ""})
    with pytest.raises(UnicodeEncodeError):
        write_files({first: "changed", second: "\ud800"})
    with pytest.raises(OSError, match=r"^\[Errno 28\] No space left on device: '/dev/full'$"):
        write_files({first: "changed", Path("/dev/full"): "x"})
    assert (first.read_text(), second.read_bytes()) == ("ä\n", b"\0")
    assert sorted(tmp_path.rglob("*.*")) == [second, first]


def test_a_large_file_moves_to_its_place_with_the_others(tmp_path):
    part, place, note = tmp_path / ".p", tmp_path / "p", tmp_path / "n"
    part.write_text("large")
    write_files({place: part, note: "small"})
    assert (place.read_text(), note.read_text(), part.exists()) == ("large", "small", False)
    part.write_text("larger")
    with pytest.raises(UnicodeEncodeError):
        write_files({place: part, note: "\ud800"})
    assert (place.read_text(), note.read_text(), part.exists()) == ("large", "small", False)


@pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="needs /dev/stdout")
def test_a_pipe_is_written_as_it_is():
    text = "from pathlib import Path\nfrom model.command import write_json\nwrite_json(Path('/dev/stdout'), 1)"
    done = subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


def test_links_and_devices_stay(tmp_path):
    link, target = tmp_path / "link", tmp_path / "target"
    link.symlink_to(target)
    write_json(link, {"x": "ä"})
    write_json(Path(os.devnull), [])
    write_json(None, {})
    assert link.is_symlink()
    assert target.read_text() == '{\n  "x": "ä"\n}\n'
    assert Path(os.devnull).is_char_device()


def test_outputs_are_checked_before_the_work(tmp_path):
    file = tmp_path / "file"
    file.touch()
    check_outputs(None, file, tmp_path / "a" / "b" / "c.json")
    assert (tmp_path / "a" / "b").is_dir()
    with pytest.raises(NotADirectoryError, match=r"output must be in a folder, which .*file cannot be"):
        check_outputs(file / "x.json")
    with pytest.raises(IsADirectoryError, match="output must be a file, not the folder "):
        check_outputs(tmp_path)
