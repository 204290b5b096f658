"""One specimen of every kind of object that torch can save.

A specimen is a function, so that equal objects can be made anew, elsewhere in memory. Everything is seeded: two calls
give equal objects. The classes live here, in a module with a stable name, because pickle finds classes by name.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

LARGE_NUMEL = 100_003  # as float32 a little over the size from which a storage is written where it lies

DTYPE_NAMES = (
    "float64", "float32", "float16", "bfloat16",
    "float8_e5m2", "float8_e4m3fn", "float8_e5m2fnuz", "float8_e4m3fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool",
    "complex32", "complex64", "complex128", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2",
)  # fmt: skip
"""Dtypes that a plain tensor can have and torch can save; a torch that lacks one skips it."""

Make = Callable[[], object]
SPECIMENS: dict[str, Make] = {}


def specimen(make: Make) -> Make:
    """Enter a function under its own name."""
    SPECIMENS[make.__name__] = make
    return make


def seeded(seed: int = 0) -> torch.Generator:
    """A generator of its own: specimens do not depend on which others were made before."""
    return torch.Generator().manual_seed(seed)


def randoms(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random numbers that are the same at each call."""
    return torch.randn(*shape, generator=seeded(seed), dtype=dtype)


def random_bytes(nbytes: int, seed: int = 0) -> torch.Tensor:
    """Every byte value, NaN patterns included: only bitwise copies survive."""
    return torch.randint(0, 256, (nbytes,), generator=seeded(seed), dtype=torch.uint8)


def tensor_of(dtype: torch.dtype, numel: int = 48, seed: int = 0) -> torch.Tensor:
    """A tensor of any dtype, made from bytes, since most dtypes have no random numbers of their own."""
    source = random_bytes(numel * dtype.itemsize, seed) if dtype is not torch.bool else random_bytes(numel, seed) % 2
    return torch.empty(0, dtype=dtype).set_(source.untyped_storage(), 0, (numel,), (1,))


def _add_dtypes() -> None:
    for name in DTYPE_NAMES:
        if dtype := getattr(torch, name, None):
            SPECIMENS[f"dtype_{name}"] = lambda dtype=dtype: tensor_of(dtype)


_add_dtypes()


# Strided tensors: one memory, many ways to see it.


@specimen
def views() -> object:
    base = randoms(8, 6)
    return {"row": base[3], "column": base[:, 2], "strided": base[::2, ::3], "whole": base, "flat": base.view(-1)}


@specimen
def view_without_its_base() -> object:
    return randoms(100)[17:23]


@specimen
def overlapping_views() -> object:
    base = torch.arange(20.0)
    return [base[0:10], base[5:15], base.as_strided((4, 4), (2, 1)), base.unfold(0, 5, 2)]


@specimen
def transposed() -> object:
    return [randoms(3, 5).T, randoms(2, 3, 4).permute(2, 0, 1), randoms(2, 3, 4, 5).to(memory_format=torch.channels_last)]


@specimen
def expanded() -> object:
    return [torch.arange(3).expand(4, 3), torch.tensor(2.5).expand(5)]


@specimen
def zero_dimensional() -> object:
    return [torch.tensor(3.25), torch.tensor(7), torch.tensor(True), randoms(4)[2]]


@specimen
def empty() -> object:
    return {"(0,)": torch.empty(0), "(0, 3)": torch.empty(0, 3), "(2, 0, 4)": torch.empty(2, 0, 4, dtype=torch.int64)}


@specimen
def empty_between_full() -> object:
    none = torch.empty(0)
    return [torch.arange(3), none, torch.arange(4), none, none.view(0, 1), torch.arange(5), torch.empty(0, 3)]


@specimen
def empty_view_of_full() -> object:
    return torch.arange(10.0)[4:4]


@specimen
def shared_storages_with_keys_of_two_digits() -> object:
    bases = [randoms(5, seed=seed) for seed in range(23)]
    return [base[1:] for base in bases] + [base[:-1] for base in reversed(bases)]


