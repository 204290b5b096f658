"""Models built from configurations kept here, with random weights. Nothing is downloaded."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from room import GIB, find_shortage

# Both are read when transformers is imported.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
try:
    from transformers import (
        CLIPVisionConfig,
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        Phi3Config,
        Phi3ForCausalLM,
        PreTrainedModel,
        T5Config,
        T5ForConditionalGeneration,
    )
    from vision_model import VisionLanguageModel
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: install the extra that the benchmarks need, pip install 'fastpersist[bench]'") from error

Model = PreTrainedModel | VisionLanguageModel

_SEQUENCE_LENGTH = 8
# In float16 the default of 1e-8 rounds to zero, and an unused weight becomes 0/0.
_ADAMW_EPSILON = {torch.float32: 1e-8, torch.float16: 1e-6}


class ModelName(enum.StrEnum):
    """What --model takes."""

    TINY_T5 = "tiny-t5"
    GPT2_LARGE = "gpt2-large"
    PHI3 = "phi3"
    PHI3_V = "phi3-v"
    LLAMA3_1B = "llama3-1B"
    AUTO = "auto"


_AUTO_ORDER = (ModelName.GPT2_LARGE, ModelName.TINY_T5)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to build the checkpoint of a model.

    ``optimizer``: with AdamW's state after one step, ``fused`` or not. ``width``: of gpt2-large only, a multiple of its
    20 heads, to have it smaller.
    """

    model: ModelName
    half: bool = False
    optimizer: bool = False
    fused: bool = False
    width: int | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return torch.float16 if self.half else torch.float32


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes that the saved file and the building of its content take."""

    file_nbytes: int
    memory_nbytes: int


def _tiny_t5() -> PreTrainedModel:
    """The shape of t5-efficient-tiny."""
    config = T5Config(d_model=256, d_kv=64, d_ff=1024, num_layers=4, num_heads=4, decoder_start_token_id=0)
    return T5ForConditionalGeneration(config)


def _gpt2_large(width: int = 1280) -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(n_embd=width, n_layer=36, n_head=20))


def _phi3() -> PreTrainedModel:
    """The shape of Phi-3.5-mini."""
    config = Phi3Config(
        vocab_size=32064,
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=32,
        num_attention_heads=32,
        tie_word_embeddings=False,
    )
    return Phi3ForCausalLM(config)


def _phi3_v() -> VisionLanguageModel:
    """The shape of Phi-3-vision: transformers has no class for it, but has its parts."""
    eyes = CLIPVisionConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
        image_size=336,
        patch_size=14,
        projection_dim=768,
    )
    return VisionLanguageModel(eyes, _phi3())


def _llama3_1b() -> PreTrainedModel:
    """The shape of Llama-3.2-1B."""
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


_BUILDERS: dict[ModelName, Callable[[], Model]] = {
    ModelName.TINY_T5: _tiny_t5,
    ModelName.GPT2_LARGE: _gpt2_large,
    ModelName.PHI3: _phi3,
    ModelName.PHI3_V: _phi3_v,
    ModelName.LLAMA3_1B: _llama3_1b,
}


def _build(recipe: Recipe) -> Model:
    return _BUILDERS[recipe.model]() if recipe.width is None else _gpt2_large(recipe.width)


def choose_model(folder: Path, *, half: bool, optimizer: bool) -> tuple[ModelName, str]:
    """What "auto" stands for here, and why: the largest of its candidates that memory and the disk of ``folder`` hold."""
    refusals: list[str] = []
    for name in _AUTO_ORDER:
        wanted = needs(Recipe(name, half=half, optimizer=optimizer))
        shortage = find_shortage(folder, file_nbytes=wanted.file_nbytes, memory_nbytes=wanted.memory_nbytes)
        if shortage is None:
            break
        refusals.append(f"not {name}, for {shortage}")
    return name, "; ".join(refusals) or "memory and disk suffice"


def needs(recipe: Recipe) -> Needs:
    """Counted on a model without memory. An optimizer adds two moments to the file and, while it steps, the gradients."""
    with torch.device("meta"):
        model = _build(recipe)
    weights_nbytes = sum(weight.numel() for weight in model.parameters()) * recipe.dtype.itemsize
    return Needs(
        file_nbytes=weights_nbytes * (3 if recipe.optimizer else 1),
        memory_nbytes=weights_nbytes * (4 if recipe.optimizer else 1) + _largest_temporaries_nbytes(recipe, model),
    )


def _largest_temporaries_nbytes(recipe: Recipe, model: Model) -> int:
    """AdamW works on one weight at a time, through a few temporaries of its size."""
    largest_nbytes = max(weight.numel() for weight in model.parameters()) * recipe.dtype.itemsize
    return 4 * largest_nbytes if recipe.optimizer else 0


def build_checkpoint(recipe: Recipe, device: str) -> dict[str, object]:
    """{"model": state dict} and, if asked for, "optimizer": AdamW's state after a forward, a backward and a step."""
    model = build_model(recipe, device)
    checkpoint: dict[str, object] = {"model": model.state_dict()}
    if recipe.optimizer:
        checkpoint["optimizer"] = _step(model, recipe).state_dict()
    return checkpoint


def build_model(recipe: Recipe, device: str) -> Model:
    """Made in its final type and place: a conversion afterwards would need both in memory."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(recipe.dtype)
    try:
        with torch.device(device):
            return _build(recipe)
    finally:
        torch.set_default_dtype(previous)


def _step(model: Model, recipe: Recipe) -> torch.optim.AdamW:
    """One step on a tiny random batch. The gradients are given up: they are no part of a checkpoint."""
    epsilon = _ADAMW_EPSILON[recipe.dtype]
    optimizer = torch.optim.AdamW(model.parameters(), eps=epsilon, fused=recipe.fused or None)
    tiny_loss(model).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return optimizer


def tiny_loss(model: Model) -> torch.Tensor:
    """The loss of a forward pass over a tiny random batch."""
    tokens = torch.randint(0, model.config.vocab_size, (1, _SEQUENCE_LENGTH), device=model.device)
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def describe(recipe: Recipe, payload: int) -> str:
    """One line for the reader of the figures."""
    state = f", AdamW state{' (fused)' if recipe.fused else ''} after one step" if recipe.optimizer else ""
    width = f", width {recipe.width}" if recipe.width else ""
    return f"model: {recipe.model}{width}, {recipe.dtype}{state}, {payload / GIB:.2f} GiB"
