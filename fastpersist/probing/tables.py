"""What a probe prints for people: facts, measurements, verdict, remedies."""

from __future__ import annotations

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from fastpersist.probing.devices import Device
from fastpersist.probing.facts import Facts
from fastpersist.probing.report import Report
from fastpersist.probing.sweep import Measurement, Sweep
from fastpersist.probing.trial import Pass, Settings
from fastpersist.probing.verdict import Verdict


def show(report: Report, console: Console) -> None:
    """Print all that is known."""
    _show_facts(report.facts, report.path, console)
    if report.sweep is not None:
        _show_sweep(report.sweep, report.verdict, console)
    if report.verdict is not None:
        _show_verdict(report.verdict, console)
    for note in report.notes:
        console.print(f"note: {note}", soft_wrap=True, markup=False)
    for remedy in report.remedies:
        console.print(f"- {remedy.why}\n  -> {remedy.command}", soft_wrap=True, markup=False)
    if report.profile_file is not None:
        console.print(f"profile saved: {report.profile_file}", soft_wrap=True, markup=False)


def _show_facts(facts: Facts, path: str, console: Console) -> None:
    table = Table(title=path, title_justify="left", show_header=False, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _fact_lines(facts):
        table.add_row(name, text)
    console.print(table, markup=False)


def _fact_lines(facts: Facts) -> Iterator[tuple[str, str]]:
    filesystem, direct = facts.filesystem, facts.direct_io
    yield "kernel", f"{facts.kernel}, {facts.architecture}, {facts.cores} cores"
    yield "filesystem", f"{filesystem.kind} on {filesystem.mountpoint} ({filesystem.source}; {','.join(filesystem.options)})"
    yield "free space", f"{decimal(filesystem.free_nbytes)} of {decimal(filesystem.total_nbytes)}"
    for device in facts.devices:
        yield "  " * device.level + device.kind, _device_line(device)
    if not facts.devices:
        yield "device", "none" if facts.in_memory else "not known"
    if direct.supported:
        yield "direct I/O", f"memory at {direct.memory_alignment}, offsets at {direct.offset_alignment}: {direct.found_by}"
    else:
        yield "direct I/O", f"no: {direct.found_by}" if direct.supported is False else direct.found_by
    for name, verdict in facts.engines.items():
        yield f"engine {name}", "usable" if verdict.usable else f"no: {verdict.reason}"
    yield "locked memory", "unlimited" if facts.memlock_nbytes is None else decimal(facts.memlock_nbytes)
    huge = facts.huge_pages
    yield "huge pages", f"transparent: {huge.transparent or 'not known'}; {huge.free} of {huge.reserved} reserved ones free"
    yield "GPU", ", ".join((facts.gpu.verdict, *facts.gpu.names))
    yield "GPUDirect Storage", facts.gpu.gds
    yield "memcpy, CRC-32", f"{facts.memcpy_gb_per_s:.1f} GB/s, {facts.crc_gb_per_s:.1f} GB/s a core"


def _device_line(device: Device) -> str:
    numa = None if device.numa_node is None else f"NUMA node {device.numa_node}"
    parts = [device.name, "virtio" if device.virtio else None, device.model, device.backing_file, device.link, numa]
    parts += [decimal(device.nbytes)] if device.nbytes is not None else []
    named = {
        "logical block": device.logical_block_nbytes,
        "max_sectors_kb": device.max_sectors_kb,
        "nr_requests": device.nr_requests,
        "scheduler": device.scheduler,
        "write cache": device.write_cache,
    }
    return ", ".join(
        [part for part in parts if part] + [f"{name} {value}" for name, value in named.items() if value is not None]
    )


def _show_sweep(sweep: Sweep, verdict: Verdict | None, console: Console) -> None:
    table = Table(
        title="GB/s (reserving space and fdatasync included)",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for column in ("engine", "block", "in\nflight"):
        table.add_column(column, no_wrap=True)
    for column in ("fresh", "over-\nwrite", "read", "p50\nms", "p99\nms", "CPU\ns/GB", "fdata-\nsync ms"):
        table.add_column(column, justify="right", no_wrap=True)
    fine = [item for item in sweep.measurements if item.step == "fine"] or sweep.measurements
    for item in sorted(fine, key=lambda item: -item.fresh.gb_per_s):
        chosen = verdict is not None and item.settings == verdict.best
        table.add_row(*_cells(item), style="bold" if chosen else None)
    console.print(table)
    for run in sweep.sustained:
        part = "second" if run.seconds >= 2 else "half"
        console.print(
            f"confirmed: {_words(run.settings)}: {run.gb_per_s:.2f} GB/s over {run.seconds:.1f} s (transfers alone: "
            f"{run.first_second_gb_per_s:.2f} in the first {part}, {run.last_second_gb_per_s:.2f} in the last)",
            soft_wrap=True,
        )
    console.print(
        f"{len(sweep.measurements)} trials in {sweep.seconds:.0f} s; {decimal(sweep.written_nbytes)} written and "
        f"{decimal(sweep.read_nbytes)} read in a file of at most {decimal(sweep.file_nbytes)}",
        soft_wrap=True,
    )


def _cells(item: Measurement) -> list[str]:
    settings, fresh = item.settings, item.fresh
    return [
        settings.engine,
        words_of_nbytes(settings.block_nbytes),
        words_of_nbytes(settings.in_flight_nbytes),
        *(_rate(part) for part in (fresh, item.overwrite, item.read)),
        f"{fresh.latency_p50_seconds * 1e3:.2f}",
        f"{fresh.latency_p99_seconds * 1e3:.2f}",
        f"{fresh.cpu_seconds_per_gb:.3f}",
        f"{fresh.sync_seconds * 1e3:.1f}",
    ]


def _rate(part: Pass | None) -> str:
    return "" if part is None else f"{part.gb_per_s:.2f}"


def _show_verdict(verdict: Verdict, console: Console) -> None:
    best = verdict.best
    console.print(f"best: {_words(best)}, queue depth {best.queue_depth}: {verdict.gb_per_s:.2f} GB/s", style="bold")
    console.print(f"limited by {verdict.limiter.name}: {verdict.limiter.reason}", soft_wrap=True)
    table = Table("a checkpoint of 10 GB, durable", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("seconds", justify="right")
    table.add_column("GB/s", justify="right")
    for item in verdict.estimates:
        table.add_row(item.name, f"{item.seconds:.1f}", f"{item.gb_per_s:.2f}")
    console.print(table)


def _words(settings: Settings) -> str:
    block, depth = words_of_nbytes(settings.block_nbytes), words_of_nbytes(settings.in_flight_nbytes)
    return f"{settings.engine}, blocks of {block}, {depth} in flight"


def words_of_nbytes(nbytes: int) -> str:
    """A power of two in words: "256 KiB", "16 MiB"."""
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"
