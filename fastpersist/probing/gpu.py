"""GPUs and GPUDirect Storage: a verdict that never calls a driver which is not there.

kvikio is not imported: without a driver its calls may never return. What this says is what can be known without it.
"""

from __future__ import annotations

import ctypes
import importlib.util
from dataclasses import dataclass
from pathlib import Path

DRIVER = "libcuda.so.1"
NVIDIA_FS = Path("/proc/driver/nvidia-fs/stats")
_NAME_NBYTES = 256


@dataclass(frozen=True, slots=True)
class Gpu:
    """``names`` of the GPUs, the verdict on them, and on direct transfers between them and the disk (``gds``)."""

    names: tuple[str, ...]
    verdict: str
    gds: str


def describe_gpu(driver: str = DRIVER, nvidia_fs: Path = NVIDIA_FS) -> Gpu:
    """Ask the driver, if there is one."""
    try:
        cuda = ctypes.CDLL(driver)
    except OSError:
        return Gpu((), f"no GPU: {driver} is not installed", "no: there is no GPU driver")
    try:
        code = int(cuda.cuInit(0))
        if code != 0:
            return Gpu((), f"no GPU that works: cuInit answers {code}", "no: there is no GPU")
        names = _names(cuda)
    except AttributeError as error:
        return Gpu((), f"{driver} is no CUDA driver ({error})", "no: there is no GPU driver")
    return Gpu(names, f"{len(names)} GPU" + "s" * (len(names) != 1), _gds(names, nvidia_fs))


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


def _gds(names: tuple[str, ...], nvidia_fs: Path) -> str:
    if not names:
        return "no: there is no GPU"
    if importlib.util.find_spec("kvikio") is None:
        return "no: kvikio is not installed (pip install 'fastpersist[gds]')"
    if not nvidia_fs.exists():
        return "cuFile without the nvidia-fs module: transfers go through host memory, or over P2P where cuFile has it"
    return "cuFile and nvidia-fs are there, GDS unverified"
