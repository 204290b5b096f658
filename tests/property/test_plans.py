"""Plans and files for any sizes, residues, layouts and block sizes."""

from __future__ import annotations

import io
import tempfile
import zipfile
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastpersist
from fastpersist.archive import zipformat
from fastpersist.archive.layout import LARGE_NBYTES, ArchivePlan, plan
from fastpersist.engines.memory import MemoryEngine
from fastpersist.transfer.extents import Direct, cut_into_blocks, plan_extents

LIMIT = zipformat.LIMIT_32

sizes = st.one_of(
    st.integers(0, 300),
    st.integers(LARGE_NBYTES - 5, LARGE_NBYTES + 5),
    st.integers(0, 1 << 22),
    st.integers(LIMIT - 30_000, LIMIT + 30_000),
    st.integers(0, 1 << 44),
)
residues = st.integers(0, 63).map(lambda number: 64 * number)
layouts = st.sampled_from(["auto", "torch"])
prefixes = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/"), min_size=1, max_size=40)


@st.composite
def inputs(draw: st.DrawFn) -> tuple[ArchivePlan, np.ndarray, str]:
    """(plan, residues of the storages, layout)."""
    storages = draw(st.lists(st.tuples(sizes, residues), max_size=30))
    layout, pickle_bytes = draw(layouts), draw(st.binary(max_size=200)) * draw(st.integers(1, 100))
    nbytes = np.array([size for size, _ in storages], np.int64)
    wanted = np.array([residue for _, residue in storages], np.int64)
    return plan(draw(prefixes), pickle_bytes, nbytes, wanted, layout), wanted, layout


@given(inputs())
def test_records_are_in_order_and_disjoint(case):
    archive, _, _ = case
    ends = archive.data_offsets + archive.nbytes
    assert archive.header_offsets[0] == 0
    assert (archive.header_offsets < archive.data_offsets).all()
    descriptors = np.array(
        [
            zipformat.descriptor_nbytes(nbytes, header)
            for nbytes, header in zip(archive.nbytes.tolist(), archive.header_offsets.tolist(), strict=True)
        ]
    )
    # No gap and no overlap: each header begins where the descriptor before it ends.
    assert (ends + descriptors).tolist() == [*archive.header_offsets[1:].tolist(), archive.directory_offset]


@given(inputs())
def test_data_lies_where_it_was_wanted(case):
    archive, wanted, layout = case
    assert (archive.data_offsets % 64 == 0).all()
    if layout == "torch":
        assert (archive.data_offsets % 4096 == 0).all()
    else:
        followed = np.flatnonzero((archive.storages >= 0) & (archive.nbytes >= LARGE_NBYTES))
        assert (archive.data_offsets[followed] % 4096).tolist() == wanted[archive.storages[followed]].tolist()


@given(inputs())
def test_padding_is_less_than_a_page(case):
    archive, _, _ = case
    for record, name in enumerate(archive.names):
        nbytes, header, data = (int(x[record]) for x in (archive.nbytes, archive.header_offsets, archive.data_offsets))
        shortest = zipformat.LOCAL_HEADER_NBYTES + zipformat.FILLER_HEADER_NBYTES + len(name)
        padding = data - header - shortest - zipformat.zip64_extra_nbytes(nbytes, header)
        assert 0 <= padding < 4096
        assert len(zipformat.local_header(name, nbytes, header, data)) == data - header


@given(inputs())
def test_each_storage_has_one_record(case):
    archive, wanted, _ = case
    stored = archive.storages[archive.storages >= 0]
    assert sorted(stored.tolist()) == list(range(len(wanted)))
    assert set(archive.metadata) == set(np.flatnonzero(archive.storages < 0).tolist())
    assert len(set(archive.names)) == archive.records


