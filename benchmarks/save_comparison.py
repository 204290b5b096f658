"""The tests of the torch_save scripts: each way to save an object, in turn, round by round, with one file on disk at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import fio
from comparison import Comparison, LeftOut, Result, print_table, result_line, speed_up
from measuring import Machine
from outputs import Outputs
from peers import peer_savers
from room import remove_and_settle, scratch_folder
from saving import (
    BASELINE,
    DEFAULT_ENGINES,
    NOTHING,
    Saver,
    crc32_of_torch,
    fastpersist_saver,
    measure_save,
    torch_save,
    torch_save_fsync,
    unusable_engines,
    verify_saved,
    warm_up,
)
from verifying import payload_nbytes
from workloads import MIB

FIO_BLOCK_NBYTES = 8 * MIB


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
    peers: bool = True


def run(obj: object, workload: str, folder: Path, options: Options, outputs: Outputs) -> None:
    """Save ``obj`` in every way, print a line for each save, then the table and the speed-up; write the outputs.

    Raises DifferenceError if a file does not hold ``obj``, and whatever a save raises. No file is left.
    """
    nbytes = payload_nbytes(obj)
    with scratch_folder(folder) as scratch, crc32_of_torch(options.checksum):  # the comparison stays one of equals
        machine = Machine.here(scratch)
        print(machine, flush=True)
        candidates = list(_candidates(options))
        savers = [candidate for candidate in candidates if isinstance(candidate, Saver)]
        comparison = Comparison(
            title="save, from a page cache that was readied",
            state_title="fsync",
            nbytes=nbytes,
            baseline_tag=BASELINE,
            results=[Result(saver.tag, state=saver.synced, equal=saver.durable) for saver in savers],
            left_out=[candidate for candidate in candidates if isinstance(candidate, LeftOut)],
        )
        for left_out in comparison.left_out:
            print(left_out)
        engine = _ceiling_engine(scratch) if options.statistics or outputs.wanted else None
        warm_up(savers, scratch / "warm-up.pt")
        for _ in range(options.rounds):
            if engine:
                comparison.ceiling.append(fio.write_rate(scratch / "fio", nbytes, FIO_BLOCK_NBYTES, engine))
            for saver, result in zip(savers, comparison.results, strict=True):
                _run_once(saver, result, obj, nbytes, scratch / f"{saver.tag}.pt", verify=options.verify)
    if options.statistics:
        print_table(comparison)
        print(speed_up(comparison))
    outputs.write(machine, workload, dataclasses.asdict(options), [comparison])


def _candidates(options: Options) -> Iterator[Saver | LeftOut]:
    """torch's two, the peers, and one for each engine; in place of what cannot run the reason."""
    yield Saver("test_save", torch_save, synced=NOTHING)
    yield Saver(BASELINE, torch_save_fsync)
    if options.peers:
        yield from peer_savers()
    refused = {left_out.tag: left_out for left_out in unusable_engines(options.engines)}
    for name in dict.fromkeys(options.engines):
        ours = fastpersist_saver(
            name, block_nbytes=options.block_nbytes, queue_depth=options.queue_depth, checksum=options.checksum
        )
        yield refused.get(ours.tag, ours)


def _ceiling_engine(folder: Path) -> str | None:
    engine, remark = fio.usable_engine(folder)
    print(remark, flush=True)
    return engine


def _run_once(saver: Saver, result: Result, obj: object, nbytes: int, path: Path, *, verify: bool) -> None:
    cost = measure_save(saver, obj, path, nbytes)
    result.costs.append(cost)
    print(result_line(saver.tag, nbytes, cost.seconds), flush=True)
    if not saver.writes:
        return
    if verify:
        result.verified = verify_saved(saver, obj, nbytes, path)
    remove_and_settle(path)
