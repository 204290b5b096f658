"""What is tried, what counts as best, what is said to be in the way: rules over made-up measurements."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fastpersist.engines import Availability
from fastpersist.probing.devices import Device
from fastpersist.probing.facts import DirectIO, Facts, Filesystem, HugePages
from fastpersist.probing.gpu import Gpu
from fastpersist.probing.sweep import (
    BLOCK_NBYTES,
    IN_FLIGHT_NBYTES,
    MIB,
    Measurement,
    Sustained,
    Sweep,
    TorchSave,
    best_settings,
    choose_finalists,
    choose_two,
    plan_grid,
)
from fastpersist.probing.trial import Pass, Settings, Timeline, percentile
from fastpersist.probing.verdict import estimate, find_limiter, find_remedies, judge

GB = 10**9


def _pass(gb_per_s: float, *, cpu_seconds_per_gb: float = 0.01, direct: bool = True) -> Pass:
    return Pass(GB, 1 / gb_per_s, 0.0, 0.0, 0.001, 0.002, cpu_seconds_per_gb, direct)


def _facts(kind: str = "ext4", **changes: Any) -> Facts:
    return dataclasses.replace(
        Facts(
            kernel="Linux 6.18",
            architecture="x86_64",
            cores=4,
            available_memory_nbytes=GB,
            filesystem=Filesystem(kind, "/mnt", "/dev/x", ("rw",), GB, GB),
            devices=(),
            direct_io=DirectIO(True, 512, 512, "statx"),
            engines={"posix": Availability(usable=True)},
            memlock_nbytes=None,
            huge_pages=HugePages("madvise", 0, 0, 2 * MIB),
            gpu=Gpu((), "no GPU", "no"),
            memcpy_gb_per_s=10.0,
            crc_gb_per_s=25.0,
        ),
        **changes,
    )


def test_the_whole_grid_is_planned_where_there_is_room() -> None:
    grid = plan_grid(["posix", "io_uring"], 8 * GB, 8 * GB)
    blocks = {settings.block_nbytes for settings in grid}
    assert (blocks, {settings.in_flight_nbytes for settings in grid}) == (set(BLOCK_NBYTES), set(IN_FLIGHT_NBYTES))
    assert len(grid) == len(set(grid)) == 2 * (6 + 7 + 7)
    for settings in grid:
        assert settings.queue_depth * settings.block_nbytes == settings.in_flight_nbytes


@pytest.mark.parametrize("budget_nbytes", [MIB, 2 * MIB, 3_000_000, 10 * MIB, 33 * MIB, 100 * MIB, GB // 2, 2 * GB])
@pytest.mark.parametrize("engines", [["posix"], ["posix", "io_uring"]])
def test_one_queue_of_each_trial_never_exceeds_the_budget(budget_nbytes: int, engines: list[str]) -> None:
    grid = plan_grid(engines, budget_nbytes, budget_nbytes)
    assert {settings.engine for settings in grid} == set(engines)
    assert sum(settings.in_flight_nbytes for settings in grid) <= budget_nbytes
    assert all(settings.block_nbytes <= settings.in_flight_nbytes <= budget_nbytes // 4 for settings in grid)


def test_the_smallest_in_flight_within_three_percent_is_best() -> None:
    deep, middle, shallow, slow = (Settings("posix", 4 * MIB, nbytes * MIB) for nbytes in (64, 32, 16, 8))
    assert best_settings({deep: 3.00, middle: 2.95, shallow: 2.92, slow: 2.90}) == shallow
    assert best_settings({deep: 3.00, middle: 2.90}) == deep
    assert best_settings({deep: 3.00}) == deep


def test_of_equals_in_flight_the_fastest_is_best() -> None:
    small, large = Settings("posix", MIB, 8 * MIB), Settings("io_uring", 8 * MIB, 8 * MIB)
    assert best_settings({small: 2.99, large: 3.0}) == large
    assert best_settings({small: 3.0, large: 2.99}) == small


def test_no_measurement_has_no_best() -> None:
    with pytest.raises(ValueError, match="empty"):
        best_settings({})


def test_finalists_hold_the_best_of_each_engine_and_the_default() -> None:
    rates = {Settings("fast", MIB << exponent, 64 * MIB): 5.0 - exponent / 10 for exponent in range(5)}
    rates |= {Settings("slow", MIB, 8 * MIB): 1.0, Settings("slow", 2 * MIB, 8 * MIB): 1.1}
    chosen = choose_finalists(rates, 4)
    assert len(chosen) == len(set(chosen)) == 4
    assert Settings("slow", 2 * MIB, 8 * MIB) in chosen
    assert Settings("fast", MIB, 64 * MIB) in chosen
    assert Settings("fast", 8 * MIB, 64 * MIB) in chosen  # blocks and depth as they are by default


def test_two_different_settings_are_confirmed_the_best_by_the_rule_first() -> None:
    deep, shallow, slow = Settings("a", MIB, 64 * MIB), Settings("a", MIB, 8 * MIB), Settings("a", MIB, 32 * MIB)
    assert choose_two({deep: 3.0, shallow: 2.95, slow: 1.0}) == [shallow, deep]
    assert choose_two({shallow: 3.0, deep: 2.95, slow: 1.0}) == [shallow, deep]
    assert choose_two({deep: 3.0}) == [deep]


def _sweep(*items: Measurement) -> Sweep:
    return Sweep(GB, measurements=list(items))


def test_later_steps_count_more() -> None:
    first, second = Settings("posix", MIB, 8 * MIB), Settings("posix", 2 * MIB, 8 * MIB)
    sweep = _sweep(Measurement("coarse", first, _pass(5)), Measurement("coarse", second, _pass(1)))
    assert sweep.final_rates() == sweep.rates() == {first: 5.0, second: 1.0}
    sweep.measurements.append(Measurement("fine", second, _pass(2)))
    assert sweep.final_rates() == {second: 2.0}
    sweep.sustained.append(Sustained(second, GB, 1.0, 1.5, 1.5, 1.5))
    assert sweep.final_rates() == {second: 1.5}
    verdict = judge(_facts(), sweep)
    assert verdict is not None
    assert (verdict.best, verdict.gb_per_s) == (second, 1.5)


def test_without_measurements_there_is_no_verdict() -> None:
    assert judge(_facts(), _sweep()) is None


@pytest.mark.parametrize(
    ("fresh", "gb_per_s", "changes", "limiter"),
    [
        (_pass(3), 3.0, {}, "disk"),
        (_pass(30), 30.0, {}, "crc"),
        (_pass(3), 3.0, {"crc_gb_per_s": 2.0}, "crc"),
        (_pass(3, cpu_seconds_per_gb=1.2), 3.0, {}, "cpu"),
        (_pass(3, cpu_seconds_per_gb=1.2, direct=False), 3.0, {}, "memcpy"),
        (_pass(1, cpu_seconds_per_gb=0.5, direct=False), 1.0, {}, "disk"),
        (_pass(1, cpu_seconds_per_gb=0.5, direct=False), 1.0, {"kind": "tmpfs"}, "memcpy"),
        (_pass(3, cpu_seconds_per_gb=0.3), 3.0, {"cores": 1}, "cpu"),
    ],
)
def test_the_limiter(fresh: Pass, gb_per_s: float, changes: dict[str, Any], limiter: str) -> None:
    found = find_limiter(_facts(**changes), fresh, gb_per_s)
    assert found.name == limiter
    assert found.reason


def test_ten_gigabytes_per_engine_and_under_torch_save() -> None:
    sweep = _sweep(
        Measurement("coarse", Settings("posix", MIB, 8 * MIB), _pass(9)),
        Measurement("fine", Settings("posix", MIB, 8 * MIB), _pass(2)),
        Measurement("fine", Settings("posix", 2 * MIB, 8 * MIB), _pass(2.5)),
        Measurement("coarse", Settings("io_uring", MIB, 8 * MIB), _pass(4)),
    )
    sweep.torch_save = TorchSave(GB, 0.5, 0.5)
    found = [(item.name, pytest.approx(item.seconds)) for item in estimate(sweep)]
    assert found == [("io_uring", 2.5), ("posix", 4.0), ("torch.save", 10.0)]


def _device(**changes: Any) -> Device:
    empty: dict[str, Any] = dict.fromkeys((field.name for field in dataclasses.fields(Device)), None)
    return Device(**empty | {"level": 0, "name": "nvme0n1", "kind": "nvme", "number": "259:0"} | changes)


@pytest.mark.parametrize(
    ("changes", "command"),
    [
        ({"engines": {"io_uring": Availability(usable=False, reason="no", remedy="sysctl it")}}, "sysctl it"),
        ({"huge_pages": HugePages("never", 0, 0, 0)}, "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"),
        ({"devices": (_device(scheduler="bfq"),)}, "echo none | sudo tee /sys/block/nvme0n1/queue/scheduler"),
        (
            {"devices": (_device(max_sectors_kb=128, max_hw_sectors_kb=2048),)},
            "echo 1024 | sudo tee /sys/block/nvme0n1/queue/max_sectors_kb",
        ),
        ({"devices": (_device(link="8 x2", link_at_best="8 x4"),)}, "lspci"),
        ({"filesystem": Filesystem("ext4", "/mnt", "", ("rw", "sync"), 1, 1)}, "mount -o remount,async /mnt"),
    ],
)
def test_remedies_are_commands(changes: dict[str, Any], command: str) -> None:
    (remedy,) = find_remedies(_facts(**changes), None, None)
    assert command in remedy.command
    assert remedy.why


def test_a_machine_in_order_needs_no_remedy() -> None:
    healthy = _device(scheduler="none", max_sectors_kb=1024, max_hw_sectors_kb=2048, link="8 x4", link_at_best="8 x4")
    assert find_remedies(_facts(devices=(healthy, _device(kind="disk", scheduler="bfq"))), None, None) == ()


def test_a_full_cache_and_a_slow_checksum_are_told() -> None:
    settings = Settings("posix", MIB, 8 * MIB)
    sweep = _sweep(Measurement("fine", settings, _pass(3)))
    sweep.sustained = [Sustained(settings, GB, 5.0, 3.0, 3.0, 1.0), Sustained(settings, GB, 5.0, 3.0, 3.0, 1.0)]
    facts = _facts(crc_gb_per_s=1.0)
    why = [remedy.why for remedy in find_remedies(facts, sweep, judge(facts, sweep))]
    assert [words in text for words, text in zip(("slowed down", "checksums"), why, strict=True)] == [True, True]
    on_tmpfs = _facts("tmpfs")
    assert find_remedies(on_tmpfs, sweep, judge(on_tmpfs, sweep)) == ()  # memory has no cache to fill
    on_overlay = _facts("overlay")
    assert find_remedies(on_overlay, sweep, judge(on_overlay, sweep))[0].command.startswith("sudo fstrim --all")
    sweep.sustained = [Sustained(settings, GB, 5.0, 3.0, 3.0, 2.9)]
    assert find_remedies(_facts(), sweep, judge(_facts(), sweep)) == ()


def test_percentiles() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile(values, 1)) == (50.0, 99.0, 100.0)
    assert (percentile([7.0], 0.99), percentile([], 0.5)) == (7.0, 0.0)


def test_the_first_second_against_the_last() -> None:
    points = [(second + tenth / 10, GB if second < 2 else GB // 10) for second in range(5) for tenth in range(1, 11)]
    first, last = Timeline(points).first_and_last_gb_per_s()
    assert (first, last) == (pytest.approx(10.0), pytest.approx(1.0))


def test_a_short_run_is_halved() -> None:
    assert Timeline([(0.25, GB), (0.5, GB), (0.75, 0), (1.0, GB)]).first_and_last_gb_per_s() == (4.0, 2.0)
    assert Timeline().first_and_last_gb_per_s() == (0.0, 0.0)
    assert Timeline([(0.0, GB)]).first_and_last_gb_per_s() == (0.0, 0.0)
