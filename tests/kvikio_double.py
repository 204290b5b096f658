"""Stands in for the package kvikio and a GPU: "device memory" is host memory, transfers run in threads and fail on demand."""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fastpersist.engines import _gds, _libc

Outcome = int | Exception | None
"""What a transfer is made to do: move fewer bytes, fail, or (None) just what it should."""


class KvikioDouble:
    """What the tests see of it, and how they steer it. As the real one it keeps no reference to the memory it works on."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {"num_threads": 1}
        self.driver: dict[str, Any] = {"is_gds_available": False, "allow_compat_mode": True}
        self.compat_mode = False
        self.outcome: Callable[[str, int, int], Outcome] = lambda kind, nbytes, file_offset: None
        self.open_error: Exception | None = None
        self.go = threading.Event()  # no transfer ends before it is set
        self.go.set()
        self.begun: list[tuple[str, int, int, int]] = []  # (kind, nbytes, file offset, task size)
        self.ended = 0
        self.most_at_once = 0
        self.done_calls = 0
        self.open_files = 0
        self.lock = threading.Lock()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put it in the place of kvikio, and let the driver find one GPU."""
        package = ModuleType("kvikio")
        parts = {
            "defaults": SimpleNamespace(
                get=self.settings.__getitem__, set=self.settings.__setitem__, is_compat_mode_preferred=lambda: self.compat_mode
            ),
            "cufile_driver": SimpleNamespace(get=self._ask_driver),
        }
        monkeypatch.setitem(sys.modules, "kvikio", package)
        for name, part in parts.items():
            setattr(package, name, part)
            monkeypatch.setitem(sys.modules, f"kvikio.{name}", part)
        package.CuFile = self._open  # type: ignore[attr-defined]
        monkeypatch.setattr(_gds, "find_gpus", lambda: _gds.Gpus(("A GPU",)))

    def _ask_driver(self, name: str) -> Any:
        answer = self.driver[name]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _open(self, path: str, flags: str = "r") -> _CuFile:
        if self.open_error is not None:
            raise self.open_error
        return _CuFile(self, path, flags)


class _CuFile:
    def __init__(self, double: KvikioDouble, path: str, flags: str) -> None:
        self._double = double
        self._fileno = os.open(path, {"r": os.O_RDONLY, "r+": os.O_RDWR}[flags])
        double.open_files += 1

    def close(self) -> None:
        fileno, self._fileno = self._fileno, -1
        if fileno >= 0:
            self._double.open_files -= 1
            os.close(fileno)

    def pwrite(self, buf: Any, size: int, file_offset: int, task_size: int) -> _Future:
        return self._begin("write", buf, size, file_offset, task_size)

    def pread(self, buf: Any, size: int, file_offset: int, task_size: int) -> _Future:
        return self._begin("read", buf, size, file_offset, task_size)

    def _begin(self, kind: str, buf: Any, size: int, file_offset: int, task_size: int) -> _Future:
        interface = buf.__cuda_array_interface__
        assert (interface["shape"], interface["typestr"], interface["version"]) == ((size,), "|u1", 3)
        address, read_only = interface["data"]
        assert not read_only
        double = self._double
        with double.lock:
            double.begun.append((kind, size, file_offset, task_size))
            double.most_at_once = max(double.most_at_once, len(double.begun) - double.ended)

        def work() -> int:
            double.go.wait()
            outcome = double.outcome(kind, size, file_offset)
            with double.lock:
                double.ended += 1
            if isinstance(outcome, Exception):
                raise outcome
            return self._move(kind, address, size if outcome is None else outcome, file_offset)

        return _Future(double, work)

    def _move(self, kind: str, address: int, nbytes: int, file_offset: int) -> int:
        moved = 0
        while moved < nbytes:
            call = _libc.pwrite if kind == "write" else _libc.pread
            result = call(self._fileno, address + moved, nbytes - moved, file_offset + moved)
            if result == -errno.EBADF:
                raise RuntimeError("KvikIO failure at: posix_io.hpp:1: POSIX error: Operation not permitted")
            if result < 0:
                raise RuntimeError(f"KvikIO failure at: posix_io.hpp:1: POSIX error on p{kind}: {os.strerror(-result)}")
            if result == 0:
                raise RuntimeError("KvikIO failure at: posix_io.hpp:1: POSIX error on pread: EOF")
            moved += result
        return moved


class _Future:
    def __init__(self, double: KvikioDouble, work: Callable[[], int]) -> None:
        self._double = double
        self._result: Outcome = None

        def run() -> None:
            try:
                self._result = work()
            except Exception as error:
                self._result = error

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def done(self) -> bool:
        self._double.done_calls += 1
        return not self._thread.is_alive()

    def get(self) -> int:
        self._thread.join()
        if isinstance(self._result, Exception):
            raise self._result
        assert self._result is not None
        return self._result
