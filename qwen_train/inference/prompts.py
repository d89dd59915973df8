"""Prompts for the stock pipelines, encoded by the cache's text encoder, so that training and inference agree.

Under transformers 5, diffusers 0.42's Edit pipelines give Qwen2.5-VL one-dimensional positions; here it gets the
positions that it was trained with. Everything else equals the pipelines: the same modules on the same shapes. The
encoder is loaded on first use, stays on its device for all prompts, and then is freed or leaves, so that no device
holds it together with the transformer.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from accelerate import cpu_offload
from diffusers.utils.torch_utils import empty_device_cache
from PIL import Image
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from qwen_cache.encode.text import TextEncoder
from qwen_cache.models.devices import is_accelerator
from qwen_cache.models.folder import ModelFolder
from qwen_cache.sources.images import over_white
from qwen_cache.sources.sizes import calculate_dimensions
from qwen_train.inference.devices import Devices, Offload, memory_for


def encode_prompts(
    model: ModelFolder,
    images: Sequence[Image.Image],
    prompt: str,
    negative_prompt: str | None,
    devices: Devices,
    dtype: torch.dtype,
    offload: Offload = "none",
    *,
    area: int,
) -> dict[str, Tensor]:
    """The pipeline's arguments in place of the prompts, on the transformer's device; see `PromptEncoder.arguments`.

    The encoder is freed.
    """
    encoder = PromptEncoder(model, devices.text, dtype, offload)
    embeds = encoder.arguments(images, prompt, negative_prompt, area)
    encoder.free()
    return {name: tensor.to(devices.transformer) for name, tensor in embeds.items()}


class Embedded(NamedTuple):
    """Encoded prompts, padded on the right."""

    embeds: Tensor
    """`[B, L, D]`"""
    mask: Tensor
    """`[B, L]`: 1 where there is a token."""
    is_image: Tensor
    """`[B, L]`: where it is a token of an image."""


@dataclass
class PromptEncoder:
    """The text encoder: loaded on first use, kept until it is freed.

    With `offload` of `model` its weights are on the device from a prompt until `leave`; of `sequential`, one layer's.
    """

    model: ModelFolder
    device: torch.device
    dtype: torch.dtype
    offload: Offload = "none"
    _encoder: TextEncoder | None = None

    def arguments(
        self, images: Sequence[Image.Image], prompt: str, negative_prompt: str | None, area: int
    ) -> dict[str, Tensor]:
        """A pipeline's arguments in place of the prompts for `images` of any size, resized to about `area` pixels.

        They are `prompt_embeds` and `prompt_embeds_mask`, for Qwen-Image-2.1 also `image_pad_mask`; with a negative
        prompt also the same, named `negative_…`.
        """
        resized = [p.resize(calculate_dimensions(area, p.size), Image.Resampling.LANCZOS) for p in images]
        arguments: dict[str, Tensor] = {}
        for kind, text in (("", prompt), ("negative_", negative_prompt)):
            if text is not None:
                embeds, mask, is_image = self.embed([text], resized)
                arguments |= {f"{kind}prompt_embeds": embeds, f"{kind}prompt_embeds_mask": mask}
                arguments |= {f"{kind}image_pad_mask": is_image} if self.model.family.joint_sequence else {}
        return arguments

    def embed(self, prompts: Sequence[str], images: Sequence[Image.Image]) -> Embedded:
        """The prompts about the resized `images`, padded as in the pipelines.

        In Qwen-Image-2.1 all prompts share all images, whose transparency is laid over white. In the 20B family images
        are split evenly over the prompts; ValueError if that is impossible.
        """
        shared = self.model.family.joint_sequence
        images = [over_white(image) for image in images] if shared else images
        per_prompt, remainder = divmod(len(images), len(prompts))
        if not shared and (remainder or per_prompt > (self.model.max_controls or len(images))):
            raise ValueError(f"{len(images)} images for {len(prompts)} prompts of a {self.model.pipeline}")
        with memory_for("encoding the prompt", self.device):
            encoder = self._load()
            encoded = [
                encoder.encode_whole(images if shared else images[i * per_prompt : (i + 1) * per_prompt], prompt)
                for i, prompt in enumerate(prompts)
            ]
        masks = [row.new_ones(len(row), dtype=torch.long) for row, _ in encoded]
        rows, slots = ([each[i] for each in encoded] for i in range(2))
        return Embedded(*(pad_sequence(each, batch_first=True) for each in (rows, masks, slots)))

    def leave(self) -> None:
        """Make room on the device: weights that are offloaded as a whole wait in host memory for the next prompt."""
        if self._encoder is not None and self._moves_whole:
            self._encoder.model.to("cpu")
            empty_device_cache(self.device.type)

    def free(self) -> None:
        """Free the encoder's memory."""
        self._encoder = None
        gc.collect()
        empty_device_cache(self.device.type)

    @property
    def _offloads(self) -> bool:
        return self.offload != "none" and is_accelerator(self.device)

    @property
    def _moves_whole(self) -> bool:
        return self._offloads and self.offload == "model"

    def _load(self) -> TextEncoder:
        if self._encoder is None:
            by_layer = self._offloads and self.offload == "sequential"
            encoder = TextEncoder(self.model, torch.device("cpu") if by_layer else self.device, self.dtype)
            if by_layer:
                encoder.run_on(self.device)  # its weights come layer by layer
                cpu_offload(encoder.model, self.device)
            self._encoder = encoder
        elif self._moves_whole:
            self._encoder.model.to(self.device)
        return self._encoder
