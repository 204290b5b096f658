"""How others save, each with the file synced, where it is installed; their best settings, as far as they are known.

test_save_tuned            torch.save without checksums, through pinned memory where there is a GPU
test_dcp_save              torch.distributed.checkpoint in one process
test_safetensors_save      tensors only; those that share memory once
test_ds_aio_fast_save      DeepSpeed's FastFileWriter, which needs no GPU
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from comparison import LeftOut
from peer_deepspeed import DeepSpeedWriter
from saving import Saver, crc32_of_torch, sync_file, torch_save_fsync
from verifying import compare, dotted, named_tensors, verify_in_memory

SAFETENSORS_MISSING = "safetensors is not installed: pip install safetensors"
DCP_MISSING = "this torch was built without torch.distributed"


def peer_savers() -> Iterator[Saver | LeftOut]:
    """All of them; in place of what cannot run the reason."""
    yield Saver("test_save_tuned", _torch_save_tuned)
    if torch.distributed.is_available():
        yield Saver("test_dcp_save", dcp_save, verify=_verify_dcp)
    else:
        yield LeftOut("test_dcp_save", DCP_MISSING)
    if importlib.util.find_spec("safetensors"):
        yield Saver("test_safetensors_save", safetensors_save, verify=_verify_safetensors)
    else:
        yield LeftOut("test_safetensors_save", SAFETENSORS_MISSING)
    yield deepspeed_saver()


def _torch_save_tuned(obj: object, path: Path) -> None:
    with crc32_of_torch(False), _pinned_memory():
        torch_save_fsync(obj, path)


def _pinned_memory() -> contextlib.AbstractContextManager[object]:
    if not torch.cuda.is_available() or importlib.util.find_spec("torch.utils.serialization") is None:  # torch 2.6 has none
        return contextlib.nullcontext()
    from torch.utils.serialization import config

    patched: contextlib.AbstractContextManager[object] = config.patch({"save.use_pinned_memory_for_d2h": True})
    return patched


def dcp_save(obj: object, path: Path) -> None:
    """A folder; every file in it is synced."""
    from torch.distributed import checkpoint

    with _no_single_process_warning():
        checkpoint.save(obj, storage_writer=checkpoint.FileSystemWriter(path, sync_files=True), no_dist=True)


def dcp_load(targets: dict[object, object], path: Path) -> None:
    """Read the tensors of the folder ``path`` into those of ``targets``."""
    from torch.distributed import checkpoint

    with _no_single_process_warning():
        checkpoint.load(targets, checkpoint_id=path, no_dist=True)


@contextlib.contextmanager
def _no_single_process_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _verify_dcp(path: Path, expected: object) -> None:
    """Tensor by tensor, so that memory need not hold the whole twice."""
    for keys, tensor in named_tensors(expected):
        target = torch.empty_like(tensor, device="cpu")
        nested: dict[object, object] = {keys[-1]: target}
        for key in reversed(keys[:-1]):
            nested = {key: nested}
        dcp_load(nested, path)
        compare(target, tensor.detach().cpu(), dotted(keys))


def distinct_tensors(obj: object) -> dict[str, torch.Tensor]:
    """Tensors by dotted path; of those that are the same view of the same memory the first: the format has no sharing."""
    found: dict[object, tuple[str, torch.Tensor]] = {}
    for keys, tensor in named_tensors(obj):
        # Without elements there is no memory by which to tell them apart.
        same: object = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.dtype) if tensor.numel() else keys
        found.setdefault(same, (dotted(keys), tensor.detach()))
    return dict(found.values())


def safetensors_save(obj: object, path: Path) -> None:
    """What is no tensor is left out, which favours it a little."""
    from safetensors.torch import save_file

    save_file(distinct_tensors(obj), path)
    sync_file(path)


def _verify_safetensors(path: Path, expected: object) -> None:
    from safetensors import safe_open

    tensors: Mapping[str, torch.Tensor] = distinct_tensors(expected)
    with safe_open(path, framework="pt") as file:
        compare(sorted(file.keys()), sorted(tensors), "the list of tensors")
        for name, tensor in tensors.items():
            compare(file.get_tensor(name), tensor.cpu(), name)


@functools.cache
def deepspeed_saver() -> Saver | LeftOut:
    """DeepSpeed's, or why it cannot run. Its library is built once, and its buffer is taken once."""
    tag = "test_ds_aio_fast_save"
    if importlib.util.find_spec("deepspeed") is None:
        return LeftOut(tag, "deepspeed is not installed: pip install deepspeed (and libaio-dev, a C++ compiler, ninja)")
    try:
        writer = DeepSpeedWriter()
    except Exception as error:  # it compiles its library here, and whatever goes wrong there should not end the benchmark
        return LeftOut(tag, f"deepspeed cannot build or open its writer: {error!r:.200}")
    return Saver(tag, writer.save, verify=verify_in_memory, copies=1)
