"""A small transformer that is trained on random tokens, and how long its optimizer had to wait for a save."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_HEAD_WIDTH = 64
_SEQUENCES, _TOKENS = 2, 128  # of one micro-batch
_CALIBRATION_REPETITIONS = 5
# AdamW keeps two averages beside each parameter.
_COPIES = 3


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model: ``hidden`` is a multiple of 64."""

    hidden: int
    layers: int
    vocabulary: int

    def parameter_nbytes(self) -> int:
        """Bytes of all parameters; none of them is allocated."""
        with torch.device("meta"):
            return sum(parameter.nbytes for parameter in Transformer(self).parameters())

    def checkpoint_nbytes(self) -> int:
        """Bytes of parameters and the state of AdamW."""
        return _COPIES * self.parameter_nbytes()

    def training_nbytes(self) -> int:
        """Bytes of parameters, gradients and the state of AdamW."""
        return (_COPIES + 1) * self.parameter_nbytes()


class Transformer(nn.Module):
    """A decoder without dropout."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        heads = max(1, shape.hidden // _HEAD_WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                shape.hidden, heads, 4 * shape.hidden, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"
            )
            for _ in range(shape.layers)
        )
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits for the token after each of ``tokens``."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        logits: torch.Tensor = self.head(hidden)
        return logits


class Trainer:
    """Model and AdamW. ``blocked_seconds``: how long the hooks before the last optimizer step took."""

    def __init__(self, shape: Shape, device: str) -> None:
        self.shape = shape
        self.device = device
        self.model = Transformer(shape).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.micro_batches = 1
        self.steps = 0
        self.blocked_seconds = 0.0

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds; the tensors are those that are trained."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.steps}

    def step(self) -> None:
        """One step of the optimizer; the device is done with it when this returns."""
        for _ in range(self.micro_batches):
            self._accumulate()
        self._update()
        self.optimizer.zero_grad()
        self.steps += 1

    def calibrate(self, step_seconds: float) -> None:
        """Choose the number of micro-batches that makes a step last about ``step_seconds``."""
        self.step()
        batch_seconds, update_seconds = _shortest_seconds(self._accumulate), _shortest_seconds(self._update)
        self.optimizer.zero_grad()
        self.micro_batches = max(1, round((step_seconds - update_seconds) / batch_seconds))

    def _accumulate(self) -> None:
        tokens = torch.randint(self.shape.vocabulary, (_SEQUENCES, _TOKENS + 1), device=self.device)
        logits = self.model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        torch.autograd.backward(loss / self.micro_batches)
        self._synchronize()

    def _update(self) -> None:
        """The hook that is registered last runs last: what passed until then was spent in those of a save."""
        begun: list[float] = []
        handle = self.optimizer.register_step_pre_hook(lambda *_: begun.append(time.perf_counter()))
        started = time.perf_counter()
        self.optimizer.step()
        self._synchronize()
        handle.remove()
        self.blocked_seconds = begun[0] - started

    def _synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def _shortest_seconds(action: Callable[[], None]) -> float:
    """Of some repetitions, since others use the machine as well."""
    seconds: list[float] = []
    for _ in range(_CALIBRATION_REPETITIONS):
        started = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - started)
    return min(seconds)
