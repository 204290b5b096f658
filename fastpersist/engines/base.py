"""The interface of all engines: requests in, completions out.

As in fio, the base class checks and counts, and a subclass only moves bytes. A subclass implements four hooks, and may
implement the second, all called by the one thread that owns the engine:

    _start(ticket, request)            begin the transfer; do not wait for it
    _hand_over()                       called after one or several _start: those that only prepare are made good here
    _collect(timeout, at_least)        [(ticket, bytes moved or negated errno)], one or more unless time runs out;
                                       so many will be waited for: whoever can waits for all of them at once
    _settle()                          return only when no memory of any request is in use, whatever was interrupted
    _shut()                            release the engine's own resources; nothing is in flight. Called again if Ctrl-C
                                       interrupted it

Engines know raw addresses and file offsets. They know nothing of torch, of zip files, or of why bytes move.
"""

from __future__ import annotations

import enum
import errno
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from fastpersist.engines import _libc
from fastpersist.engines.files import File, open_file
from fastpersist.errors import AlignmentError, EngineStateError, QueueFull

DEFAULT_BLOCK_NBYTES = 8 << 20
DEFAULT_QUEUE_DEPTH = 8
MAX_TRANSFER_NBYTES = 0x7FFFF000  # the most that one read(2) or write(2) moves on Linux
MAX_QUEUE_DEPTH = 1024


class Memory(enum.Enum):
    """Where a request's address points to."""

    HOST = "host"
    DEVICE = "device"


@dataclass(frozen=True, slots=True)
class Request:
    """One transfer of ``nbytes`` between memory at ``address`` and ``file`` at ``file_offset``.

    ``owner`` is whatever keeps the memory alive: it stays referenced until the completion is reaped. ``tag`` is the
    caller's own and comes back untouched.
    """

    file: File
    address: int
    nbytes: int
    file_offset: int
    memory: Memory = Memory.HOST
    device_index: int = 0
    owner: Any = None
    tag: Any = None

    def tagged(self, tag: Any) -> Self:
        """The same transfer with another tag (dataclasses.replace takes ten times as long)."""
        return type(self)(
            self.file, self.address, self.nbytes, self.file_offset, self.memory, self.device_index, self.owner, tag
        )


class Write(Request):
    """Memory to file."""

    __slots__ = ()


class Read(Request):
    """File to memory."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of a request. I/O failures arrive here and are never raised.

    ``residual`` is the part still to be transferred (after a short or interrupted transfer), aligned so that it can be
    submitted as it is. A read that meets the end of the file has neither ``error`` nor ``residual``.
    """

    request: Request
    transferred: int
    error: OSError | None = None
    residual: Request | None = None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do. ``persistent`` is False where nothing outlives the process (memory, null)."""

    memory: frozenset[Memory] = frozenset({Memory.HOST})
    max_transfer_nbytes: int = MAX_TRANSFER_NBYTES
    registered_buffers: bool = False
    persistent: bool = True


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether an engine can run on this machine; if not, why, and what would change that."""

    usable: bool
    reason: str = ""
    remedy: str = ""


