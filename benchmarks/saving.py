"""The tests of the torch_save scripts: each way to save an object, in turn, round by round, with one file on disk at a time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from measuring import GB, Cost, Spread, machine_line, measure, paired_ratios
from rich.console import Console
from rich.table import Table
from room import GIB, ready_page_cache, remove_and_settle, scratch_folder
from verifying import payload_nbytes, verify_file

import fastpersist
from fastpersist.engines import engine_class

BASELINE = "test_save_fsync"
DEFAULT_ENGINES = ("posix", "io_uring")
_TABLE_WIDTH = 150  # where the output is no terminal


@dataclass(frozen=True, slots=True)
class Saver:
    """One way to save. ``durable``: the file is on stable storage when ``save`` returns. ``writes``: there is a file."""

    tag: str
    save: Callable[[object, Path], object]
    durable: bool = True
    writes: bool = True


@dataclass(frozen=True, slots=True)
class Options:
    """What the scripts' options say about saving. None leaves a choice to fastpersist."""

    engines: tuple[str, ...] = DEFAULT_ENGINES
    block_nbytes: int | None = None
    queue_depth: int | None = None
    checksum: bool = True
    rounds: int = 3
    verify: bool = True
    statistics: bool = True


@dataclass(slots=True)
class Result:
    """What the rounds of one saver gave."""

    saver: Saver
    costs: list[Cost] = field(default_factory=list)
    verified: bool = False

    @property
    def seconds(self) -> list[float]:
        """Round by round."""
        return [cost.seconds for cost in self.costs]


def torch_save(obj: object, path: Path) -> None:
    """torch.save as it is: part of the file is still in the page cache when it returns."""
    torch.save(obj, path)


def torch_save_fsync(obj: object, path: Path) -> None:
    """torch.save, then the file's data on stable storage."""
    torch.save(obj, path)
    fileno = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fileno)
    finally:
        os.close(fileno)


def fastpersist_saver(
    engine: str, *, block_nbytes: int | None = None, queue_depth: int | None = None, checksum: bool = True
) -> Saver:
    """fastpersist.save with an engine opened for each save, as a program would have it."""

    def save(obj: object, path: Path) -> fastpersist.SaveReport:
        return fastpersist.save(obj, path, engine=engine, block_nbytes=block_nbytes, queue_depth=queue_depth, checksum=checksum)

    writes = engine_class(engine).capabilities.persistent
    return Saver(f"test_fastpersist_{engine}", save, durable=writes, writes=writes)


def usable_engines(names: Sequence[str]) -> Iterator[str]:
    """Those that can run here, each once; for the others a line says why not. Raises ValueError for an unknown name."""
    for name in dict.fromkeys(names):
        verdict = engine_class(name).availability()
        if verdict.usable:
            yield name
        else:
            print(f"test_fastpersist_{name} skipped: {verdict.reason} ({verdict.remedy})", flush=True)


def all_savers(options: Options) -> list[Saver]:
    """torch's two and one for each engine that can run."""
    sizes = {"block_nbytes": options.block_nbytes, "queue_depth": options.queue_depth}
    ours = [fastpersist_saver(name, checksum=options.checksum, **sizes) for name in usable_engines(options.engines)]
    return [Saver("test_save", torch_save, durable=False), Saver(BASELINE, torch_save_fsync), *ours]


def result_line(tag: str, nbytes: int, seconds: float) -> str:
    """The line that DeepSpeed's scripts print, in their unit: GB is 2**30 bytes."""
    gib = nbytes / GIB
    return f"{tag} -- {gib:5.2f} GB, {seconds:5.2f} secs, {gib / seconds:5.2f} GB/s"


def run(obj: object, folder: Path, options: Options) -> None:
    """Save ``obj`` in every way, print a line for each save, then the table and the speed-up.

    Raises DifferenceError if a file does not hold ``obj``, and whatever a save raises. No file is left.
    """
    nbytes = payload_nbytes(obj)
    results = [Result(saver) for saver in all_savers(options)]
    with scratch_folder(folder) as scratch, _crc32_of_torch(options.checksum):
        print(machine_line(scratch), flush=True)
        warm_up([result.saver for result in results], scratch / "warm-up.pt")
        for _ in range(options.rounds):
            for result in results:
                _run_once(result, obj, nbytes, scratch / f"{result.saver.tag}.pt", verify=options.verify)
    if options.statistics:
        _print_table(results, nbytes)
        print(_speed_up(results))


@contextlib.contextmanager
def _crc32_of_torch(enabled: bool) -> Iterator[None]:
    """Without checksums, torch computes none either: the comparison stays one of equals."""
    previous = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(enabled)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(previous)


def warm_up(savers: Iterable[Saver], path: Path) -> None:
    """What a process does once (imports, pools, the first use of a library) is no part of the first round."""
    for saver in savers:
        saver.save({"tensor": torch.zeros(1 << 20)}, path)
        remove_and_settle(path)


def measure_save(saver: Saver, obj: object, path: Path, nbytes: int) -> Cost:
    """Save ``obj``, of ``nbytes``, to a fresh file and leave it there."""
    remove_and_settle(path)
    ready_page_cache(path, nbytes)  # for every saver alike, though only a buffered one gains by it
    return measure(lambda: saver.save(obj, path))


def _run_once(result: Result, obj: object, nbytes: int, path: Path, *, verify: bool) -> None:
    cost = measure_save(result.saver, obj, path, nbytes)
    result.costs.append(cost)
    print(result_line(result.saver.tag, nbytes, cost.seconds), flush=True)
    if result.saver.writes:
        if verify:
            verify_file(path, obj)
            result.verified = True
        remove_and_settle(path)


def _print_table(results: Sequence[Result], nbytes: int) -> None:
    columns = ("test", "median s", "GB/s (1e9 bytes)", "range GB/s", f"x {BASELINE} (range)", "CPU s/GB", "fsync", "verified")
    table = Table(*columns, title="medians over rounds; ratios are medians of paired rounds")
    baseline = _find(results, BASELINE)
    for result in results:
        table.add_row(*_table_row(result, baseline, nbytes / GB))
    console = Console()
    Console(width=None if console.is_terminal else _TABLE_WIDTH).print(table)


def _table_row(result: Result, baseline: Result, payload_gb: float) -> tuple[str, ...]:
    rate = Spread.of([payload_gb / seconds for seconds in result.seconds])
    return (
        result.saver.tag,
        f"{Spread.of(result.seconds).median:.3f}",
        f"{rate.median:.2f}",
        f"{rate.low:.2f}..{rate.high:.2f}",
        str(paired_ratios(baseline.seconds, result.seconds)),
        f"{Spread.of([cost.cpu_seconds / payload_gb for cost in result.costs]).median:.3f}",
        "yes" if result.saver.durable else "no",
        "yes" if result.verified else "no",
    )


def _speed_up(results: Sequence[Result]) -> str:
    """The last line: how much faster than torch.save + fsync the fastest durable engine is."""
    baseline = _find(results, BASELINE)
    ours = [result for result in results if result.saver.durable and result is not baseline]
    if not ours:
        return "speed-up: none to report, no engine that writes could run"
    best = max(ours, key=lambda result: paired_ratios(baseline.seconds, result.seconds).median)
    ratio = paired_ratios(baseline.seconds, best.seconds)
    return (
        f"speed-up: {best.saver.tag} is {ratio.median:.2f} times as fast as torch.save + fsync "
        f"({ratio.low:.2f} to {ratio.high:.2f}; paired rounds: {len(best.costs)})"
    )


def _find(results: Sequence[Result], tag: str) -> Result:
    return next(result for result in results if result.saver.tag == tag)
