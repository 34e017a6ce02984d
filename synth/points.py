"""Engine of the sweeps: a function over many points on all cores or a Dask cluster, where finished points outlive an interruption (docs/sweep.md)."""

import contextlib
import hashlib
import importlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import cache, partial
from itertools import product
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

from model.command import CommandError, end_tools

__all__ = ["Point", "Progress", "Row", "SweepError", "Value", "grid", "named", "numeric", "pareto", "run", "sources"]

Value = str | int | float | bool | None
Point = dict[str, Value]
"""Parameters of a point, by name."""
Row = dict[str, Value]
"""A point and its figures."""

Progress = Callable[[int, int, int], None]
"""Told how many points are done, how many of them by an earlier run, and how many there are."""

_ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = ("hdl", "model", "sim", "synth")
_CONNECT = "20s"
_CLEANING = 0.5


class SweepError(CommandError):
    """A sweep could not be finished; the message says why, and the finished points are kept."""


def grid(axes: Mapping[str, Sequence[Value]]) -> list[Point]:
    """Return every combination of the axes' values, the last axis fastest.

    Raises
    ------
    ValueError
        An axis has no value, or one twice.
    """
    for name, values in axes.items():
        if not values or len(set(values)) < len(values):
            raise ValueError(f"axis {name} must have one or more different values, not {', '.join(map(str, values))}")
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def named(name: str) -> Callable[[Point], Row]:
    """Return the function called ``module:function``.

    Raises
    ------
    ValueError
        There is no such module or function.
    """
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"function must be module:function, not {name!r}: {error}") from None
    if not callable(found):
        raise ValueError(f"function must be something to call, not {name!r}")
    return cast(Callable[[Point], Row], found)


