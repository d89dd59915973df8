"""Captions by a vision-language model: the text encoder's own language model, or another Qwen2.5-VL or Qwen3-VL.

Generation is transformers' `generate`, greedy, one sample at a time: the same images give the same caption on the same
machine. A model without `lm_head` is refused. The controls come first, the target last.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from PIL import Image
from transformers import GenerationConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from qwen_cache.errors import SourceError
from qwen_cache.experimental.attention import CHAT
from qwen_cache.models.devices import choose_devices, is_accelerator, torch_dtype
from qwen_cache.models.encoders import (
    PROCESSORS,
    batch_windows,
    load_processor,
    load_text_encoder,
    load_tokenizer,
    make_processor,
    text_encoder_type,
)
from qwen_cache.models.folder import ModelFolder
from qwen_cache.settings.load import Config
from qwen_cache.settings.sections import CaptionConfig
from qwen_cache.sources.images import open_rgb
from qwen_cache.sources.rows import Row

ANSWER = "<|im_start|>assistant\n"
REPETITION_PENALTY = 1.05
"""That of the published Qwen2.5-VL's generation_config.json: without it, greedy captions may repeat themselves."""


class Captioner:
    """A vision-language model on one device."""

    def __init__(self, model: Any, processor: Any, kind: str, settings: CaptionConfig, device: torch.device) -> None:
        self.model, self.processor, self.settings, self.device = model.to(device), processor, settings, device
        self.template = CHAT[kind]
        if is_accelerator(device):
            batch_windows(model.model.visual)

    @torch.inference_mode()
    def caption(self, images: Sequence[Image.Image], instruction: str) -> str:
        """The answer to an instruction about images."""
        text = self.template.text(instruction, len(images)) + ANSWER
        inputs = self.processor(text=[text], images=[smaller(each, self.settings.image_size) for each in images])
        inputs = inputs.convert_to_tensors("pt").to(self.device)
        inputs["pixel_values"] = inputs["pixel_values"].to(self.model.dtype)
        tokenizer = self.processor.tokenizer
        greedy = GenerationConfig(
            do_sample=False,
            max_new_tokens=self.settings.max_new_tokens,
            repetition_penalty=REPETITION_PENALTY,
            eos_token_id=tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]),
            pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        )
        tokens = self.model.generate(**inputs, generation_config=greedy)[0, inputs["input_ids"].shape[1] :]
        caption = tokenizer.decode(tokens, skip_special_tokens=True)
        return " ".join(caption.split())


def smaller(image: Image.Image, pixels: int) -> Image.Image:
    """The image at no more than about this many pixels, in its own shape."""
    scale = math.sqrt(pixels / (image.width * image.height))
    if scale >= 1:
        return image
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    return image.resize(size, Image.Resampling.LANCZOS)


def load_captioners(model: ModelFolder | Path, config: Config) -> list[Captioner]:
    """A captioner for each of the text encoder's devices: of a model, or of the folder of a language model."""
    settings, dtype = config.caption, torch_dtype(config.cache.dtype)
    devices = choose_devices(config.cache.text_device, "--text-device", preferred=1)
    folder = model if isinstance(model, Path) else model.component("text_encoder")
    kind = text_encoder_type(folder)
    if isinstance(model, Path):
        processor = make_processor(kind, folder)
    elif model.takes_controls:
        processor = load_processor(model)
    else:  # Qwen-Image has no processor: the defaults of its class
        processor = PROCESSORS[kind](Qwen2VLImageProcessorPil(), load_tokenizer(model))
    return [Captioner(load_text_encoder(folder, dtype), processor, kind, settings, device) for device in devices]


def caption_rows(
    rows: Sequence[Row], captioners: Sequence[Captioner], settings: CaptionConfig
) -> Iterator[tuple[Row, str | SourceError]]:
    """Each row with its caption, or why there is none; in order, on all captioners at the same time."""
    free: SimpleQueue[Captioner] = SimpleQueue()
    for captioner in captioners:
        free.put(captioner)

    def work(row: Row) -> str | SourceError:
        instruction = settings.edit_instruction if row.controls else settings.instruction
        captioner = free.get()
        try:
            images = [open_rgb(image.read(), str(image)) for image in (*row.controls, row.target) if image]
            caption = captioner.caption(images, instruction)
        except SourceError as error:
            return error
        finally:
            free.put(captioner)
        return caption or SourceError("the model wrote nothing", where=row.where, do="write this prompt yourself")

    pool = ThreadPoolExecutor(len(captioners), "captions")
    try:
        yield from zip(rows, pool.map(work, rows), strict=True)
    finally:
        pool.shutdown(cancel_futures=True)
