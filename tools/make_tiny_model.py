"""Write a tiny Qwen-Image, Qwen-Image-Edit or Qwen-Image-2.1: the real classes, a few megabytes, random weights.

    python tools/make_tiny_model.py OUT [--variant edit|edit-plus|edit-2511|t2i|qwen-image-21] [--seed N]

OUT becomes a diffusers folder that stock `from_pretrained` loads (without torchvision the caller passes `processor=`,
because transformers' Qwen2VLProcessor and Qwen3VLProcessor require it). Everything that code around a model relies on
is real: special tokens, template lengths, M-RoPE, windowed vision, mean and standard deviation of latents, pixel
limits, scheduler. The weights are random, but every output depends on every input at the scale of the trained networks,
and the VAE returns a coarse version of its input image. Equal seeds give equal bytes.

The parts of Qwen-Image-2.1 are in tiny_qwen_image_21.py, which says where they differ. `--sample-sigmas` writes the
noise levels of a distilled one.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Sequence
from pathlib import Path

import diffusers
import tiny_qwen_image_21
import torch
from diffusers import (
    AutoencoderKLQwenImage,
    DiffusionPipeline,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageRMS_norm
from tiny_model_parts import (
    CONSTANT,
    TEXT_WIDTH,
    TRACE,
    fill,
    make_scheduler,
    set_diagonal,
    train_tokenizer,
    vision_token_ids,
    write_json,
)
from tiny_model_parts import SPECIAL_TOKENS as SPECIAL_TOKENS
from torch import nn
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

PIPELINES: dict[str, type[DiffusionPipeline]] = {
    "edit": QwenImageEditPipeline,
    "edit-plus": QwenImageEditPlusPipeline,
    "edit-2511": QwenImageEditPlusPipeline,
    "t2i": QwenImagePipeline,
}

VARIANTS = [*PIPELINES, "qwen-image-21"]

CARRIED = 4  # channels that carry the image through the VAE: red, green, blue and CONSTANT


def make_tiny_model(
    out: Path, variant: str = "edit", seed: int = 0, sample_sigmas: Sequence[float] | None = None
) -> Path:
    """Write the model of `variant` to the folder `out`, overwrite existing files, and return `out`.

    `sample_sigmas` are the noise levels of a distilled Qwen-Image-2.1, without the last, 0; no other variant has them.
    """
    if sample_sigmas is not None and variant != "qwen-image-21":
        raise ValueError(f"sample_sigmas: {variant} has none, only qwen-image-21")
    out = Path(out)
    generator = torch.Generator().manual_seed(seed)
    if variant == "qwen-image-21":
        tokenizer = tiny_qwen_image_21.make_tokenizer()
        parts = {
            "scheduler": make_scheduler(),
            "text_encoder": tiny_qwen_image_21.make_text_encoder(tokenizer, generator),
            "transformer": tiny_qwen_image_21.make_transformer(generator),
            "vae": tiny_qwen_image_21.make_vae(generator),
        }
    else:
        tokenizer = make_tokenizer()
        parts = {
            "scheduler": make_scheduler(),
            "text_encoder": make_text_encoder(tokenizer, generator),
            "tokenizer": tokenizer,
            "transformer": make_transformer(generator, zero_cond_t=variant == "edit-2511"),
            "vae": make_vae(generator),
        }
    for name, part in parts.items():
        part.save_pretrained(out / name)
    index: dict[str, object] = {
        name: [type(part).__module__.split(".")[0], type(part).__name__] for name, part in parts.items()
    }
    if variant == "qwen-image-21":
        tiny_qwen_image_21.save_processor(out / "processor", tokenizer)
        index |= tiny_qwen_image_21.index_entries(sample_sigmas)
    else:
        index["_class_name"] = PIPELINES[variant].__name__
        if variant != "t2i":
            save_processor(out / "processor", tokenizer)
            index["processor"] = ["transformers", "Qwen2VLProcessor"]
    write_json(out / "model_index.json", index | {"_diffusers_version": diffusers.__version__})
    return out


def make_tokenizer() -> Qwen2Tokenizer:
    """A byte-level BPE with one token for each word of the pipelines' templates, as in the trained tokenizer."""
    pipelines = [empty_pipeline(pipeline) for pipeline in dict.fromkeys(PIPELINES.values())]
    tokenizer = train_tokenizer([pipeline.prompt_template_encode for pipeline in pipelines])
    for pipeline in pipelines:
        # The pipelines drop the template before the user's images and prompt, by its length.
        prefix = pipeline.prompt_template_encode.split("{}")[0].split("<|vision_start|>")[0]
        length, expected = len(tokenizer(prefix).input_ids), pipeline.prompt_template_encode_start_idx
        assert length == expected, f"{type(pipeline).__name__}: template prefix of {length} tokens, expected {expected}"
    return tokenizer


def empty_pipeline(pipeline: type[DiffusionPipeline]) -> DiffusionPipeline:
    """The pipeline without models, for its template and the length that it drops."""
    return pipeline(**dict.fromkeys(inspect.signature(pipeline).parameters))


