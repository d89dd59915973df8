"""The families and variants of Qwen-Image, and the templates of their prompts: what differs between them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

# ---- template --------------------------------------------------------------------------------------------------------
# The text encoder's input: the text around images and prompt, as diffusers' pipelines write it.
#
# The first `drop_idx` tokens (the system prompt, and in the 20B family the beginning of the user's message) are encoded
# but not kept. A test compares everything, as token ids, with the installed pipelines.

VISION_END = "<|vision_end|>"
PIXEL_TOKENS = ("<|image_pad|>", "<|video_pad|>")
"""Tokens that stand for pixels, which no prompt may contain."""
IMAGE = f"<|vision_start|><|image_pad|>{VISION_END}"


def chat(system: str) -> str:
    """The frame of a chat with this system message."""
    return f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{{}}<|im_end|>\n<|im_start|>assistant\n"


def pixel_token(prompt: str) -> str | None:
    """The first token in a prompt that stands for pixels; None if it has none."""
    return next((token for token in PIXEL_TOKENS if token in prompt), None)


def pixel_token_told(token: str) -> tuple[str, str]:
    """The problem of a prompt that contains the token: what is wrong, and what to do."""
    return f"the prompt contains {token}, which stands for an image's pixels", "remove it"


@dataclass(frozen=True)
class Template:
    """The text around images and prompt."""

    frame: str
    """The whole text; `{}` stands for images and prompt."""
    image: str = ""
    """The text of an image; `{}` is its number, from 1."""
    drop_idx: int = 0
    """The number of first tokens that are not kept."""
    dropped_message: str | None = None
    """In place of `drop_idx`: the system message, which the processor's chat template turns into those tokens."""
    condition_image_size: int = 0
    """Pixels of an image for the text encoder; 0 if it gets no images, or the same images as the VAE."""
    separator: str = ""
    """The text between two images."""
    empty_prompt: str = ""
    """The prompt that replaces an empty one."""
    max_length: int | None = None
    """Tokens kept after the dropped ones; None keeps all."""

    def text(self, prompt: str, images: int) -> str:
        """The whole input text for `prompt` and this number of images."""
        before = self.separator.join(self.image.format(i + 1) for i in range(images))
        return self.frame.format(before + (prompt or self.empty_prompt))


# ---- family ----------------------------------------------------------------------------------------------------------
# What differs between the model families: one `Family` value for each, all of them here.
#
# The pipelines of a family share VAE, text encoder and the kind of transformer; they differ in template and number of
# images. Classes are given by name, so that this imports neither torch nor diffusers. `CONTRIBUTING.md` says what a
# third family needs besides its value.

PipelineName = Literal["QwenImageEditPipeline", "QwenImageEditPlusPipeline", "QwenImagePipeline", "QwenImage21Pipeline"]
VAE_IMAGE_SIZE = 1024 * 1024
"""Pixels of an image for the VAE, in all pipelines."""
BYTES_PER_TOKEN = 4  # of English
TOKENS_PER_LABEL = 7  # ` <image1>` and the tokens around an image


@dataclass(frozen=True)
class Pipeline:
    """A pipeline of diffusers: its template, its images, and the parts that encode them."""

    name: PipelineName
    models: tuple[str, ...]
    """The published repositories."""
    template: Template
    min_controls: int
    """The fewest control images that diffusers' class takes. Without any, its family's text to image is meant."""
    max_controls: int | None
    """The most control images; None: any number."""
    without_controls: Template | None = None
    """The template of samples without controls, if it is another one: that of text to image."""
    tokenizer: str = "tokenizer"
    """The folder of the tokenizer."""
    distilled: tuple[str, ...] = ()
    """The models with noise levels of their own: to generate with, since plain training undoes the distillation."""

    def template_for(self, controls: int) -> Template:
        """The template of a sample with this number of controls."""
        return self.template if controls or self.without_controls is None else self.without_controls

    @property
    def encoder_parts(self) -> tuple[str, ...]:
        """The folders of the frozen encoders, as far as this pipeline has them."""
        processor = ("processor",) if self.max_controls != 0 or self.tokenizer == "processor" else ()
        return ("vae", "text_encoder", *(("tokenizer",) if self.tokenizer == "tokenizer" else ()), *processor)


