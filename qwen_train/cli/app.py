"""The command line of `qwen-train`. Commands import their work inside, so that `--help` is fast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from qwen_cache.command_line import run_app, version_option

app = typer.Typer(
    name="qwen-train",
    help="Train a LoRA for Qwen-Image-Edit from a cache, and generate images with it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

RENAMED = {"predict": {"--num-images": "--num-images-per-prompt", "--steps": "--num-inference-steps"}}
"""Old names of options."""
ConfigFile = Annotated[Path | None, typer.Option("--config", help="The settings.", show_default="qwen.yaml")]
Assignments = Annotated[list[str] | None, typer.Option("--set", help="section.key=value, overrides the settings.")]
Model = Annotated[str | None, typer.Option(help="A diffusers folder, or a repository on the hub.")]


@app.command()
def run(
    cache: Annotated[
        str | None, typer.Argument(help="The cache; with --encode-on-the-fly, the source.", show_default="shards")
    ] = None,
    config: ConfigFile = None,
    set_: Assignments = None,
    model: Model = None,
    encode_on_the_fly: Annotated[
        bool,
        typer.Option(
            "--encode-on-the-fly", help="Without a cache: another process encodes, on cache.vae_device and text_device."
        ),
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest checkpoint of train.output_dir, if there is one.")
    ] = False,
) -> int:
    """Train on a cache. Only the transformer is loaded."""
    from qwen_cache.settings.load import load_config

    source = cache if encode_on_the_fly else None
    named = {} if encode_on_the_fly else _cache_settings(cache)
    settings = load_config(config, set_ or (), model__path=model, **named)
    encode_from = source or settings.data.source if encode_on_the_fly else None
    from qwen_train.cli.run import run_train

    return run_train(settings, resume=resume, encode_from=encode_from)


@app.command()
def predict(
    prompt: Annotated[list[str] | None, typer.Option(help="The instruction; repeat it for several images.")] = None,
    image: Annotated[list[Path] | None, typer.Option(help="A control image; repeat it for more.")] = None,
    negative_prompt: Annotated[str | None, typer.Option(help="The prompt to guide away from; may be empty.")] = None,
    true_cfg_scale: Annotated[
        float | None, typer.Option(help="Classifier-free guidance, which doubles the time; 1 turns it off.")
    ] = None,
    guidance_scale: Annotated[float | None, typer.Option(help="For guidance-distilled models.")] = None,
    num_inference_steps: Annotated[int | None, typer.Option(help="Denoising steps.")] = None,
    sigmas: Annotated[str | None, typer.Option(help="Noise levels such as 1,0.6,0.2, in place of steps.")] = None,
    num_images_per_prompt: Annotated[
        int | None, typer.Option(help="Images per prompt: out-1.png, out-2.png, …")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The seed of the noise.")] = None,
    height: Annotated[int | None, typer.Option(help="Pixels, in steps of 16; Qwen-Image-2.1: 32.")] = None,
    width: Annotated[int | None, typer.Option(help="Pixels, in steps of 16; Qwen-Image-2.1: 32.")] = None,
    output_resolution: Annotated[
        int | None,
        typer.Option(help="Qwen-Image-2.1: about its square are the pixels of control images, and of the result."),
    ] = None,
    max_sequence_length: Annotated[
        int | None, typer.Option(help="The maximum number of tokens of a prompt without images.")
    ] = None,
    lora: Annotated[
        list[str] | None, typer.Option(help="PATH or PATH:weight, a file or the folder of a run; repeat it for more.")
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            help="An image per row, into --out: a folder of images with prompts (NAME.txt) or --prompt, or any source "
            "of `qwen-cache build`, with or without targets."
        ),
    ] = None,
    from_cache: Annotated[
        str | None, typer.Option(help="A cache whose samples --key names; loads no text encoder.", metavar="CACHE")
    ] = None,
    key: Annotated[
        list[str] | None, typer.Option(help="A sample's name, or the first digits of its key; repeat it for more.")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also generate without the LoRAs, and write a page with all side by side.")
    ] = False,
    merge: Annotated[bool, typer.Option("--merge", help="Add the LoRAs to the weights before generating.")] = False,
    out: Annotated[Path, typer.Option(help="The path of the image; with --source, a folder.")] = Path("out.png"),
    model: Model = None,
    device: Annotated[str, typer.Option(help="The device of all components.")] = "auto",
    vae_device: Annotated[str | None, typer.Option(help="The device of the VAE.")] = None,
    text_device: Annotated[str | None, typer.Option(help="The device of the text encoder.")] = None,
    transformer_device: Annotated[str | None, typer.Option(help="The device of the transformer.")] = None,
    offload: Annotated[
        str | None, typer.Option(help="none, model or sequential: the weights that wait in host memory.")
    ] = None,
    save_interrupted: Annotated[
        bool, typer.Option("--save-interrupted", help="When interrupted, save the unfinished image.")
    ] = False,
    config: ConfigFile = None,
    set_: Assignments = None,
) -> int:
    """Generate images with the stock pipeline and LoRAs, from --prompt, rows of --source, or samples --from-cache."""
    from qwen_cache.settings.load import load_config

    settings = load_config(
        config,
        set_ or (),
        model__path=model,
        predict__negative_prompt=negative_prompt,
        predict__true_cfg_scale=true_cfg_scale,
        predict__guidance_scale=guidance_scale,
        predict__num_inference_steps=num_inference_steps,
        predict__sigmas=sigmas,
        predict__num_images_per_prompt=num_images_per_prompt,
        predict__seed=seed,
        predict__height=height,
        predict__width=width,
        predict__output_resolution=output_resolution,
        predict__max_sequence_length=max_sequence_length,
        predict__offload=offload,
    )
    from qwen_cache.errors import ConfigError
    from qwen_train.cli.predict import PredictOptions, run_predict
    from qwen_train.inference.devices import choose
    from qwen_train.inference.loras import parse_lora
    from qwen_train.inference.settings import check_guidance

    check_guidance(settings.predict, true_cfg_scale)
    if from_cache and (width or height or output_resolution):
        do = "leave out --width, --height and --output-resolution"
        raise ConfigError("a cached sample has a fixed size", do=do)
    options = PredictOptions(
        out=out,
        images=image or (),
        prompts=prompt or (),
        source=source,
        cache=from_cache,
        keys=key or (),
        loras=[parse_lora(text) for text in lora or []],
        merge=merge,
        compare=compare,
        save_interrupted=save_interrupted,
    )
    return run_predict(settings, choose(device, vae_device, text_device, transformer_device), options)


@app.command()
def decode(
    folder: Annotated[
        Path | None, typer.Argument(help="The output folder of a run, or a folder of latents.", show_default="out")
    ] = None,
    model: Model = None,
    vae_device: Annotated[str, typer.Option(help="The device of the VAE.")] = "auto",
    config: ConfigFile = None,
    set_: Assignments = None,
) -> int:
    """Decode the latents of validation images to PNGs. Only the VAE is loaded."""
    from qwen_train.cli.decode import run_decode

    return run_decode(folder, model, vae_device, config, set_ or ())


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="The output folder of a run.")] = Path("out"),
) -> int:
    """Write report.html again: curves, settings and images of a run on one page."""
    from qwen_train.cli.report import run_report

    return run_report(folder)


@app.command()
def plan(
    cache: Annotated[str | None, typer.Argument(help="The cache.", show_default="shards")] = None,
    gpu_memory: Annotated[str | None, typer.Option(help="The memory of the GPU, such as 24GB.")] = None,
    model: Model = None,
    config: ConfigFile = None,
    set_: Assignments = None,
    json_: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> int:
    """Predict the memory of training by part, and whether it fits. Loads no weights."""
    from qwen_cache.settings.load import load_config

    settings = load_config(config, set_ or (), model__path=model, **_cache_settings(cache))
    from qwen_train.cli.plan import run_plan

    return run_plan(settings, gpu_memory, as_json=json_)


@app.command()
def export(
    source: Annotated[Path, typer.Argument(help="A LoRA: its file, or the folder of a run.")],
    to: Annotated[str, typer.Option(help="diffusers, comfyui, or merged: the LoRA added to the model's weights.")],
    out: Annotated[Path, typer.Option(help="The output: a .safetensors file; with --to merged, a folder.")],
    model: Model = None,
) -> int:
    """Convert a LoRA for other programs."""
    from qwen_train.cli.export import run_export

    return run_export(source, to, out, model)


@app.command("mask-head")
def mask_head(
    cache: Annotated[str | None, typer.Argument(help="The cache.", show_default="shards")] = None,
    out: Annotated[Path, typer.Option(help="The path of the head.")] = Path("mask_head.safetensors"),
    device: Annotated[str | None, typer.Option(help="The device for training.", show_default="auto")] = None,
    config: ConfigFile = None,
    set_: Assignments = None,
    json_: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> int:
    """Experimental: train a mask head on a cache with masks and attention. No part of the model is loaded."""
    from qwen_cache.settings.load import load_config
    from qwen_train.cli.mask_head import run_mask_head

    settings = load_config(config, set_ or (), cache__path=cache, mask_head__device=device)
    return run_mask_head(settings, out, as_json=json_)


def _cache_settings(cache: str | None) -> dict[str, Any]:
    """Settings for a cache on the command line, which replaces all caches of qwen.yaml."""
    return {"cache__path": cache, "train__caches": []} if cache else {}


app.callback()(version_option)


def main() -> Any:
    run_app(app, RENAMED)
