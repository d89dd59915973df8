"""Write a tiny Qwen-Image(-Edit) model: the real classes and structure, a few megabytes, random weights.

    python tools/make_tiny_model.py OUT [--variant edit|edit-plus|edit-2511|t2i] [--seed N]

OUT becomes a diffusers folder that stock `from_pretrained` loads (without torchvision the caller passes `processor=`,
because transformers' Qwen2VLProcessor requires it). Everything that code around a model relies on is real: special
tokens, template lengths, M-RoPE, windowed vision, mean and standard deviation of latents, pixel limits, scheduler. The
weights are random, but every output depends on every input at the scale of the trained networks, and the VAE returns a
coarse version of its input image. Equal seeds give equal bytes.
"""

from __future__ import annotations

import argparse
import inspect
import json
from pathlib import Path

import diffusers
import torch
from diffusers import (
    AutoencoderKLQwenImage,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageRMS_norm
from torch import nn
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

PIPELINES: dict[str, type[DiffusionPipeline]] = {
    "edit": QwenImageEditPipeline,
    "edit-plus": QwenImageEditPlusPipeline,
    "edit-2511": QwenImageEditPlusPipeline,
    "t2i": QwenImagePipeline,
}

# In Qwen2.5-VL's order, which is the order of their ids.
SPECIAL_TOKENS = [
    *("<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>"),
    *("<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
]

TEXT_WIDTH = 64  # 4 heads of 16, the smallest with M-RoPE's real ratio of time, height and width, 2 : 3 : 3

# The channels that carry the image through the VAE: red, green, blue and a constant. The constant, far larger than the
# colours, keeps the length that RMS norms divide by nearly equal; otherwise they would remove each pixel's brightness.
CARRIED, CONSTANT = 4, 32.0
TRACE = 0.02  # the fraction of all other channels that each layer adds to them, so that every weight matters


def make_tiny_model(out: Path, variant: str = "edit", seed: int = 0) -> Path:
    """Write the model of `variant` to the folder `out`, overwrite existing files, and return `out`."""
    out = Path(out)
    generator = torch.Generator().manual_seed(seed)
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
    index = {name: [type(part).__module__.split(".")[0], type(part).__name__] for name, part in parts.items()}
    if variant != "t2i":
        save_processor(out / "processor", tokenizer)
        index["processor"] = ["transformers", "Qwen2VLProcessor"]
    index |= {"_class_name": PIPELINES[variant].__name__, "_diffusers_version": diffusers.__version__}
    write_json(out / "model_index.json", index)
    return out


def make_tokenizer() -> Qwen2Tokenizer:
    """A byte-level BPE with one token for each word of the pipelines' templates, as in the trained tokenizer."""
    pipelines = [empty_pipeline(pipeline) for pipeline in dict.fromkeys(PIPELINES.values())]
    tokenizer = Qwen2Tokenizer(
        eos_token="<|im_end|>", padding_side="right", model_max_length=131072, extra_special_tokens=SPECIAL_TOKENS
    ).train_new_from_iterator(
        [pipeline.prompt_template_encode for pipeline in pipelines],
        vocab_size=2000,  # more than the templates have merges: training ends when every word is one token
        show_progress=False,
    )
    for pipeline in pipelines:
        # The pipelines drop the template before the user's images and prompt, by its length.
        prefix = pipeline.prompt_template_encode.split("{}")[0].split("<|vision_start|>")[0]
        length, expected = len(tokenizer(prefix).input_ids), pipeline.prompt_template_encode_start_idx
        assert length == expected, f"{type(pipeline).__name__}: template prefix of {length} tokens, expected {expected}"
    return tokenizer


def empty_pipeline(pipeline: type[DiffusionPipeline]) -> DiffusionPipeline:
    """The pipeline without models, for its template and the length that it drops."""
    return pipeline(**dict.fromkeys(inspect.signature(pipeline).parameters))


def make_scheduler() -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(
        num_train_timesteps=1000,
        shift=1.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        base_image_seq_len=256,
        max_image_seq_len=8192,
        shift_terminal=0.02,
        time_shift_type="exponential",
    )


def make_text_encoder(tokenizer: Qwen2Tokenizer, generator: torch.Generator) -> Qwen2_5_VLForConditionalGeneration:
    text_config = {
        "vocab_size": len(tokenizer),
        "hidden_size": TEXT_WIDTH,
        "intermediate_size": 2 * TEXT_WIDTH,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
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
    ids = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(token)
        for name, token in (
            ("image", "<|image_pad|>"),
            ("video", "<|video_pad|>"),
            ("vision_start", "<|vision_start|>"),
            ("vision_end", "<|vision_end|>"),
        )
    }
    model = Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(text_config=text_config, vision_config=vision_config, dtype="float32", **ids)
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


def set_diagonal(conv: nn.Conv3d, diagonal: torch.Tensor, bias: torch.Tensor) -> None:
    conv.weight.data = torch.diag(diagonal)[:, :, None, None, None]
    conv.bias.data = bias


def fill(model: nn.Module, generator: torch.Generator) -> nn.Module:
    """Random weights that preserve the scale of a signal from layer to layer, so that nothing fades or saturates."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            noise = torch.randn(parameter.shape, generator=generator)
            if isinstance(module, nn.Embedding):
                parameter.data = noise
            elif name == "bias":
                parameter.data = 0.1 * noise
            elif isinstance(module, nn.Linear | nn.Conv2d | nn.Conv3d):
                parameter.data = noise * parameter[0].numel() ** -0.5
            else:  # the gain of a norm
                parameter.data = 1 + 0.05 * noise
    return model


def save_processor(folder: Path, tokenizer: Qwen2Tokenizer) -> None:
    """Files for images and videos that name the torchvision backends, as in the published checkpoints."""
    tokenizer.save_pretrained(folder)
    settings = Qwen2VLImageProcessorPil(min_pixels=3136, max_pixels=12845056).to_dict()
    settings["processor_class"] = "Qwen2VLProcessor"
    image = settings | {"image_processor_type": "Qwen2VLImageProcessorFast"}
    video = settings | {"video_processor_type": "Qwen2VLVideoProcessor"}
    write_json(folder / "preprocessor_config.json", image)
    write_json(folder / "video_preprocessor_config.json", video)


def write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a tiny Qwen-Image(-Edit) model with random weights.")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write")
    parser.add_argument("--variant", choices=list(PIPELINES), default="edit")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(make_tiny_model(arguments.out, arguments.variant, arguments.seed))


if __name__ == "__main__":
    main()