@dataclass(frozen=True)
class Family:
    """A model family. Latents are `[S, 64]` in all of them, a token covers 16×16 pixels."""

    name: str
    licence: str
    """The licence of the published weights, by its name on the hub."""
    pipelines: tuple[Pipeline, ...]
    vae: str
    """The class in diffusers."""
    text_encoder: str
    """The `model_type` in transformers (`encoders.py` has the class and its processor)."""
    transformer: str
    """The class in diffusers."""
    text_width_key: str
    """The key of the text embeddings' width in the transformer's config.json."""
    text_norm: str
    """The transformer's parameter of that width, which only this family has."""
    pixels_per_text_token: int
    """Pixels of an image per token of the text encoder."""
    image_mode: Literal["RGB", "RGBA"] = "RGB"
    """The channels that the VAE takes and gives; the text encoder always sees RGB."""
    one_condition_image: bool = False
    """True if VAE and text encoder get the same resized image; otherwise the encoder's has a size of its own."""
    final_norm: bool = True
    """True if embeddings are the text encoder's last hidden states after its final norm; False: before it."""
    text_rows_only: bool = False
    """True if embeddings at image tokens are left out: the transformer replaces them by the image's latents."""
    target_last: bool = False
    """True if the transformer takes the control images before the target. A cache stores the target first."""
    joint_sequence: bool = False
    """True if text and images are one causal sequence, in which a prefix can serve several noise draws."""
    latent_channels: int = 16
    """Channels of the VAE's latents: 16 at an eighth of the image's sides, or 64 at a sixteenth."""
    rope_positions: int = 4096
    """The rows of the transformer's RoPE table for positions from 0: both of diffusers' classes have a fixed one."""
    pixels_per_step: int = 16
    """Sides of generated images are multiples of it."""
    predict_defaults: Mapping[str, float | bool] = field(default_factory=dict)
    """The pipelines' own defaults, for settings of `predict` that are None."""
    not_in_predict: Mapping[str, str] = field(default_factory=dict)
    """Settings of `predict` that the pipelines do not have, and why."""

    def longest_text(self, img_shapes: Sequence[Sequence[int]]) -> int:
        """The most rows of text beside images of these shapes [1, h, w], the target first.

        Text begins where images end: in one sequence with them after the sides of all controls, and the target follows
        it; otherwise at half of the longest side, as positions of an image are centred on 0 (diffusers' QwenEmbedRope).
        """
        sides = [max(height, width) for _, height, width in img_shapes]
        if self.joint_sequence:
            return max(0, self.rope_positions - 1 - sum(sides[1:]))
        return self.rope_positions - max(sides) // 2


