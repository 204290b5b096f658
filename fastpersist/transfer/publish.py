"""From a temporary file to the published one: at every instant the target's name holds an old complete file or a new one.

The order is the guarantee: data written and synced, then the name given or moved in one step, then the directory synced.
The temporary file has no name at all (O_TMPFILE) until then, so that a killed process leaves nothing: it is linked to a
target that does not exist, and renamed over one that does, from a hidden name that it has for this moment only. Where a
filesystem has no such files it is a hidden file from the start, locked while in use, and a later save removes those
without a lock. So it is where a retired file is recycled.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import stat
import time
from typing import Self

from fastpersist.engines import Engine, File
from fastpersist.errors import NotDurableError, RecycleRefusedError, TransferError
from fastpersist.transfer.recycling import RetiredFile
from fastpersist.transfer.temporary import new_name, remove_abandoned, try_lock

log = logging.getLogger("fastpersist")

_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL, errno.ENOSYS)
_ATTEMPTS = 16


def resolve_target(path: str | os.PathLike[str]) -> str:
    """The absolute path to publish at: symlinks are followed, so that the file they point to is the one replaced.

    Raises TypeError for what is no path, IsADirectoryError, FileNotFoundError or NotADirectoryError for a directory that
    is missing, and ValueError for a target that exists and is no regular file.
    """
    if hasattr(path, "write"):
        raise TypeError(
            f"fastpersist saves to a path, not to a {type(path).__name__}: a file-like object cannot be replaced "
            "atomically (use torch.save for it)"
        )
    text = os.fsdecode(path)
    if not text:
        raise ValueError("the path is empty")
    target = os.path.realpath(text)
    try:
        mode = os.stat(target).st_mode
    except (FileNotFoundError, NotADirectoryError):
        mode = None
    if text.endswith(os.sep) or (mode is not None and stat.S_ISDIR(mode)):
        raise IsADirectoryError(errno.EISDIR, "the path is a directory: give the checkpoint a file name in it", text)
    if mode is None:
        _check_directory(os.path.dirname(target))
    elif not stat.S_ISREG(mode):
        raise ValueError(
            f"{text} exists and is no regular file ({stat.filemode(mode)}): it would be replaced, give another path"
        )
    return target


def _check_directory(directory: str) -> None:
    try:
        is_directory = stat.S_ISDIR(os.stat(directory).st_mode)
    except FileNotFoundError:
        raise FileNotFoundError(errno.ENOENT, "the directory does not exist: create it first", directory) from None
    if not is_directory:
        raise NotADirectoryError(errno.ENOTDIR, "the path's parent is no directory", directory)


@functools.cache
def _can_name_nameless_files() -> bool:
    return hasattr(os, "O_TMPFILE") and os.path.exists("/proc/self/fd")  # a nameless file gets its name through /proc


class Publication:
    """A temporary file beside ``target``: write to ``file``, then ``publish``. Left unpublished, it vanishes.

    ``recycle`` is the path of a file that shall become the temporary one. If it vanishes, the exception gets a note. With
    ``must_recycle`` False one that cannot be recycled is left alone, and a fresh file made.
    """

    def __init__(
        self, engine: Engine, target: str, *, durable: bool, recycle: str | None = None, must_recycle: bool = True
    ) -> None:
        self._engine = engine
        self._target = target
        folder, _, self._target_name = target.rpartition("/")
        self._folder = folder or "/"
        self._durable = durable
        self._must_recycle = must_recycle
        self._retired = None if recycle is None else RetiredFile(recycle)
        self._directory = -1
        self._name: str | None = None
        self._file: File | None = None
        self.sync_seconds = 0.0

    def __enter__(self) -> Self:
        try:
            self._directory = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
            remove_abandoned(self._folder, self._directory)
            if self._retired is None or not self._take_over(self._retired):
                self._create()
        except TransferError:
            self._clean_up()
            raise
        except OSError as error:
            self._clean_up()
            message = f"cannot create a temporary file in the target's directory ({error.strerror}): it must be writable"
            raise type(error)(error.errno, message, self._folder) from error
        except BaseException:
            self._clean_up()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        self._clean_up(error)

    def _clean_up(self, error: BaseException | None = None) -> None:
        try:
            if self._name is not None:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._name, dir_fd=self._directory)
                    if self._retired is not None:
                        _tell_that_it_is_lost(self._retired.path, error)
        finally:
            if self._retired is not None:
                self._retired.close()
            if self._file is not None:
                self._file.close()
            directory, self._directory = self._directory, -1
            if directory >= 0:
                os.close(directory)

    @property
    def file(self) -> File:
        """The temporary file, open for writing."""
        if self._file is None:
            raise RuntimeError("a publication has a file only within its with block")
        return self._file

    def publish(self) -> None:
        """Make the written file durable and give it the target's name.

        Raises TransferError before it has the name (the target is untouched), NotDurableError after that.
        """
        started = time.perf_counter()
        try:
            replaces = self._take_over_mode()
            if self._durable:
                self._engine.sync(self.file)
            if self._name is not None or replaces or not self._link_target():
                self._rename()
        except OSError as error:
            raise TransferError(error.errno or errno.EIO, "cannot publish", self._target) from error
        self._sync_directory()
        self.sync_seconds = time.perf_counter() - started

    def _sync_directory(self) -> None:
        if not self._durable:
            return
        try:
            os.fsync(self._directory)
        except OSError as error:
            raise NotDurableError(
                error.errno or errno.EIO, "published, not known durable: the directory cannot be synced", self._target
            ) from error

    def _create(self) -> None:
        if _can_name_nameless_files():
            try:
                self._file = self._engine.open(self._folder, "tmpfile")
                return
            except OSError as error:
                if error.errno not in _NO_TMPFILE:
                    raise
        self._create_named()

    def _take_over(self, retired: RetiredFile) -> bool:
        """False if the file cannot be recycled, and need not be."""
        try:
            self._file = retired.take(self._engine, self._target, self._directory)
        except BaseException as error:
            retired.give_back(self._directory, error)
            if self._must_recycle or not isinstance(error, RecycleRefusedError):
                raise
            log.info("%s; a fresh file is written", error)
            retired.close()
            self._retired = None
            return False
        self._name = retired.hidden_name
        return True

    def _create_named(self) -> None:
        for _ in range(_ATTEMPTS):
            self._name = new_name()  # known before the file exists: an interrupt in between leaves nothing
            self._file = self._engine.open(os.path.join(self._folder, self._name), "x")
            # A save that cleans up may have found the file before it was locked: then it is gone, and another is made.
            if try_lock(self._file.fileno) and os.fstat(self._file.fileno).st_nlink > 0:
                return
            self._file.close()
        raise OSError(errno.EBUSY, f"{_ATTEMPTS} temporary files were removed by other processes as soon as they were made")

    def _link_target(self) -> bool:
        """Give the nameless file the target's name; False if another file got it first."""
        try:
            self._link(self._target_name)
        except FileExistsError:
            self._take_over_mode()
            return False
        return True

    def _rename(self) -> None:
        if self._name is None:
            try_lock(self.file.fileno)  # nobody else can reach it yet
            self._name = new_name()  # known before the file has it: an interrupt in between leaves nothing
            self._link(self._name)
        if self._retired is not None:
            self._retired.release()  # nobody is to wait for a file that has its public name
        os.rename(self._name, self._target_name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        self._name = None

    def _link(self, name: str) -> None:
        # A source directory descriptor makes Python use linkat, which can follow the link in /proc to the nameless file.
        source = f"/proc/self/fd/{self.file.fileno}"
        os.link(source, name, src_dir_fd=self._directory, dst_dir_fd=self._directory, follow_symlinks=True)

    def _take_over_mode(self) -> bool:
        """Take the mode of the file that is to be replaced; False if there is none."""
        try:
            replaced = os.stat(self._target_name, dir_fd=self._directory)
        except FileNotFoundError:
            return False
        os.fchmod(self.file.fileno, stat.S_IMODE(replaced.st_mode))
        return True


class Unpublished:
    """The file of an engine that keeps nothing beyond the process: open under the target's name, and never published."""

    sync_seconds = 0.0

    def __init__(self, engine: Engine, target: str) -> None:
        self.file = engine.open(target, "w")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def publish(self) -> None:
        """Nothing is to be done."""


def _tell_that_it_is_lost(path: str, error: BaseException | None) -> None:
    lost = f"{path}: the file was being recycled and is gone; the target is as it was"
    log.warning(lost)
    if error is not None:
        error.add_note(lost)
