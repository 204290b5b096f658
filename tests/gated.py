"""An engine whose writes wait until a test lets them go, and what a test of background saves leaves behind: nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Any, ClassVar

from fastpersist import engines
from fastpersist.engines import Request
from fastpersist.engines.posix import PosixEngine
from fastpersist.memory.buffers import shared_pool
from fastpersist.memory.staging import shared_staging
from fastpersist.pending import _failures
from fastpersist.saving_thread import saving_thread

LIMIT_SECONDS = 30.0  # for hangs alone


class Gate:
    """Open at first. Closed, it holds every write; ``reached`` is set when one has come up to it."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._way = threading.Condition()
        self._passes: float = float("inf")
        self.written: list[tuple[int, int]] = []  # (address, bytes), each when it is in the file
        self.failing: Callable[[Request], int] = lambda _: 0

    def close(self, passes: int = 0) -> None:
        """Hold the writes that come after so many more."""
        with self._way:
            self.reached.clear()
            self._passes = passes
            self._way.notify_all()

    def open(self) -> None:
        with self._way:
            self._passes = float("inf")
            self._way.notify_all()

    def wait_until_reached(self) -> None:
        assert self.reached.wait(LIMIT_SECONDS), "no write has come up to the gate"

    def transfer(self, request: Request) -> int:
        with self._way:
            while not self._passes:
                self.reached.set()
                self._way.wait()
            self._passes -= 1
        code = self.failing(request)
        if code:
            return -code
        moved = PosixEngine._transfer(request)
        self.written.append((request.address, request.nbytes))
        return moved

    def written_from(self, address: int, nbytes: int) -> int:
        """Bytes of a range of memory that are in the file."""
        return sum(size for start, size in self.written.copy() if address <= start and start + size <= address + nbytes)


class GatedEngine(PosixEngine):
    """The posix engine behind a gate."""

    gate: ClassVar[Gate]

    @staticmethod
    def _transfer(request: Request) -> int:
        return GatedEngine.gate.transfer(request)


def install(monkeypatch: Any) -> Gate:
    """Register engine "gated", with a gate of its own."""
    GatedEngine.gate = Gate()
    monkeypatch.setitem(engines._REGISTRY, "gated", (__name__, "GatedEngine"))
    return GatedEngine.gate


def wait_until_idle() -> None:
    """Until every background save has ended, and all that follows on its end has been done."""
    worker = saving_thread()
    with worker._changed:
        assert worker._changed.wait_for(lambda: not worker._unfinished, LIMIT_SECONDS), "a save or its place is left over"
    thread = worker._thread
    if thread is not None:
        thread.join(LIMIT_SECONDS)
        assert not thread.is_alive()


def assert_nothing_left(older: Collection[threading.Thread]) -> None:
    """No save is pending or unreported, no memory lent, no thread running but ``older`` ones."""
    wait_until_idle()
    shared_staging().trim()
    left, _failures[:] = _failures.copy(), []
    assert left == []
    assert not saving_thread()._queue
    assert list(shared_staging()._lent) == []
    assert shared_pool().lent_nbytes == 0
    running = [thread for thread in threading.enumerate() if thread not in older]
    assert [thread for thread in running if thread.name.startswith("fastpersist")] == []


class Call:
    """A function that runs in a thread of its own, to see whether it waits."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.returned = threading.Event()
        self._function = function
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="call", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:
            self._error = error
        finally:
            self.returned.set()

    def result(self) -> Any:
        """What the function returned, or raised."""
        assert self.returned.wait(LIMIT_SECONDS), "it never returns"
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result
