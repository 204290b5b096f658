"""Hands cases to a judge in another process, and survives what the judge does not: crashes and hangs become findings."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tests.fuzz.forge import good_checkpoint

ROOT = Path(__file__).parents[2]
ALL_VERBS = (
    "load", "load verified", "load posix", "load only", "load only prefix", "load mmap", "load meta", "inspect", "verify",
)  # fmt: skip
MAIN_VERBS = ("load verified", "inspect", "verify")
STARTUP_SECONDS = 60.0


@dataclass(frozen=True)
class Finding:
    """What one verb did with one file; ``fault`` is None where that is within the contract."""

    verb: str
    outcome: str
    fault: str | None

    def __str__(self) -> str:
        return f"{self.verb}: {self.fault or self.outcome}"


class Court:
    """Runs a judge, and a new one when it has died. A context manager.

    Scratch files lie in memory where the system has a place for that: a file just written and then read directly would
    wait for the disk each time.
    """

    def __init__(self, *, seconds: float = 10.0) -> None:
        self.seconds = seconds
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self._folder = tempfile.TemporaryDirectory(prefix="fastpersist-fuzz-", dir=memory)
        self._process: subprocess.Popen[bytes] | None = None
        self._errors = self.folder / "stderr"
        self.good = self.folder / "good.pt"
        self.good.write_bytes(good_checkpoint())

    @property
    def folder(self) -> Path:
        """Where files of cases may lie, until the court closes."""
        return Path(self._folder.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._folder.cleanup()

    def hear(self, content: bytes, verbs: Sequence[str] = ALL_VERBS, expected: str | None = None) -> list[Finding]:
        """Findings of the verbs on a file with this content."""
        path = self.folder / "case.pt"
        path.write_bytes(content)
        return self.hear_file(path, verbs, expected)

    def hear_file(self, path: Path, verbs: Sequence[str] = ALL_VERBS, expected: str | None = None) -> list[Finding]:
        """Findings of the verbs on the file at ``path``. A verb that kills the judge ends there: the others run anew."""
        return self._hear({"path": str(path), "expected": expected, "aftermath": True}, verbs)

    def hear_edited(
        self,
        base: Path,
        edits: Iterable[tuple[int, bytes]],
        keep: int | None,
        verbs: Sequence[str] = MAIN_VERBS,
        expected: str | None = None,
    ) -> list[Finding]:
        """Findings on ``base`` with bytes replaced at offsets and all from ``keep`` on cut off; base does not change.

        Made for thousands of cases: what a case does to the next load is not looked at.
        """
        changes = [(at, new.hex()) for at, new in edits]
        case: dict[str, Any] = {"path": str(base), "expected": expected, "edits": changes, "aftermath": False}
        if keep is not None:
            case["keep"] = keep
        return self._hear(case, verbs)

    def _hear(self, case: dict[str, Any], verbs: Sequence[str]) -> list[Finding]:
        findings: list[Finding] = []
        left = list(verbs)
        while left:
            judge = self._running_judge()
            assert judge.stdin is not None
            judge.stdin.write(json.dumps({**case, "verbs": left}).encode() + b"\n")
            begun = 0
            while True:
                answer = self._answer(self.seconds)
                if isinstance(answer, str):
                    verb = left[max(begun - 1, 0)]
                    findings.append(Finding(verb, answer, answer))
                    # After a crash the other verbs are heard; to see them all hang would take too long.
                    left = left[max(begun, 1) :] if answer.startswith("crash") else []
                    break
                if "verdicts" in answer:
                    findings += [Finding(**verdict) for verdict in answer["verdicts"]]
                    left = []
                    break
                begun += 1
        return findings

    def _running_judge(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._stop()
            command = [sys.executable, "-m", "tests.fuzz.judge", str(self.folder / "scratch.pt"), str(self.good)]
            with self._errors.open("wb") as errors:
                self._process = subprocess.Popen(
                    command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, bufsize=0
                )
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({"path": str(self.good), "verbs": [], "aftermath": False}).encode() + b"\n")
            started = self._answer(STARTUP_SECONDS)
            if isinstance(started, str):
                raise RuntimeError(f"no judge can be had: {started}\n{self._errors.read_text()[-3000:]}")
        return self._process

    def _answer(self, seconds: float) -> dict[str, Any] | str:
        """The next line, or how the judge ended without one."""
        process = self._process
        assert process is not None
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            # The pipe is unbuffered, and the judge writes whole lines: what is ready is a line.
            line = process.stdout.readline() if selector.select(seconds) else None
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        if line is None:
            self._stop()
            return f"hang: no answer within {seconds:.0f} s"
        code = process.wait()
        return f"crash: {signal.Signals(-code).name}" if code < 0 else f"crash: exit status {code}"

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
            self._process = None


def faults(findings: Iterable[Finding]) -> list[str]:
    """What is wrong, in words; empty where all is well."""
    return [str(finding) for finding in findings if finding.fault is not None]
