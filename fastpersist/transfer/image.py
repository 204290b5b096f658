"""The bytes of the file, produced range by range: what a plan and the storages' memory amount to.

Ranges must be asked for in file order, those written straight from memory included (they are only checksummed): a
record's checksum is then complete when its descriptor, which follows the data, is produced, and each byte of payload is
touched once.
"""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Callable, Collection, Iterator

import numpy as np

from fastpersist.archive import zipformat
from fastpersist.archive.layout import ArchivePlan, Int64Array, serialization_id
from fastpersist.memory.buffers import AlignedBuffer
from fastpersist.memory.checksum import crc32
from fastpersist.memory.pages import copy_memory, view_memory
from fastpersist.transfer.extents import Direct

CopyFromDevice = Callable[[int, int, memoryview], None]
"""(storage, start, target): have in ``target`` the bytes from ``start`` on of a storage that has no host address."""


_NONE = np.zeros(1, np.int64)  # the address of what is no storage


class ArchiveImage:
    """Fills buffers with ranges of the file, and keeps the checksums.

    addresses: host address of each storage, 0 where ``copy_from_device`` must fetch its bytes. With ``checksum`` False
    storages get the checksum 0, as torch writes them with its check off; so do, in any case, the records ``unseen``, which
    are written from device memory. Metadata records always carry theirs.

    Small storages come in runs: records without zip64 fields, with names of one length, that lie wholly within the range.
    Of these only the data is copied and summed one by one; what stands around it is encoded for all of them together.
    """

    def __init__(
        self,
        plan: ArchivePlan,
        addresses: Int64Array,
        copy_from_device: CopyFromDevice,
        *,
        checksum: bool,
        unseen: Collection[int] = (),
    ) -> None:
        self._plan = plan
        self._copy_from_device = copy_from_device
        self._checksum = checksum
        self._unseen = unseen
        self._checksums = [0] * plan.records
        self._directory: bytes | None = None
        # Plain lists: one element at a time, they are several times faster to read than numpy arrays.
        self._nbytes: list[int] = plan.nbytes.tolist()
        self._headers: list[int] = plan.header_offsets.tolist()
        self._ends: list[int] = [*self._headers[1:], plan.directory_offset]
        self._datas: list[int] = plan.data_offsets.tolist()
        self._storages: list[int] = plan.storages.tolist()
        self._addresses: list[int] = np.concatenate((addresses, _NONE))[plan.storages].tolist()  # of each record
        self._runs = _Runs(plan)

    def fill(self, buffer: AlignedBuffer, file_offset: int, nbytes: int) -> int:
        """Put the file's bytes from ``file_offset`` on into the first ``nbytes`` of ``buffer``; zeros after its end.

        Returns how many of them are payload: bytes of storages.
        """
        window = _Window(buffer, file_offset, file_offset + nbytes)
        record = max(bisect.bisect_right(self._headers, file_offset) - 1, 0)
        payload = 0
        while record < self._plan.records and self._headers[record] < window.stop:
            stop = min(self._runs.stop(record), bisect.bisect_right(self._ends, window.stop))
            if self._headers[record] >= window.start and stop > record + 1:
                payload += self._fill_run(window, record, stop)
                record = stop
            else:
                payload += self._fill_record(window, record)
                record += 1
        if window.stop > self._plan.directory_offset:
            window.put(self._plan.directory_offset, self._directory_and_end())
            window.clear_from(self._plan.file_nbytes)
        return payload

    def checksum_direct(self, block: Direct, nbytes: int) -> None:
        """Take account of so many bytes that are written straight from memory, ``block`` and what adjoins it."""
        if self._checksum and block.device < 0:
            self._checksums[block.record] = crc32(view_memory(block.address, nbytes), self._checksums[block.record])

    def without_address(self, file_offset: int, nbytes: int) -> Iterator[tuple[int, int, int, int]]:
        """(storage, start, nbytes, place) of each piece of a storage without host address that lies in this range of the
        file: ``start`` counts from that of the storage, ``place`` from that of the range.
        """
        stop = file_offset + nbytes
        for record in range(max(bisect.bisect_right(self._headers, file_offset) - 1, 0), self._plan.records):
            if self._headers[record] >= stop:
                break
            data = self._datas[record]
            low, high = max(data, file_offset), min(data + self._nbytes[record], stop)
            if low < high and self._storages[record] >= 0 and not self._addresses[record]:
                yield self._storages[record], low - data, high - low, low - file_offset

    def record_at(self, file_offset: int) -> str:
        """Name of the record that the file's byte at ``file_offset`` belongs to, for messages."""
        if file_offset >= self._plan.directory_offset:
            return "central directory"
        return self._plan.names[bisect.bisect_right(self._headers, file_offset) - 1].decode()

    def _fill_run(self, window: _Window, first: int, stop: int) -> int:
        run = slice(first, stop)
        self._copy_run(window, run)
        nbytes, headers, datas = self._plan.nbytes[run], self._plan.header_offsets[run], self._plan.data_offsets[run]
        names = self._runs.names(run)
        fillers = datas - headers - zipformat.LOCAL_HEADER_NBYTES - names.shape[1] - zipformat.FILLER_HEADER_NBYTES
        window.put_rows(headers, zipformat.local_header_rows(names, nbytes, fillers))
        for filler in np.unique(fillers).tolist():
            window.put_rows(datas[fillers == filler] - filler, np.full((1, filler), ord("Z"), np.uint8))
        window.put_rows(datas + nbytes, zipformat.descriptor_rows(np.array(self._checksums[run], np.uint32), nbytes))
        return int(nbytes.sum())

    def _copy_run(self, window: _Window, run: slice) -> None:
        """Copy and sum the data of whole storages: the one loop that small storages cannot do without."""
        origin, checksum = window.address(0), self._checksum
        of_each = zip(range(run.start, run.stop), self._datas[run], self._nbytes[run], self._addresses[run], strict=True)
        for record, data, nbytes, address in of_each:
            if address:
                copy_memory(origin + data, address, nbytes)
            else:
                self._copy_from_device(self._storages[record], 0, window.view(data, data + nbytes))
            if checksum:
                self._checksums[record] = crc32(window.view(data, data + nbytes))

    def _fill_record(self, window: _Window, record: int) -> int:
        name, nbytes = self._plan.names[record], self._nbytes[record]
        header, data = self._headers[record], self._datas[record]
        if data > window.start:
            window.put(header, zipformat.local_header(name, nbytes, header, data))
        payload = 0
        if self._storages[record] < 0:
            self._fill_metadata(window, record)
        else:
            payload = self._fill_storage(window, record)
        if window.stop > data + nbytes:
            window.put(data + nbytes, zipformat.descriptor(self._checksums[record], nbytes, header))
        return payload

    def _fill_metadata(self, window: _Window, record: int) -> None:
        content = self._plan.metadata[record]
        if content is None:
            checksums = np.array(self._checksums[:record], np.uint32).tobytes()
            content = serialization_id(self._plan.names, checksums, self._plan.nbytes.tobytes())
        self._checksums[record] = crc32(content)
        window.put(self._datas[record], content)

    def _fill_storage(self, window: _Window, record: int) -> int:
        data = self._datas[record]
        start, stop = max(data, window.start), min(data + self._nbytes[record], window.stop)
        if start >= stop:
            return 0
        target = window.view(start, stop)
        address = self._addresses[record]
        if address:
            copy_memory(window.address(start), address + start - data, stop - start)
        else:
            self._copy_from_device(self._storages[record], start - data, target)
        if self._checksum and record not in self._unseen:  # of the copy: it is still in the cache
            self._checksums[record] = crc32(target, self._checksums[record])
        return stop - start

    def _directory_and_end(self) -> bytes:
        if self._directory is None:
            plan = self._plan
            end = zipformat.end_of_archive(plan.records, plan.directory_nbytes, plan.directory_offset, plan.comment_nbytes)
            self._directory = b"".join([*self._directory_entries(), end])
        return self._directory

    def _directory_entries(self) -> Iterator[bytes]:
        plan, record = self._plan, 0
        while record < plan.records:
            stop = self._runs.stop(record)
            run = slice(record, stop)
            if stop - record > 1:
                sums = np.array(self._checksums[run], np.uint32)
                yield zipformat.central_header_rows(
                    self._runs.names(run), sums, plan.nbytes[run], plan.header_offsets[run]
                ).tobytes()
            else:
                yield zipformat.central_header(
                    plan.names[record], self._checksums[record], self._nbytes[record], self._headers[record]
                )
            record = stop


