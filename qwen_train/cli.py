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
    settings = load_config(config, set_ or (), cache__path=None if encode_on_the_fly else cache, model__path=model)
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
    picture = predict(folder, open_pictures(image or []), prompt, settings.predict, devices, lora)
    picture.save(out)
    console().print(f"[bold green]done[/]: {out}, {picture.width}×{picture.height}", highlight=False)
    return 0


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
