"""Objects to save. Their bytes are random: no disk and no filesystem can compress them away."""

from __future__ import annotations

import math

import torch

MIB = 1 << 20
_INT64_LIMIT = 1 << 63

# The tensors of one layer of a decoder with grouped-query attention, hidden size 1024: matrices beside tiny vectors.
_LAYER_SHAPES = {
    "input_layernorm.weight": (1024,),
    "self_attn.q_proj.weight": (1024, 1024),
    "self_attn.k_proj.weight": (256, 1024),
    "self_attn.v_proj.weight": (256, 1024),
    "self_attn.o_proj.weight": (1024, 1024),
    "self_attn.q_norm.weight": (64,),
    "self_attn.k_norm.weight": (64,),
    "post_attention_layernorm.weight": (1024,),
    "mlp.gate_proj.weight": (3584, 1024),
    "mlp.up_proj.weight": (3584, 1024),
    "mlp.down_proj.weight": (1024, 3584),
}
_LAYERS = 27
_VOCABULARY = 80_000


def random_tensor(*shape: int) -> torch.Tensor:
    """A bfloat16 tensor of random bits, in an allocation of its own. The number of elements is rounded up to 4."""
    words = torch.randint(-_INT64_LIMIT, _INT64_LIMIT - 1, (math.ceil(math.prod(shape) / 4),), dtype=torch.int64)
    return words.view(torch.bfloat16)[: math.prod(shape)].view(shape)


def random_tensors(count: int, nbytes_each: int) -> dict[str, torch.Tensor]:
    """``count`` bfloat16 tensors of ``nbytes_each``, a multiple of 8."""
    return {f"tensor.{index:05d}": random_tensor(nbytes_each // 2) for index in range(count)}


def transformer_tensors() -> dict[str, torch.Tensor]:
    """300 tensors, 0.99 GiB: embedding, 27 layers, final norm and output head, as in a decoder's state dict."""
    tensors = {"model.embed_tokens.weight": random_tensor(_VOCABULARY, 1024)}
    for layer in range(_LAYERS):
        tensors |= {f"model.layers.{layer}.{name}": random_tensor(*shape) for name, shape in _LAYER_SHAPES.items()}
    tensors["model.norm.weight"] = random_tensor(1024)
    tensors["lm_head.weight"] = random_tensor(_VOCABULARY, 1024)
    return tensors
