"""GPUs and GPUDirect Storage: what the kvikio engine says of them. No driver is called which is not there."""

from __future__ import annotations

from dataclasses import dataclass

from fastpersist.engines import _gds, engine_class


@dataclass(frozen=True, slots=True)
class Gpu:
    """``names`` of the GPUs, the verdict on them, and on direct transfers between them and the disk (``gds``)."""

    names: tuple[str, ...]
    verdict: str
    gds: str


def describe_gpu() -> Gpu:
    """Ask the driver, if there is one, and then KvikIO."""
    gpus = _gds.find_gpus()
    if gpus.problem:
        return Gpu((), gpus.problem, "no: there is no GPU")
    kvikio = engine_class("kvikio").availability()
    gds = kvikio.reason if kvikio.usable else f"no: {kvikio.reason} ({kvikio.remedy})"
    return Gpu(gpus.names, f"{len(gpus.names)} GPU" + "s" * (len(gpus.names) != 1), gds)
