"""The verdict: what is best, what is in the way, what a checkpoint would take, and what to change. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass

from fastpersist.probing.facts import Facts
from fastpersist.probing.sweep import Sustained, Sweep, best_settings
from fastpersist.probing.trial import Pass, Settings

CHECKPOINT_NBYTES = 10 * 10**9
BUSY_SHARE = 0.85
"""CPUs that are busy for this part of the time, or more, leave the disk waiting."""
CLIFF_SHARE = 0.7
"""A last second below this part of the first means that a cache was full."""
READ_SHARE = 0.9
_LARGE_REQUEST_KB = 1024


@dataclass(frozen=True, slots=True)
class Limiter:
    """What bounds a save: "disk", "memcpy", "crc" or "cpu", and the figures that say so."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds that a durable save of 10 GB would take: by an engine, or by "torch.save" with an fsync."""

    name: str
    seconds: float
    gb_per_s: float


@dataclass(frozen=True, slots=True)
class Remedy:
    """Something to change: why, and the command (or the words) that does it."""

    why: str
    command: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """``best`` is the configuration to use; estimates are sorted, the fastest first."""

    best: Settings
    gb_per_s: float
    limiter: Limiter
    estimates: tuple[Estimate, ...]


def judge(facts: Facts, sweep: Sweep) -> Verdict | None:
    """The verdict on a sweep; None if nothing was measured."""
    rates = sweep.final_rates()
    if not rates:
        return None
    best = best_settings(rates)
    measured = sweep.latest(best)
    if measured is None:
        return None
    return Verdict(best, rates[best], find_limiter(facts, measured.fresh, rates[best]), estimate(sweep))


def find_limiter(facts: Facts, fresh: Pass, gb_per_s: float) -> Limiter:
    """What bounds a save at this rate (units of 1e9 bytes per second).

    A save needs, beside the transfers, one checksum over everything, which the submitting thread computes meanwhile.
    Without direct I/O every byte is copied by the CPU, and that copy competes with the disk.
    """
    if facts.crc_gb_per_s < gb_per_s:
        return Limiter("crc", f"one thread sums {facts.crc_gb_per_s:.1f} GB/s, and {gb_per_s:.1f} GB/s could be written")
    transfer_share = fresh.cpu_seconds_per_gb * gb_per_s / facts.cores
    busy_share = transfer_share + gb_per_s / facts.crc_gb_per_s / facts.cores
    if not fresh.direct and (facts.in_memory or busy_share >= BUSY_SHARE):
        return Limiter(
            "memcpy",
            f"every byte is copied to the page cache: {fresh.cpu_seconds_per_gb:.2f} CPU seconds per GB "
            f"(memcpy alone runs at {facts.memcpy_gb_per_s:.1f} GB/s a core)",
        )
    if busy_share >= BUSY_SHARE:
        return Limiter(
            "cpu",
            f"transfers and checksums keep {min(busy_share, 1):.0%} of {facts.cores} cores busy "
            f"({fresh.cpu_seconds_per_gb:.2f} CPU seconds per GB)",
        )
    return Limiter("disk", f"it takes {gb_per_s:.2f} GB/s with {min(busy_share, 1):.0%} of {facts.cores} cores busy")


def estimate(sweep: Sweep) -> tuple[Estimate, ...]:
    """Seconds of a durable save of 10 GB: per engine with its best settings, and for torch.save."""
    gigabytes = CHECKPOINT_NBYTES / 1e9
    by_engine: dict[str, float] = {}
    fine = {item.settings.engine for item in sweep.measurements if item.step == "fine"}
    for item in sweep.measurements:
        engine, rate = item.settings.engine, item.fresh.gb_per_s
        if item.step == "fine" or engine not in fine:  # longer runs count, where there were any
            by_engine[engine] = max(by_engine.get(engine, 0.0), rate)
    if sweep.torch_save is not None:
        by_engine["torch.save"] = sweep.torch_save.gb_per_s
    found = [Estimate(name, gigabytes / rate, rate) for name, rate in by_engine.items() if rate > 0]
    return tuple(sorted(found, key=lambda item: item.seconds))


def find_remedies(facts: Facts, sweep: Sweep | None, verdict: Verdict | None) -> tuple[Remedy, ...]:
    """What could be changed, the machine first."""
    remedies = [*_engine_remedies(facts), *_memory_remedies(facts), *_device_remedies(facts), *_mount_remedies(facts)]
    if sweep is not None:
        remedies += [remedy for run in sweep.sustained if (remedy := _cliff_remedy(facts, run)) is not None][:1]
    if verdict is not None:
        remedies += _limiter_remedies(verdict)
    return tuple(remedies)


def _engine_remedies(facts: Facts) -> list[Remedy]:
    return [
        Remedy(f"engine {name} cannot run: {verdict.reason}", verdict.remedy)
        for name, verdict in facts.engines.items()
        if not verdict.usable
    ]


def _memory_remedies(facts: Facts) -> list[Remedy]:
    if facts.huge_pages.transparent == "never":
        setting = "/sys/kernel/mm/transparent_hugepage/enabled"
        return [Remedy("transparent huge pages are off: pinning memory costs more", f"echo madvise | sudo tee {setting}")]
    return []


def _device_remedies(facts: Facts) -> list[Remedy]:
    remedies: list[Remedy] = []
    for device in facts.devices:
        queue = f"/sys/block/{device.name}/queue"
        if device.kind == "nvme" and device.scheduler not in (None, "none"):
            remedies.append(
                Remedy(
                    f"{device.name}: the scheduler {device.scheduler} costs CPU time and gains an NVMe disk nothing",
                    f"echo none | sudo tee {queue}/scheduler",
                )
            )
        limit, most = device.max_sectors_kb, device.max_hw_sectors_kb
        if device.kind != "partition" and limit and most and limit < min(most, _LARGE_REQUEST_KB):
            remedies.append(
                Remedy(
                    f"{device.name}: requests are cut at {limit} KiB, the device takes more",
                    f"echo {min(most, _LARGE_REQUEST_KB)} | sudo tee {queue}/max_sectors_kb",
                )
            )
        if device.link and device.link_at_best and device.link != device.link_at_best:
            why = f"{device.name}: its PCI link runs at {device.link}, it could run at {device.link_at_best}"
            remedies.append(Remedy(why, "sudo lspci -vv (look for LnkSta: downgraded), then try another slot"))
    return remedies


def _mount_remedies(facts: Facts) -> list[Remedy]:
    options, mountpoint = facts.filesystem.options, facts.filesystem.mountpoint
    if "sync" in options:
        return [Remedy("the filesystem is mounted with sync: every write waits", f"sudo mount -o remount,async {mountpoint}")]
    return []


def _cliff_remedy(facts: Facts, run: Sustained) -> Remedy | None:
    if facts.in_memory or run.last_second_gb_per_s >= CLIFF_SHARE * run.first_second_gb_per_s:
        return None
    # An overlay cannot be trimmed itself; the filesystem below it can.
    place = "--all" if facts.filesystem.kind == "overlay" else f"--verbose {facts.filesystem.mountpoint}"
    return Remedy(
        f"fresh writes slowed down from {run.first_second_gb_per_s:.2f} to {run.last_second_gb_per_s:.2f} GB/s within "
        f"{run.seconds:.1f} s: a cache was full (of the drive or of its host)",
        f"sudo fstrim {place}, and leave more of the drive free",
    )


def _limiter_remedies(verdict: Verdict) -> list[Remedy]:
    if verdict.limiter.name == "crc":
        return [Remedy("checksums are slower than the disk", "fastpersist.save(..., checksum=False)")]
    return []