@cache
def sources(module: str) -> str:
    """Return a hash of the source text of this project's packages and of a module."""
    digest = hashlib.sha256()
    for package in _PACKAGES:
        for path in sorted(path for kind in ("py", "lib") for path in (_ROOT / package).rglob(f"*.{kind}")):
            digest.update(f"{path.relative_to(_ROOT).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    own = getattr(importlib.import_module(module), "__file__", None)
    if own is not None:
        digest.update(Path(own).read_bytes())
    return digest.hexdigest()


def _importable(function: Callable[[Point], Row]) -> tuple[str, Callable[[Point], Row]]:
    """Return name and function as other processes find them: what runs as ``python -m`` is not called ``__main__`` there."""
    inner = function.func if isinstance(function, partial) else function
    module = inner.__module__
    spec = getattr(sys.modules[module], "__spec__", None)
    name = f"{spec.name if spec else module}:{inner.__qualname__}"
    found = named(name)
    return name, partial(found, *function.args, **function.keywords) if isinstance(function, partial) else found


class _Store:
    """Finished points: a line of JSON each, in one file that only grows."""

    def __init__(self, folder: Path, context: Callable[[Point], Any]):
        self._path = folder / "points.jsonl"
        self._context = context
        folder.mkdir(parents=True, exist_ok=True)
        self._rows = dict(self._read())
        self._file = self._path.open("ab")
        # The last line of a run that was killed may have no end; it then is no line of ours.
        if self._path.stat().st_size and not self._path.read_bytes().endswith(b"\n"):
            self._file.write(b"\n")

    def _key(self, point: Point) -> str:
        return hashlib.sha256(json.dumps([self._context(point), point], sort_keys=True).encode()).hexdigest()

    def _read(self) -> Iterator[tuple[str, Row]]:
        if not self._path.exists():
            return
        for line in self._path.read_bytes().splitlines():
            try:
                entry = json.loads(line)
                key, row = entry["key"], entry["row"]
            except (ValueError, KeyError, TypeError):
                continue
            if isinstance(key, str) and isinstance(row, dict):
                yield key, row

    def get(self, point: Point) -> Row | None:
        return self._rows.get(self._key(point))

    def put(self, point: Point, row: Row) -> None:
        """Keep a row; it is on the disk when this returns."""
        entry = {"key": self._key(point), "row": row}
        self._file.write(json.dumps(entry, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._rows[self._key(point)] = row

    def close(self) -> None:
        self._file.close()


def _evaluate(function: Callable[[Point], Row], digest: str, module: str, point: Point) -> Row:
    """Return the row of a point; one that the function refuses by a ValueError has the reason instead of figures."""
    if sources(module) != digest:
        raise SweepError("a worker must have the same source text as the command")
    try:
        figures = function(point)
    except ValueError as error:
        figures = {"refused": str(error)}
    # Kept rows come back from JSON; new ones go through it too, so that both are alike.
    return cast(Row, json.loads(json.dumps({**point, **figures}, allow_nan=False)))


def _end_with(parent: Connection) -> None:
    """Let a worker, and the tool that it runs, end when the command closes its end of a pipe, or is killed."""

    def watch() -> None:
        wait([parent])
        end_tools()
        # Time enough to remove the files of the tool.
        time.sleep(_CLEANING)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _here(
    task: Callable[[Point], Row], points: Sequence[Point], jobs: int
) -> Generator[tuple[Point, Callable[[], Row]], None, None]:
    if jobs == 1:
        for point in points:
            yield point, partial(task, point)
        return
    # A forked child of a process with threads may hang.
    method = multiprocessing.get_context("spawn")
    theirs, ours = method.Pipe(duplex=False)
    pool = ProcessPoolExecutor(min(jobs, max(len(points), 1)), method, _end_with, (theirs,))
    try:
        # Ctrl-C reaches all processes of a terminal; workers end by the pipe.
        with _held(signal.SIGINT):
            futures: dict[Future[Row], Point] = {pool.submit(task, point): point for point in points}
        for future in as_completed(futures):
            yield futures[future], future.result
    except BaseException:
        ours.close()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        ours.close()
        theirs.close()


@contextlib.contextmanager
def _held(number: signal.Signals) -> Iterator[None]:
    """Hold back a signal from this thread, and for good from the processes that it starts meanwhile."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _on_cluster(
    task: Callable[[Point], Row], points: Sequence[Point], scheduler: str
) -> Generator[tuple[Point, Callable[[], Row]], None, None]:
    try:
        import distributed
    except ModuleNotFoundError:
        raise SweepError("a scheduler needs the package distributed: pip install 'dask[distributed]'") from None
    try:
        client = distributed.Client(scheduler, timeout=_CONNECT)
    except (OSError, ValueError, TimeoutError) as error:
        first = str(error).partition("\n")[0]
        raise SweepError(f"scheduler must be the address of a Dask scheduler, not {scheduler!r}: {first}") from None
    with client:
        futures = {client.submit(task, point, pure=False): point for point in points}
        for future in distributed.as_completed(futures):
            yield futures[future], future.result


def run(
    function: Callable[[Point], Row],
    points: Sequence[Point],
    folder: Path,
    *,
    context: Callable[[Point], Any] = lambda point: None,
    jobs: int = 1,
    scheduler: str | None = None,
    progress: Progress = lambda done, kept, total: None,
) -> list[Row]:
    """Return the rows of all points, in their order, whatever order they end in.

    Rows that an earlier run left in ``folder`` are taken from there, if function, ``context``, source text and point are the same.

    Parameters
    ----------
    function : callable
        Figures of a point; at the top of a module (or a ``partial`` of such), so that other processes find it. It must be a function of
        point, ``context`` and source text alone. A point that it refuses by a ValueError keeps a row with the text under ``refused``.
    points : sequence of Point
    folder : Path
        Has the finished points in ``points.jsonl``.
    context : callable
        What else the figures of a point depend on, such as versions of tools, as JSON-like data.
    jobs : int
        Processes at a time; 1 is this one.
    scheduler : str, optional
        Address of a Dask scheduler whose workers do it instead.
    progress : callable

    Raises
    ------
    SweepError
        A point failed in another way, which is found when all others are done, or the scheduler cannot be reached.
    ValueError
        ``jobs`` is not positive, or a point occurs twice.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be positive, not {jobs}")
    if len({json.dumps(point, sort_keys=True) for point in points}) < len(points):
        raise ValueError("points must differ from each other")
    name, function = _importable(function)
    module = name.partition(":")[0]
    digest = sources(module)
    store = _Store(folder, lambda point: [name, digest, context(point)])
    todo = [point for point in points if store.get(point) is None]
    done = kept = len(points) - len(todo)
    progress(done, kept, len(points))
    task = partial(_evaluate, function, digest, module)
    failed: list[tuple[Point, Exception]] = []
    try:
        ended = _here(task, todo, jobs) if scheduler is None or not todo else _on_cluster(task, todo, scheduler)
        with contextlib.closing(ended):
            for point, result in ended:
                try:
                    row = result()
                except (SweepError, BrokenProcessPool):
                    raise
                except Exception as error:
                    failed.append((point, error))
                    continue
                store.put(point, row)
                done += 1
                progress(done, kept, len(points))
    except BrokenProcessPool:
        raise SweepError(f"a worker process ended too early; {done} of {len(points)} points are kept") from None
    finally:
        store.close()
    if failed:
        point, reason = failed[0]
        values = " ".join(f"{key}={value}" for key, value in point.items())
        raise SweepError(
            f"{len(failed)} of {len(points)} points failed, first {values}: {type(reason).__name__}: {reason}"
        )
    return [found for point in points if (found := store.get(point)) is not None]


def numeric(rows: Iterable[Row], *names: str) -> list[Row]:
    """Return the rows that have numbers in all of these columns."""
    return [row for row in rows if all(isinstance(row.get(name), int | float) for name in names)]


def pareto(rows: Iterable[Row], x: str, y: str, larger: Sequence[str] = ()) -> list[Row]:
    """Return the rows that no other beats in one figure without losing in the other, by ascending ``x``.

    Parameters
    ----------
    rows : iterable of Row
        Those without either figure are left out.
    x, y : str
        Names of the figures; smaller is better.
    larger : sequence of str
        Those of the two of which larger is better.
    """

    def cost(row: Row, name: str) -> float:
        value = cast(float, row[name])
        return -value if name in larger else value

    whole = numeric(rows, x, y)
    front: list[Row] = []
    for row in sorted(whole, key=lambda row: (cost(row, x), cost(row, y))):
        last = front[-1] if front else None
        if (
            last is None
            or cost(row, y) < cost(last, y)
            or (cost(row, x), cost(row, y)) == (cost(last, x), cost(last, y))
        ):
            front.append(row)
    return front if x not in larger else front[::-1]