@given(inputs(), st.sampled_from([1, 4, 64, 512, 4096]), st.sampled_from([4096, 8192, 65536]), st.data())
def test_extents_cover_the_file(case, memory_alignment, cut_nbytes, data):
    archive, wanted, _ = case
    shifts = data.draw(st.lists(st.sampled_from([0, 1, 64, 4096]), min_size=len(wanted), max_size=len(wanted)))
    addresses = (1 << 45) * (1 + np.arange(len(wanted))) + wanted + np.array(shifts, np.int64)
    extents = plan_extents(archive, addresses, memory_alignment=memory_alignment, cut_nbytes=cut_nbytes)
    cursor = 0
    for extent in extents:
        assert (extent.file_offset, extent.nbytes % cut_nbytes) == (cursor, 0)
        cursor += extent.nbytes
        if isinstance(extent, Direct):
            start = extent.file_offset - int(archive.data_offsets[extent.record])
            assert 0 <= start < start + extent.nbytes <= archive.nbytes[extent.record]
            assert extent.address == addresses[archive.storages[extent.record]] + start
            assert extent.address % memory_alignment == 0
    assert archive.file_nbytes <= cursor < archive.file_nbytes + cut_nbytes


@given(
    st.integers(1, 50).map(lambda n: 4096 * n), st.integers(1, 50).map(lambda n: 4096 * n), st.lists(st.integers(0, 1 << 21))
)
def test_blocks_partition_the_extents(direct_limit, assembled_limit, nbytes):
    wanted = np.zeros(len(nbytes), np.int64)
    archive = plan("model", b"pickle", np.array(nbytes, np.int64), wanted, "auto")
    extents = plan_extents(archive, (1 << 45) * (1 + np.arange(len(nbytes))), memory_alignment=512, cut_nbytes=4096)
    cursor = 0
    for block in cut_into_blocks(extents, direct_limit, assembled_limit):
        assert block.file_offset == cursor
        assert 0 < block.nbytes <= (direct_limit if isinstance(block, Direct) else assembled_limit)
        cursor += block.nbytes
    assert cursor == sum(extent.nbytes for extent in extents)


@dataclass(frozen=True)
class Recipe:
    """A tensor to make: its length, how far beyond a multiple of 64 its memory begins, and its element type."""

    nbytes: int
    shift: int
    dtype: torch.dtype

    def make(self, seed: int) -> torch.Tensor:
        """Random bytes in memory of the wanted misalignment, as elements of the dtype."""
        numel = self.nbytes // self.dtype.itemsize
        memory = np.random.default_rng(seed).integers(0, 256, self.nbytes + 8192, np.uint8)
        start = -memory.ctypes.data % 64 + self.shift
        if numel == 0:
            return torch.empty(0, dtype=self.dtype)
        return torch.frombuffer(memory[start : start + numel * self.dtype.itemsize], dtype=self.dtype)


recipes = st.builds(
    Recipe,
    st.one_of(
        st.integers(0, 500), st.integers(0, 100_000), st.integers(LARGE_NBYTES, LARGE_NBYTES + 9000), st.just(5 * LARGE_NBYTES)
    ),
    st.sampled_from([0, 0, 0, 64, 512, 4032, 1, 8]),
    st.sampled_from([torch.uint8, torch.int16, torch.int64, torch.complex128]),
)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(recipes, max_size=12),
    st.integers(1, 64).map(lambda number: 4096 * number),
    st.integers(1, 8),
    layouts,
    st.booleans(),
    st.booleans(),
)
def test_any_tensors_make_a_file_that_torch_loads(wanted, block_nbytes, queue_depth, layout, checksum, zero_copy):
    tensors = [recipe.make(seed) for seed, recipe in enumerate(wanted)]
    with MemoryEngine(queue_depth=8) as engine:
        report = fastpersist.save(
            tensors,
            f"{tempfile.gettempdir()}/model.pt",
            engine=engine,
            block_nbytes=block_nbytes,
            queue_depth=queue_depth,
            layout=layout,
            checksum=checksum,
            zero_copy=zero_copy,
        )
        content = engine.contents(report.path)
    assert len(content) == report.file_nbytes
    assert report.nbytes == report.zero_copy_nbytes + report.copied_nbytes == sum(t.nbytes for t in tensors)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert len(archive.namelist()) == report.records
        if checksum:
            assert archive.testzip() is None
    loaded = torch.load(io.BytesIO(content))
    assert [t.dtype for t in loaded] == [t.dtype for t in tensors]
    assert [t.numpy().tobytes() for t in loaded] == [t.numpy().tobytes() for t in tensors]