@specimen
def same_tensor_twice() -> object:
    once = randoms(4)
    return {"first": once, "second": once, "inside": [once, once]}


@specimen
def same_untyped_storage_twice() -> object:
    once = random_bytes(33).untyped_storage()
    return [once, once, torch.empty(0, dtype=torch.uint8).set_(once)]


@specimen
def requires_grad() -> object:
    return [randoms(3).requires_grad_(), torch.tensor(1.0, requires_grad=True)]


@specimen
def result_with_history() -> object:
    leaf = randoms(3).requires_grad_()
    return [leaf, (leaf * 2).sum()]


@specimen
def conjugate() -> object:
    return [randoms(6, dtype=torch.complex64).conj(), randoms(2, 3, dtype=torch.complex128).conj().T]


@specimen
def negative() -> object:
    return [torch._neg_view(randoms(6)), randoms(6, dtype=torch.complex64).conj().imag]


@specimen
def conjugate_and_negative() -> object:
    return torch._neg_view(randoms(6, dtype=torch.complex64).conj())


@specimen
def python_attributes() -> object:
    tensor = randoms(3)
    tensor.comment = "ours"
    tensor.scale = torch.tensor(0.5)
    return [tensor, tensor]


@specimen
def attribute_that_refers_back() -> object:
    tensor = randoms(3)
    tensor.partner = [tensor]
    return tensor


# Large storages, and memory that lies awkwardly: the ones that are written where they lie, and the ones that cannot be.


@specimen
def large() -> object:
    return randoms(LARGE_NUMEL)


@specimen
def large_among_small() -> object:
    sizes = [3, LARGE_NUMEL, 0, 1, LARGE_NUMEL + 1021, 700, LARGE_NUMEL + 4096, 5]
    return {f"layer.{index}": randoms(size, seed=index) for index, size in enumerate(sizes)}


@specimen
def large_views() -> object:
    base = randoms(3, LARGE_NUMEL)
    return [base[1], base[2, 5:], base.T]


@specimen
def large_at_every_address() -> object:
    nbytes = 4 * LARGE_NUMEL
    keeper = bytearray(nbytes + 4160)
    keeper[:] = random_bytes(len(keeper)).numpy().tobytes()
    return [_placed(keeper, shift, nbytes) for shift in (0, 4, 64, 100, 512, 4096)]


def _placed(keeper: bytearray, shift: int, nbytes: int) -> torch.Tensor:
    # Each gets memory of its own: storages that begin at different places must not overlap by accident.
    return torch.frombuffer(bytearray(keeper), dtype=torch.uint8, offset=shift, count=nbytes)


@specimen
def memory_from_numpy() -> object:
    return [torch.from_numpy(np.arange(5.0)), torch.from_numpy(np.arange(24).reshape(4, 6)[1:, ::2])]


@specimen
def memory_shared_between_processes() -> object:
    return [randoms(5).share_memory_(), randoms(LARGE_NUMEL).share_memory_()]


@specimen
def storage_longer_than_its_tensor() -> object:
    return torch.empty(0, dtype=torch.float32).set_(random_bytes(400).untyped_storage(), 10, (3,), (7,))


# Tensors of other layouts.


@specimen
def sparse_coo() -> object:
    dense = torch.tensor([[0.0, 1.5], [2.5, 0.0]])
    indices = torch.tensor([[0, 0], [1, 1]])
    return {
        "coalesced": dense.to_sparse(),
        "not coalesced": torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0]), (2, 2), check_invariants=True),
        "hybrid": torch.sparse_coo_tensor(torch.tensor([[0, 2]]), randoms(2, 3), (4, 3), check_invariants=True),
        "empty": torch.sparse_coo_tensor(size=(3, 3), check_invariants=True),
    }


