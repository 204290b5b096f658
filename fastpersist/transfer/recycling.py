"""A retired file becomes the temporary file of a save: overwriting blocks is faster than having fresh ones allocated.

The order is the guarantee. A write lease proves that nobody else has the file open or mapped. Then it gets a hidden name
in the target's directory, and the directories are synced, before its first byte changes: whatever a power cut leaves
under the retired name is the old complete file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import stat

from fastpersist.engines import Engine, File
from fastpersist.errors import RecycleRefusedError, as_transfer_error
from fastpersist.transfer.temporary import new_name, try_lock

_IN_USE = "it is open or mapped, in another process or in this one"
_CLOSE_IT = "close it there (tensors of a mapped load hold their file), or save without recycle"
_SAVE_PLAINLY = "save without recycle"
_REFUSED_OPENS = {errno.ENOENT, errno.ELOOP, errno.EACCES, errno.EPERM, errno.EROFS, errno.ETXTBSY, errno.EAGAIN}
_REFUSED_LEASES = {
    errno.EAGAIN: (_IN_USE, _CLOSE_IT),
    errno.EACCES: ("it belongs to another user", "save as its owner, or without recycle"),
    errno.EINVAL: ("its filesystem has no leases, which alone tell whether somebody reads it", _SAVE_PLAINLY),
}


class RetiredFile:
    """A file whose content nobody needs any more. ``take`` it over; until it is written to, ``give_back`` undoes that."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.hidden_name: str | None = None
        self._file: File | None = None
        self._source = -1  # the directory it comes from

    def take(self, engine: Engine, target: str, directory: int) -> File:
        """The file, open for writing, under its hidden name in ``directory`` (a descriptor) for good: it may be overwritten.

        Raises RecycleRefusedError where that could harm anybody, TransferError for a system call that fails. Nothing has
        been written then, and ``give_back`` restores the name.
        """
        with as_transfer_error("cannot recycle", self.path):
            status = self._check(target, directory)
            self._source = os.open(os.path.dirname(self.path) or os.curdir, os.O_RDONLY | os.O_DIRECTORY)
            self._file = self._open(engine)
            if not os.path.samestat(status, os.fstat(self._file.fileno)):
                raise self._refusal("another file took its place meanwhile", _SAVE_PLAINLY)
            if not try_lock(self._file.fileno):
                raise self._refusal(_IN_USE, _CLOSE_IT)
            self._lease(self._file)
            self._hide(self._file, directory)
            # An open that was under way when the lease was given may have ended since: only now is it seen for certain.
            self._lease(self._file)
            return self._file

    def give_back(self, directory: int, error: BaseException) -> None:
        """Restore the name, without replacing what may have it now; ``error`` gets a note if that fails."""
        if self.hidden_name is None:
            return
        name = os.path.basename(self.path)
        try:
            if self.hidden_name not in os.listdir(directory):
                return  # it never was renamed
            try:
                self._link(name, directory)
            except FileExistsError:
                self._link(name + self.hidden_name, directory)
                error.add_note(f"{self.path}: another file has this name now; the retired one is {name + self.hidden_name}")
            os.unlink(self.hidden_name, dir_fd=directory)
        except OSError as failure:
            error.add_note(
                f"{self.path}: cannot get its name back ({failure.strerror}): it is {self.hidden_name} in the target's "
                "directory, where a later save removes it"
            )

    def release(self) -> None:
        """Let others open the file again; harmless when repeated."""
        if self._file is not None and self._file.fileno >= 0:
            with contextlib.suppress(OSError):  # there is none, or the kernel took it away after somebody had waited for long
                fcntl.fcntl(self._file.fileno, fcntl.F_SETLEASE, fcntl.F_UNLCK)

    def close(self) -> None:
        """Release the lease and close everything; harmless when repeated."""
        self.release()
        if self._file is not None:
            self._file.close()
        source, self._source = self._source, -1
        if source >= 0:
            os.close(source)

    def _check(self, target: str, directory: int) -> os.stat_result:
        try:
            status = os.lstat(self.path)
        except OSError as error:
            raise self._refusal(f"it cannot be found ({error.strerror})", _SAVE_PLAINLY) from error
        if stat.S_ISLNK(status.st_mode):
            raise self._refusal("it is a symlink", "give the path of the file itself")
        if not stat.S_ISREG(status.st_mode):
            raise self._refusal(f"it is no regular file ({stat.filemode(status.st_mode)})", "give the path of a checkpoint")
        if status.st_nlink > 1:
            raise self._refusal(f"it has {status.st_nlink} names", "remove its other hard links, or save without recycle")
        if status.st_dev != os.fstat(directory).st_dev:
            raise self._refusal("it lies on another filesystem than the target", "recycle a file of the target's filesystem")
        if os.path.exists(target) and os.path.samestat(status, os.stat(target)):
            raise self._refusal("it is the target, which stays complete until the new file is", "recycle an older checkpoint")
        return status

    def _open(self, engine: Engine) -> File:
        try:
            return engine.open(self.path, "recycle")
        except OSError as error:
            if error.errno not in _REFUSED_OPENS:
                raise
            if isinstance(error, BlockingIOError):
                raise self._refusal(_IN_USE, _CLOSE_IT) from error
            raise self._refusal(f"it cannot be opened for writing ({error.strerror})", _SAVE_PLAINLY) from error

    def _lease(self, file: File) -> None:
        # Whoever opens the file waits, and its holder is told by SIGIO, which kills: ask for a signal that is ignored, and
        # then for none (F_SETLEASE makes this process the one to be told).
        fcntl.fcntl(file.fileno, fcntl.F_SETSIG, signal.SIGURG)
        try:
            fcntl.fcntl(file.fileno, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(file.fileno, fcntl.F_SETOWN, 0)
        except OSError as error:
            reason, remedy = _REFUSED_LEASES.get(error.errno or 0, (f"no lease is to be had ({error.strerror})", _SAVE_PLAINLY))
            raise self._refusal(reason, remedy) from error

    def _hide(self, file: File, directory: int) -> None:
        """Give it the hidden name, see that it is the right file and that nobody waits for it, and make the name durable."""
        self.hidden_name = new_name()  # known before the rename: an interrupt just after it can be undone
        try:
            os.rename(os.path.basename(self.path), self.hidden_name, src_dir_fd=self._source, dst_dir_fd=directory)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            raise self._refusal("it lies on another mount than the target", _SAVE_PLAINLY) from error
        status = os.fstat(file.fileno)
        if not os.path.samestat(os.stat(self.hidden_name, dir_fd=directory, follow_symlinks=False), status):
            raise self._refusal("another file took its place meanwhile", _SAVE_PLAINLY)
        if status.st_nlink != 1:
            raise self._refusal("it got another name meanwhile", _SAVE_PLAINLY)
        if fcntl.fcntl(file.fileno, fcntl.F_GETLEASE) != fcntl.F_WRLCK:  # the kernel waits with an open until it is released
            raise self._refusal("somebody began to open it meanwhile", _CLOSE_IT)
        # Not for durability: without it the old name could come back after a power cut, over new bytes.
        with as_transfer_error("cannot sync the directory of", self.path):
            os.fsync(directory)
            if not os.path.samestat(os.fstat(self._source), os.fstat(directory)):
                os.fsync(self._source)

    def _link(self, name: str, directory: int) -> None:
        os.link(str(self.hidden_name), name, src_dir_fd=directory, dst_dir_fd=self._source, follow_symlinks=False)

    def _refusal(self, reason: str, remedy: str) -> RecycleRefusedError:
        return RecycleRefusedError(self.path, reason, remedy)
