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
    from qwen_cache.config import load_config
    from qwen_cache.console import console

    source = cache if encode_on_the_fly else None
    named = {} if encode_on_the_fly else _in_place_of_all_caches(cache)
    settings = load_config(config, set_ or (), model__path=model, **named)
    from qwen_train.train import train

    path = train(settings, resume=resume, encode_from=source or settings.data.source if encode_on_the_fly else None)
    console().print(f"[bold green]done[/]: {path}", highlight=False)
    return 0


@app.command()
def predict(
    prompt: Annotated[str, typer.Option(help="The instruction.")],
    image: Annotated[list[Path] | None, typer.Option(help="A control picture; repeat it for more.")] = None,
    lora: Annotated[Path | None, typer.Option(help="A LoRA: its file, or the folder that `run` wrote.")] = None,
    out: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("out.png"),
    model: Model = None,
    vae_device: Annotated[str, typer.Option(help="Where the VAE runs.")] = "auto",
    text_device: Annotated[str, typer.Option(help="Where the text encoder runs.")] = "auto",
    transformer_device: Annotated[str, typer.Option(help="Where the transformer runs.")] = "auto",
    steps: Annotated[int | None, typer.Option(help="Denoising steps.")] = None,
    seed: Annotated[int | None, typer.Option(help="The seed of the noise.")] = None,
    config: ConfigFile = None,
    set_: Assignments = None,
) -> int:
    """Draw a picture with the stock pipeline and a LoRA."""
    from qwen_cache.config import load_config
    from qwen_cache.console import console
    from qwen_cache.model_folder import open_model

    settings = load_config(
        config, set_ or (), model__path=model, predict__num_inference_steps=steps, predict__seed=seed
    )
    folder = open_model(
        settings.model.path,
        ("vae", "text_encoder", "tokenizer", "processor", "transformer", "scheduler"),
        settings.model.revision,
    )
    from qwen_cache.encode.devices import choose_device
    from qwen_train.predict import Devices, open_pictures, predict

    devices = Devices(
        choose_device(vae_device, "--vae-device"),
        choose_device(text_device, "--text-device"),
        choose_device(transformer_device, "--transformer-device"),
    )
    pictures, quantization = open_pictures(image or []), settings.model.quantization
    picture = predict(folder, pictures, prompt, settings.predict, devices, lora, quantization)
    picture.save(out)
    console().print(f"[bold green]done[/]: {out}, {picture.width}×{picture.height}", highlight=False)
    return 0


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
    from qwen_cache.config import CONFIG_NAME, load_config
    from qwen_cache.console import console, plural
    from qwen_cache.model_folder import open_model

    saved = folder / CONFIG_NAME if folder is not None and (folder / CONFIG_NAME).is_file() else None
    settings = load_config(config or saved, set_ or (), model__path=model)
    folder = folder or Path(settings.train.output_dir)
    import torch

    from qwen_cache.encode.devices import choose_device
    from qwen_train.decode import decode_folder, latents_files
    from qwen_train.metrics import METRICS_NAME
    from qwen_train.report import write_report

    latents_files(folder)
    vae = open_model(settings.model.path, ("vae",), settings.model.revision)
    device, dtype = choose_device(vae_device, "--vae-device"), getattr(torch, settings.predict.dtype)
    made = decode_folder(folder, vae, device, dtype)
    if (folder / METRICS_NAME).is_file():
        write_report(folder)
    console().print(f"[bold green]done[/]: {plural(len(made), 'new picture')} in {folder}", highlight=False)
    return 0


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="The output folder of a run.")] = Path("out"),
) -> int:
    """Make report.html anew: curves, settings and pictures of a run on one page."""
    from qwen_cache.console import console
    from qwen_train.report import write_report

    console().print(f"[bold green]done[/]: {write_report(folder)}", highlight=False)
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
    from qwen_cache.config import load_config
    from qwen_cache.console import FAULTS, print_json

    settings = load_config(config, set_ or (), model__path=model, **_in_place_of_all_caches(cache))
    from qwen_train.plan_command import capacity_of, plan, print_plan

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
    from qwen_cache.console import console
    from qwen_train.export import export

    path = export(source, to, out, model)
    console().print(f"[bold green]done[/]: {path}", highlight=False)
    return 0


def _in_place_of_all_caches(cache: str | None) -> dict[str, Any]:
    """What is named on the command line is trained, whichever caches qwen.yaml names."""
    return {"cache__path": cache, "train__caches": []} if cache else {}


def _version(value: bool) -> None:
    if value:
        from qwen_cache import __version__

        print(f"qwen-train {__version__}")
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
