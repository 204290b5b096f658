"""DeepSpeed saving and loading through fastpersist; in processes of their own, as DeepSpeed takes over what it runs in."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")

# Every fact in the printed JSON is what one test below looks at.
SCENARIO = """
import json, pathlib, sys
import torch, deepspeed
import deepspeed.runtime.engine as runtime
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
from fastpersist.integrations.deepspeed import FastPersistCheckpointEngine, install
import fastpersist

folder, facts = pathlib.Path(sys.argv[1]), {}
deepspeed.init_distributed(dist_backend="gloo", verbose=False)

def make(stage=0):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.GELU(), torch.nn.Linear(300, 1))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    }
    engine, *_ = deepspeed.initialize(model=module, config=config)
    engine.backward(engine(torch.ones(1, 64)).sum())
    engine.step()
    return engine

def tensors(obj):
    if isinstance(obj, torch.Tensor):
        return [obj]
    values = obj.values() if isinstance(obj, dict) else obj if isinstance(obj, (list, tuple)) else ()
    return [tensor for value in values for tensor in tensors(value)]

def state(engine):
    return tensors([dict(engine.module_state_dict()), engine.optimizer.state_dict()])

def same_after(engine, load):
    before = [tensor.detach().clone() for tensor in state(engine)]
    with torch.no_grad():
        for tensor in state(engine):
            tensor.zero_()
    load()
    return len(before) > 4 and all(torch.equal(a, b) for a, b in zip(before, state(engine), strict=True))

undo = install(deepspeed, engine="posix")
engine = make()
facts["installed"] = type(engine.checkpoint_engine).__name__
engine.save_checkpoint(folder / "a", tag="t", client_state={"note": 7})
facts["files"] = {str(p.relative_to(folder / "a")): fastpersist.inspect(p).torch_offsets for p in (folder / "a").rglob("*.pt")}
facts["latest"] = (folder / "a" / "latest").read_text()
facts["back"] = same_after(engine, lambda: engine.load_checkpoint(folder / "a"))
facts["client_state"] = engine.load_checkpoint(folder / "a")[1]["note"]
undo()
stock = make()
facts["undone"] = type(stock.checkpoint_engine).__name__
facts["stock_reads_ours"] = same_after(stock, lambda: stock.load_checkpoint(folder / "a"))
stock.save_checkpoint(folder / "b", tag="t")
facts["ours_reads_stock"] = same_after(engine, lambda: engine.load_checkpoint(folder / "b"))

stock.save_non_zero_checkpoint = False
undo = install(stock)
facts["engine_installed"] = [type(stock.checkpoint_engine).__name__, stock.save_non_zero_checkpoint]
undo()
facts["engine_undone"] = [type(stock.checkpoint_engine).__name__, stock.save_non_zero_checkpoint]

zero = make(stage=1)
install(zero)
zero.save_checkpoint(folder / "z")
facts["zero_files"] = len(list((folder / "z").rglob("*.pt")))
facts["zero_back"] = same_after(zero, lambda: zero.load_checkpoint(folder / "z"))

ours = FastPersistCheckpointEngine(None)
facts["methods"] = sorted(
    name for name in vars(CheckpointEngine) if not name.startswith("_") and name not in vars(FastPersistCheckpointEngine)
)
facts["answers"] = [
    ours.is_data_parallel_writer(0), ours.is_data_parallel_writer(1), ours.is_decoupled(), ours.get_commit_info(),
    ours.preserves_storage_sharing(), ours.set_commit_info(None), ours.cleanup(),
]
ours.makedirs(folder / "m" / "n", exist_ok=True)
ours.save({"set": {1, 2}, "path": pathlib.PurePosixPath("x"), "t": torch.arange(3)}, folder / "m" / "n" / "o.pt")
loaded = ours.load(folder / "m" / "n" / "o.pt", map_location=lambda storage, location: storage)
facts["any_object"] = [sorted(loaded["set"]), str(loaded["path"]), loaded["t"].tolist()]
facts["commit"] = ours.commit(CheckpointCommitInfo(tag="n", save_dir=str(folder / "m"), save_latest=False))
for name, call in {
    "wrong_target": lambda: install(object()),
    "wrong_engine": lambda: install(deepspeed, engine="nonesuch"),
    "missing": lambda: ours.load(folder / "nonesuch.pt"),
    "no_folder": lambda: ours.save({}, folder / "nonesuch" / "x.pt"),
}.items():
    try:
        call()
    except Exception as error:
        facts[name] = type(error).__name__
print("FACTS " + json.dumps(facts))
"""


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the scenario saw."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment = os.environ | {name: str(value) for name, value in launcher.items()} | {"DS_ACCELERATOR": "cpu"}
    # DeepSpeed compiles a library at first use, for minutes: not into the cache that is new for each run of the tests.
    environment.setdefault("TORCH_EXTENSIONS_DIR", str(Path.home() / ".cache" / "torch_extensions" / "fastpersist-tests"))
    command = [sys.executable, "-c", SCENARIO, str(tmp_path_factory.mktemp("deepspeed"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("FACTS "))
    found: dict[str, Any] = json.loads(line.removeprefix("FACTS "))
    return found


@needs_deepspeed
def test_installing_in_the_module_and_undoing_it(facts: dict[str, Any]) -> None:
    assert facts["installed"] == "FastPersistCheckpointEngine"
    assert facts["undone"] == "TorchCheckpointEngine"


@needs_deepspeed
def test_installing_in_an_engine_decides_again_who_writes(facts: dict[str, Any]) -> None:
    assert facts["engine_installed"] == ["FastPersistCheckpointEngine", True]
    assert facts["engine_undone"] == ["TorchCheckpointEngine", False]


@needs_deepspeed
def test_a_checkpoint_comes_back_through_deepspeed(facts: dict[str, Any]) -> None:
    assert facts["files"] == {"t/mp_rank_00_model_states.pt": "read"}
    assert facts["latest"] == "t"
    assert facts["back"] is True
    assert facts["client_state"] == 7


@needs_deepspeed
def test_zero_saves_its_files_and_loads_them(facts: dict[str, Any]) -> None:
    assert facts["zero_files"] == 2
    assert facts["zero_back"] is True


@needs_deepspeed
def test_each_writer_reads_what_the_other_wrote(facts: dict[str, Any]) -> None:
    assert facts["stock_reads_ours"] is True
    assert facts["ours_reads_stock"] is True


@needs_deepspeed
def test_every_method_of_the_interface_is_our_own(facts: dict[str, Any]) -> None:
    assert facts["methods"] == []
    assert facts["answers"] == [True, False, False, None, True, None, None]
    assert facts["commit"] is True


@needs_deepspeed
def test_objects_of_any_class_are_loaded(facts: dict[str, Any]) -> None:
    assert facts["any_object"] == [[1, 2], "x", [0, 1, 2]]


@needs_deepspeed
def test_mistakes_are_told(facts: dict[str, Any]) -> None:
    assert facts["wrong_target"] == "TypeError"
    assert facts["wrong_engine"] == "ValueError"
    assert facts["missing"] == "FileNotFoundError"
    assert facts["no_folder"] == "FileNotFoundError"


def test_without_deepspeed_the_import_names_the_remedy(tmp_path: Path) -> None:
    script = "import sys; sys.modules['deepspeed'] = None\nimport fastpersist.integrations.deepspeed"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1
    assert "ImportError: fastpersist.integrations.deepspeed needs DeepSpeed: pip install deepspeed" in done.stderr