class _Runs:
    """Consecutive records that can be encoded together: storages that are not empty, near, and with names of one length."""

    def __init__(self, plan: ArchivePlan) -> None:
        name_nbytes = np.fromiter(map(len, plan.names), np.int64, plan.records)
        self._names = np.frombuffer(b"".join(plan.names), np.uint8)
        self._name_stops = np.cumsum(name_nbytes)
        alone = (plan.storages < 0) | (plan.nbytes == 0)
        alone |= np.maximum(plan.nbytes, plan.header_offsets) >= zipformat.LIMIT_32  # they have zip64 fields
        begins = alone[1:] | alone[:-1] | (name_nbytes[1:] != name_nbytes[:-1])
        self._begins: list[int] = [*(begins.nonzero()[0] + 1).tolist(), plan.records]

    def stop(self, record: int) -> int:
        """The first record that is not of the run of ``record``."""
        return self._begins[bisect.bisect_right(self._begins, record)]

    def names(self, run: slice) -> zipformat.Rows:
        """The names of a run, one in each row."""
        start = self._name_stops[run.start - 1] if run.start else 0
        return self._names[start : self._name_stops[run.stop - 1]].reshape(run.stop - run.start, -1)


class _Window:
    """The part of the file from ``start`` to ``stop``, as it lies in a buffer."""

    __slots__ = ("_buffer", "start", "stop")

    def __init__(self, buffer: AlignedBuffer, start: int, stop: int) -> None:
        self._buffer = buffer
        self.start = start
        self.stop = stop

    def address(self, file_offset: int) -> int:
        return self._buffer.address + file_offset - self.start

    def view(self, start: int, stop: int) -> memoryview:
        return self._buffer.view[start - self.start : stop - self.start]

    def put(self, file_offset: int, content: bytes) -> None:
        """Write as much of ``content``, which belongs at ``file_offset``, as lies within the window."""
        start, stop = max(file_offset, self.start), min(file_offset + len(content), self.stop)
        if start < stop:
            self.view(start, stop)[:] = content[start - file_offset : stop - file_offset]

    def put_rows(self, file_offsets: Int64Array, rows: zipformat.Rows) -> None:
        """Write each row at its offset (one row: at all of them); all must lie within the window."""
        if rows.shape[1]:
            everything = np.frombuffer(self._buffer.view[: self.stop - self.start], np.uint8)
            places = np.lib.stride_tricks.sliding_window_view(everything, rows.shape[1], writeable=True)
            places[file_offsets - self.start] = rows

    def clear_from(self, file_offset: int) -> None:
        """Zero what lies beyond the file's end: buffers are reused, and old bytes must not reach the disk."""
        start = max(file_offset, self.start)
        if start < self.stop:
            ctypes.memset(self.address(start), 0, self.stop - start)
