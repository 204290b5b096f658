"""The order in which memory is looked at, summed, written and released."""

from __future__ import annotations

import io
import zipfile

import pytest
import torch

from fastpersist.archive.pickling import flatten
from fastpersist.engines import Request
from fastpersist.engines.memory import MemoryEngine
from fastpersist.transfer.extents import Direct, Extent
from fastpersist.transfer.saving import SaveJob
from fastpersist.transfer.writer import Watcher

BLOCK_NBYTES = 65536


class Scribbler(Watcher):
    """Overwrites memory as soon as it is released, as its owner may; notes what happens."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Extent]] = []

    def before(self, block: Extent) -> None:
        self.events.append(("before", block))

    def released(self, block: Extent) -> None:
        self.events.append(("released", block))
        if isinstance(block, Direct):
            scratch = torch.empty(0, dtype=torch.uint8).set_(
                self.storage, block.address - self.storage.data_ptr(), (block.nbytes,)
            )
            scratch.fill_(255)

    storage: torch.UntypedStorage


class CountingEngine(MemoryEngine):
    """Notes the offsets that each call of submit brings."""

    def __init__(self, queue_depth: int) -> None:
        super().__init__(queue_depth=queue_depth)
        self.calls: list[list[int]] = []

    def submit(self, *requests: Request) -> None:
        self.calls.append([request.file_offset for request in requests])
        super().submit(*requests)


@pytest.mark.parametrize("depth", [1, 2, 5, 8, 16])
def test_memory_is_summed_before_it_is_released(depth):
    tensor = torch.randint(0, 255, (40 * BLOCK_NBYTES + 12_345,), dtype=torch.uint8)
    content = bytes(tensor.numpy())
    watcher = Scribbler()
    watcher.storage = tensor.untyped_storage()
    with CountingEngine(depth) as engine:
        job = SaveJob.check("m.pt", engine=engine, block_nbytes=BLOCK_NBYTES, queue_depth=depth)
        report = job.run(flatten([tensor]), watcher=watcher)
        with zipfile.ZipFile(io.BytesIO(engine.contents(job.target))) as archive:
            assert archive.testzip() is None
            assert archive.read("m/data/0") == content
    assert {"before", "released"} == {kind for kind, _ in watcher.events}
    for kind in ("before", "released"):
        seen = [block for event, block in watcher.events if event == kind]
        assert len(seen) == len(set(seen))
        assert sum(block.nbytes for block in seen) == report.file_nbytes
    for number, (kind, block) in enumerate(watcher.events):
        if kind == "released":
            assert ("before", block) in watcher.events[:number]


def test_adjoining_blocks_start_together():
    with CountingEngine(8) as engine:
        tensors = [torch.zeros(20 * BLOCK_NBYTES, dtype=torch.uint8) for _ in range(2)]
        SaveJob.check("m.pt", engine=engine, block_nbytes=BLOCK_NBYTES, queue_depth=8).run(flatten(tensors))
    assert max(len(call) for call in engine.calls) > 3
    offsets = [offset for call in engine.calls for offset in call]
    assert offsets == sorted(offsets)
    assert len(engine.calls) <= len(offsets) / 2
