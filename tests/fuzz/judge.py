"""Judges what the verbs do with a file, in a process of its own that may crash, hang or run out of memory.

python -m tests.fuzz.judge SCRATCH GOOD_FILE: reads a case per line, as JSON, answers with a line of findings.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import json
import os
import pickle
import resource
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

import fastpersist
from fastpersist import CheckpointFormatError

ALLOWED_NBYTES = (64 << 20) + (48 << 20)
"""Beyond the file's own size: the pool, and what Python, threads and allocators take beside it."""
ADDRESS_SPACE_NBYTES = 2 << 30
"""Room for thread stacks and arenas; whoever asks for more than this at once is refused by the kernel, and found out."""
MESSAGE_CHARACTERS = 20_000
TORCH_REFUSALS = ("Attempting to deserialize", "don't know how to restore", "mmap can only be used with files saved")
"""What torch says of good files that do not fit the machine or the call."""
SECONDS = 2.0
"""Of processor time: from here on a verb has taken suspiciously long for the small files of these tests."""


def _half(path: str) -> bool:
    return not path.startswith("model.v")


QUICK = "io_uring" if fastpersist.available()["io_uring"].usable else "posix"
"""The engine of most verbs: io_uring starts no threads, which take longer than all else here."""

VERBS: dict[str, Callable[[str], Any]] = {
    "load": lambda path: fastpersist.load(path, engine=QUICK),
    "load verified": lambda path: fastpersist.load(path, engine=QUICK, verify=True),
    "load posix": lambda path: fastpersist.load(path, engine="posix", verify=True),
    "load only": lambda path: fastpersist.load(path, engine=QUICK, only=_half, verify=True),
    "load only prefix": lambda path: fastpersist.load(path, engine=QUICK, only="model"),
    "load mmap": lambda path: fastpersist.load(path, mmap=True),
    "load meta": lambda path: fastpersist.load(path, map_location="meta"),
    "inspect": fastpersist.inspect,
    "verify": lambda path: fastpersist.verify(path, engine=QUICK),
}
EXACT = ("load verified", "load posix")
"""What these return is the content that was saved, or they raise."""


def tensors_in(value: Any) -> list[tuple[str, torch.Tensor]]:
    """All tensors of a nest, each object visited once, however often and however deep it is contained."""
    found: list[tuple[str, torch.Tensor]] = []
    seen: set[int] = set()
    todo = [("", value)]
    while todo:
        path, item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            found.append((path, item))
        elif isinstance(item, dict):
            todo += [
                (f"{path}.{str(key)[:50]}" if isinstance(key, str | int) else path, inner) for key, inner in dict.items(item)
            ]
        elif isinstance(item, list | tuple):
            todo += [(f"{path}.{place}", inner) for place, inner in enumerate(item)]
    return found


