"""The guard: what only a step changes is not copied, and the step waits; all else is saved as it was at the call."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fastpersist
from fastpersist import PendingSave, guarding
from fastpersist.memory.staging import shared_staging
from tests.gated import Call, Gate, wait_until_idle

BLOCK_NBYTES = 65536
INPUTS = 300

# A hang is a failure like any other here: it must end the test, and not the run.
pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_left")]

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": torch.optim.AdamW,
    "AdamW, foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "AdamW, amsgrad, lr in a tensor": lambda parameters: torch.optim.AdamW(
        parameters, lr=torch.tensor(0.001), amsgrad=True, foreach=False
    ),
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, max_iter=3),
}


class Training:
    """A model with BatchNorm, its moving average, an optimizer with a schedule, and one step done."""

    def __init__(self, make_optimizer: MakeOptimizer) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(INPUTS, INPUTS), torch.nn.BatchNorm1d(INPUTS), torch.nn.Linear(INPUTS, 7, bias=False)
        )
        self.average = torch.optim.swa_utils.AveragedModel(self.model, use_buffers=True)
        self.optimizer = make_optimizer(self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        self.scaler = torch.amp.GradScaler(device="cpu", growth_interval=1)  # it changes with every step
        self.step()
        self.between_steps()

    def loss(self) -> torch.Tensor:
        """A forward and a backward pass, which change the buffers and the gradients."""
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.model(torch.randn(5, INPUTS)).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def step(self) -> None:
        self.optimizer.step(self.loss)

    def scaled_step(self) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(self.model(torch.randn(5, INPUTS)).square().mean()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def between_steps(self) -> None:
        """All that changes between two steps."""
        self.loss()
        self.average.update_parameters(self.model)
        self.schedule.step()

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": [self.scaler.state_dict(), self.scaler._scale],
            "gradients": [parameter.grad for parameter in self.model.parameters()],
        }


def save(obj: Any, path: Path, **options: Any) -> PendingSave:
    """async_save without a snapshot, in small blocks, all of them at the gate at once."""
    settings = {"engine": "gated", "block_nbytes": BLOCK_NBYTES, "queue_depth": 256, "durable": False, "snapshot": False}
    return fastpersist.async_save(obj, path, **{**settings, **options})


def assert_equal(found: Any, expected: Any) -> None:
    """Equal through all levels, tensors bit for bit."""
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_equal(found[key], value)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    else:
        assert found == expected


def step_in_thread(
    optimizer: torch.optim.Optimizer, step: Callable[[], object], pending: PendingSave
) -> tuple[Call, list[bool]]:
    """Take a step in another thread; the list tells whether the save had let go when the step went on."""
    seen: list[bool] = []
    handle = optimizer.register_step_pre_hook(lambda *_: seen.append(pending.staged()))  # called after that of the save

    def take() -> None:
        step()
        handle.remove()

    return Call(take), seen


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_step_waits_and_everything_is_saved_as_it_was(tmp_path: Path, gate: Gate, name: str) -> None:
    training = Training(OPTIMIZERS[name])
    expected = copy.deepcopy(training.state())
    gate.close()
    pending = save(training.state(), tmp_path / "a.pt", guard=training.optimizer)
    training.between_steps()
    gate.wait_until_reached()
    assert not pending.staged()
    call, seen = step_in_thread(training.optimizer, training.step, pending)
    assert not call.returned.wait(0.05)
    assert_equal(
        [parameter.detach() for parameter in training.model.parameters()],
        [expected["model"][key] for key, _ in training.model.named_parameters()],
    )
    gate.open()
    call.result()
    assert seen[0] is True
    report = pending.result()
    assert_equal(torch.load(tmp_path / "a.pt", weights_only=False), expected)
    assert report.zero_copy_nbytes + report.copied_nbytes == report.nbytes


def test_a_step_of_a_gradient_scaler_waits(tmp_path: Path, gate: Gate) -> None:
    training = Training(OPTIMIZERS["SGD"])
    training.scaled_step()
    expected = copy.deepcopy(training.state())
    gate.close()
    pending = save(training.state(), tmp_path / "a.pt", guard=training.optimizer)
    gate.wait_until_reached()
    call, seen = step_in_thread(training.optimizer, training.scaled_step, pending)
    assert not call.returned.wait(0.05)
    gate.open()
    call.result()
    assert seen == [True]
    assert pending.wait()
    assert_equal(torch.load(tmp_path / "a.pt"), expected)


def test_several_optimizers(tmp_path: Path, gate: Gate) -> None:
    trainings = [Training(OPTIMIZERS["SGD"]), Training(OPTIMIZERS["AdamW"])]
    expected = copy.deepcopy([training.state() for training in trainings])
    gate.close()
    guard = (training.optimizer for training in trainings)
    pending = save([training.state() for training in trainings], tmp_path / "a.pt", guard=guard)
    gate.wait_until_reached()
    calls = [step_in_thread(training.optimizer, training.step, pending) for training in trainings]
    assert not any(call.returned.wait(0.05) for call, _ in calls)
    gate.open()
    for call, seen in calls:
        call.result()
        assert seen[0] is True
    assert pending.wait()
    assert_equal(torch.load(tmp_path / "a.pt"), expected)


def test_an_optimizer_that_is_not_guarded_does_not_wait(tmp_path: Path, gate: Gate) -> None:
    guarded, free = Training(OPTIMIZERS["SGD"]), Training(OPTIMIZERS["SGD"])
    both = {"guarded": guarded.state(), "free": free.state()}
    expected = copy.deepcopy(both)
    gate.close()
    pending = save(both, tmp_path / "a.pt", guard=guarded.optimizer)
    gate.wait_until_reached()
    free.step()  # what it changes has been copied
    assert not pending.staged()
    gate.open()
    assert pending.wait()
    assert_equal(torch.load(tmp_path / "a.pt"), expected)


def test_guarded_storages_are_not_copied(tmp_path: Path, gate: Gate) -> None:
    parameter = torch.nn.Parameter(torch.ones(300_000))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    parameter.sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    parameter.grad = None
    pending = save({"parameter": parameter, "optimizer": optimizer.state_dict()}, tmp_path / "a.pt", guard=optimizer)
    assert shared_staging().buffers() == []
    assert pending.result().zero_copy_nbytes > 2 * (1_200_000 - 2 * 4096)
    gate.close()
    other = torch.ones(300_000)
    pending = save({"parameter": parameter, "other": other}, tmp_path / "a.pt", guard=optimizer)
    other.zero_()
    gate.wait_until_reached()
    assert gate.written_from(other.data_ptr(), 1_200_000) == 0
    (buffer,) = shared_staging().buffers()
    assert 1_200_000 <= buffer.nbytes < 1_200_000 + 4096
    gate.open()
    assert pending.result().copied_nbytes >= 1_200_000
    assert torch.load(tmp_path / "a.pt")["other"].eq(1).all()


def test_what_is_not_guarded_and_does_not_fit_is_written_before_the_call_returns(tmp_path: Path, gate: Gate) -> None:
    parameter, other = torch.nn.Parameter(torch.ones(300_000)), torch.ones(300_000)
    optimizer = torch.optim.SGD([parameter])
    gate.close()
    obj = {"other": other, "parameter": parameter}

    def call() -> PendingSave:
        pending = save(obj, tmp_path / "a.pt", guard=optimizer, max_staging_nbytes=0)
        other.zero_()
        return pending

    calling = Call(call)
    gate.wait_until_reached()
    assert not calling.returned.wait(0.05)
    gate.open()
    assert calling.result().wait()
    assert torch.load(tmp_path / "a.pt")["other"].eq(1).all()


@pytest.mark.parametrize("end", ["failure", "cancel"])
def test_a_save_that_does_not_succeed_lets_the_step_go_on(tmp_path: Path, gate: Gate, end: str) -> None:
    training = Training(OPTIMIZERS["AdamW"])
    gate.close()
    pending = save(training.state(), tmp_path / "a.pt", guard=training.optimizer)
    gate.wait_until_reached()
    call = Call(training.step)
    assert not call.returned.wait(0.05)
    if end == "cancel":
        assert pending.cancel()
    else:
        gate.failing = lambda _: 5
    gate.open()
    call.result()
    assert pending.exception() is not None
    training.step()


def test_hooks_do_not_gather_and_those_of_others_stay(tmp_path: Path, gate: Gate) -> None:
    training = Training(OPTIMIZERS["SGD"])
    steps: list[str] = []
    training.optimizer.register_step_pre_hook(lambda *_: steps.append("before"))
    training.optimizer.register_step_post_hook(lambda *_: steps.append("after"))
    hooks = training.optimizer._optimizer_step_pre_hooks
    for turn in range(50):
        pending = save({"model": training.model.state_dict()}, tmp_path / "a.pt", guard=training.optimizer)
        assert len(hooks) <= 2
        training.step()
        assert steps == ["before", "after"] * (turn + 1)
    assert pending.wait()
    assert save({"x": 1}, tmp_path / "a.pt").wait()
    assert len(hooks) == 1
    assert guarding._hooks == []


def test_steps_without_a_save_in_work_do_not_wait(tmp_path: Path) -> None:
    training = Training(OPTIMIZERS["SGD"])
    assert save(training.state(), tmp_path / "a.pt", guard=training.optimizer).wait()
    training.step()
    training.step()


def test_a_guard_keeps_neither_optimizer_nor_model_alive(tmp_path: Path, gate: Gate) -> None:
    training = Training(OPTIMIZERS["SGD"])
    optimizer, model = weakref.ref(training.optimizer), weakref.ref(training.model)
    assert save(training.state(), tmp_path / "a.pt", guard=training.optimizer).wait()
    wait_until_idle()
    del training
    gc.collect()
    assert (optimizer(), model()) == (None, None)


def test_idle_hooks_are_removed_from_several_threads_at_once() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    everybody = threading.Barrier(4)

    def idle() -> bool:
        everybody.wait()  # all have chosen the same hook when the first removes it
        return True

    guarding.hold_next_step([optimizer], lambda: None, idle)
    calls = [Call(guarding.remove_idle_hooks) for _ in range(4)]
    for call in calls:
        call.result()
    assert guarding._hooks == []
    assert not optimizer._optimizer_step_pre_hooks


def test_what_is_guarded() -> None:
    shared = torch.zeros(10)
    parameter, view = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(shared[2:5])
    sparse = torch.zeros(3).to_sparse()
    optimizer = torch.optim.SGD([{"params": [parameter]}, {"params": [view], "lr": torch.tensor(0.1)}])
    nested = torch.zeros(4)
    optimizer.state[parameter] = {"deep": [{"deeper": (nested, 1, "text")}], "sparse": sparse}
    expected = {tensor.untyped_storage()._cdata for tensor in (parameter, shared, nested)}
    assert guarding.guarded_storages([optimizer]) == expected


def test_one_or_several() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    assert guarding.as_optimizers(optimizer) == [optimizer]
    assert guarding.as_optimizers(iter([optimizer, optimizer])) == [optimizer, optimizer]
    for wrong in (1, [1], [optimizer, None], "text"):
        with pytest.raises(TypeError):
            guarding.as_optimizers(wrong)  # type: ignore[arg-type]
