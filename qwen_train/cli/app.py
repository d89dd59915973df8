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
    from qwen_train.train import train

    path = train(settings, resume=resume, encode_from=source or settings.data.source if encode_on_the_fly else None)
    _done(path)
    return 0


@app.command()
def predict(
    prompt: Annotated[list[str] | None, typer.Option(help="The instruction; repeat it for a picture of each.")] = None,
    image: Annotated[list[Path] | None, typer.Option(help="A control picture; repeat it for more.")] = None,
    negative_prompt: Annotated[str | None, typer.Option(help="What to guide away from; may be empty.")] = None,
    true_cfg_scale: Annotated[float | None, typer.Option(help="How far, in twice the time; 1: not at all.")] = None,
    guidance_scale: Annotated[float | None, typer.Option(help="For guidance-distilled models.")] = None,
    steps: Annotated[int | None, typer.Option(help="Denoising steps.")] = None,
    sigmas: Annotated[str | None, typer.Option(help="In place of steps: noise levels such as 1,0.6,0.2.")] = None,
    num_images: Annotated[int | None, typer.Option(help="Pictures at once: out-1.png, out-2.png and so on.")] = None,
    seed: Annotated[int | None, typer.Option(help="The seed of the noise.")] = None,
    height: Annotated[int | None, typer.Option(help="Pixels, in steps of 16.")] = None,
    width: Annotated[int | None, typer.Option(help="Pixels, in steps of 16.")] = None,
    max_sequence_length: Annotated[int | None, typer.Option(help="Tokens kept of a prompt without pictures.")] = None,
    lora: Annotated[
        list[str] | None, typer.Option(help="PATH or PATH:weight, the file or the folder of a run; repeat it for more.")
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            help="A folder of pictures, with prompts beside them (NAME.txt) or all with --prompt; or a source as "
            "`qwen-cache build` reads it, targets or not: a picture for each row, into --out."
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
    out: Annotated[Path, typer.Option(help="Where the picture goes; with --source, a folder.")] = Path("out.png"),
    model: Model = None,
    device: Annotated[str, typer.Option(help="Where all parts run.")] = "auto",
    vae_device: Annotated[str | None, typer.Option(help="Where the VAE runs.")] = None,
    text_device: Annotated[str | None, typer.Option(help="Where the text encoder runs.")] = None,
    transformer_device: Annotated[str | None, typer.Option(help="Where the transformer runs.")] = None,
    offload: Annotated[
        str | None, typer.Option(help="none, model or sequential: what waits in the host's memory.")
    ] = None,
    save_interrupted: Annotated[
        bool, typer.Option("--save-interrupted", help="When interrupted, save the picture as it is then.")
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
        predict__num_inference_steps=steps,
        predict__sigmas=sigmas,
        predict__num_images_per_prompt=num_images,
        predict__seed=seed,
        predict__height=height,
        predict__width=width,
        predict__max_sequence_length=max_sequence_length,
        predict__offload=offload,
    )
    from qwen_cache.errors import ConfigError
    from qwen_train.cli.predict import Asked, run_predict
    from qwen_train.inference.devices import choose
    from qwen_train.inference.loras import parse_lora
    from qwen_train.inference.predict import check_guidance

    check_guidance(settings.predict, true_cfg_scale)
    if from_cache and (width or height):
        raise ConfigError("a cached sample has its size", do="leave out --width and --height")
    asked = Asked(
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
    """Make PNGs of the latents of validation pictures. Only the VAE is loaded."""
    from qwen_cache.console import plural
    from qwen_cache.models.folder import open_model
    from qwen_cache.settings.load import CONFIG_NAME, load_config

    saved = folder / CONFIG_NAME if folder is not None and (folder / CONFIG_NAME).is_file() else None
    settings = load_config(config or saved, set_ or (), model__path=model)
    folder = folder or Path(settings.train.output_dir)
    import torch

    from qwen_cache.models.devices import choose_device
    from qwen_train.inference.decode import decode_folder, latents_files
    from qwen_train.metrics import METRICS_NAME
    from qwen_train.report import write_report

    latents_files(folder)
    vae = open_model(settings.model.path, ("vae",), settings.model.revision)
    device, dtype = choose_device(vae_device, "--vae-device"), getattr(torch, settings.predict.dtype)
    made = decode_folder(folder, vae, device, dtype)
    if (folder / METRICS_NAME).is_file():
        write_report(folder)
    _done(f"{plural(len(made), 'new picture')} in {folder}")
    return 0


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="The output folder of a run.")] = Path("out"),
) -> int:
    """Make report.html anew: curves, settings and pictures of a run on one page."""
    from qwen_train.report import write_report

    _done(write_report(folder))
    return 0


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
    from qwen_cache.console import FAULTS, print_json
    from qwen_cache.settings.load import load_config

    settings = load_config(config, set_ or (), model__path=model, **_in_place_of_all_caches(cache))
    from qwen_train.memory.plan import capacity_of, plan, print_plan

    found = plan(settings, capacity_of(gpu_memory) if gpu_memory else None)
    (print_json if json_ else print_plan)(found)
    return 0 if found.get("fits", True) else FAULTS


@app.command()
def export(
    source: Annotated[Path, typer.Argument(help="A LoRA: its file, or the folder that `run` wrote.")],
    to: Annotated[str, typer.Option(help="diffusers, comfyui, or merged: the LoRA added to the model's weights.")],
    out: Annotated[Path, typer.Option(help="Where it goes: a .safetensors file; with --to merged, a folder.")],
    model: Model = None,
) -> int:
    """Write a LoRA as other programs take it."""
    from qwen_train.lora.export import export

    path = export(source, to, out, model)
    _done(path)
    return 0


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
    from qwen_cache.console import print_json
    from qwen_cache.format.cache import open_cache
    from qwen_cache.models.devices import choose_device
    from qwen_cache.settings.load import load_config
    from qwen_train.mask_head import train_mask_head

    settings = load_config(config, set_ or (), cache__path=cache, mask_head__device=device)
    place = choose_device(settings.mask_head.device, "--device")
    opened = open_cache(
        settings.cache.path,
        recipe=settings.cache.recipe,
        local_copies=settings.cache.local_copies,
        local_copies_size=settings.cache.local_copies_size,
    )
    trained = train_mask_head(opened, settings.mask_head, place, out)
    if json_:
        print_json(trained.to_json())
    else:
        _done(trained)
    return 0


def _done(what: object) -> None:
    from rich.markup import escape

    from qwen_cache.console import console

    console().print(f"[bold green]done[/]: {escape(str(what))}", highlight=False)


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
    run_app(app)