def digest(value: Any) -> str:
    """Of all tensors: paths, dtypes, shapes, bytes."""
    total = hashlib.sha256()
    for path, tensor in sorted(tensors_in(value), key=lambda found: found[0]):
        total.update(f"{path} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(bytes(tensor.detach().contiguous().flatten().view(torch.uint8).tolist()))
    return total.hexdigest()


def outside_its_storage(value: Any) -> str | None:
    """The first tensor that reaches beyond its storage: using it would read or write foreign memory."""
    for path, tensor in tensors_in(value):
        if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_nested:
            continue
        low = high = tensor.storage_offset()
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            low += min(0, (size - 1) * stride)
            high += max(0, (size - 1) * stride)
        if tensor.numel() and (low < 0 or (high + 1) * tensor.element_size() > torch.Tensor.untyped_storage(tensor).nbytes()):
            return f"tensor {path!r} reaches from element {low} to {high}, beyond its storage"
    return None


def refusal_at_fault(verb: str, error: BaseException, path: str) -> str | None:
    """Why an exception is not one that the contract allows; None if it is."""
    message = str(error)
    if len(message) > MESSAGE_CHARACTERS:
        return f"{type(error).__name__} with a message of {len(message)} characters"
    try:
        message.encode("utf-8", "surrogateescape" if any(0xDC80 <= ord(letter) <= 0xDCFF for letter in path) else "strict")
    except UnicodeEncodeError:
        return f"unprintable: {type(error).__name__} with a message that is no UTF-8: {ascii(message)[-200:]}"
    for link in (error, error.__cause__, error.__context__):
        if isinstance(link, MemoryError) or (link is not None and _speaks_of_memory(str(link))):
            return f"memory: {type(link).__name__}: {str(link)[:200]}"
    if isinstance(error, CheckpointFormatError):
        return None if path in message else f"unnamed file: {type(error).__name__}: {message[:200]}"
    if isinstance(error, RuntimeError) and message.startswith(TORCH_REFUSALS):
        return None
    if isinstance(error, pickle.UnpicklingError) and verb.startswith("load"):
        return None
    if isinstance(error, TypeError | KeyError | ValueError) and verb.startswith("load only") and "only=" in message:
        return None
    return f"escapes: {type(error).__name__}: {message[:300]}"


def _speaks_of_memory(message: str) -> bool:
    return any(words in message for words in ("t allocate memory", "Cannot allocate memory", "not enough memory"))


def judge(verb: str, path: str, expected: str | None) -> dict[str, Any]:
    """Run one verb on a file. ``outcome`` tells what it did, ``fault`` what is wrong with that."""
    started = time.process_time()
    try:
        with memory_bounded(os.stat(path).st_size) as peak:
            value = VERBS[verb](path)
        outcome, fault = "ok", None
        if verb.startswith("load"):
            fault = outside_its_storage(value)
        if fault is None and verb in EXACT and expected is not None and digest(value) != expected:
            fault = "silent corruption: other data than was saved, with verify=True"
    except Exception as error:
        outcome, fault = f"{type(error).__name__}: {str(error)[:300]}", refusal_at_fault(verb, error, path)
    if fault is None and peak and peak[0] > 0:
        fault = f"memory: {peak[0] >> 20} MiB more than allowed"
    seconds = time.process_time() - started
    if fault is None and seconds > SECONDS:
        fault = f"slow: {seconds:.1f} s"
    return {"verb": verb, "outcome": outcome, "fault": fault}


def _status(key: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(key))


@contextlib.contextmanager
def memory_bounded(file_nbytes: int) -> Any:
    """Yields a list that gets, at the end, how many bytes above the allowance the resident memory peaked."""
    excess: list[int] = []
    with open("/proc/self/clear_refs", "w") as control:
        control.write("5")  # resets VmHWM
    before = _status("VmRSS:")
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_status("VmSize:") + 3 * file_nbytes + ADDRESS_SPACE_NBYTES, hard))
    try:
        yield excess
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        excess.append(_status("VmHWM:") - before - file_nbytes - ALLOWED_NBYTES)


def poisoned(good_path: str, expected: str) -> str | None:
    """Whether a good file still loads after all that: a fault must not outlive the call that met it."""
    try:
        value = fastpersist.load(good_path, engine=QUICK)
    except Exception as error:
        return f"poisoned: a good file no longer loads: {type(error).__name__}: {str(error)[:200]}"
    return None if digest(value) == expected else "poisoned: a good file loads as something else"


def _materialize(case: dict[str, Any], scratch: str) -> str:
    """The path of the case's file: as it is, or a base file with bytes replaced and the end cut off."""
    if "edits" not in case:
        return str(case["path"])
    with open(case["path"], "rb") as base:
        content = bytearray(base.read())
    for offset, replacement in case["edits"]:
        content[offset : offset + len(replacement) // 2] = bytes.fromhex(replacement)
    with open(scratch, "wb") as target:
        target.write(content[: case.get("keep", len(content))])
    return scratch


def main() -> None:
    """Judge cases until the input ends."""
    scratch, good_path = sys.argv[1:3]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    faulthandler.enable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    good = digest(torch.load(good_path))
    for verb in VERBS.values():
        verb(good_path)  # what is made at first use is no memory of the cases
    for line in sys.stdin:
        case = json.loads(line)
        path = _materialize(case, scratch)
        verdicts = []
        for verb in case["verbs"]:
            print(json.dumps({"begin": verb}), file=answers, flush=True)
            verdicts.append(judge(verb, path, case.get("expected")))
        fault = poisoned(good_path, good) if case["aftermath"] else None
        if fault is not None:
            verdicts.append({"verb": "good file after", "outcome": "", "fault": fault})
        print(json.dumps({"verdicts": verdicts}), file=answers, flush=True)


if __name__ == "__main__":
    main()
