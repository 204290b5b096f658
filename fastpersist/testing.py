"""For authors of engines: the contract that every engine passes, and an engine that fails on demand. Needs pytest.

class TestMyEngine(EngineContract):
    def make_engine(self, queue_depth): return MyEngine(queue_depth=queue_depth)
"""

from __future__ import annotations

import errno
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from fastpersist.engines import Completion, Engine, File, Memory, Read, Request, Write
from fastpersist.errors import AlignmentError, EngineStateError, QueueFull
from fastpersist.memory.alignment import round_down, round_up
from fastpersist.memory.buffers import AlignedBuffer

BLOCK_NBYTES = 16384
QUEUE_DEPTH = 4


class EngineContract(ABC):
    """Subclass it, say how to make the engine, and how to read a file back around it (None: it keeps nothing)."""

    @abstractmethod
    def make_engine(self, queue_depth: int) -> Engine:
        """A new engine that allows ``queue_depth`` requests in flight."""

    def read_back(self, engine: Engine, path: str) -> bytes | None:
        """The content of a file, not read through the engine."""
        return Path(path).read_bytes()

    @pytest.fixture
    def engine(self) -> Iterator[Engine]:
        with self.make_engine(QUEUE_DEPTH) as engine:
            yield engine

    @pytest.fixture
    def path(self, tmp_path: Path) -> str:
        return str(tmp_path / "file")

    def test_writes_land_at_their_offsets(self, engine: Engine, path: str) -> None:
        content = os.urandom(6 * BLOCK_NBYTES)
        with engine.open(path, "w") as file:
            write_all(engine, file, content, order=(5, 0, 3, 1, 4, 2))
            engine.sync(file)
        found = self.read_back(engine, path)
        assert found is None or found == content

    def test_reads_find_what_the_file_holds(self, engine: Engine, path: str) -> None:
        content = os.urandom(4 * BLOCK_NBYTES)
        with engine.open(path, "w") as file:
            write_all(engine, file, content)
        buffer = AlignedBuffer(len(content))
        with engine.open(path, "r") as file:
            for start in range(0, len(content), BLOCK_NBYTES):
                engine.submit(Read(file, buffer.address + start, BLOCK_NBYTES, start, owner=buffer))
            finished = collect(engine)
        assert all(completion.error is None and completion.residual is None for completion in finished)
        if self.read_back(engine, path) is not None:
            assert bytes(buffer.view) == content

    def test_a_read_beyond_the_end_moves_nothing_and_is_no_error(self, engine: Engine, path: str) -> None:
        with engine.open(path, "w") as file:
            write_all(engine, file, os.urandom(BLOCK_NBYTES))
            buffer = AlignedBuffer(BLOCK_NBYTES)
            engine.submit(Read(file, buffer.address, BLOCK_NBYTES, 4 * BLOCK_NBYTES, owner=buffer))
            (completion,) = collect(engine)
        assert (completion.transferred, completion.error, completion.residual) == (0, None, None)

    def test_reserve_and_resize_set_the_length(self, engine: Engine, path: str) -> None:
        with engine.open(path, "w") as file:
            engine.reserve(file, 2 * BLOCK_NBYTES)
            write_all(engine, file, os.urandom(2 * BLOCK_NBYTES))
            engine.resize(file, BLOCK_NBYTES + 7)
        found = self.read_back(engine, path)
        assert found is None or len(found) == BLOCK_NBYTES + 7

    def test_reserve_cuts_a_longer_file(self, engine: Engine, path: str) -> None:
        content = os.urandom(4 * BLOCK_NBYTES)
        with engine.open(path, "w") as file:
            write_all(engine, file, content)
        with engine.open(path, "r+") as file:
            engine.reserve(file, 2 * BLOCK_NBYTES)
        found = self.read_back(engine, path)
        assert found is None or found == content[: 2 * BLOCK_NBYTES]

    def test_a_full_queue_pushes_back_and_loses_nothing(self, engine: Engine, path: str) -> None:
        buffer = AlignedBuffer(BLOCK_NBYTES)
        with engine.open(path, "w") as file:
            for index in range(QUEUE_DEPTH):
                engine.submit(Write(file, buffer.address, BLOCK_NBYTES, index * BLOCK_NBYTES, owner=buffer))
            assert engine.in_flight == QUEUE_DEPTH
            with pytest.raises(QueueFull):
                engine.submit(Write(file, buffer.address, BLOCK_NBYTES, QUEUE_DEPTH * BLOCK_NBYTES, owner=buffer))
            assert len(collect(engine)) == QUEUE_DEPTH

    def test_several_start_together(self, engine: Engine, path: str) -> None:
        content = os.urandom(QUEUE_DEPTH * BLOCK_NBYTES)
        buffer = AlignedBuffer(len(content))
        buffer.view[:] = content
        with engine.open(path, "w") as file:
            blocks = range(0, len(content), BLOCK_NBYTES)
            engine.submit(*(Write(file, buffer.address + start, BLOCK_NBYTES, start, owner=buffer) for start in blocks))
            assert engine.in_flight == QUEUE_DEPTH
            assert len(engine.wait(min_completions=QUEUE_DEPTH - 1)) >= QUEUE_DEPTH - 1
            collect(engine)
        found = self.read_back(engine, path)
        assert found is None or found == content

    @pytest.mark.parametrize("last", [{"nbytes": 0}, {"file_offset": -1}, {}])
    def test_of_several_all_start_or_none(self, engine: Engine, path: str, last: dict[str, int]) -> None:
        buffer = AlignedBuffer(BLOCK_NBYTES)
        with engine.open(path, "w") as file:
            good = Write(file, buffer.address, BLOCK_NBYTES, 0, owner=buffer)
            bad = [replace(good, **last)] if last else [good] * QUEUE_DEPTH  # type: ignore[arg-type]
            with pytest.raises(ValueError if last else QueueFull):
                engine.submit(good, *bad)
            assert engine.in_flight == 0
            engine.submit()
            engine.submit(good)
            assert len(collect(engine)) == 1

    def test_waiting_for_nothing_returns_at_once(self, engine: Engine) -> None:
        assert engine.wait() == []
        assert engine.wait(timeout=0.0) == []

    def test_the_request_comes_back_untouched(self, engine: Engine, path: str) -> None:
        buffer, tag = AlignedBuffer(BLOCK_NBYTES), object()
        with engine.open(path, "w") as file:
            request = Write(file, buffer.address, BLOCK_NBYTES, 0, owner=buffer, tag=tag)
            engine.submit(request)
            (completion,) = collect(engine)
        assert completion.request is request
        assert completion.request.tag is tag

    def test_memory_is_kept_alive_until_reaped_and_not_longer(self, engine: Engine, path: str) -> None:
        buffer = AlignedBuffer(BLOCK_NBYTES)
        alive = weakref.ref(buffer)
        with engine.open(path, "w") as file:
            engine.submit(Write(file, buffer.address, BLOCK_NBYTES, 0, owner=buffer))
            del buffer
            assert alive() is not None
            finished = collect(engine)
            finished.clear()
            engine.drain()
        # A worker lets go of its last request a moment after it has reported the result.
        for _ in range(1000):
            if alive() is None:
                break
            threading.Event().wait(0.001)
        assert alive() is None

    def test_misalignment_is_refused_on_a_direct_file(self, engine: Engine, path: str) -> None:
        buffer = AlignedBuffer(2 * BLOCK_NBYTES)
        with engine.open(path, "w") as file:
            if not file.direct:
                pytest.skip("direct I/O is not to be had in the test's directory")
            for shift in ({"address": buffer.address + 1}, {"nbytes": BLOCK_NBYTES - 1}, {"file_offset": 1}):
                request = Write(file, buffer.address, BLOCK_NBYTES, 0, owner=buffer)
                with pytest.raises(AlignmentError):
                    engine.submit(replace(request, **shift))  # type: ignore[arg-type]
        assert engine.in_flight == 0

    def test_a_buffered_file_takes_any_alignment(self, engine: Engine, path: str) -> None:
        buffer = AlignedBuffer(BLOCK_NBYTES)
        buffer.view[:] = os.urandom(BLOCK_NBYTES)
        with engine.open(path, "w", direct=False) as file:
            engine.submit(Write(file, buffer.address + 1, 1001, 0, owner=buffer))
            (completion,) = collect(engine)
        assert completion.transferred == 1001
        found = self.read_back(engine, path)
        assert found is None or found == bytes(buffer.view[1:1002])

    @pytest.mark.parametrize("change", [{"nbytes": 0}, {"nbytes": -1}, {"file_offset": -1}, {"address": 0}])
    def test_an_impossible_request_is_refused(self, engine: Engine, path: str, change: dict[str, int]) -> None:
        buffer = AlignedBuffer(BLOCK_NBYTES)
        with engine.open(path, "w") as file, pytest.raises(ValueError, match=r"bytes|range"):
            engine.submit(replace(Write(file, buffer.address, BLOCK_NBYTES, 0), **change))  # type: ignore[arg-type]

    def test_memory_of_a_kind_it_cannot_move_is_refused(self, engine: Engine, path: str) -> None:
        buffer = AlignedBuffer(BLOCK_NBYTES)
        if Memory.DEVICE in engine.capabilities.memory:
            pytest.skip("this engine moves device memory")
        with engine.open(path, "w") as file, pytest.raises(ValueError, match="device"):
            engine.submit(Write(file, buffer.address, BLOCK_NBYTES, 0, memory=Memory.DEVICE))

    def test_an_io_error_arrives_in_the_completion(self, engine: Engine, path: str) -> None:
        if not engine.capabilities.persistent:
            pytest.skip("an engine without a disk has no I/O errors")
        Path(path).write_bytes(bytes(BLOCK_NBYTES))
        buffer = AlignedBuffer(BLOCK_NBYTES)
        with engine.open(path, "r") as file:  # opened for reading: the kernel refuses to write
            engine.submit(Write(file, buffer.address, BLOCK_NBYTES, 0, owner=buffer))
            (completion,) = collect(engine)
        assert completion.error is not None
        assert completion.error.errno == errno.EBADF
        assert completion.residual is None

    def test_registered_buffers_transfer_like_others(self, engine: Engine, path: str) -> None:
        buffers = [AlignedBuffer(2 * BLOCK_NBYTES) for _ in range(2)]
        engine.register([(buffer.address, buffer.nbytes) for buffer in buffers])
        content = [os.urandom(BLOCK_NBYTES) for _ in range(4)]
        with engine.open(path, "w") as file:
            for index, piece in enumerate(content):
                buffer, start = buffers[index // 2], index % 2 * BLOCK_NBYTES
                buffer.view[start : start + BLOCK_NBYTES] = piece
                engine.submit(Write(file, buffer.address + start, BLOCK_NBYTES, index * BLOCK_NBYTES, owner=buffer))
            assert all(completion.error is None for completion in collect(engine))
        found = self.read_back(engine, path)
        assert found is None or found == b"".join(content)

    def test_drain_and_close_leave_nothing_in_flight(self, path: str) -> None:
        engine = self.make_engine(QUEUE_DEPTH)
        buffer = AlignedBuffer(BLOCK_NBYTES)
        with engine.open(path, "w") as file:
            engine.submit(Write(file, buffer.address, BLOCK_NBYTES, 0, owner=buffer))
            engine.drain()
            assert engine.in_flight == 0
            engine.submit(Write(file, buffer.address, BLOCK_NBYTES, 0, owner=buffer))
            engine.close()
            assert engine.in_flight == 0
            engine.close()
            with pytest.raises(EngineStateError, match="closed"):
                engine.submit(Write(file, buffer.address, BLOCK_NBYTES, 0, owner=buffer))

    def test_a_second_thread_is_refused(self, engine: Engine, path: str) -> None:
        buffer = AlignedBuffer(BLOCK_NBYTES)
        refusals: list[BaseException] = []
        with engine.open(path, "w") as file:
            request = Write(file, buffer.address, BLOCK_NBYTES, 0, owner=buffer)
            engine.submit(request)

            def intrude() -> None:
                try:
                    engine.submit(request)
                except EngineStateError as error:
                    refusals.append(error)

            thread = threading.Thread(target=intrude)
            thread.start()
            thread.join()
            collect(engine)
        assert len(refusals) == 1

    @pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
    def test_a_forked_child_is_refused_and_may_close(self, engine: Engine, path: str) -> None:
        with engine.open(path, "w") as file:
            request = Write(file, AlignedBuffer(BLOCK_NBYTES).address, BLOCK_NBYTES, 0)
            child = os.fork()
            if child == 0:
                os._exit(_exit_status_of_child(engine, request))
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 0
            write_all(engine, file, os.urandom(BLOCK_NBYTES))  # the parent's engine has taken no harm


def _exit_status_of_child(engine: Engine, request: Request) -> int:
    try:
        engine.submit(request)
    except EngineStateError:
        engine.close()
        return 0
    return 1


def write_all(engine: Engine, file: File, content: bytes, order: tuple[int, ...] | None = None) -> None:
    """Write ``content`` in blocks of BLOCK_NBYTES, in the order given, and check every completion."""
    buffer = AlignedBuffer(len(content))
    buffer.view[: len(content)] = content
    finished: list[Completion] = []
    for index in order or range(len(content) // BLOCK_NBYTES):
        start = index * BLOCK_NBYTES
        while engine.in_flight >= engine.queue_depth:
            finished += engine.wait()
        engine.submit(Write(file, buffer.address + start, BLOCK_NBYTES, start, owner=buffer))
    finished += collect(engine)
    assert [completion.error for completion in finished] == [None] * (len(content) // BLOCK_NBYTES)
    assert {completion.transferred for completion in finished} == {BLOCK_NBYTES}


def collect(engine: Engine) -> list[Completion]:
    """All completions of what is in flight."""
    finished: list[Completion] = []
    while engine.in_flight:
        finished += engine.wait()
    return finished


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one request: it fails with ``code``, or moves only ``nbytes`` (then nothing, if that is 0)."""

    code: int = 0
    nbytes: int = 0

    @classmethod
    def error(cls, code: int) -> Fault:
        """The request completes with this errno, and moves nothing."""
        return cls(code=code)

    @classmethod
    def short(cls, nbytes: int) -> Fault:
        """The request moves so many bytes of what was asked for, and reports that."""
        return cls(nbytes=nbytes)


class FaultyEngine(Engine):
    """Passes everything to ``inner``, but for the faults: the N-th request submitted, counted from 1, meets faults[N].

    ``calls`` makes open, reserve, resize or sync raise OSError with the given errno. ``submitted`` counts the requests.
    """

    name = "faulty"

    def __init__(self, inner: Engine, faults: Mapping[int, Fault], calls: Mapping[str, int] | None = None) -> None:
        super().__init__(block_nbytes=inner.block_nbytes, queue_depth=inner.queue_depth)
        self.capabilities = inner.capabilities  # type: ignore[misc]  # those of the engine that it stands for
        self.inner = inner
        self.faults = dict(faults)
        self.calls = dict(calls or {})
        self.submitted = 0
        self._failed: list[tuple[int, int]] = []

    def open(self, path: str, mode: str, *, direct: bool = True, permissions: int = 0o666) -> File:
        self._maybe_raise("open")
        return self.inner.open(path, mode, direct=direct, permissions=permissions)

    def reserve(self, file: File, nbytes: int) -> None:
        self._maybe_raise("reserve")
        self.inner.reserve(file, nbytes)

    def resize(self, file: File, nbytes: int) -> None:
        self._maybe_raise("resize")
        self.inner.resize(file, nbytes)

    def sync(self, file: File) -> None:
        self._maybe_raise("sync")
        self.inner.sync(file)

    def _maybe_raise(self, call: str) -> None:
        code = self.calls.get(call)
        if code is not None:
            raise OSError(code, os.strerror(code))

    def _start(self, ticket: int, request: Request) -> None:
        self.submitted += 1
        fault = self.faults.get(self.submitted)
        if fault is None:
            self.inner.submit(replace(request, tag=(ticket, None)))
        elif fault.code:
            self._failed.append((ticket, -fault.code))
        elif fault.nbytes:
            self._transfer_short(ticket, request, min(fault.nbytes, request.nbytes))
        else:
            self._failed.append((ticket, 0))

    def _transfer_short(self, ticket: int, request: Request, nbytes: int) -> None:
        # An odd number of bytes cannot be submitted to a direct file: an aligned number moves, the odd one is reported.
        # Of a write, fewer bytes move, so that the rest is missed if it is not written again; of a read, more, for no
        # kernel reports bytes that it has not put there.
        unit = max(request.file.offset_alignment, request.file.memory_alignment) if request.file.direct else 1
        aligned = round_down(nbytes, unit) if isinstance(request, Write) else min(round_up(nbytes, unit), request.nbytes)
        if aligned:
            self.inner.submit(replace(request, nbytes=aligned, tag=(ticket, nbytes)))
        else:
            self._failed.append((ticket, nbytes))

    def _collect(self, timeout: float | None, at_least: int) -> list[tuple[int, int]]:
        results, self._failed = self._failed, []
        for completion in self.inner.wait(timeout=0.0 if results else timeout):
            ticket, reported = completion.request.tag
            if completion.error is not None:
                results.append((ticket, -(completion.error.errno or errno.EIO)))
            elif completion.residual is not None and completion.transferred == 0:
                results.append((ticket, -errno.EAGAIN))
            elif reported is None or (isinstance(completion.request, Read) and completion.transferred < reported):
                results.append((ticket, completion.transferred))
            else:
                results.append((ticket, reported))
        return results

    def _settle(self) -> None:
        self.inner.drain()

    def _shut(self) -> None:
        self.inner.close()
