"""Files and storages over 4 GiB: zip64 structures as torch writes them, checked without writing the data."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch.utils.serialization import config

import fastpersist
from fastpersist.archive.layout import ArchivePlan, plan
from fastpersist.archive.pickling import flatten
from fastpersist.memory.buffers import AlignedBuffer
from fastpersist.transfer.image import ArchiveImage

LIMIT = 0xFFFFFFFF
GIB = 1 << 30
HEAD_NBYTES = 5 * 4096  # data.pkl, three more records, then data/0: each at a multiple of 4096
WINDOW_NBYTES = 1 << 16


def _sizes_to_reach(offset: int) -> list[int]:
    """A first storage so long that the header after it begins at ``offset``, its descriptor of 16 bytes included."""
    return [offset - 16 - HEAD_NBYTES, 8, 8]


CASES = {
    "one large": [5 * GIB],
    "large between small": [8, 5 * GIB, 16, 8],
    "far beyond the limit": [3 * GIB, 3 * GIB, 8, 0, 16],
    "size at the limit": [LIMIT, 8],
    "size below the limit": [LIMIT - 1, 8],
    "size above the limit": [LIMIT + 1, 8],
    "header at the limit": _sizes_to_reach(LIMIT),
    "header below the limit": _sizes_to_reach(LIMIT - 1),
    "header above the limit": _sizes_to_reach(LIMIT + 1),
    "empty beyond the limit": [LIMIT - 5, 0, 0],
    "large twice": [5 * GIB, 6 * GIB],
}


def _untouched(sizes: list[int]) -> list[torch.Tensor]:
    """Tensors that take no memory: their pages are never touched."""
    return [torch.empty(nbytes, dtype=torch.uint8) for nbytes in sizes]


@pytest.mark.parametrize(("case", "offset"), [("at", LIMIT), ("below", LIMIT - 1), ("above", LIMIT + 1)])
def test_cases_reach_the_limit(case, offset):
    """Guards the cases below: a longer pickle or one more record would move the header away from the limit."""
    flat = flatten(_untouched(CASES[f"header {case} the limit"]))
    sizes = np.array(flat.storage_nbytes, np.int64)
    assert offset in plan("model", flat.pickle_bytes, sizes, np.zeros_like(sizes), "torch").header_offsets


@pytest.mark.parametrize("case", CASES)
def test_zip64_is_torchs(case, tmp_path):
    """skip_data makes torch write all structures and leave holes for the data: a sparse file, soon read."""
    obj = _untouched(CASES[case])
    path = tmp_path / "model.pt"
    with config.patch("save.storage_alignment", 4096), torch.serialization.skip_data():
        torch.save(obj, path)
    flat = flatten(obj)
    sizes = np.array(flat.storage_nbytes, np.int64)
    archive = plan("model", flat.pickle_bytes, sizes, np.zeros_like(sizes), "torch")
    image = ArchiveImage(archive, np.array(flat.addresses, np.int64), _never_copied, checksum=False)

    assert archive.file_nbytes == path.stat().st_size
    for start, stop in _structure_ranges(archive):
        ours = _image_bytes(image, start, stop)
        with path.open("rb") as file:
            file.seek(start)
            theirs = file.read(stop - start)
        assert _masked(archive, ours, start) == _masked(archive, theirs, start), f"bytes {start} to {stop}"


def _never_copied(storage: int, start: int, target: memoryview) -> None:
    raise AssertionError("every storage has an address")


def _structure_ranges(archive: ArchivePlan) -> Iterator[tuple[int, int]]:
    """From the end of each record's data to the data of the next: descriptor, header, padding; at last the directory."""
    stops = archive.data_offsets + archive.nbytes
    yield 0, int(archive.data_offsets[0])
    for record in range(archive.records - 1):
        yield int(stops[record]), int(archive.data_offsets[record + 1])
    yield int(archive.data_offsets[-1]), archive.file_nbytes


def _image_bytes(image: ArchiveImage, start: int, stop: int) -> bytes:
    buffer = AlignedBuffer(WINDOW_NBYTES)
    assert stop - start <= buffer.nbytes
    image.fill(buffer, start, stop - start)
    return bytes(buffer.view[: stop - start])


def _masked(archive: ArchivePlan, content: bytes, start: int) -> bytes:
    """Without the serialization id and its checksums, and the checksums of storages, which skip_data leaves out."""
    last = int(archive.data_offsets[-1])
    if start < last:
        return content
    masked = bytearray(content)
    directory = archive.directory_offset - start
    # The id of 40 bytes, then in its descriptor 4 bytes of signature and 4 of checksum.
    masked[last - start : last - start + 40] = bytes(40)
    masked[last - start + 44 : last - start + 48] = bytes(4)
    central = masked.index(archive.names[-1], directory) - 46
    masked[central + 16 : central + 20] = bytes(4)
    return bytes(masked)


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("FASTPERSIST_SLOW") != "1", reason="writes 4 GiB and more: set FASTPERSIST_SLOW=1")
@pytest.mark.parametrize("layout", ["auto", "torch"], indirect=True)
def test_real_file_over_4gib(layout, tmp_path):
    sizes = [8, LIMIT + 4096, 300_000, 16]
    if min(psutil.virtual_memory().available, shutil.disk_usage(tmp_path).free) < 2 * sum(sizes):
        pytest.skip("not enough memory or disk for a storage of 4 GiB and its file")
    obj = [torch.zeros(nbytes, dtype=torch.uint8) for nbytes in sizes]
    for tensor in obj:
        tensor[-5:] = torch.arange(1, 6)
    path = tmp_path / "model.pt"
    fastpersist.save(obj, path, layout=layout, engine="posix", durable=False)
    _check_mapped(path, obj, calculate=False)
    _check_mapped(path, obj, calculate=True)


def _check_mapped(path: Path, obj: list[torch.Tensor], *, calculate: bool) -> None:
    with config.patch("load.calculate_storage_offsets", calculate):
        loaded = torch.load(path, mmap=True)
    for expected, actual in zip(obj, loaded, strict=True):
        assert expected.shape == actual.shape
        assert actual[-5:].tolist() == [1, 2, 3, 4, 5]
        assert int(actual[:4096].count_nonzero()) == int(expected[:4096].count_nonzero())
