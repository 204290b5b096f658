"""A vision encoder before a decoder, put together from transformers' parts."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CLIPVisionConfig, CLIPVisionModel, PreTrainedModel

_MERGED_PATCHES = 4  # the features of four neighbouring patches become one token


class VisionLanguageModel(torch.nn.Module):
    """Encoder, projection with its two separators, decoder. The decoder reads a picture before the tokens."""

    def __init__(self, eyes: CLIPVisionConfig, language: PreTrainedModel) -> None:
        super().__init__()
        width, hidden = _MERGED_PATCHES * eyes.hidden_size, language.config.hidden_size
        self.language = language
        self.vision = CLIPVisionModel(eyes)
        self.projection = torch.nn.Sequential(torch.nn.Linear(width, hidden), torch.nn.GELU(), torch.nn.Linear(hidden, hidden))
        self.image_separator = torch.nn.Parameter(torch.zeros(1, 1, width))
        self.row_separator = torch.nn.Parameter(torch.zeros(1, 1, width))
        self._picture_shape = (1, 3, eyes.image_size, eyes.image_size)

    @property
    def config(self) -> Any:
        """The decoder's."""
        return self.language.config

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.language.device

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        """The decoder's output for a random picture and ``input_ids``."""
        picture = torch.rand(self._picture_shape, device=self.device, dtype=self.language.dtype)
        patches = self.vision(picture).last_hidden_state[:, 1:]  # the first is the class
        merged = patches.reshape(1, -1, _MERGED_PATCHES * patches.shape[-1])
        features = self.projection(torch.cat((self.row_separator, merged, self.image_separator), dim=1))
        words = self.language.get_input_embeddings()(input_ids)
        ignored = labels.new_full(features.shape[:2], -100)
        return self.language(inputs_embeds=torch.cat((features, words), dim=1), labels=torch.cat((ignored, labels), dim=1))
