"""GPUDirect Storage through NVIDIA's KvikIO: between device memory and the disk, past host memory where cuFile can do that.

Host memory takes the way of the posix engine, through the same threads and the same queue: a thread makes one transfer at a
time and waits for it, whatever its kind, so nothing is ever polled.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from typing import Any

from fastpersist.engines import _gds
from fastpersist.engines.base import (
    DEFAULT_BLOCK_NBYTES,
    DEFAULT_QUEUE_DEPTH,
    Availability,
    Capabilities,
    Completion,
    Memory,
    Read,
    Request,
)
from fastpersist.engines.files import File
from fastpersist.engines.posix import PosixEngine, transfer_host_memory
from fastpersist.errors import EngineUnavailableError
from fastpersist.memory.alignment import PAGE_NBYTES

log = logging.getLogger("fastpersist")

# Errors come as RuntimeError with a text, which ends with what strerror says of the errno.
_ERRNO_OF_TEXT = {os.strerror(code): code for code in errno.errorcode}
_ERRNO_OF_TEXT["POSIX error: Operation not permitted"] = errno.EBADF  # what KvikIO says of EBADF, and of that only

_pool_lock = threading.Lock()


class KvikioFile(File):
    """A file that is open in KvikIO too, by descriptors of its own on the same inode."""

    __slots__ = ("cufile",)

    def __init__(self, opened: File, cufile: Any) -> None:
        """Takes the descriptor over from ``opened``."""
        super().__init__(
            opened.path, -1, direct=opened.direct,
            memory_alignment=opened.memory_alignment, offset_alignment=opened.offset_alignment,
        )  # fmt: skip
        self.cufile = cufile
        self.fileno, opened.fileno = opened.fileno, -1

    def close(self) -> None:
        """Close all descriptors; harmless when repeated."""
        self.cufile.close()
        super().close()


class KvikioEngine(PosixEngine):
    """Moves device memory by cuFile, host memory by pwrite and pread. ``route`` says what cuFile made of it.

    A device request needs memory that the driver knows (its address tells the device), and on a direct file offsets and
    lengths at multiples of a page. Work of the GPU that fills or reads the memory must have ended before submit.
    """

    name = "kvikio"
    capabilities = Capabilities(memory=frozenset(Memory))

    def __init__(self, *, block_nbytes: int = DEFAULT_BLOCK_NBYTES, queue_depth: int = DEFAULT_QUEUE_DEPTH) -> None:
        """Raises EngineUnavailableError, with the remedy, where there is no GPU, no driver or no KvikIO."""
        self._kvikio = _gds.require_kvikio()
        super().__init__(block_nbytes=block_nbytes, queue_depth=queue_depth)
        self._device_transfers = 0
        self._counted_before = _gds.count_transfers()
        self._last_route: _gds.Route | None = None
        _give_threads(self._kvikio, len(self._threads))

    @classmethod
    def availability(cls) -> Availability:
        """Whether KvikIO can run here; if it can, ``reason`` tells which way its transfers will go, as far as is known."""
        try:
            return Availability(usable=True, reason=str(_gds.find_route(_gds.require_kvikio())))
        except EngineUnavailableError as error:
            return Availability(usable=False, reason=error.reason, remedy=error.remedy)

    @property
    def route(self) -> _gds.Route:
        """Which way the device memory moved so far has gone, and the evidence; after close, what was known then."""
        if self._last_route is not None:
            return self._last_route
        before, after = self._counted_before, _gds.count_transfers()
        counted = None if before is None or after is None else after - before
        return _gds.find_route(self._kvikio, self._device_transfers, counted)

    def open(self, path: str, mode: str, *, direct: bool = True, permissions: int = 0o666) -> File:
        """Open a file here and in KvikIO. While it is open, nobody can hold a lease on it."""
        opened = super().open(path, mode, direct=direct, permissions=permissions)
        try:
            # Through the descriptor: the file may be nameless, and nothing may be created or cut a second time.
            cufile = self._kvikio.CuFile(f"/proc/self/fd/{opened.fileno}", "r" if mode == "r" else "r+")
        except Exception as error:
            opened.close()
            raise OSError(_errno_of(error), f"KvikIO cannot open the file: {error}", path) from error
        return KvikioFile(opened, cufile)

    @staticmethod
    def _transfer(request: Request) -> int:
        if request.memory is Memory.HOST:
            return transfer_host_memory(request)
        try:
            return _transfer_device_memory(request)
        except Exception as error:  # a thread that died of it would leave the request in flight for ever
            return _Failure(_errno_of(error), str(error) or repr(error))

    def _check_request(self, request: Request) -> None:
        super()._check_request(request)
        if request.memory is Memory.DEVICE and not isinstance(request.file, KvikioFile):
            raise ValueError(f"{request.file.path}: device memory needs a file that engine 'kvikio' has opened")

    def _alignment(self, request: Request) -> tuple[int, int]:
        if request.memory is Memory.HOST:
            return super()._alignment(request)
        # cuFile copies what shares a page with the rest of a file, and writes the whole page: neighbours would lose bytes.
        return 1, max(request.file.offset_alignment, PAGE_NBYTES)

    def _complete(self, request: Request, direct: bool, result: int) -> Completion:
        if isinstance(result, _Failure):  # an EINVAL of cuFile says nothing about O_DIRECT
            return Completion(request, 0, error=OSError(-result, result.text))
        completion = super()._complete(request, direct, result)
        if request.memory is Memory.DEVICE and completion.transferred:
            self._device_transfers += 1
        return completion

    def _shut(self) -> None:
        super()._shut()
        self._last_route = self.route
        if self._device_transfers:
            log.info("kvikio made %d transfers of device memory (%s)", self._device_transfers, self._last_route)


class _Failure(int):
    """A negated errno, with the words of the library that failed."""

    def __new__(cls, code: int, text: str) -> _Failure:
        failure = super().__new__(cls, -code)
        failure.text = text
        return failure

    text: str


class _DeviceMemory:
    """Raw memory of a GPU in the shape that KvikIO takes: the CUDA Array Interface, version 3, of a row of bytes."""

    __slots__ = ("__cuda_array_interface__",)

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


def _transfer_device_memory(request: Request) -> int:
    """Bytes moved. Raises what KvikIO raises."""
    file, nbytes = request.file, request.nbytes
    assert isinstance(file, KvikioFile)
    call = file.cufile.pwrite
    if isinstance(request, Read):
        call = file.cufile.pread
        # KvikIO's own path through host memory takes the end of the file for an error.
        nbytes = min(nbytes, os.fstat(file.fileno).st_size - request.file_offset)
        if nbytes <= 0:
            return 0
    memory = _DeviceMemory(request.address, nbytes)
    # One task: of several, KvikIO does not wait for the others after one has failed, and they would go on using the memory.
    return int(call(memory, size=nbytes, file_offset=request.file_offset, task_size=nbytes).get())


def _errno_of(error: Exception) -> int:
    """The errno that an exception of KvikIO carries or spells out; EIO where it does neither."""
    if isinstance(error, OSError) and error.errno:
        return error.errno
    found = [text for text in _ERRNO_OF_TEXT if str(error).endswith(text)]
    return _ERRNO_OF_TEXT[max(found, key=len)] if found else errno.EIO


def _give_threads(kvikio: Any, count: int) -> None:
    """Let KvikIO's pool, which all of the process shares, make ``count`` transfers at once. It starts with a single thread."""
    with _pool_lock:
        if kvikio.defaults.get("num_threads") < count:
            kvikio.defaults.set("num_threads", count)
