"""The probe's file: bounded, nameless, and gone on every way out."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastpersist.probing import scratch as module
from fastpersist.probing.scratch import ProbeError, bound_nbytes, check_directory, exit_on_signals, scratch_file

MIB = 1 << 20


def _refuse(code: int, *, nameless_only: bool) -> Callable[..., int]:
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any) -> int:
        if not nameless_only or flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(code, os.strerror(code))
        return real(path, flags, *rest)

    return refuse


def test_a_tenth_of_the_free_space_or_the_budget() -> None:
    assert bound_nbytes(100 * MIB, 1000 * MIB) == 10 * MIB
    assert bound_nbytes(1000 * MIB, 7 * MIB) == 7 * MIB
    assert bound_nbytes(1000 * MIB, 1000 * MIB, memory_nbytes=200 * MIB) == 20 * MIB


@pytest.mark.parametrize(
    ("free_nbytes", "budget_nbytes", "reason"), [(9 * MIB, 8 << 30, "only 9.4 MB are free"), (1 << 40, MIB - 1, "budget")]
)
def test_too_little_room_is_refused(free_nbytes: int, budget_nbytes: int, reason: str) -> None:
    with pytest.raises(ProbeError, match=reason) as caught:
        bound_nbytes(free_nbytes, budget_nbytes)
    assert caught.value.remedy


def test_only_a_directory_can_be_probed(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    check_directory(tmp_path)
    with pytest.raises(ProbeError, match=f"is a file.*fastpersist probe {tmp_path}$"):
        check_directory(tmp_path / "file")
    with pytest.raises(ProbeError, match=r"does not exist.*mkdir -p"):
        check_directory(tmp_path / "missing")


@pytest.mark.parametrize("code", [None, errno.EOPNOTSUPP, errno.EISDIR])
def test_the_file_has_no_name_and_can_be_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int | None
) -> None:
    if code is not None:
        monkeypatch.setattr(module.os, "open", _refuse(code, nameless_only=True))
    with scratch_file(tmp_path) as scratch:
        assert os.listdir(tmp_path) == []
        Path(scratch.path).write_bytes(b"content")
        assert os.pread(scratch.fileno, 7, 0) == b"content"
        assert os.fstat(scratch.fileno).st_dev == tmp_path.stat().st_dev
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(scratch.fileno)


def test_it_is_closed_by_an_exception(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), scratch_file(tmp_path) as scratch:
        raise KeyboardInterrupt
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(scratch.fileno)


def test_a_name_that_was_needed_is_removed_when_opening_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def create_and_fail(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "")
        os.close(real(path, flags, *rest))
        raise KeyboardInterrupt

    monkeypatch.setattr(module.os, "open", create_and_fail)
    with pytest.raises(KeyboardInterrupt), scratch_file(tmp_path):
        pass
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.EROFS, "remount,rw"),
        (errno.EACCES, "you may write to"),
        (errno.ENOSPC, "free some space"),
        (errno.EDQUOT, "quota"),
    ],
)
def test_where_no_file_can_be_made_the_remedy_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, remedy: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module.os, "open", _refuse(code, nameless_only=False))
        with pytest.raises(ProbeError, match=os.strerror(code)) as caught, scratch_file(tmp_path):
            pass
    assert remedy in caught.value.remedy


def test_without_proc_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.os.path, "exists", lambda path: False)
    with pytest.raises(ProbeError, match="mount -t proc"), scratch_file(tmp_path):
        pass


def test_handlers_of_signals_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught, exit_on_signals():
        os.kill(os.getpid(), signal.SIGTERM)
    assert caught.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


_VICTIM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits that it is ignored
from fastpersist import probe
from fastpersist.probing.sweep import Sweeper

def wait_to_be_killed(self, finalists):
    print("measured", len(self.sweep.measurements), flush=True)
    while True:
        self._bench.fresh(finalists[0], 1 << 20, 0.1)

Sweeper._fine = wait_to_be_killed
probe.app([sys.argv[1], "--budget-gb", "0.01", "--engine", "posix"])
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_the_middle_of_the_sweep_leaves_nothing(tmp_path: Path, number: signal.Signals, status: int) -> None:
    command = [sys.executable, "-c", _VICTIM, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("measured")
            assert os.listdir(tmp_path) == []  # nor would SIGKILL leave anything
            process.send_signal(number)
            _, errors = process.communicate(timeout=120)
        finally:
            process.kill()  # harmless after its end, and without it the test would wait for a victim that lives on
    assert process.returncode == status
    assert "Traceback" not in errors
    assert os.listdir(tmp_path) == []
