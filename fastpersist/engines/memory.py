"""Engines without a disk: ``memory`` keeps the bytes (the oracle of tests), ``null`` discards them (the software's ceiling)."""

from __future__ import annotations

import ctypes

from fastpersist.engines.base import DEFAULT_BLOCK_NBYTES, DEFAULT_QUEUE_DEPTH, Capabilities, Engine, Request, Write
from fastpersist.engines.files import File


class NullEngine(Engine):
    """Accepts every write and keeps nothing; a read finds the end of the file at once."""

    name = "null"
    capabilities = Capabilities(persistent=False)

    def __init__(self, *, block_nbytes: int = DEFAULT_BLOCK_NBYTES, queue_depth: int = DEFAULT_QUEUE_DEPTH) -> None:
        super().__init__(block_nbytes=block_nbytes, queue_depth=queue_depth)
        self._finished: list[tuple[int, int]] = []

    def open(self, path: str, mode: str, *, direct: bool = True, permissions: int = 0o666) -> File:
        """A file that exists in name only. It demands of memory what a strict disk does, so that plans are true to one."""
        return File(path, -1, direct=direct, memory_alignment=512 if direct else 1, offset_alignment=512 if direct else 1)

    def reserve(self, file: File, nbytes: int) -> None:
        """Nothing to reserve."""

    def resize(self, file: File, nbytes: int) -> None:
        """Nothing to cut."""

    def sync(self, file: File) -> None:
        """Nothing to keep."""

    def _start(self, ticket: int, request: Request) -> None:
        self._finished.append((ticket, self._transfer(request)))

    def _transfer(self, request: Request) -> int:
        return request.nbytes if isinstance(request, Write) else 0

    def _collect(self, timeout: float | None, at_least: int) -> list[tuple[int, int]]:
        finished, self._finished = self._finished, []
        return finished

    def _settle(self) -> None:
        self._finished.clear()

    def _shut(self) -> None:
        self._finished.clear()


class MemoryEngine(NullEngine):
    """Keeps each file in a bytearray, by path, until the engine is closed."""

    name = "memory"

    def __init__(self, *, block_nbytes: int = DEFAULT_BLOCK_NBYTES, queue_depth: int = DEFAULT_QUEUE_DEPTH) -> None:
        super().__init__(block_nbytes=block_nbytes, queue_depth=queue_depth)
        self._files: dict[str, bytearray] = {}

    def open(self, path: str, mode: str, *, direct: bool = True, permissions: int = 0o666) -> File:
        """Open one of this engine's own files; modes as for a disk."""
        if mode in ("r", "r+") and path not in self._files:
            raise FileNotFoundError(2, "the memory engine holds no such file", path)
        if mode == "x" and path in self._files:
            raise FileExistsError(17, "the memory engine holds this file already", path)
        if mode in ("w", "x", "tmpfile"):
            self._files[path] = bytearray()
        return super().open(path, mode, direct=direct, permissions=permissions)

    def contents(self, path: str) -> bytes:
        """What has been written to ``path``; KeyError if nothing was."""
        return bytes(self._files[path])

    def resize(self, file: File, nbytes: int) -> None:
        """Cut a file, or extend it with zeros, to ``nbytes``: what ftruncate is to a disk."""
        content = self._files[file.path]
        del content[nbytes:]
        content.extend(bytes(nbytes - len(content)))

    def reserve(self, file: File, nbytes: int) -> None:
        """Give the file its size."""
        self.resize(file, nbytes)

    def _transfer(self, request: Request) -> int:
        content = self._files[request.file.path]
        start, stop = request.file_offset, request.file_offset + request.nbytes
        if isinstance(request, Write):
            if len(content) < stop:
                content.extend(bytes(stop - len(content)))
            content[start:stop] = ctypes.string_at(request.address, request.nbytes)
            return request.nbytes
        piece = bytes(content[start:stop])
        ctypes.memmove(request.address, piece, len(piece))
        return len(piece)

    def _shut(self) -> None:
        super()._shut()
        self._files.clear()
