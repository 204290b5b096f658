"""The ``progress`` option: False, True for a bar on the terminal, or a function of (bytes done, bytes in all)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

Progress = Callable[[int, int], None]


def progress_reporter(progress: bool | Progress, path: str) -> contextlib.AbstractContextManager[Progress]:
    """The function to call with (bytes done, bytes in all), whatever form the option has."""
    if callable(progress):
        return contextlib.nullcontext(progress)
    return _bar(os.path.basename(path)) if progress else contextlib.nullcontext(_ignore)


class ProgressCounter:
    """Adds up the bytes of single transfers and reports (bytes done, bytes in all), never more than all."""

    def __init__(self, report: Progress, total_nbytes: int) -> None:
        self._report = report
        self._total_nbytes = total_nbytes
        self._done_nbytes = 0

    def add(self, nbytes: int) -> None:
        """Account for ``nbytes`` more. The last block is padded beyond the file's end: the padding does not count."""
        self._done_nbytes = min(self._done_nbytes + nbytes, self._total_nbytes)
        self._report(self._done_nbytes, self._total_nbytes)


def _ignore(done_nbytes: int, total_nbytes: int) -> None:
    pass


@contextlib.contextmanager
def _bar(description: str) -> Iterator[Progress]:
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    with Bar(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()) as bar:
        task = bar.add_task(description)
        yield lambda done_nbytes, total_nbytes: bar.update(task, completed=done_nbytes, total=total_nbytes)
