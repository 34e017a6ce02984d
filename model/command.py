"""What the command lines share: one line for what went wrong, an end without leftovers, progress, and files that are there whole or not at all."""

import contextlib
import functools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = [
    "CommandError",
    "Progress",
    "check_outputs",
    "command",
    "end_tools",
    "positive",
    "run_tool",
    "write_files",
    "write_json",
]

Main = Callable[[Sequence[str] | None], int]
Command = Callable[..., int]

_INTERRUPTED, _NO_READER = 130, 141
"""Exit statuses of a shell for SIGINT and SIGPIPE."""

_tools: set[subprocess.Popen[Any]] = set()
_ending = threading.Event()


class CommandError(RuntimeError):
    """Something that a command cannot go on after; the message says what, and what to do."""


class _TerminatedError(KeyboardInterrupt):
    """SIGTERM, which ends a command as Ctrl-C does."""


def command(*, prefix: str = "error", status: int = 1, interrupted: str = "interrupted") -> Callable[[Main], Command]:
    """Make a command of a function of its arguments that returns an exit status.

    Wrong values, files that cannot be read or written, missing packages and every `CommandError` become one line on the standard error stream.
    Ctrl-C and SIGTERM end all tools that :func:`run_tool` started, in whatever thread, and then the command, as 130 and 143. A reader that goes
    away (``| head``) ends it silently, as 141.

    Parameters
    ----------
    prefix : str
        Stands before the line.
    status : int
        Exit status of a failure.
    interrupted : str
        The line after an interruption.
    """

    def decorate(main: Main) -> Command:
        @functools.wraps(main)
        def run(arguments: Sequence[str] | None = None) -> int:
            with _signals():
                try:
                    found = main(arguments)
                    print(end="", flush=True)
                    return found
                except KeyboardInterrupt as error:
                    # Of what was half made, Amaranth's modules among it.
                    warnings.simplefilter("ignore")
                    print(f"{prefix}: {interrupted}", file=sys.stderr)
                    return 128 + signal.SIGTERM if isinstance(error, _TerminatedError) else _INTERRUPTED
                except BrokenPipeError:
                    _give_up_stdout()
                    return _NO_READER
                except (CommandError, OSError, ImportError, TypeError, ValueError) as error:
                    _give_up_stdout()
                    print(f"{prefix}: {error}", file=sys.stderr)
                    return status

        return run

    return decorate


def _give_up_stdout() -> None:
    """Take care that what cannot be printed is not tried again, with a traceback, when Python ends."""
    try:
        print(end="", flush=True)
    except OSError:
        with contextlib.suppress(OSError), open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), sys.stdout.fileno())


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """End tools, then this command, on SIGINT and SIGTERM."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def end(number: int, frame: FrameType | None) -> None:
        # Whoever asks twice does not want to wait for any cleaning.
        for each in before:
            signal.signal(each, signal.SIG_DFL)
        end_tools()
        raise _TerminatedError if number == signal.SIGTERM else KeyboardInterrupt

    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _ending.clear()


def end_tools() -> None:
    """Kill all tools that :func:`run_tool` runs now, and let it start no more."""
    _ending.set()
    for process in list(_tools):
        _kill(process)


def _kill(process: subprocess.Popen[Any]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_tool(words: Sequence[str | Path], timeout: float | None = None, **options: Any) -> int:
    """Run a program without input to its end, and return its exit status.

    It has a session of its own, and is killed with all that it started when time is up or the command is interrupted.

    Parameters
    ----------
    words : sequence of str or Path
        Program and arguments; no shell.
    timeout : float, optional
        Seconds.
    options
        As for `subprocess.Popen`.

    Raises
    ------
    subprocess.TimeoutExpired
    OSError
        The program does not start.
    KeyboardInterrupt
        The command was interrupted meanwhile, in this thread or another.
    """
    if _ending.is_set():
        raise KeyboardInterrupt
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True, **options)
    try:
        _tools.add(process)
        # The signal may have come between.
        found = -signal.SIGKILL if _ending.is_set() else process.wait(timeout)
    finally:
        _kill(process)
        _tools.discard(process)
    if _ending.is_set():
        raise KeyboardInterrupt
    return found


class Progress:
    """Prints lines, with the seconds since it was made, on the standard error stream, unless it must be ``quiet``."""

    def __init__(self, quiet: bool = False):
        self._quiet = quiet
        self._started = time.monotonic()

    def __call__(self, text: str) -> None:
        """Print a line."""
        if not self._quiet:
            print(f"{text}, {time.monotonic() - self._started:.0f} s", file=sys.stderr, flush=True)


def positive(options: Any, *names: str) -> None:
    """Check options that are numbers, or lists of numbers, and may be None.

    Raises
    ------
    ValueError
        One is not greater than 0, or infinite.
    """
    for name in names:
        value = getattr(options, name)
        for number in value if isinstance(value, list) else [value]:
            if number is not None and not 0 < number < math.inf:
                kind = "finite" if number == math.inf else "positive"
                raise ValueError(f"--{name.replace('_', '-')} must be {kind}, not {number:g}")


def check_outputs(*paths: Path | None) -> None:
    """Make the folders of files that will be written, so that a command fails before its work and not behind it.

    Raises
    ------
    OSError
        A file cannot be written.
    """
    for path in paths:
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError):
                raise NotADirectoryError(f"output must be in a folder, which {path.parent} cannot be") from None
            if path.is_dir():
                raise IsADirectoryError(f"output must be a file, not the folder {path}")
            if not os.access(path if path.exists() else path.parent, os.W_OK):
                raise PermissionError(f"output must be a file that can be written, not {path}")


def write_files(files: Mapping[Path, str | bytes | Path]) -> None:
    """Write all files or none: each under another name first. Text is UTF-8; folders are made.

    A path as content is that of a file that has been written beside its place, to which it moves; it is removed if that cannot be.

    Raises
    ------
    OSError
        A file cannot be written.
    """
    check_outputs(*files)
    waiting: list[tuple[str, Path]] = []
    try:
        for path, content in files.items():
            if isinstance(content, Path):
                waiting.append((str(content), path))
                continue
            try:
                _write_beside(path, content.encode() if isinstance(content, str) else content, waiting)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(path)) from None
        while waiting:
            os.replace(*waiting[-1])
            waiting.pop()
    finally:
        for name, _ in waiting:
            os.unlink(name)


def _write_beside(path: Path, data: bytes, waiting: list[tuple[str, Path]]) -> None:
    """Write a file under another name, which joins those that wait for theirs."""
    # A device or a pipe has no other name, and a link stays one.
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    target = path.resolve()
    handle, name = tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent)
    waiting.append((name, target))
    with open(handle, "wb") as file:
        file.write(data)
    # As a file that open() makes, not readable by the user alone.
    mask = os.umask(0)
    os.umask(mask)
    os.chmod(name, 0o666 & ~mask)


def write_json(path: Path | None, data: Any, indent: int = 2) -> None:
    """Write data as JSON, whole or not at all; without a path, nothing."""
    if path is not None:
        write_files({path: json.dumps(data, indent=indent, ensure_ascii=False) + "\n"})
