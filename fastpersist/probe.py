"""``python -m fastpersist.probe PATH``: how fast a directory's drive can take a checkpoint, and what is in the way.

Facts, then a sweep over engines and sizes, then a verdict. fastpersist itself never imports this module.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from fastpersist.engines import available, engine_class
from fastpersist.errors import EngineUnavailableError
from fastpersist.probing.facts import Facts, collect_facts
from fastpersist.probing.plot import check_plotting, draw
from fastpersist.probing.profile import Profile, save_profile
from fastpersist.probing.report import Problem, Report, as_json
from fastpersist.probing.scratch import ProbeError, Scratch, bound_nbytes, check_directory, exit_on_signals, scratch_file
from fastpersist.probing.sweep import IN_FLIGHT_NBYTES, Advance, Sweep, Sweeper
from fastpersist.probing.tables import show
from fastpersist.probing.trial import Bench
from fastpersist.probing.verdict import find_remedies, judge

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

NOT_MEASURED, REFUSED, INTERRUPTED = 1, 2, 130
"""Exit statuses: facts only, for nothing could be measured; not even facts; Ctrl-C."""


@app.command()
def probe(
    path: Annotated[Path, typer.Argument(help="The directory where checkpoints are, or will be.")],
    engine: Annotated[list[str] | None, typer.Option(help="Engine to try; repeat it for several. Default: all usable.")] = None,
    budget_gb: Annotated[float, typer.Option(min=0.002, help="Bound of the file, and of what each of three steps writes.")] = 8,
    seconds: Annotated[float, typer.Option(min=0.1, help="Bound of each of the two confirming runs.")] = 5,
    as_json_text: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a heatmap per engine to this PNG file.")] = None,
    save_as_profile: Annotated[
        bool, typer.Option("--save-profile", help="Let engine='auto' and default sizes use the result on this filesystem.")
    ] = False,
) -> None:
    """Measure how fast a drive can take a checkpoint, with which engine and sizes, and what is in the way.

    Works on one hidden file, of at most a tenth of the free space, that is gone afterwards.

    Exit status: 0 measured, 1 facts only, 2 refused.
    """
    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        check_directory(path)
        if plot is not None:
            check_plotting(plot)
        engines = _engines(engine)
        with exit_on_signals(), _progress() as advance:
            report = examine(path, engines, int(budget_gb * 1e9), seconds, advance)
        report = _keep(report, plot, save_as_profile=save_as_profile)
    except (ProbeError, EngineUnavailableError, ValueError, OSError) as error:
        errors.print(f"error: {error}", style="red", markup=False)
        raise typer.Exit(REFUSED) from None
    except KeyboardInterrupt:
        errors.print("interrupted; the probe's file is gone", markup=False)
        raise typer.Exit(INTERRUPTED) from None
    if as_json_text:
        print(json.dumps(as_json(report), indent=2))
    else:
        show(report, Console(highlight=False))
    if report.problem is not None:
        errors.print(f"error: {report.problem.reason}. Remedy: {report.problem.remedy}", style="red", markup=False)
        raise typer.Exit(NOT_MEASURED)


def examine(path: Path, engines: Sequence[str], budget_nbytes: int, seconds: float, advance: Advance) -> Report:
    """Facts, sweep, verdict. Where nothing can be written, the report holds the facts and the problem."""
    sweep, problem = None, None
    with _warnings(path) as notes:
        try:
            with scratch_file(path) as scratch:
                facts = collect_facts(path, scratch)
                sweep, problem = _measure(facts, scratch, engines, budget_nbytes, seconds, advance)
        except ProbeError as error:
            facts = collect_facts(path, None)
            problem = Problem(error.reason, error.remedy)
    verdict = None if sweep is None else judge(facts, sweep)
    return Report(str(path), facts, sweep, verdict, find_remedies(facts, sweep, verdict), tuple(notes), problem)


def _measure(
    facts: Facts, scratch: Scratch, engines: Sequence[str], budget_nbytes: int, seconds: float, advance: Advance
) -> tuple[Sweep | None, Problem | None]:
    memory_nbytes = facts.available_memory_nbytes if facts.in_memory else None
    try:
        file_nbytes = bound_nbytes(facts.filesystem.free_nbytes, budget_nbytes, memory_nbytes)
    except ProbeError as error:
        return None, Problem(error.reason, error.remedy)
    sweeper = Sweeper(Bench(scratch, max(IN_FLIGHT_NBYTES)), file_nbytes, budget_nbytes, advance)
    try:
        return sweeper.run(engines, seconds), None
    except OSError as error:
        return sweeper.sweep, Problem(f"a trial failed: {error.strerror or error}", "dmesg, df, quota: then probe again")


def _engines(names: Sequence[str] | None) -> list[str]:
    """The engines to try. Raises ValueError for an unknown one, EngineUnavailableError for one that cannot run."""
    verdicts = available()
    if not names:  # trials move host memory, which says nothing of kvikio
        return [
            name
            for name, verdict in verdicts.items()
            if verdict.usable and name != "kvikio" and engine_class(name).capabilities.persistent
        ]
    for name in names:
        if not engine_class(name).capabilities.persistent:
            raise ProbeError(f"engine {name!r} has no disk to measure", "try --engine posix or --engine io_uring")
        if not verdicts[name].usable:
            raise EngineUnavailableError(name, verdicts[name].reason, verdicts[name].remedy)
    return list(dict.fromkeys(names))


def _keep(report: Report, plot: Path | None, *, save_as_profile: bool) -> Report:
    """Write the plot and the profile that were asked for. Where that fails the report says so: it took a while to make."""
    verdict, rates = report.verdict, {} if report.sweep is None else report.sweep.rates()
    if verdict is None or report.problem is not None:
        return report
    try:
        if plot is not None:
            draw(rates, verdict.best, f"fresh writes in GB/s, {report.facts.filesystem.kind}", plot)
        if not save_as_profile:
            return report
        best = verdict.best
        profile = Profile(best.engine, best.block_nbytes, best.queue_depth)
        return replace(report, profile_file=str(save_profile(report.path, profile, gb_per_s=verdict.gb_per_s)))
    except OSError as error:
        return replace(report, problem=Problem(f"all is measured, but {error}", "make that place writable, or name another"))


@contextlib.contextmanager
def _progress() -> Iterator[Advance]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("facts", total=1.0)
        yield lambda words, share: bar.update(task, description=words, completed=share)


@contextlib.contextmanager
def _warnings(path: Path) -> Iterator[dict[str, None]]:
    """Collects what fastpersist warns of meanwhile, each warning once, instead of printing it at every trial."""
    notes: dict[str, None] = {}
    logger = logging.getLogger("fastpersist")

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            _, separator, words = record.getMessage().partition(": ")  # before the colon stands the nameless file
            notes.setdefault(f"{path}: {words}" if separator else record.getMessage())

    collector, propagated = Collector(logging.WARNING), logger.propagate
    logger.addHandler(collector)
    logger.propagate = False
    try:
        yield notes
    finally:
        logger.removeHandler(collector)
        logger.propagate = propagated


if __name__ == "__main__":
    app(prog_name="fastpersist probe")
