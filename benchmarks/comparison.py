"""What the rounds of several tests gave, side by side: lines, table and speed-up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from measuring import GB, Series, Spread, paired_ratios
from rich.console import Console
from rich.table import Column, Table
from room import GIB

OURS = "test_fastpersist_"
_TABLE_WIDTH = 170  # where the output is no terminal


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A test that cannot run here, and why."""

    tag: str
    reason: str

    def __str__(self) -> str:
        return f"{self.tag} left out: {self.reason}"


@dataclass(slots=True, kw_only=True)
class Result(Series):
    """What the rounds of one test gave.

    ``state``: what a save has made durable, or where a load reads from. ``equal``: it did what the baseline did, so that
    the two may be compared. ``verified``: yes, or why not.
    """

    state: str
    equal: bool = True
    verified: str = "no"


@dataclass(slots=True)
class Comparison:
    """The results of one kind of work on ``nbytes``. ``ceiling``: fio's bytes per second, round by round; empty without fio."""

    title: str
    state_title: str
    nbytes: int
    baseline_tag: str
    results: list[Result]
    left_out: list[LeftOut] = field(default_factory=list)
    ceiling: list[float] = field(default_factory=list)

    @property
    def baseline(self) -> Result:
        """The result that the others are compared to."""
        return next(result for result in self.results if result.tag == self.baseline_tag)

    def ratio_to_baseline(self, result: Result) -> Spread:
        """How many times as fast as the baseline."""
        return paired_ratios(self.baseline.seconds, result.seconds)

    def ratio_to_ceiling(self, result: Result) -> Spread | None:
        """Share of the disk's own speed; None without fio."""
        return paired_ratios(result.rates(self.nbytes), self.ceiling) if self.ceiling else None


def result_line(tag: str, nbytes: int, seconds: float) -> str:
    """The line that DeepSpeed's scripts print, in their unit: GB is 2**30 bytes."""
    gib = nbytes / GIB
    return f"{tag} -- {gib:5.2f} GB, {seconds:5.2f} secs, {gib / seconds:5.2f} GB/s"


def print_table(comparison: Comparison) -> None:
    """One row per test. GB is 1e9 bytes here."""
    columns = (
        Column("test", no_wrap=True),
        "median s",
        "GB/s (range)",
        f"x {comparison.baseline_tag} (range)",
        "of fio (range)",
        "CPU s/GB",
        comparison.state_title,
        "verified",
    )
    title = f"{comparison.title}: medians over rounds, ratios are medians of paired rounds; GB = 1e9 bytes"
    table = Table(*columns, title=title)
    if comparison.ceiling:
        table.add_row(*_ceiling_row(comparison))
    for result in comparison.results:
        table.add_row(*_row(comparison, result))
    console = Console()
    Console(width=None if console.is_terminal else _TABLE_WIDTH).print(table)


def _ceiling_row(comparison: Comparison) -> tuple[str, ...]:
    seconds = [comparison.nbytes / rate for rate in comparison.ceiling]
    return (
        "fio, the disk's own speed",
        f"{Spread.of(seconds).median:.3f}",
        str(Spread.of([rate / GB for rate in comparison.ceiling])),
        str(paired_ratios(comparison.baseline.seconds, seconds)),
        "1",
        *["-"] * 3,
    )


def _row(comparison: Comparison, result: Result) -> tuple[str, ...]:
    payload_gb = comparison.nbytes / GB
    return (
        result.tag,
        f"{Spread.of(result.seconds).median:.3f}",
        str(Spread.of([rate / GB for rate in result.rates(comparison.nbytes)])),
        str(comparison.ratio_to_baseline(result)),
        str(comparison.ratio_to_ceiling(result) or "-"),
        f"{Spread.of([cost.cpu_seconds / payload_gb for cost in result.costs]).median:.3f}",
        result.state,
        result.verified,
    )


def speed_up(comparison: Comparison) -> str:
    """How much faster than the baseline our fastest test is, and how much faster than the fastest peer, if there are any."""
    equals = [result for result in comparison.results if result.equal and result.tag != comparison.baseline_tag]
    ours = [result for result in equals if result.tag.startswith(OURS)]
    peers = [result for result in equals if not result.tag.startswith(OURS)]
    if not ours:
        return "speed-up: none to report, no engine that does the whole work could run"
    best = _fastest(comparison, ours)
    ratio = comparison.ratio_to_baseline(best)
    line = (
        f"speed-up: {best.tag} is {ratio.median:.2f} times as fast as {comparison.baseline_tag} "
        f"({ratio.low:.2f} to {ratio.high:.2f}; paired rounds: {len(best.costs)})"
    )
    if peers:
        rival = _fastest(comparison, peers)
        to_rival = paired_ratios(rival.seconds, best.seconds)
        line += f"; and {to_rival.median:.2f} times as fast as the fastest of the others, {rival.tag}"
    return line


def _fastest(comparison: Comparison, results: Sequence[Result]) -> Result:
    return max(results, key=lambda result: comparison.ratio_to_baseline(result).median)
