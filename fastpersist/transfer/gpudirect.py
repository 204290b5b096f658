"""Whether device memory reaches a filesystem past host memory: found out by writing some, and believed only when counted."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, cast

from fastpersist.engines import Memory, Write, _gds, open_engine
from fastpersist.errors import FastPersistError
from fastpersist.transfer.cuda import CUDA

if TYPE_CHECKING:
    from fastpersist.engines.kvikio import KvikioEngine

log = logging.getLogger("fastpersist")

TRIAL_NBYTES = 1 << 20

_verdicts: dict[int, bool] = {}


def has_gpudirect(directory: str, device: int) -> bool:
    """True where a write of engine "kvikio" has gone by GPUDirect Storage. Tried once for each filesystem and process."""
    filesystem = os.stat(directory).st_dev
    if filesystem not in _verdicts:
        _verdicts[filesystem] = _try(directory, device)
    return _verdicts[filesystem]


def _try(directory: str, device: int) -> bool:
    if _gds.count_transfers() is None:  # nothing could be proven, and nothing else is loaded or called
        return False
    try:
        with cast("KvikioEngine", open_engine("kvikio", queue_depth=1)) as engine, engine.open(directory, "tmpfile") as file:
            memory = CUDA.allocate(device, TRIAL_NBYTES)
            CUDA.synchronize(CUDA.record(CUDA.current_stream(device)))  # whoever had this memory before is done with it
            request = Write(file, memory.data_ptr(), TRIAL_NBYTES, 0, memory=Memory.DEVICE, device_index=device, owner=memory)
            engine.submit(request)
            failures = [completion.error for completion in engine.wait() if completion.error is not None]
            route = engine.route
    except (FastPersistError, OSError, RuntimeError) as error:
        log.info("%s: no GPUDirect Storage (%s)", directory, error)
        return False
    log.info("%s: a trial write from device memory went by %s", directory, failures[0] if failures else route)
    return not failures and route.name == "GDS"