@specimen
def sparse_compressed() -> object:
    dense = torch.tensor([[0.0, 1.0, 0.0, 2.0], [0.0, 3.0, 0.0, 4.0], [5.0, 0.0, 0.0, 0.0], [6.0, 0.0, 7.0, 0.0]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # these layouts are in beta, torch says
        return {
            "csr": dense.to_sparse_csr(),
            "csc": dense.to_sparse_csc(),
            "bsr": dense.to_sparse_bsr((2, 2)),
            "bsc": dense.to_sparse_bsc((2, 2)),
        }


@specimen
def nested_strided() -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype, torch says
        return torch.nested.nested_tensor([randoms(2, 3), randoms(4, 3, seed=1)])


@specimen
def nested_jagged() -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype, torch says
        return torch.nested.nested_tensor([randoms(2, 3), randoms(4, 3, seed=1)], layout=torch.jagged)


@specimen
def meta() -> object:
    return [torch.empty(3, 4, device="meta"), nn.Parameter(torch.empty(2, device="meta"))]


@specimen
def meta_beside_real() -> object:
    return [torch.arange(3), torch.empty(1 << 20, device="meta"), torch.arange(4)]


def _quantize(make: Callable[[], object]) -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantized tensors are deprecated, torch says
        return make()


@specimen
def quantized_per_tensor() -> object:
    return _quantize(
        lambda: {
            name: torch.quantize_per_tensor(randoms(6, 4), 0.1, 3, getattr(torch, name))
            for name in ("qint8", "quint8", "qint32")
        }
    )


@specimen
def quantized_per_channel() -> object:
    scales, zeros = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 1, 2])
    return _quantize(
        lambda: {
            name: torch.quantize_per_channel(randoms(3, 4), scales, zeros, 0, getattr(torch, name))
            for name in ("qint8", "quint8", "qint32")
        }
    )


@specimen
def quantized_to_half_bytes() -> object:
    scales, zeros = torch.full((3,), 0.5), torch.zeros(3)
    return _quantize(lambda: torch.quantize_per_channel(randoms(3, 8), scales, zeros, 0, torch.quint4x2))


@specimen
def quantized_view() -> object:
    return _quantize(lambda: torch.quantize_per_tensor(randoms(6, 4), 0.1, 0, torch.qint8)[2:4].T)


# Storages.


@specimen
def untyped_storage() -> object:
    return random_bytes(37).untyped_storage()


@specimen
def empty_untyped_storage() -> object:
    return torch.UntypedStorage(0)


@specimen
def typed_storage() -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # typed storages are deprecated, torch says
        return [torch.FloatStorage([1.0, 2.0, 3.0]), torch.LongStorage([4, 5]), torch.BoolStorage([True, False])]


@specimen
def typed_storage_beside_its_tensor() -> object:
    tensor = randoms(5)
    return [tensor, tensor._typed_storage()]


# Modules, optimizers, subclasses.


class Net(nn.Module):
    """A module with tied weights, buffers and a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight
        self.temperature = 0.7

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


def trained_net() -> tuple[Net, torch.optim.Optimizer]:
    """A net after one real step of its optimizer."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    net(randoms(8, 4)).square().mean().backward()
    optimizer.step()
    return net, optimizer


@specimen
def module() -> object:
    return trained_net()[0]


@specimen
def state_dict() -> object:
    return trained_net()[0].state_dict()


@specimen
def training_state() -> object:
    net, optimizer = trained_net()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up)
    return {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(), "step": 1}


def warm_up(step: int) -> float:
    """A learning rate's factor."""
    return min(1.0, step / 10)


@specimen
def optimizer() -> object:
    return trained_net()[1]


@specimen
def parameters() -> object:
    frozen = nn.Parameter(randoms(3), requires_grad=False)
    named = nn.Parameter(randoms(2))
    named.tag = "with an attribute"
    return [nn.Parameter(randoms(2, 3)), frozen, named, nn.Buffer(randoms(2))]


@specimen
def parameter_list() -> object:
    return nn.ParameterList([randoms(1), randoms(2)])


@specimen
def uninitialized_parameter() -> object:
    return [nn.UninitializedParameter(), nn.UninitializedBuffer(requires_grad=False)]


class Tagged(torch.Tensor):
    """A subclass with state of its own."""


