"""The bytes of the file: the same, however they are asked for, and those that a plain encoder puts together."""

from __future__ import annotations

import io
import random
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pytest

from fastpersist.archive import zipformat
from fastpersist.archive.layout import LARGE_NBYTES, SERIALIZATION_ID_NBYTES, ArchivePlan, plan
from fastpersist.memory.buffers import AlignedBuffer
from fastpersist.transfer.extents import Direct, cut_into_blocks, plan_extents
from fastpersist.transfer.image import ArchiveImage

PICKLE = bytes(range(256)) * 40
SIZES = [100, LARGE_NBYTES + 5, 0, 1, 4096, LARGE_NBYTES, 7777, 3]


@dataclass
class Sample:
    """An archive of random storages in host memory, ``on_device`` of them to be fetched by a function instead."""

    layout: str = "auto"
    sizes: list[int] = field(default_factory=lambda: list(SIZES))
    on_device: set[int] = field(default_factory=set)
    fetched: list[tuple[int, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        generator = np.random.default_rng(len(self.sizes))
        self.storages = [generator.integers(0, 256, nbytes, np.uint8) for nbytes in self.sizes]
        addresses = [0 if i in self.on_device else s.ctypes.data for i, s in enumerate(self.storages)]
        self.addresses = np.array(addresses, np.int64)
        residues = self.addresses % 4096 // 64 * 64
        self.plan: ArchivePlan = plan("model", PICKLE, np.array(self.sizes, np.int64), residues, self.layout)

    def image(self, *, checksum: bool = True) -> ArchiveImage:
        """A fresh image: it is good for one pass."""
        return ArchiveImage(self.plan, self.addresses, self._fetch, checksum=checksum)

    def _fetch(self, storage: int, start: int, target: memoryview) -> None:
        self.fetched.append((storage, start, len(target)))
        target[:] = self.storages[storage].tobytes()[start : start + len(target)]

    def content(self, record: int, identity: bytes) -> bytes:
        """What a record holds."""
        storage = int(self.plan.storages[record])
        if storage >= 0:
            return self.storages[storage].tobytes()
        content = self.plan.metadata[record]
        return identity if content is None else content


def in_pieces(image: ArchiveImage, lengths: Iterable[int], file_nbytes: int) -> bytes:
    """The file, asked for in pieces of these lengths. The buffer is dirty, as a pool's buffers are."""
    content = bytearray()
    buffer = AlignedBuffer(file_nbytes)
    buffer.view[:] = b"\xaa" * buffer.nbytes
    for length in lengths:
        if len(content) >= file_nbytes:
            break
        image.fill(buffer, len(content), length)
        content += buffer.view[:length]
    assert len(content) >= file_nbytes
    return bytes(content)


def whole(sample: Sample, *, checksum: bool = True) -> bytes:
    """The file, asked for at once."""
    nbytes = sample.plan.file_nbytes
    return in_pieces(sample.image(checksum=checksum), [nbytes], nbytes)


def encoded_plainly(sample: Sample, identity: bytes, *, checksum: bool = True) -> bytes:
    """The file, record by record."""
    archive, content, directory = sample.plan, bytearray(), bytearray()
    for record, name in enumerate(archive.names):
        data, header = sample.content(record, identity), len(content)
        summed = zlib.crc32(data) if checksum or archive.storages[record] < 0 else 0
        content += zipformat.local_header(name, len(data), header, int(archive.data_offsets[record])) + data
        content += zipformat.descriptor(summed, len(data), header)
        directory += zipformat.central_header(name, summed, len(data), header)
    end = zipformat.end_of_archive(len(archive.names), len(directory), len(content), archive.comment_nbytes)
    return bytes(content + directory + end)


def identity_in(sample: Sample, content: bytes) -> bytes:
    """The serialization id that stands in a file."""
    start = int(sample.plan.data_offsets[-1])
    return content[start : start + SERIALIZATION_ID_NBYTES]


@pytest.mark.parametrize("layout", ["auto", "torch"])
@pytest.mark.parametrize("checksum", [True, False])
def test_the_whole_file_is_the_plain_encoding(layout, checksum):
    sample = Sample(layout)
    content = whole(sample, checksum=checksum)
    assert content == encoded_plainly(sample, identity_in(sample, content), checksum=checksum)


@pytest.mark.parametrize("layout", ["auto", "torch"])
@pytest.mark.parametrize("seed", range(8))
def test_pieces_of_any_length_make_the_same_file(layout, seed):
    sample, generator = Sample(layout, on_device={1, 6}), random.Random(seed)
    largest = generator.choice([300, 5000, 100_000])
    lengths = (generator.randint(1, largest) for _ in iter(int, 1))
    nbytes = sample.plan.file_nbytes
    assert in_pieces(sample.image(), lengths, nbytes)[:nbytes] == whole(sample)


def test_single_bytes_make_the_same_file():
    sample = Sample(sizes=[3, 0, 65])
    nbytes = sample.plan.file_nbytes
    assert in_pieces(sample.image(), [1] * nbytes, nbytes) == whole(sample)


def test_zeros_follow_the_end():
    """Old bytes of a reused buffer must not reach the disk."""
    sample = Sample()
    nbytes = sample.plan.file_nbytes
    content = in_pieces(sample.image(), [nbytes // 2, nbytes], nbytes)
    assert content[nbytes:] == bytes(len(content) - nbytes)
    assert len(content) > nbytes


@pytest.mark.parametrize("block_nbytes", [4096, 65536, 1 << 20])
@pytest.mark.parametrize("checksum", [True, False])
def test_straight_ranges_and_pieces_make_the_same_file(block_nbytes, checksum):
    sample = Sample(sizes=[LARGE_NBYTES * 2 + 5, 10, LARGE_NBYTES + 4096, 0, 500])
    image, content = sample.image(checksum=checksum), bytearray()
    buffer = AlignedBuffer(block_nbytes)
    extents = plan_extents(sample.plan, sample.addresses, memory_alignment=1, cut_nbytes=4096)
    straight = 0
    for block in cut_into_blocks(extents, block_nbytes, block_nbytes):
        if isinstance(block, Direct):
            straight += block.nbytes
            image.checksum_direct(block, block.nbytes)
            content += bytes(memoryview(sample.storages[sample.plan.storages[block.record]]))[_within(sample, block)]
        else:
            image.fill(buffer, block.file_offset, block.nbytes)
            content += buffer.view[: block.nbytes]
    assert straight > 0
    assert bytes(content[: sample.plan.file_nbytes]) == whole(sample, checksum=checksum)


def _within(sample: Sample, block: Direct) -> slice:
    start = block.file_offset - int(sample.plan.data_offsets[block.record])
    return slice(start, start + block.nbytes)


def test_payload_is_counted_once():
    sample, generator = Sample(), random.Random(1)
    buffer, offset, payload = AlignedBuffer(1 << 16), 0, 0
    image = sample.image()
    while offset < sample.plan.file_nbytes:
        length = generator.randint(1, 1 << 16)
        payload += image.fill(buffer, offset, length)
        offset += length
    assert payload == sum(sample.sizes)


def test_device_memory_is_fetched_once_and_in_order():
    sample = Sample(on_device={1, 4})
    in_pieces(sample.image(), [10_000] * 100, sample.plan.file_nbytes)
    for storage in (1, 4):
        pieces = [(start, nbytes) for number, start, nbytes in sample.fetched if number == storage]
        assert [start for start, _ in pieces] == [sum(nbytes for _, nbytes in pieces[:i]) for i in range(len(pieces))]
        assert sum(nbytes for _, nbytes in pieces) == sample.sizes[storage]
    assert {number for number, _, _ in sample.fetched} == {1, 4}


def test_an_error_of_the_device_is_passed_on():
    sample = Sample(on_device={1})

    def fail(storage: int, start: int, target: memoryview) -> None:
        raise RuntimeError("device lost")

    image = ArchiveImage(sample.plan, sample.addresses, fail, checksum=True)
    with pytest.raises(RuntimeError, match="device lost"):
        in_pieces(image, [1 << 16] * 100, sample.plan.file_nbytes)


@pytest.mark.parametrize("layout", ["auto", "torch"])
def test_zipfile_verifies_it(layout):
    with zipfile.ZipFile(io.BytesIO(whole(Sample(layout)))) as archive:
        assert archive.testzip() is None


def test_every_byte_has_a_record():
    sample = Sample()
    image, archive = sample.image(), sample.plan
    for record, name in enumerate(archive.names):
        header, data, nbytes = (int(x[record]) for x in (archive.header_offsets, archive.data_offsets, archive.nbytes))
        for offset in (header, data - 1, data + nbytes - 1):
            assert image.record_at(offset) == name.decode()
    assert image.record_at(archive.directory_offset) == "central directory"
    assert image.record_at(archive.file_nbytes + 100) == "central directory"


def test_identity_depends_on_contents_and_names():
    samples = [Sample(sizes=sizes) for sizes in ([100], [101], [100, 0], [50, 50])]
    changed = Sample(sizes=[100])
    changed.storages[0][7] ^= 1
    identities = {identity_in(sample, whole(sample)) for sample in [*samples, changed]}
    assert len(identities) == 5
    assert identity_in(samples[0], whole(samples[0])) == identity_in(Sample(sizes=[100]), whole(Sample(sizes=[100])))


def test_identity_depends_on_lengths_where_there_are_no_checksums():
    samples = [Sample(sizes=[100]), Sample(sizes=[101])]
    assert len({identity_in(sample, whole(sample, checksum=False)) for sample in samples}) == 2
