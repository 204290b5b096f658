"""How far fastpersist is from what the machine can do: a table for each kind of work, in paired rounds beside fio and others.

python benchmarks/limits.py --folder /mnt/nvme0
python benchmarks/limits.py --folder /mnt/nvme0 --row fresh --row recycled

fresh           2 GiB in 64 tensors to a fresh file
recycled        the same over a retired file
ram-disk        as fresh, on a disk in memory; needs root
null            as fresh, to nowhere: what the software takes by itself
memory          extra memory of a save of 2 GiB in 64 tensors
small-4k        100 000 tensors of 4 KiB
small-64        100 000 tensors of 64 bytes
tiny            one tensor of 64 KiB, 200 times, and what opening an engine takes
load            2 GiB in 64 tensors, not in the page cache
small-load-4k   100 000 tensors of 4 KiB, not in the page cache
small-load-64   100 000 tensors of 64 bytes, not in the page cache
model           gpt2-large with the state of AdamW, 9.3 GB

Every time of a save but those of null includes fsync, and every file is deleted before it is written again. Nothing can be
compressed away.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import fio
import load_rounds
import script_options
import torch
import typer
from measuring import Cost, Series, machine_line, measure, middle_half
from memory_growth import peak_growth_nbytes
from peers import deepspeed_saver
from ram_disk import NoRamDiskError, ram_disk, ram_disk_nbytes
from reading import TORCH as TORCH_LOAD
from reading import loaders, remove_files, write_files
from room import NoRoomError, require_room, scratch_folder
from save_rounds import Saves, measure_rounds, our_saver, recycling_refusal, save_lines
from saving import (
    DEFAULT_ENGINES,
    Saver,
    fastpersist_saver,
    torch_save_fsync,
    torch_save_published,
    usable_engines,
    warm_up,
)
from tables import Cells, item_cells, print_table
from verifying import fingerprints, payload_nbytes
from workloads import MIB, random_tensors

import fastpersist

TORCH = "torch.save + fsync"
TORCH_PUBLISHED = "torch.save + fsync + rename + fsync of the folder"
DEEPSPEED = "DeepSpeed FastFileWriter"
LARGE_TENSORS = 64
LARGE_NBYTES = 32 * MIB
SMALL_TENSORS = 100_000
TINY_NBYTES = 64 << 10
TINY_REPETITIONS = 200
_PAGE_NBYTES = 4096
_GPT2_HEADS, _GPT2_HEAD_WIDTH = 20, 64
_FORMATS = 3
# What a record takes in a file beside its data: headers, padding, its part of data.pkl.
_OVERHEAD_NBYTES = 512


class LeftOutError(Exception):
    """A row cannot run here; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Bench:
    """What every row needs to know. ``scale`` shrinks sizes and counts."""

    scratch: Path
    rounds: int
    scale: float
    engines: tuple[str, ...]

    @property
    def path(self) -> Path:
        """Where the checkpoint goes."""
        return self.scratch / "checkpoint.pt"

    @property
    def large_nbytes_each(self) -> int:
        """Bytes of one of the large tensors: whole pages."""
        return max(_PAGE_NBYTES, int(LARGE_NBYTES * self.scale) // _PAGE_NBYTES * _PAGE_NBYTES)

    @property
    def large_nbytes(self) -> int:
        """Bytes of all large tensors."""
        return LARGE_TENSORS * self.large_nbytes_each

    @property
    def large_name(self) -> str:
        """The large tensors, in words."""
        return f"{self.large_nbytes / (1 << 30):.4g} GiB of random bytes in {LARGE_TENSORS} tensors"

    def large_tensors(self) -> dict[str, torch.Tensor]:
        """Built anew: a row that is done keeps no memory."""
        return random_tensors(LARGE_TENSORS, self.large_nbytes_each)

    def count(self, full: int) -> int:
        """``full`` things, or fewer."""
        return max(2, round(full * self.scale))

    def ours(self, **options: Any) -> list[Saver]:
        """fastpersist.save by each engine, with these options."""
        return [our_saver(f"fastpersist, {name}", engine=name, **options) for name in self.engines]

    def ours_and_variants(self, **options: Any) -> list[Saver]:
        """Those, and io_uring with other options than the defaults, to show what each costs."""
        variants = [{"checksum": False}, {"zero_copy": True}, {"zero_copy": False}] if "io_uring" in self.engines else []
        return [*self.ours(**options), *(_variant(variant, options) for variant in variants)]

    def heading(self, title: str, folder: Path, *remarks: str) -> None:
        """What the reader of a table must know."""
        print(f"**{title}; {self.rounds} paired rounds, GB = 1e9 bytes**", end="\n\n")
        print("; ".join((machine_line(folder), *remarks)), flush=True)


def _variant(variant: dict[str, bool], options: dict[str, Any]) -> Saver:
    ((name, value),) = variant.items()
    return our_saver(f"fastpersist, io_uring, {name}={value}", engine="io_uring", **variant, **options)


def fresh(bench: Bench) -> None:
    """Large tensors to a fresh file, beside fio's best rate of writing one."""
    require_room(bench.scratch, file_nbytes=bench.large_nbytes, memory_nbytes=bench.large_nbytes)
    save_fresh(bench, f"fresh: {bench.large_name}", bench.large_tensors(), bench.scratch)


def save_fresh(bench: Bench, title: str, obj: object, folder: Path, *remarks: str) -> None:
    """Every way to save ``obj`` to a fresh file in ``folder``."""
    nbytes = payload_nbytes(obj)
    path = folder / bench.path.name
    fio_engine, fio_remark = fio.usable_engine(folder)
    ceiling = fio.Ceiling(fio_engine, nbytes) if fio_engine else None
    others = peers()
    savers = [*others.values(), *bench.ours_and_variants()]
    warm_up(savers, path)
    saves = [Saves(saver.tag, saver=saver, ceiling=ceiling) for saver in savers]
    measure_rounds(saves, obj, path, bench.rounds)
    bench.heading(title, folder, fio_remark, *remarks)
    print_table(save_lines(saves, nbytes, dict(zip(others, saves, strict=False))))


def peers() -> dict[str, Saver]:
    """Those that fastpersist is compared with, by the names of their columns."""
    deepspeed = deepspeed_saver()
    if not isinstance(deepspeed, Saver):
        print(deepspeed, end="\n\n")
        return {"torch": torch_saver()}
    return {"torch": torch_saver(), "DeepSpeed": dataclasses.replace(deepspeed, tag=DEEPSPEED)}


def torch_saver() -> Saver:
    """torch.save until the file is on stable storage."""
    return Saver(TORCH, torch_save_fsync)


def recycled(bench: Bench) -> None:
    """Large tensors over a retired file, beside fio's best rate of overwriting; torch and DeepSpeed can only write afresh."""
    require_room(bench.scratch, file_nbytes=2 * bench.large_nbytes, memory_nbytes=bench.large_nbytes)
    refusal = recycling_refusal(bench.scratch)
    if refusal:
        raise LeftOutError(refusal)
    tensors = bench.large_tensors()
    retired = bench.scratch / "retired.pt"
    others = peers()
    warm_up([*others.values(), *bench.ours()], bench.path)
    fastpersist.save(tensors, retired)
    fio_engine, fio_remark = fio.usable_engine(bench.scratch)
    ceiling = fio.Ceiling(fio_engine, bench.large_nbytes, allocated=retired) if fio_engine else None
    saves = [Saves(f"{saver.tag}, fresh", saver=saver) for saver in others.values()]
    recycling = bench.ours_and_variants(recycle=retired)
    saves += [Saves(saver.tag, saver=saver, ceiling=ceiling, retired=retired) for saver in recycling]
    measure_rounds(saves, tensors, bench.path, bench.rounds)
    retired.unlink()
    bench.heading(f"recycled: {bench.large_name}", bench.scratch, fio_remark)
    print_table(save_lines(saves, bench.large_nbytes, dict(zip(others, saves, strict=False))))


def on_ram_disk(bench: Bench) -> None:
    """As fresh, where no drive is the limit."""
    disk_nbytes = ram_disk_nbytes(bench.large_nbytes)
    require_room(bench.scratch, file_nbytes=0, memory_nbytes=disk_nbytes + 2 * bench.large_nbytes)
    with ram_disk(bench.scratch, disk_nbytes) as disk:
        save_fresh(bench, f"ram-disk: {bench.large_name}", bench.large_tensors(), disk.root, disk.description)


def null(bench: Bench) -> None:
    """Large tensors to nowhere."""
    require_room(bench.scratch, file_nbytes=0, memory_nbytes=bench.large_nbytes)
    tensors = bench.large_tensors()
    savers = [
        our_saver("fastpersist, null", writes=False, engine="null"),
        our_saver("fastpersist, null, no checksums", writes=False, engine="null", checksum=False),
    ]
    warm_up(savers, bench.path)
    saves = [Saves(saver.tag, saver=saver) for saver in savers]
    measure_rounds(saves, tensors, bench.path, bench.rounds)
    bench.heading(f"null: {bench.large_name}, nothing is written", bench.scratch)
    print_table(save_lines(saves, bench.large_nbytes, {}))


def memory(bench: Bench) -> None:
    """How far the peak of resident memory grows during the first save of a new process."""
    require_room(bench.scratch, file_nbytes=bench.large_nbytes, memory_nbytes=bench.large_nbytes)
    makers = {TORCH: torch_saver}
    makers |= {f"fastpersist, {name}": functools.partial(fastpersist_saver, name) for name in bench.engines}
    lines: list[Cells] = []
    for tag, maker in makers.items():
        growth = peak_growth_nbytes(maker, bench.path, tensors=LARGE_TENSORS, nbytes_each=bench.large_nbytes_each)
        lines.append({"": tag, "extra MiB": f"{growth / MIB:.1f}"})
    print(f"**memory: {bench.large_name}; one save of a new process each**\n\n{machine_line(bench.scratch)}")
    print_table(lines)


def small(name: str, nbytes_each: int, bench: Bench) -> None:
    """Many small tensors to a fresh file."""
    count = bench.count(SMALL_TENSORS)
    require_room(bench.scratch, file_nbytes=count * (nbytes_each + _OVERHEAD_NBYTES), memory_nbytes=count * nbytes_each)
    savers = [torch_saver(), *bench.ours()]
    warm_up(savers, bench.path)
    saves = [Saves(saver.tag, saver=saver) for saver in savers]
    measure_rounds(saves, random_tensors(count, nbytes_each), bench.path, bench.rounds)
    bench.heading(f"{name}: {count} tensors of {nbytes_each} random bytes", bench.scratch)
    print_table([item_cells(series, count, "torch", saves[0]) | series.file_cells() for series in saves])


def tiny(bench: Bench) -> None:
    """One small tensor, again and again: what a save takes by itself.

    Garbage is collected before each, which leaves the processor's caches as cold as a training step would; then, for the
    columns "warm", three times in a row, the last of which counts.
    """
    obj = random_tensors(1, TINY_NBYTES)
    repetitions = bench.count(TINY_REPETITIONS)
    with contextlib.ExitStack() as opened:
        savers = [Saver(TORCH_PUBLISHED, torch_save_published), *bench.ours(), our_saver("fastpersist, auto")]
        for name in bench.engines:
            engine = opened.enter_context(fastpersist.open_engine(name, path=bench.scratch))
            savers.append(our_saver(f"fastpersist, {name}, open already", engine=engine))
        warm_up(savers, bench.path)
        saves = [Saves(saver.tag, saver=saver) for saver in savers]
        measure_rounds(saves, obj, bench.path, repetitions)
        warm = [Series(saver.tag) for saver in savers]
        for _ in range(repetitions):
            for saver, series in zip(savers, warm, strict=True):
                series.costs.append(_third_cost(saver, obj, bench.path))
    bench = dataclasses.replace(bench, rounds=repetitions)
    bench.heading(f"tiny: one tensor of {TINY_NBYTES} bytes, file and folder synced", bench.scratch)
    print_table([_tiny_cells(cold, saves[0], series, warm[0]) for cold, series in zip(saves, warm, strict=True)])
    bench.heading("tiny: opening and closing an engine", bench.scratch)
    print_table([_opening_cells(name, repetitions) for name in bench.engines])


def _tiny_cells(series: Saves, baseline: Saves, warm: Series, warm_baseline: Series) -> Cells:
    return {
        "": series.tag,
        "median ms": _milliseconds(series.seconds),
        "x torch (middle half)": _times_as_fast(series, baseline),
        "CPU ms": _milliseconds(series.cpu_seconds),
        "median ms, warm": _milliseconds(warm.seconds),
        "x torch, warm (middle half)": _times_as_fast(warm, warm_baseline),
        "CPU ms, warm": _milliseconds(warm.cpu_seconds),
        "verified": series.verified,
    }


def _milliseconds(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.2f}"


def _times_as_fast(series: Series, baseline: Series) -> str:
    if series is baseline:
        return "1"
    return middle_half([other / own for other, own in zip(baseline.seconds, series.seconds, strict=True)])


def _third_cost(saver: Saver, obj: object, path: Path) -> Cost:
    for _ in range(3):
        path.unlink(missing_ok=True)
        cost = measure(lambda: saver.save(obj, path), collect=False)
    return cost


def _opening_cells(name: str, repetitions: int) -> Cells:
    opening, closing = Series("open"), Series("close")
    engines: list[fastpersist.Engine] = []
    for _ in range(repetitions):
        opening.costs.append(measure(lambda: engines.append(fastpersist.open_engine(name))))
        closing.costs.append(measure(engines.pop().close))
    cells: Cells = {"engine": name}
    for series in (opening, closing):
        cells[f"{series.tag}, microseconds"] = f"{statistics.median(series.seconds) * 1e6:.0f}"
        cells[f"{series.tag}, CPU microseconds"] = f"{statistics.median(series.cpu_seconds) * 1e6:.0f}"
    return cells


def load(bench: Bench) -> None:
    """Large tensors from the disk, beside fio's rate of reading the file."""
    require_room(bench.scratch, file_nbytes=_FORMATS * bench.large_nbytes, memory_nbytes=3 * bench.large_nbytes)
    tensors = bench.large_tensors()
    write_files(tensors, bench.scratch)
    fio_engine, fio_remark = fio.usable_engine(bench.scratch)
    ways = list(loaders(bench.scratch, weights_only=True, engines=bench.engines))
    outcome = load_rounds.measure_rounds(ways, fingerprints(tensors), bench.scratch, bench.rounds, fio_engine=fio_engine)
    remove_files(bench.scratch)
    bench.heading(f"load: {bench.large_name}, not in the page cache, weights_only=True", bench.scratch, fio_remark)
    print_table(outcome.rate_lines(bench.large_nbytes))


def small_load(name: str, nbytes_each: int, bench: Bench) -> None:
    """Many small tensors from the disk, with torch's restricted unpickler and with Python's."""
    count = bench.count(SMALL_TENSORS)
    file_nbytes = count * (nbytes_each + _OVERHEAD_NBYTES)
    require_room(bench.scratch, file_nbytes=2 * file_nbytes, memory_nbytes=2 * file_nbytes)
    tensors = random_tensors(count, nbytes_each)
    write_files(tensors, bench.scratch, peers=False)
    for weights_only in (True, False):
        ways = list(loaders(bench.scratch, weights_only=weights_only, engines=[*bench.engines, "auto"], variants=False))
        outcome = load_rounds.measure_rounds(ways, fingerprints(tensors), bench.scratch, bench.rounds)
        title = f"{name}: {count} tensors of {nbytes_each} random bytes, not in the page cache, weights_only={weights_only}"
        bench.heading(title, bench.scratch)
        print_table([item_cells(series, count, TORCH_LOAD, outcome.baseline) for series in outcome.loads])
    remove_files(bench.scratch)


def model(bench: Bench) -> None:
    """A real model with its optimizer to a fresh file; a smaller scale makes it narrower."""
    if importlib.util.find_spec("transformers") is None:
        raise LeftOutError("transformers is not installed: pip install 'fastpersist[bench]'")
    from models import ModelName, Recipe, build_checkpoint, describe, needs  # transformers takes seconds to import

    width = _GPT2_HEADS * max(1, round(_GPT2_HEAD_WIDTH * math.sqrt(bench.scale)))
    recipe = Recipe(ModelName.GPT2_LARGE, optimizer=True, width=width)
    wanted = needs(recipe)
    require_room(bench.scratch, file_nbytes=wanted.file_nbytes, memory_nbytes=wanted.memory_nbytes)
    checkpoint = build_checkpoint(recipe, "cpu")
    save_fresh(bench, describe(recipe, payload_nbytes(checkpoint)), checkpoint, bench.scratch)


ROWS: dict[str, Callable[[Bench], None]] = {
    "fresh": fresh,
    "recycled": recycled,
    "ram-disk": on_ram_disk,
    "null": null,
    "memory": memory,
    "small-4k": functools.partial(small, "small-4k", 4096),
    "small-64": functools.partial(small, "small-64", 64),
    "tiny": tiny,
    "load": load,
    "small-load-4k": functools.partial(small_load, "small-load-4k", 4096),
    "small-load-64": functools.partial(small_load, "small-load-64", 64),
    "model": model,
}

Rows = Annotated[list[str] | None, typer.Option("--row", help=f"Repeat for several; else all: {', '.join(ROWS)}.")]
Rounds = Annotated[int, typer.Option(min=1, help="Rounds; in each, everything is measured once.")]
Scale = Annotated[float, typer.Option(min=0.0001, max=1.0, help="Share of the sizes and counts, for where there is less room.")]


def main(folder: script_options.Folder, row: Rows = None, rounds: Rounds = 7, scale: Scale = 1.0) -> None:
    """Print a Markdown table for each row as soon as it is measured."""
    for name in row or ():
        if name not in ROWS:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(ROWS)}", param_hint="--row")
    with script_options.plain_errors(), scratch_folder(folder) as scratch:
        bench = Bench(scratch, rounds, scale, tuple(usable_engines(DEFAULT_ENGINES)))
        for name in row or ROWS:
            try:
                ROWS[name](bench)
            except (NoRoomError, NoRamDiskError, LeftOutError) as error:
                hint = ", or a --scale below 1" if isinstance(error, NoRoomError) else ""
                print(f"{name} left out: {error}{hint}", end="\n\n", flush=True)


if __name__ == "__main__":
    typer.run(main)
