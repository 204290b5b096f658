"""io_uring: the kernel takes requests from a shared ring and works on them all at once; one thread keeps a deep queue."""

from __future__ import annotations

import bisect
import errno
import logging
import os
import time
from collections.abc import Iterable

from fastpersist.engines import _liburing
from fastpersist.engines.base import (
    DEFAULT_BLOCK_NBYTES,
    DEFAULT_QUEUE_DEPTH,
    Availability,
    Capabilities,
    Engine,
    Request,
    Write,
)
from fastpersist.errors import EngineUnavailableError

log = logging.getLogger("fastpersist")

# Best first. The first saves interrupts and locks (Linux 6.1), the second interrupts (5.19), the last runs since 5.1.
SETUP_FLAGS = (
    _liburing.SETUP_R_DISABLED | _liburing.SETUP_SINGLE_ISSUER | _liburing.SETUP_DEFER_TASKRUN,
    _liburing.SETUP_COOP_TASKRUN,
    0,
)
SUBMIT_ATTEMPTS = 100
SUBMIT_PAUSE_SECONDS = 0.01

_VERDICTS = {
    errno.EPERM: (
        "the kernel forbids io_uring to this process (EPERM)",
        "allow it: 'sysctl -w kernel.io_uring_disabled=0', or in a container a seccomp profile that permits io_uring_setup, "
        "io_uring_enter and io_uring_register; or use engine='posix'",
    ),
    errno.ENOSYS: ("the kernel has no io_uring (ENOSYS)", "run Linux 5.6 or newer, or use engine='posix'"),
    errno.ENOMEM: (
        "the limit on locked memory is too small for a ring (ENOMEM)",
        "raise it with 'ulimit -l unlimited' or LimitMEMLOCK=, or use a smaller queue_depth, or engine='posix'",
    ),
}


def _open_ring(queue_depth: int) -> tuple[_liburing.Ring, int]:
    """A ring with the best flags that this kernel takes, and those flags. Raises EngineUnavailableError."""
    for flags in SETUP_FLAGS:
        try:
            return _liburing.Ring(queue_depth, flags), flags
        except OSError as error:
            if error.errno == errno.EINVAL and flags != SETUP_FLAGS[-1]:
                continue  # flags that are newer than the kernel
            reason, remedy = _VERDICTS.get(error.errno or 0, (f"io_uring_setup failed: {error.strerror}", "use engine='posix'"))
            raise EngineUnavailableError("io_uring", reason, remedy) from error
    raise AssertionError("the last flags either succeed or raise")


class IoUringEngine(Engine):
    """One ring per engine; the thread that first submits becomes its only submitter."""

    name = "io_uring"
    capabilities = Capabilities(registered_buffers=True)

    def __init__(self, *, block_nbytes: int = DEFAULT_BLOCK_NBYTES, queue_depth: int = DEFAULT_QUEUE_DEPTH) -> None:
        super().__init__(block_nbytes=block_nbytes, queue_depth=queue_depth)
        self._ring, self._flags = _open_ring(queue_depth)
        self._enabled = not self._flags & _liburing.SETUP_R_DISABLED
        self._unsubmitted: list[int] = []  # tickets prepared in the ring that the kernel has not taken yet
        self._registered: list[tuple[int, int]] = []

    @classmethod
    def availability(cls) -> Availability:
        """Asks the kernel by opening a small ring."""
        try:
            ring, _ = _open_ring(1)
        except EngineUnavailableError as error:
            return Availability(usable=False, reason=error.reason, remedy=error.remedy)
        ring.close()
        return Availability(usable=True)

    def register(self, buffers: Iterable[tuple[int, int]]) -> bool:
        """Pin buffers once instead of at each transfer. A refusal (RLIMIT_MEMLOCK) is logged, and does no harm."""
        ranges = sorted(buffers)
        code = self._ring.register(ranges)
        self._registered = ranges if code == 0 else []
        if code != 0:
            log.info("io_uring registers no buffers (%s); transfers pin their pages one by one", os.strerror(-code))
        return code == 0

    def _start(self, ticket: int, request: Request) -> None:
        if not self._enabled:
            self._ring.enable()
            self._enabled = True
        # A buffered write would be copied inline, by the submitting thread: worker threads of the kernel take it instead.
        flags = 0 if request.file.direct else _liburing.SQE_ASYNC
        prepared = self._ring.prepare(
            isinstance(request, Write), request.file.fileno, request.address, request.nbytes, request.file_offset,
            ticket, flags, self._registered_index(request),
        )  # fmt: skip
        if not prepared:
            raise AssertionError("queue_depth bounds the requests in flight below the ring's entries")
        self._unsubmitted.append(ticket)

    def _hand_over(self) -> None:
        self._push()

    def _push(self) -> int:
        """Hand prepared entries to the kernel; 0, or why it took none of them now."""
        taken = self._ring.submit()
        if taken > 0:
            del self._unsubmitted[:taken]
            return 0
        return taken

    def _collect(self, timeout: float | None, at_least: int) -> list[tuple[int, int]]:
        if self._unsubmitted and (refused := self._push_again()):
            stuck, self._unsubmitted = self._unsubmitted, []
            self._interrupted = True  # the entries are still in the ring: nothing may be submitted after them
            return [(ticket, refused) for ticket in stuck]
        while not (taken := self._ring.take()):
            code = self._ring.wait(timeout, max(1, min(at_least, self._ring.inside_kernel)))
            if code == -errno.ETIME:
                return []
            if code < 0 and code != -errno.EINTR:  # after EINTR Python runs the signal's handler, then we wait again
                raise OSError(-code, f"io_uring cannot wait: {os.strerror(-code)}")
        return taken

    def _push_again(self) -> int:
        """Retry what submit refused, for as long as completions may make room; 0, or the errno (negated) that stayed."""
        code = self._push()
        attempts = 0
        while code in _liburing.RETRYABLE and self._ring.inside_kernel == 0 and attempts < SUBMIT_ATTEMPTS:
            time.sleep(SUBMIT_PAUSE_SECONDS)
            attempts += 1
            code = self._push()
        if code in _liburing.RETRYABLE and self._ring.inside_kernel > 0:
            return 0  # a completion will come, and the next call tries again
        return code

    def _settle(self) -> None:
        while self._ring.inside_kernel:
            self._ring.wait(1.0, 1)
            self._ring.take()

    def _shut(self) -> None:
        self._ring.close()

    def _registered_index(self, request: Request) -> int | None:
        index = bisect.bisect_right(self._registered, (request.address, 1 << 64)) - 1
        if index < 0:
            return None
        address, nbytes = self._registered[index]
        return index if request.address + request.nbytes <= address + nbytes else None
