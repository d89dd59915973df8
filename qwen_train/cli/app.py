"""The command line of `qwen-train`. Every handler imports its work inside, so that `--help` answers at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from qwen_cache.console import run_app

app = typer.Typer(
    name="qwen-train",
    help="Train a LoRA for Qwen-Image-Edit from a cache, and draw with it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

RENAMED = {"predict": {"--num-images": "--num-images-per-prompt", "--steps": "--num-inference-steps"}}
"""Options by the name that they had."""
ConfigFile = Annotated[Path | None, typer.Option("--config", help="The settings.", show_default="qwen.yaml")]
Assignments = Annotated[list[str] | None, typer.Option("--set", help="section.key=value, over the settings.")]
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
        bool, typer.Option("--resume", help="Go on from the newest checkpoint of train.output_dir, if there is one.")
    ] = False,
) -> int:
    """Train on a cache. Only the transformer is loaded."""
    from qwen_cache.settings.load import load_config

    source = cache if encode_on_the_fly else None
    named = {} if encode_on_the_fly else _in_place_of_all_caches(cache)
    settings = load_config(config, set_ or (), model__path=model, **named)
    encode_from = source or settings.data.source if encode_on_the_fly else None
    from qwen_train.cli.run import run_train

    return run_train(settings, resume=resume, encode_from=encode_from)


@app.command()
def predict(
    prompt: Annotated[list[str] | None, typer.Option(help="The instruction; repeat it for an image of each.")] = None,
    image: Annotated[list[Path] | None, typer.Option(help="A control image; repeat it for more.")] = None,
    negative_prompt: Annotated[str | None, typer.Option(help="What to guide away from; may be empty.")] = None,
    true_cfg_scale: Annotated[float | None, typer.Option(help="How far, in twice the time; 1: not at all.")] = None,
    guidance_scale: Annotated[float | None, typer.Option(help="For guidance-distilled models.")] = None,
    num_inference_steps: Annotated[int | None, typer.Option(help="Denoising steps.")] = None,
    sigmas: Annotated[str | None, typer.Option(help="In place of steps: noise levels such as 1,0.6,0.2.")] = None,
    num_images_per_prompt: Annotated[
        int | None, typer.Option(help="Images per prompt: out-1.png, out-2.png, …")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The seed of the noise.")] = None,
    height: Annotated[int | None, typer.Option(help="Pixels, in steps of 16.")] = None,
    width: Annotated[int | None, typer.Option(help="Pixels, in steps of 16.")] = None,
    max_sequence_length: Annotated[int | None, typer.Option(help="Tokens kept of a prompt without images.")] = None,
    lora: Annotated[
        list[str] | None, typer.Option(help="PATH or PATH:weight, the file or the folder of a run; repeat it for more.")
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            help="A folder of images, with prompts beside them (NAME.txt) or all with --prompt; or a source as "
            "`qwen-cache build` reads it, targets or not: an image for each row, into --out."
        ),
    ] = None,
    from_cache: Annotated[
        str | None, typer.Option(help="A cache, of which --key names samples; loads no text encoder.", metavar="CACHE")
    ] = None,
    key: Annotated[
        list[str] | None, typer.Option(help="A sample's name, or its key's first digits; repeat it for more.")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Draw without the LoRAs too, and put all side by side on a page.")
    ] = False,
    merge: Annotated[bool, typer.Option("--merge", help="Add the LoRAs to the weights before drawing.")] = False,
    out: Annotated[Path, typer.Option(help="Where the image goes; with --source, a folder.")] = Path("out.png"),
    model: Model = None,
    device: Annotated[str, typer.Option(help="Where all parts run.")] = "auto",
    vae_device: Annotated[str | None, typer.Option(help="Where the VAE runs.")] = None,
    text_device: Annotated[str | None, typer.Option(help="Where the text encoder runs.")] = None,
    transformer_device: Annotated[str | None, typer.Option(help="Where the transformer runs.")] = None,
    offload: Annotated[
        str | None, typer.Option(help="none, model or sequential: what waits in the host's memory.")
    ] = None,
    save_interrupted: Annotated[
        bool, typer.Option("--save-interrupted", help="When interrupted, save the image as it is then.")
    ] = False,
    config: ConfigFile = None,
    set_: Assignments = None,
) -> int:
    """Draw with the stock pipeline and LoRAs: what --prompt says, each row of --source, or samples --from-cache."""
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
        predict__max_sequence_length=max_sequence_length,
        predict__offload=offload,
    )
    from qwen_cache.errors import ConfigError
    from qwen_train.cli.predict import Prediction, run_predict
    from qwen_train.inference.devices import choose
    from qwen_train.inference.generator import check_guidance
    from qwen_train.inference.loras import parse_lora

    check_guidance(settings.predict, true_cfg_scale)
    if from_cache and (width or height):
        raise ConfigError("a cached sample has its size", do="leave out --width and --height")
    asked = Prediction(
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
    return run_predict(settings, choose(device, vae_device, text_device, transformer_device), asked)


@app.command()
def decode(
    folder: Annotated[
        Path | None, typer.Argument(help="The output folder of a run, or a folder of latents.", show_default="out")
    ] = None,
    model: Model = None,
    vae_device: Annotated[str, typer.Option(help="Where the VAE runs.")] = "auto",
    config: ConfigFile = None,
    set_: Assignments = None,
) -> int:
    """Make PNGs of the latents of validation images. Only the VAE is loaded."""
    from qwen_train.cli.decode import run_decode

    return run_decode(folder, model, vae_device, config, set_ or ())


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="The output folder of a run.")] = Path("out"),
) -> int:
    """Make report.html anew: curves, settings and images of a run on one page."""
    from qwen_train.cli.report import run_report

    return run_report(folder)


@app.command()
def plan(
    cache: Annotated[str | None, typer.Argument(help="The cache.", show_default="shards")] = None,
    gpu_memory: Annotated[str | None, typer.Option(help="What the device has, such as 24GB.")] = None,
    model: Model = None,
    config: ConfigFile = None,
    set_: Assignments = None,
    json_: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> int:
    """Predict the memory of training by part, and say what fits. Loads no weights."""
    from qwen_cache.settings.load import load_config

    settings = load_config(config, set_ or (), model__path=model, **_in_place_of_all_caches(cache))
    from qwen_train.cli.plan import run_plan

    return run_plan(settings, gpu_memory, as_json=json_)


@app.command()
def export(
    source: Annotated[Path, typer.Argument(help="A LoRA: its file, or the folder that `run` wrote.")],
    to: Annotated[str, typer.Option(help="diffusers, comfyui, or merged: the LoRA added to the model's weights.")],
    out: Annotated[Path, typer.Option(help="Where it goes: a .safetensors file; with --to merged, a folder.")],
    model: Model = None,
) -> int:
    """Write a LoRA as other programs take it."""
    from qwen_train.cli.export import run_export

    return run_export(source, to, out, model)


@app.command("mask-head")
def mask_head(
    cache: Annotated[str | None, typer.Argument(help="The cache.", show_default="shards")] = None,
    out: Annotated[Path, typer.Option(help="Where the head goes.")] = Path("mask_head.safetensors"),
    device: Annotated[str | None, typer.Option(help="Where it is trained.", show_default="auto")] = None,
    config: ConfigFile = None,
    set_: Assignments = None,
    json_: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> int:
    """Learn where edits are from a cache with masks and attention. No part of the model is loaded."""
    from qwen_cache.settings.load import load_config
    from qwen_train.cli.mask_head import run_mask_head

    settings = load_config(config, set_ or (), cache__path=cache, mask_head__device=device)
    return run_mask_head(settings, out, as_json=json_)


def _in_place_of_all_caches(cache: str | None) -> dict[str, Any]:
    """What is named on the command line is trained, whichever caches qwen.yaml names."""
    return {"cache__path": cache, "train__caches": []} if cache else {}


def _version(value: bool) -> None:
    if value:
        from qwen_cache.console import version_lines

        print(version_lines("qwen-train"))
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main() -> Any:
    run_app(app, RENAMED)