_EDIT = (
    "Describe the key features of the input image (color, shape, size, texture, objects, background), then "
    "explain how the user's text instruction should alter or modify the image. Generate a new image that meets the "
    "user's requirements while maintaining consistency with the original input where appropriate."
)
_TEXT_TO_IMAGE = (
    "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships of "
    "the objects and background:"
)
_ANALYZE = "Comprehend and analyze the provided prompt."
_TEXT_TO_IMAGE_TEMPLATE = Template(chat(_TEXT_TO_IMAGE), drop_idx=34, max_length=512)
QWEN_IMAGE = Family(
    name="Qwen-Image",
    licence="apache-2.0",
    pipelines=(
        Pipeline(
            "QwenImageEditPipeline",
            ("Qwen/Qwen-Image-Edit",),
            Template(chat(_EDIT), image=IMAGE, drop_idx=64, condition_image_size=1024 * 1024),
            min_controls=1,
            max_controls=1,
            without_controls=_TEXT_TO_IMAGE_TEMPLATE,
        ),
        Pipeline(
            "QwenImageEditPlusPipeline",
            (
                "Qwen/Qwen-Image-Edit-2509",
                "Qwen/Qwen-Image-Edit-2511",
                "FireRedTeam/FireRed-Image-Edit-1.0",
                "FireRedTeam/FireRed-Image-Edit-1.1",
            ),
            Template(chat(_EDIT), image=f"Picture {{}}: {IMAGE}", drop_idx=64, condition_image_size=384 * 384),
            min_controls=1,
            max_controls=None,
            without_controls=_TEXT_TO_IMAGE_TEMPLATE,
        ),
        Pipeline(
            "QwenImagePipeline",
            ("Qwen/Qwen-Image", "Qwen/Qwen-Image-2512"),
            _TEXT_TO_IMAGE_TEMPLATE,
            min_controls=0,
            max_controls=0,
        ),
    ),
    vae="AutoencoderKLQwenImage",
    text_encoder="qwen2_5_vl",
    transformer="QwenImageTransformer2DModel",
    text_width_key="joint_attention_dim",
    text_norm="txt_norm.weight",
    pixels_per_text_token=28 * 28,  # patches of 14×14, merged 2×2
    predict_defaults={"num_inference_steps": 50, "true_cfg_scale": 4.0, "max_sequence_length": 512},
    not_in_predict={
        "output_resolution": "its pipelines always resize images to about 1024²",
        "use_kv_cache": "its text and control images change with every step, so nothing can be kept",
    },
)
QWEN_IMAGE_21 = Family(
    name="Qwen-Image-2.1",
    licence="qwen-research",
    pipelines=(
        Pipeline(
            "QwenImage21Pipeline",
            ("Qwen/Qwen-Image-2.1", "Qwen/Qwen-Image-2.1-Turbo"),
            Template(
                chat(_ANALYZE),
                image=f"<image{{}}>{IMAGE}",
                dropped_message=_ANALYZE,
                separator=" ",
                empty_prompt=" ",
            ),
            min_controls=0,
            max_controls=None,
            tokenizer="processor",
            distilled=("Qwen/Qwen-Image-2.1-Turbo",),
        ),
    ),
    vae="AutoencoderKLQwenImage21",
    text_encoder="qwen3_vl",
    transformer="QwenImage21Transformer2DModel",
    text_width_key="context_in_dim",
    text_norm="txt_in.text_norm.weight",
    pixels_per_text_token=32 * 32,  # patches of 16×16, merged 2×2
    image_mode="RGBA",
    one_condition_image=True,
    final_norm=False,
    text_rows_only=True,
    target_last=True,
    joint_sequence=True,
    latent_channels=64,
    rope_positions=8192,
    pixels_per_step=32,
    predict_defaults={
        "num_inference_steps": 40,
        "true_cfg_scale": 1.0,
        "output_resolution": 1024,
        "use_kv_cache": True,
    },
    not_in_predict={
        "guidance_scale": "its transformer takes no guidance scale",
        "max_sequence_length": "its prompts are never cut",
        "tabulated_modulation": "all its blocks share one small modulation, so there is nothing to save",
    },
)
FAMILIES = (QWEN_IMAGE, QWEN_IMAGE_21)
PIPELINES: dict[str, Pipeline] = {pipeline.name: pipeline for family in FAMILIES for pipeline in family.pipelines}
SUPPORTED = ", ".join(repository.partition("/")[2] for each in PIPELINES.values() for repository in each.models)
"""The supported models, for messages."""
NOT_YET = {"QwenImageLayeredPipeline": "Qwen-Image-Layered"}
"""Models of the same makers that nothing here can encode or train."""


def family_of(pipeline: str) -> Family:
    """The family of a pipeline; KeyError for an unknown one."""
    for family in FAMILIES:
        if any(each.name == pipeline for each in family.pipelines):
            return family
    raise KeyError(pipeline)


def same_inputs(pipeline: object, other: object) -> bool:
    """True if the transformers of two pipelines take the same inputs: those of one, or of a family's editing and its
    text to image. Two editing pipelines differ in what their text encoder sees."""
    if pipeline == other or not {pipeline, other} <= PIPELINES.keys():
        return pipeline == other
    a, b = (PIPELINES[str(name)] for name in (pipeline, other))
    return family_of(a.name) is family_of(b.name) and 0 in (a.max_controls, b.max_controls)


def family_of_recipe(recipe: Mapping[str, object]) -> Family:
    """The family of a cache's recipe; the 20B family if it names no known pipeline."""
    pipeline = recipe.get("pipeline")
    return family_of(pipeline) if isinstance(pipeline, str) and pipeline in PIPELINES else QWEN_IMAGE


def family_of_transformer(config: Mapping[str, object]) -> Family:
    """The family of a transformer's config.json; KeyError for an unknown one."""
    for family in FAMILIES:
        if family.transformer == config.get("_class_name"):
            return family
    raise KeyError(config.get("_class_name"))


def estimate_tokens(family: Family, prompt: str, images: Sequence[int]) -> tuple[int, int]:
    """The tokens of a prompt and its images of these pixels, without a tokenizer: those encoded, and those stored."""
    text = len(prompt.encode()) // BYTES_PER_TOKEN + 10
    encoded = text + sum(math.ceil(pixels / family.pixels_per_text_token) for pixels in images)
    return encoded, text + TOKENS_PER_LABEL * len(images) if family.text_rows_only else encoded