def make_text_encoder(tokenizer: Qwen2Tokenizer, generator: torch.Generator) -> Qwen2_5_VLForConditionalGeneration:
    text_config = {
        "vocab_size": len(tokenizer),
        "hidden_size": TEXT_WIDTH,
        "intermediate_size": 2 * TEXT_WIDTH,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,  # of 16, the smallest with M-RoPE's real ratio of time, height and width, 2 : 3 : 3
        "num_key_value_heads": 2,
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-6,
        # The real 1e6 is for heads of 128; with it, heads of 16 could not tell height from width.
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 3, 3]},
        "bos_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    vision_config = {
        "depth": 4,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": TEXT_WIDTH,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [1, 3],
    }
    model = Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config=text_config, vision_config=vision_config, dtype="float32", **vision_token_ids(tokenizer)
        )
    )
    return fill(model, generator)


def make_transformer(generator: torch.Generator, *, zero_cond_t: bool) -> QwenImageTransformer2DModel:
    model = QwenImageTransformer2DModel(
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=32,
        axes_dims_rope=(4, 14, 14),  # in the ratio of the real (16, 56, 56)
        joint_attention_dim=TEXT_WIDTH,
        zero_cond_t=zero_cond_t,
    )
    fill(model, generator)
    for name, gain in model.named_parameters():
        if name.endswith(("norm_q.weight", "norm_k.weight", "norm_added_q.weight", "norm_added_k.weight")):
            gain.data *= 2  # sharp attention: with 1 it nearly averages, and text and images hardly matter
    for block in model.transformer_blocks:
        attend_to_own_position(block.attn)
    return model


def attend_to_own_position(attn: nn.Module) -> None:
    """Let the first head attend to a token's own position in every image, as heads of the trained network do.

    Queries and keys share a large constant, which RoPE rotates by height and width: they match where both are equal.
    """
    for projection in (attn.to_q, attn.to_k):
        pairs = projection.bias.data[:32].view(16, 2)  # 2 for the frame, 7 for the height, 7 for the width
        for fastest in (slice(2, 5), slice(9, 12)):  # slower ones hardly rotate between positions
            pairs[fastest] = 4.0


def make_vae(generator: torch.Generator) -> AutoencoderKLQwenImage:
    """A random VAE that preserves the image's 8×8 block averages, in latents with the real mean and deviation."""
    vae = fill(AutoencoderKLQwenImage(base_dim=CARRIED, num_res_blocks=1), generator)
    for name, module in vae.named_modules():
        if isinstance(module, QwenImageRMS_norm):
            module.gamma.data *= CONSTANT / module.scale  # undoes the division by the length
        elif isinstance(module, nn.Conv2d | nn.Conv3d):
            carry_colours(name.rsplit(".", 1)[-1], module)
    for half in (vae.encoder, vae.decoder):
        half.conv_in.weight.data[CARRIED - 1] = 0
        half.conv_in.bias.data[CARRIED - 1] = CONSTANT
        # Near zero, SiLU is half its input, so that the last activation preserves the colours.
        half.norm_out.gamma.data /= 5
        half.conv_out.weight.data *= 10
    mean, std = torch.tensor(vae.config.latents_mean), torch.tensor(vae.config.latents_std)
    log_variance = torch.full_like(mean, -4.0)  # samples are near the mode, but differ from it
    set_diagonal(vae.quant_conv, torch.cat([std, torch.zeros_like(std)]), torch.cat([mean, log_variance]))
    set_diagonal(vae.post_quant_conv, 1 / std, -mean / std)
    return vae


def carry_colours(name: str, conv: nn.Conv2d | nn.Conv3d) -> None:
    """Pass the first channels on, with a trace of the others; the end of a residual branch adds only that trace."""
    weight = conv.weight.data if conv.weight.ndim == 4 else conv.weight.data[:, :, -1]  # of a single frame
    channels = 3 if name == "conv_out" else CARRIED
    if name != "conv_in":
        weight[:, CARRIED - 1] = 0  # only norms use the constant
    weight[:channels] *= TRACE
    conv.bias.data[:channels] *= TRACE
    if name in ("conv2", "proj"):
        return
    height, width = weight.shape[2:]
    for channel in range(min(channels, conv.in_channels)):
        if conv.stride[-1] == 2:
            weight[channel, channel, :2, :2] += 0.25
        else:
            weight[channel, channel, height // 2, width // 2] += 1


def save_processor(folder: Path, tokenizer: Qwen2Tokenizer) -> None:
    """Files for images and videos that name the torchvision backends, as in the published checkpoints."""
    tokenizer.save_pretrained(folder)
    settings = Qwen2VLImageProcessorPil(min_pixels=3136, max_pixels=12845056).to_dict()
    settings["processor_class"] = "Qwen2VLProcessor"
    image = settings | {"image_processor_type": "Qwen2VLImageProcessorFast"}
    video = settings | {"video_processor_type": "Qwen2VLVideoProcessor"}
    write_json(folder / "preprocessor_config.json", image)
    write_json(folder / "video_preprocessor_config.json", video)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a tiny Qwen-Image model with random weights.")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write")
    parser.add_argument("--variant", choices=VARIANTS, default="edit")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--sample-sigmas", type=float, nargs="+", metavar="S", help="noise levels of a distilled qwen-image-21"
    )
    arguments = parser.parse_args()
    if arguments.sample_sigmas and arguments.variant != "qwen-image-21":
        parser.error(f"--sample-sigmas: {arguments.variant} has none, only qwen-image-21")
    print(make_tiny_model(arguments.out, arguments.variant, arguments.seed, arguments.sample_sigmas))


if __name__ == "__main__":
    main()
