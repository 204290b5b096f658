"""GPUDirect Storage on this machine: whether KvikIO can run here, and which way its transfers go.

Some of KvikIO's calls never return where NVIDIA's driver is missing. So the driver is looked for first, without KvikIO, and
nothing else is loaded or called unless it is there and has a GPU.
"""

from __future__ import annotations

import ctypes
import importlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastpersist.errors import EngineUnavailableError, brief

DRIVER = "libcuda.so.1"
NVIDIA_FS_STATS = Path("/proc/driver/nvidia-fs/stats")
INSTALL = "pip install 'fastpersist[gds]' (for CUDA 12: pip install kvikio-cu12)"
_NAME_NBYTES = 256


@dataclass(frozen=True, slots=True)
class Gpus:
    """``names`` of the GPUs; ``problem`` says why there are none, and is empty otherwise."""

    names: tuple[str, ...]
    problem: str = ""


def find_gpus() -> Gpus:
    """Ask the driver, if there is one."""
    try:
        cuda = ctypes.CDLL(DRIVER)
    except OSError as error:
        missing = "No such file" in str(error)
        return Gpus((), f"no GPU: {DRIVER} is not installed" if missing else f"no GPU: {DRIVER} cannot be loaded ({error})")
    try:
        code = int(cuda.cuInit(0))
        names = _names(cuda) if code == 0 else ()
    except AttributeError as error:
        return Gpus((), f"no GPU: {DRIVER} is no CUDA driver ({error})")
    if code != 0:
        return Gpus((), f"no GPU that works: cuInit answers {code}")
    return Gpus(names, "" if names else "no GPU: the driver finds none")


def _names(cuda: ctypes.CDLL) -> tuple[str, ...]:
    count = ctypes.c_int(0)
    if cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return ()
    names: list[str] = []
    for index in range(count.value):
        device, text = ctypes.c_int(0), ctypes.create_string_buffer(_NAME_NBYTES)
        known = cuda.cuDeviceGet(ctypes.byref(device), index) == 0 and cuda.cuDeviceGetName(text, _NAME_NBYTES, device) == 0
        names.append(text.value.decode(errors="replace") if known else f"GPU {index}")
    return tuple(names)


def require_kvikio() -> Any:
    """The package kvikio with the modules used here. Raises EngineUnavailableError where it cannot run, and never hangs."""
    problem = find_gpus().problem
    if problem:
        remedy = f"a machine with an NVIDIA GPU and its driver, and {INSTALL}; or use engine='io_uring' or 'posix'"
        raise EngineUnavailableError("kvikio", problem, remedy)
    try:
        for module in ("kvikio.defaults", "kvikio.cufile_driver"):
            importlib.import_module(module)
        return importlib.import_module("kvikio")
    except Exception as error:  # native libraries fail to load in many ways
        if isinstance(error, ModuleNotFoundError) and error.name == "kvikio":
            raise EngineUnavailableError("kvikio", "kvikio is not installed", INSTALL) from error
        reason = f"kvikio is installed and cannot be imported ({brief(error)})"
        raise EngineUnavailableError("kvikio", reason, f"install the one for your CUDA: {INSTALL}") from error


@dataclass(frozen=True, slots=True)
class Route:
    """Which way device memory goes: "GDS", "P2P", "cuFile compat" or "unverified", and the evidence for it."""

    name: str
    evidence: str

    def __str__(self) -> str:
        return f"{self.name}: {self.evidence}"


def count_transfers() -> int | None:
    """Reads and writes that the kernel's nvidia-fs has done, of all processes; None where it is absent or does not count."""
    try:
        text = NVIDIA_FS_STATS.read_text()
    except OSError:
        return None
    counts = re.findall(r"^(?:Reads|Writes)\s*:.*\bok=(\d+)", text, re.MULTILINE)
    return sum(map(int, counts)) if counts else None


def find_route(kvikio: Any, transfers: int = 0, counted: int | None = None) -> Route:
    """What is known of the route after ``transfers`` of device memory, while nvidia-fs ``counted`` so many.

    Asks the driver only where KvikIO itself would use it.
    """
    if kvikio.defaults.is_compat_mode_preferred():
        return Route("cuFile compat", "KvikIO prefers its compatibility mode here: through host memory")
    if transfers and counted:
        return Route("GDS", f"nvidia-fs counted {counted} transfers while {transfers} were made")
    try:
        loaded = kvikio.cufile_driver.get("is_gds_available")
        fallback = kvikio.cufile_driver.get("allow_compat_mode")
    except RuntimeError as error:
        return Route("unverified", f"cuFile does not tell ({brief(error)})")
    if loaded:
        missing = "its counters have not moved" if counted == 0 else "it has counted nothing (its I/O statistics may be off)"
        return Route("unverified", f"nvidia-fs is loaded, {missing}")
    if transfers and not fallback:
        return Route("P2P", "cuFile works without nvidia-fs, and is not allowed to go through host memory")
    return Route("unverified", "nvidia-fs is not loaded: cuFile goes through host memory, or over P2P where that is set up")
