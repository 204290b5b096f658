"""An existing checkpoint file: what kind it is, and its metadata, read through the page cache and checked."""

from __future__ import annotations

import os
import stat
import struct
from typing import Self

from fastpersist.archive.directory import TAIL_NBYTES, Directory, data_offset, find_end, parse_directory
from fastpersist.archive.unpickling import LEGACY_START, LEGACY_START_NBYTES
from fastpersist.archive.zipformat import LOCAL_HEADER_NBYTES
from fastpersist.errors import CheckpointFormatError, CorruptCheckpointError
from fastpersist.memory.checksum import crc32


class CheckpointFile:
    """A regular file opened for reading; a context manager. Every error names the path.

    Raises TypeError for what is no path, FileNotFoundError and its like from open(2), CheckpointFormatError for a
    directory or another special file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._fileno = -1
        if hasattr(path, "read"):
            raise TypeError(
                f"fastpersist reads from a path, not from a {type(path).__name__}: use torch.load for file-like objects"
            )
        self.path = os.fsdecode(path)
        mode = os.stat(self.path).st_mode
        if not stat.S_ISREG(mode):  # before it is opened: opening a FIFO would wait for a writer
            what = "a directory" if stat.S_ISDIR(mode) else "no regular file"
            raise CheckpointFormatError(f"{self.path} is {what}, not a checkpoint")
        self._fileno = os.open(self.path, os.O_RDONLY)
        self.nbytes = os.fstat(self._fileno).st_size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()  # an exception may have struck between open and with

    def close(self) -> None:
        """Close the descriptor; harmless when repeated."""
        fileno, self._fileno = self._fileno, -1
        if fileno >= 0:
            os.close(fileno)

    @property
    def fileno(self) -> int:
        """The descriptor, open while the object is."""
        return self._fileno

    def read(self, offset: int, nbytes: int) -> bytes:
        """Exactly ``nbytes`` from ``offset``, which the caller has checked to lie in the file."""
        pieces: list[bytes] = []
        while nbytes:
            piece = os.pread(self._fileno, nbytes, offset)
            if not piece:
                raise CheckpointFormatError(
                    f"{self.path}: {nbytes} bytes at offset {offset} are missing: the file was cut meanwhile"
                )
            pieces.append(piece)
            offset += len(piece)
            nbytes -= len(piece)
        return b"".join(pieces)

    def is_legacy(self) -> bool:
        """True for the format of torch before 1.6, False for a zip. CheckpointFormatError says what else it is."""
        start = self.read(0, min(self.nbytes, LEGACY_START_NBYTES))
        if LEGACY_START.match(start):
            return True
        if start[:4] == b"PK\3\4":
            return False
        raise CheckpointFormatError(f"{self.path} is no checkpoint: {self._describe(start)}")

    def _describe(self, start: bytes) -> str:
        if not start:
            return "it is empty (0 bytes)"
        if start[:4] == b"PK\5\6":
            return "it is a zip file without records"
        if len(start) > 9 and start[8:9] == b"{" and struct.unpack_from("<Q", start)[0] <= self.nbytes:
            return "it looks like a safetensors file (use safetensors.torch.load_file)"
        return f"it begins with {start[:14]!r}, neither a zip file nor torch's older format"

    def directory(self) -> Directory:
        """The zip's directory, checked against the file's length. CheckpointFormatError names what is wrong and where."""
        try:
            tail_nbytes = min(self.nbytes, TAIL_NBYTES)
            end = find_end(self.read(self.nbytes - tail_nbytes, tail_nbytes), self.nbytes)
            return parse_directory(self.read(end.directory_offset, end.directory_nbytes), end, self.nbytes)
        except CheckpointFormatError as error:
            raise self.named(error) from None

    def zip_directory(self) -> Directory:
        """The directory of a file that must be a zip: CheckpointFormatError for torch's older format."""
        if self.is_legacy():
            raise CheckpointFormatError(f"{self.path} is a file of torch before 1.6: it has no records and no checksums")
        return self.directory()

    def data_offset(self, directory: Directory, record: int) -> int:
        """Where a record's data starts, from its local header."""
        header = self.read(int(directory.header_offsets[record]), LOCAL_HEADER_NBYTES)
        try:
            return data_offset(directory, record, header)
        except CheckpointFormatError as error:
            raise self.named(error) from None

    def record(self, directory: Directory, name: str) -> bytes | None:
        """Content of a metadata record, its checksum verified where it has one; None if there is no such record."""
        record = directory.index.get(name)
        if record is None:
            return None
        offset = self.data_offset(directory, record)
        content = self.read(offset, int(directory.nbytes[record]))
        expected = directory.checksums[record]
        if expected not in (0, crc32(content)):
            raise CorruptCheckpointError(
                f"{self.path}: record {name!r} (offset {offset}, {len(content)} bytes) has the checksum {crc32(content):08x}, "
                f"the directory says {expected:08x}"
            )
        return content

    def named(self, error: CheckpointFormatError) -> CheckpointFormatError:
        """The same error, with the path in front."""
        return type(error)(f"{self.path}: {error}")