class Engine(ABC):
    """Moves bytes between memory and files, up to ``queue_depth`` requests at a time. Reusable; a context manager.

    The thread that first submits owns the engine. A child made by fork cannot use it.
    """

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities] = Capabilities()

    def __init__(self, *, block_nbytes: int = DEFAULT_BLOCK_NBYTES, queue_depth: int = DEFAULT_QUEUE_DEPTH) -> None:
        if not 1 <= queue_depth <= MAX_QUEUE_DEPTH:
            raise ValueError(f"queue_depth must lie in 1..{MAX_QUEUE_DEPTH}, not {queue_depth}")
        if block_nbytes < 1:
            raise ValueError(f"block_nbytes must be positive, not {block_nbytes}")
        self.block_nbytes = block_nbytes
        self.queue_depth = queue_depth
        self._pending: dict[int, tuple[Request, bool]] = {}
        self._next_ticket = 1
        self._owner_thread: int | None = None
        self._process = os.getpid()
        self._closed = False
        self._inside_hook = False  # left True by an exception that interrupts a hook: the books are then not to be trusted
        self._interrupted = False  # nothing may be submitted any more; what is in flight is waited for

    @classmethod
    def availability(cls) -> Availability:
        """Whether this engine can run here. Cheap enough to be asked before every use."""
        return Availability(usable=True)

    @property
    def in_flight(self) -> int:
        """Requests submitted and not yet reaped."""
        return len(self._pending)

    def open(self, path: str, mode: str, *, direct: bool = True, permissions: int = 0o666) -> File:
        """Open a file that this engine can work on; modes and errors as in files.open_file."""
        return open_file(path, mode, direct=direct, permissions=permissions)

    def reserve(self, file: File, nbytes: int) -> None:
        """Give ``file`` its size and, where the filesystem can, its blocks, so that no later write extends it.

        What a longer file holds beyond that is cut off. Raises OSError, ENOSPC above all.
        """
        if os.fstat(file.fileno).st_size > nbytes:
            os.ftruncate(file.fileno, nbytes)
        try:
            _libc.fallocate(file.fileno, nbytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            os.ftruncate(file.fileno, nbytes)

    def resize(self, file: File, nbytes: int) -> None:
        """Cut ``file`` to ``nbytes``. Raises OSError."""
        os.ftruncate(file.fileno, nbytes)

    def sync(self, file: File) -> None:
        """Return when all that was written to ``file`` is on stable storage. Raises OSError; retrying it would lie."""
        os.fdatasync(file.fileno)

    def register(self, buffers: Iterable[tuple[int, int]]) -> bool:
        """Announce (address, nbytes) ranges that will be used often. True if it made a difference; failure is no error."""
        return False

    def submit(self, *requests: Request) -> None:
        """Start transfers and return without waiting for them. All are checked before the first is started.

        Raises QueueFull if more than ``queue_depth`` requests would be in flight, AlignmentError for a misaligned request
        on a direct file, ValueError for one that no engine could carry out, EngineStateError after close or from a wrong
        thread.
        """
        self._check_state()
        if self._interrupted:
            raise self._was_interrupted()
        for request in requests:
            self._check_request(request)
        if len(self._pending) + len(requests) > self.queue_depth:
            raise QueueFull(f"{len(self._pending)} of {self.queue_depth} requests are in flight: wait for completions first")
        self._inside_hook = True
        for request in requests:
            ticket = self._next_ticket
            self._next_ticket += 1
            self._pending[ticket] = (request, request.file.direct)
            self._start(ticket, request)
        self._hand_over()
        self._inside_hook = False

    def wait(self, *, min_completions: int = 1, timeout: float | None = None) -> list[Completion]:
        """Completions, at least ``min_completions`` of them (or all in flight, if fewer) unless ``timeout`` seconds pass.

        Releases the GIL while it waits.
        """
        self._check_state()
        completions: list[Completion] = []
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._pending:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            self._inside_hook = True
            missing = min(min_completions - len(completions), len(self._pending))
            for ticket, result in self._collect(left if missing > 0 else 0.0, max(missing, 1)):
                completions.append(self._complete(*self._pending.pop(ticket), result))
            self._inside_hook = False
            if len(completions) >= min_completions or left == 0.0:
                break
        return completions

    def drain(self) -> None:
        """Return when nothing is in flight any more; results are dropped. Also right after an interrupted call.

        A KeyboardInterrupt that arrives meanwhile is raised when it is safe: after the last transfer has ended.
        """
        interrupt: KeyboardInterrupt | None = None
        while self._pending or self._inside_hook:
            if self._process != os.getpid() or self._closed:
                break
            try:
                self._drain_once()
            except KeyboardInterrupt as error:
                interrupt = error
        self._pending.clear()
        if interrupt is not None:
            raise interrupt

    def close(self) -> None:
        """Drain, then release everything; harmless when repeated."""
        if self._closed:
            return
        if self._process == os.getpid():
            self.drain()
            self._shut_uninterrupted()
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _shut_uninterrupted(self) -> None:
        """As drain: a KeyboardInterrupt is raised when all is done."""
        interrupt: KeyboardInterrupt | None = None
        while not self._closed:
            try:
                self._shut()
                self._closed = True
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _drain_once(self) -> None:
        if self._inside_hook:
            self._settle()
            self._interrupted = True
            self._inside_hook = False
            self._pending.clear()
        elif self._pending:
            self.wait(min_completions=len(self._pending))

    @abstractmethod
    def _start(self, ticket: int, request: Request) -> None: ...

    def _hand_over(self) -> None: ...  # noqa: B027  # most engines prepare nothing

    @abstractmethod
    def _collect(self, timeout: float | None, at_least: int) -> list[tuple[int, int]]: ...

    @abstractmethod
    def _settle(self) -> None: ...

    @abstractmethod
    def _shut(self) -> None: ...

    def _check_state(self) -> None:
        if self._closed:
            raise EngineStateError(f"engine {self.name!r} is closed")
        if self._process != os.getpid():
            raise EngineStateError(f"engine {self.name!r} belongs to the parent process: open a new one after a fork")
        if self._inside_hook:
            raise self._was_interrupted()
        thread = threading.get_ident()
        if self._owner_thread is None:
            self._owner_thread = thread
        elif self._owner_thread != thread:
            raise EngineStateError(f"engine {self.name!r} belongs to the thread that first used it: open one per thread")

    def _was_interrupted(self) -> EngineStateError:
        return EngineStateError(f"engine {self.name!r} was interrupted inside a transfer: close it and open a new one")

    def _check_request(self, request: Request) -> None:
        file, limit = request.file, self.capabilities.max_transfer_nbytes
        if not 0 < request.nbytes <= limit:
            raise ValueError(f"a transfer moves 1..{limit} bytes, not {request.nbytes}")
        if request.address <= 0 or request.file_offset < 0:
            raise ValueError(f"address {request.address:#x} or file offset {request.file_offset} is out of range")
        if request.memory not in self.capabilities.memory:
            raise ValueError(f"engine {self.name!r} cannot move {request.memory.value} memory")
        memory, offset = self._alignment(request)
        if file.direct and (request.address % memory or request.nbytes % offset or request.file_offset % offset):
            raise AlignmentError(
                f"{file.path}: direct I/O needs addresses at multiples of {memory} and offsets and lengths "
                f"at multiples of {offset}, not address {request.address:#x}, offset "
                f"{request.file_offset}, {request.nbytes} bytes"
            )

    def _alignment(self, request: Request) -> tuple[int, int]:
        """(memory, offset) alignment in bytes that ``request`` must keep on a direct file."""
        return request.file.memory_alignment, request.file.offset_alignment

    def _complete(self, request: Request, direct: bool, result: int) -> Completion:
        """Judge one result, the same way for every engine."""
        if result == request.nbytes:
            return Completion(request, result)
        if result in (-errno.EAGAIN, -errno.EINTR):
            return Completion(request, 0, residual=request)
        if result == -errno.EINVAL and direct:
            # The verdict on O_DIRECT that no open and no statx gives for certain.
            request.file.use_page_cache("a direct transfer was refused (EINVAL)")
            return Completion(request, 0, residual=request)
        if result < 0:
            return Completion(request, 0, error=OSError(-result, os.strerror(-result)))
        if result == 0 and isinstance(request, Read):
            return Completion(request, 0)
        if result == 0 or result > request.nbytes:
            return Completion(request, 0, error=OSError(errno.EIO, f"the transfer of {request.nbytes} bytes returned {result}"))
        step = result
        if direct:
            step -= result % max(self._alignment(request))
            if step != result and isinstance(request, Read):
                return Completion(request, result)  # direct reads come short of a whole unit at the end of the file only
        residual = replace(
            request,
            address=request.address + step,
            nbytes=request.nbytes - step,
            file_offset=request.file_offset + step,
        )
        return Completion(request, step, residual=residual)