class Slotted(torch.Tensor):
    """A subclass that keeps its state in slots."""

    __slots__ = ("unit",)


@specimen
def subclass() -> object:
    tagged = randoms(4).as_subclass(Tagged)
    tagged.origin = "somewhere"
    slotted = randoms(4).as_subclass(Slotted)
    slotted.unit = "m/s"
    return [tagged, tagged, slotted, randoms(LARGE_NUMEL).as_subclass(Tagged)]


# Everything else that pickles.


class Color(enum.Enum):
    """An enumeration: a class that pickle finds by name."""

    RED = 1
    BLUE = "b"


@dataclasses.dataclass
class Settings:
    """A dataclass that holds a tensor."""

    name: str
    weights: torch.Tensor
    nested: Settings | None = None


Point = collections.namedtuple("Point", ["x", "y"])


@specimen
def plain_objects() -> object:
    return {"int": [0, -1, 255, 65536, 2**31, -(2**63), 10**30], "float": [0.1, -0.0, float("inf")], "none": None, 3: True}


@specimen
def text_and_bytes() -> object:
    return ["", "a" * 300, "naïve 日本語 🔥", "PK\x03\x04", b"", b"\0\xff" * 200, b"PK\x05\x06"]


@specimen
def text() -> object:
    return ["", "a" * 300, "naïve 日本語 🔥", "PK\x03\x04"]


@specimen
def containers() -> object:
    shared = [1, 2]
    return [(), (1,), {1, 2, 3}, [shared, shared], {"deep": {"er": {"est": (shared,)}}}, bytearray(b"xy")]


@specimen
def frozen_set() -> object:
    return frozenset({4, 5})


@specimen
def ordered_dict() -> object:
    return collections.OrderedDict([("z", randoms(2)), ("a", randoms(3)), ("m", collections.OrderedDict())])


@specimen
def other_mappings() -> object:
    return [collections.defaultdict(list, {"k": [1]}), collections.Counter("abca")]


@specimen
def counter() -> object:
    return collections.Counter("abca")


@specimen
def non_ascii_keys() -> object:
    return {"schönes.gewicht": randoms(2), "重み": randoms(3), "🔥": {"ключ": torch.arange(2)}, "": torch.arange(1)}


@specimen
def deep_nesting() -> object:
    inner: object = randoms(2)
    for level in range(120):
        inner = [inner] if level % 2 else {"inner": inner}
    return inner


@specimen
def cycle() -> object:
    ring: list[object] = [randoms(2)]
    ring.append(ring)
    return ring


@specimen
def nothing() -> object:
    return None


@specimen
def torch_values() -> object:
    return {
        "size": torch.Size([2, 3]),
        "device": [torch.device("cpu"), torch.device("cuda", 1), torch.device("meta")],
        "dtype": [torch.bfloat16, torch.uint16, torch.complex32],
        "layout": torch.sparse_csr,
    }


@specimen
def generator_state() -> object:
    return seeded(3).get_state()


@specimen
def generator() -> object:
    return seeded(5)


@specimen
def numpy_values() -> object:
    return {
        "array": np.arange(12, dtype=np.int16).reshape(3, 4),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "scalars": [np.float32(1.5), np.int64(-3), np.bool_(True)],
        "text": np.array(["a", "bc"]),
        "objects": np.array([{"k": 1}, None], dtype=object),
    }


@specimen
def library_objects() -> object:
    return [
        decimal.Decimal("1.10"), datetime.datetime(2024, 2, 29, 12, 30), pathlib.PurePosixPath("a/b"), Color.BLUE, range(3),
        complex(1, -2), slice(1, 2),
    ]  # fmt: skip


@specimen
def own_classes() -> object:
    settings = Settings("outer", randoms(3), Settings("inner", randoms(2)))
    return [settings, settings, Point(1, randoms(2)), Color.RED, Settings, warm_up]


def make(name: str) -> Any:
    """A new object of the kind ``name``."""
    return SPECIMENS[name]()
