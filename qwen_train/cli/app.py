"""The command line of `qwen-train`. Commands import their work inside, so that `--help` is fast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from qwen_cache.options import (
    DEVICES,
    GENERATE,
    INPUT,
    MODEL,
    OUTPUT,
    SAMPLING,
    TRAINING,
    Assignments,
    ConfigFile,
    Group,
    Json,
    Model,
    ReadPath,
    Transformer,
    Vae,
    add_config_command,
    command,
    run_app,
    setting,
    setting_argument,
    version_option,
)
from qwen_cache.settings.given import Given

app = typer.Typer(
    name="qwen-train",
    help="Train a LoRA for Qwen-Image-Edit from a cache, and generate images with it.",
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)

RENAMED = {"predict": {"--num-images": "--num-images-per-prompt", "--steps": "--num-inference-steps"}}
"""Old names of options."""
SIZE_HELP = "In pixels, a multiple of 16 (Qwen-Image-2.1: 32)."
SIZE_DEFAULT = "that of the last image, at about 1024² pixels"
OutputFolder = Annotated[
    Given | None,
    setting_argument("train.output_dir", "FOLDER", help="The output folder of a run."),
]


@command(
    app,
    page="howto/choose-what-is-trained.md",
    examples=[
        "qwen-train run --model Qwen/Qwen-Image-Edit-2509 --max-steps 2000 --rank 32",
        "qwen-train run shards --out runs/cats --learning-rate 5e-5 --batch-size 2",
    ],
)
def run(
    cache: Annotated[
        Given | None,
        setting_argument("cache.path", "CACHE", help="The folder or URL of the cache; with --encode-…, the source."),
    ] = None,
    encode_on_the_fly: Annotated[
        bool,
        typer.Option(
            "--encode-on-the-fly",
            help="Train without a cache: another process encodes, on cache.vae_device and cache.text_device.",
            rich_help_panel=INPUT,
        ),
    ] = False,
    encode_at: Annotated[
        str | None,
        typer.Option(
            "--encode-at",
            help="Train without a cache: a `qwen-cache serve` at this address encodes.",
            metavar="URL",
            rich_help_panel=INPUT,
        ),
    ] = None,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            help="Train while the cache is built: wait for its first commit, take in new ones at the ends of epochs.",
            rich_help_panel=INPUT,
        ),
    ] = False,
    model: Model = None,
    transformer: Transformer = None,
    vae: Vae = None,
    max_steps: Annotated[
        Given | None, setting("train.max_steps", "--max-steps", panel=TRAINING, help="Optimizer steps.")
    ] = None,
    learning_rate: Annotated[
        Given | None,
        setting("optimizer.learning_rate", "--learning-rate", panel=TRAINING, help="The peak learning rate."),
    ] = None,
    rank: Annotated[
        Given | None, setting("train.lora.rank", "--rank", panel=TRAINING, help="The rank of the LoRA.")
    ] = None,
    batch_size: Annotated[
        Given | None,
        setting(
            "train.batch_size",
            "--batch-size",
            panel=TRAINING,
            help="Samples per forward pass and device.",
            default="1 without train.max_tokens",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue from the newest checkpoint in the output folder, if there is one.",
            rich_help_panel=TRAINING,
        ),
    ] = False,
    out: Annotated[
        Given | None,
        setting(
            "train.output_dir",
            "--out",
            panel=OUTPUT,
            metavar="FOLDER",
            help="The folder for checkpoints, the LoRA and the report.",
        ),
    ] = None,
    json: Json = False,
    config: ConfigFile = None,
    set_: Assignments = None,
) -> int:
    """Train on a cache. Only the transformer is loaded."""
    from qwen_cache.errors import ConfigError
    from qwen_train.cli.run import run_train

    if encode_on_the_fly and encode_at is not None:
        raise ConfigError("--encode-on-the-fly and --encode-at exclude each other", do="leave one of them out")
    encodes = encode_on_the_fly or encode_at is not None
    named = [] if encodes else _only_cache(cache)
    if encodes and cache:
        named = [Given("CACHE", "data.source", cache.value)]
    if follow:
        named.append(Given("--follow", "train.follow", True))
    given = [model, transformer, vae, max_steps, learning_rate, rank, batch_size, out, *named]
    return run_train(
        config,
        set_,
        given,
        resume=resume,
        encode_on_the_fly=encode_on_the_fly,
        encode_at=encode_at,
        as_json=json,
    )


@command(
    app,
    page="howto/generate-images.md",
    examples=[
        "qwen-train predict --image photo.jpg --prompt 'make it night' --lora out",
        "qwen-train predict --from-cache shards --key cats/017 --lora out --out images",
    ],
)
def predict(
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="The instruction; repeat it for several images.", metavar="TEXT", rich_help_panel=GENERATE),
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(help="A control image; repeat it for more.", metavar="FILE", rich_help_panel=GENERATE),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            help="An image per row, into --out: a folder of images with prompts (NAME.txt) or --prompt, or any source "
            "of `qwen-cache build`, with or without targets.",
            metavar="SOURCE",
            rich_help_panel=GENERATE,
        ),
    ] = None,
    from_cache: Annotated[
        str | None,
        typer.Option(
            help="Generate samples of this cache, named by --key; loads no text encoder.",
            metavar="CACHE",
            rich_help_panel=GENERATE,
        ),
    ] = None,
    key: Annotated[
        list[str] | None,
        typer.Option(
            help="A sample of --from-cache, by name, key or start of the key; repeat it for more.",
            metavar="NAME",
            rich_help_panel=GENERATE,
        ),
    ] = None,
    model: Model = None,
    transformer: Transformer = None,
    vae: Vae = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(
            help="A LoRA's file or the folder of a run, with a weight such as out:0.8; repeat it for more.",
            metavar="PATH[:WEIGHT]",
            rich_help_panel=MODEL,
        ),
    ] = None,
    merge: Annotated[
        bool,
        typer.Option("--merge", help="Add the LoRAs to the weights before generating.", rich_help_panel=MODEL),
    ] = False,
    num_inference_steps: Annotated[
        Given | None,
        setting(
            "predict.num_inference_steps",
            "--num-inference-steps",
            panel=SAMPLING,
            help="Denoising steps.",
            default="50; Qwen-Image-2.1: 40",
        ),
    ] = None,
    sigmas: Annotated[
        Given | None,
        setting(
            "predict.sigmas",
            "--sigmas",
            panel=SAMPLING,
            metavar="NUMBERS",
            help="Noise levels such as 1,0.6,0.2, instead of --num-inference-steps.",
        ),
    ] = None,
    true_cfg_scale: Annotated[
        Given | None,
        setting(
            "predict.true_cfg_scale",
            "--true-cfg-scale",
            panel=SAMPLING,
            help="Classifier-free guidance, which doubles the time; 1 turns it off.",
            default="4 with --negative-prompt; Qwen-Image-2.1: 1",
        ),
    ] = None,
    negative_prompt: Annotated[
        Given | None,
        setting(
            "predict.negative_prompt",
            "--negative-prompt",
            panel=SAMPLING,
            help="The prompt to guide away from; may be empty.",
        ),
    ] = None,
    guidance_scale: Annotated[
        Given | None,
        setting(
            "predict.guidance_scale", "--guidance-scale", panel=SAMPLING, help="For guidance-distilled models only."
        ),
    ] = None,
    seed: Annotated[
        Given | None, setting("predict.seed", "--seed", panel=SAMPLING, help="The seed of the noise.")
    ] = None,
    height: Annotated[
        Given | None, setting("predict.height", "--height", panel=SAMPLING, help=SIZE_HELP, default=SIZE_DEFAULT)
    ] = None,
    width: Annotated[
        Given | None, setting("predict.width", "--width", panel=SAMPLING, help=SIZE_HELP, default=SIZE_DEFAULT)
    ] = None,
    output_resolution: Annotated[
        Given | None,
        setting(
            "predict.output_resolution",
            "--output-resolution",
            panel=SAMPLING,
            help="Qwen-Image-2.1: control images and the result have about the square of it in pixels.",
            default="1024",
        ),
    ] = None,
    max_sequence_length: Annotated[
        Given | None,
        setting(
            "predict.max_sequence_length",
            "--max-sequence-length",
            panel=SAMPLING,
            help="The maximum number of tokens of a prompt without images.",
            default="512",
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(help="The device of all components.", metavar="DEVICE", rich_help_panel=DEVICES)
    ] = "auto",
    vae_device: Annotated[
        str | None,
        typer.Option(help="The device of the VAE.", metavar="DEVICE", show_default="--device", rich_help_panel=DEVICES),
    ] = None,
    text_device: Annotated[
        str | None,
        typer.Option(
            help="The device of the text encoder.", metavar="DEVICE", show_default="--device", rich_help_panel=DEVICES
        ),
    ] = None,
    transformer_device: Annotated[
        str | None,
        typer.Option(
            help="The device of the transformer.", metavar="DEVICE", show_default="--device", rich_help_panel=DEVICES
        ),
    ] = None,
    offload: Annotated[
        Given | None,
        setting(
            "predict.offload",
            "--offload",
            panel=DEVICES,
            help="Weights that stay in host memory until they compute: whole components (model), or layers "
            "(sequential).",
        ),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            help="The image to write; with --source a folder, with --from-cache either.",
            metavar="PATH",
            rich_help_panel=OUTPUT,
        ),
    ] = Path("out.png"),
    num_images_per_prompt: Annotated[
        Given | None,
        setting(
            "predict.num_images_per_prompt",
            "--num-images-per-prompt",
            panel=OUTPUT,
            help="Images per prompt: out-1.png, out-2.png, …",
        ),
    ] = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Also generate without the LoRAs, and write a page with all side by side.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            help="An image for each value, side by side: of lora_weight, checkpoint, num_inference_steps, "
            "true_cfg_scale or seed; a second axis makes rows.",
            metavar="AXIS=V1,V2,…",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    save_interrupted: Annotated[
        bool,
        typer.Option("--save-interrupted", help="When interrupted, save the unfinished image.", rich_help_panel=OUTPUT),
    ] = False,
    json: Json = False,
    config: ConfigFile = None,
    set_: Assignments = None,
) -> int:
    """Generate images with the stock pipeline and LoRAs, from --prompt, rows of --source, or samples --from-cache."""
    from qwen_cache.settings.load import load_config

    sizes = (height, width, output_resolution)
    guidance = (negative_prompt, true_cfg_scale, guidance_scale)
    others = (
        model,
        transformer,
        vae,
        num_inference_steps,
        sigmas,
        num_images_per_prompt,
        seed,
        max_sequence_length,
        offload,
    )
    settings = load_config(config, set_, [*others, *guidance, *sizes])
    from qwen_cache.errors import ConfigError
    from qwen_train.cli.predict import PredictOptions, check_guidance, run_predict

    check_guidance(settings.predict, settings.predict.true_cfg_scale if true_cfg_scale else None)
    if from_cache and any(sizes):
        do = "leave out --width, --height and --output-resolution"
        raise ConfigError("a cached sample has a fixed size", do=do)
    options = PredictOptions(
        out=out,
        images=image or (),
        prompts=prompt or (),
        source=source,
        cache=from_cache,
        keys=key or (),
        loras=lora or (),
        devices=(device, vae_device, text_device, transformer_device),
        merge=merge,
        compare=compare,
        grid=grid or (),
        save_interrupted=save_interrupted,
        as_json=json,
    )
    return run_predict(settings, options)


@command(
    app,
    page="howto/watch-a-run.md",
    examples=["qwen-train decode", "qwen-train decode runs/cats --watch --vae-device cuda:1"],
)
def decode(
    folder: Annotated[
        Given | None,
        setting_argument("train.output_dir", "FOLDER", help="The output folder of a run, or a folder of latents."),
    ] = None,
    model: Model = None,
    vae: Vae = None,
    vae_device: Annotated[
        str, typer.Option(help="The device of the VAE.", metavar="DEVICE", rich_help_panel=DEVICES)
    ] = "auto",
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", help="Decode images as they come, until the run has ended or Ctrl-C.", rich_help_panel=INPUT
        ),
    ] = False,
    json: Json = False,
    config: ConfigFile = None,
    set_: Assignments = None,
) -> int:
    """Decode the latents of validation images to PNGs, and show them in report.html. Only the VAE is loaded."""
    from qwen_train.cli.decode import run_decode

    path = Path(folder.value) if folder else None
    return run_decode(path, [model, vae], vae_device, config, set_ or (), watch=watch, as_json=json)


@command(app, page="howto/watch-a-run.md", examples=["qwen-train report", "qwen-train report runs/cats"])
def report(folder: OutputFolder = None, json: Json = False, config: ConfigFile = None, set_: Assignments = None) -> int:
    """Write report.html again: curves, settings and images of a run on one page."""
    from qwen_cache.settings.load import load_config
    from qwen_train.cli.report import run_report

    return run_report(Path(load_config(config, set_, [folder]).train.output_dir), as_json=json)


@command(
    app,
    page="howto/train-on-24gb.md",
    examples=["qwen-train plan --gpu-memory 24GB", "qwen-train plan --set train.offload_blocks=20 --json"],
)
def plan(
    cache: ReadPath = None,
    model: Model = None,
    transformer: Transformer = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option(
            help="The memory of the GPU, such as 24GB.",
            metavar="SIZE",
            rich_help_panel=DEVICES,
        ),
    ] = None,
    json: Json = False,
    config: ConfigFile = None,
    set_: Assignments = None,
) -> int:
    """Predict the memory of training by part, and whether it fits. Loads no weights."""
    from qwen_cache.settings.load import load_config

    settings = load_config(config, set_, [model, transformer, *_only_cache(cache)])
    from qwen_train.cli.plan import run_plan

    return run_plan(settings, gpu_memory, as_json=json)


@command(
    app,
    page="howto/generate-images.md",
    examples=[
        "qwen-train export out --to comfyui --out cats.safetensors",
        "qwen-train export out --to merged --out merged",
    ],
)
def export(
    source: Annotated[Path, typer.Argument(help="A LoRA: its file, or the folder of a run.", metavar="LORA")],
    *,
    model: Model = None,
    transformer: Transformer = None,
    to: Annotated[
        Literal["diffusers", "comfyui", "peft", "merged"],
        typer.Option(help="The format; merged: the LoRA added to the model's weights.", rich_help_panel=OUTPUT),
    ],
    out: Annotated[
        Path,
        typer.Option(
            help="The output: a .safetensors file; with --to peft or merged, a folder.",
            metavar="PATH",
            rich_help_panel=OUTPUT,
        ),
    ],
    json: Json = False,
    config: ConfigFile = None,
    set_: Assignments = None,
) -> int:
    """Convert a LoRA for other programs, or merge it into the model's weights."""
    from qwen_cache.settings.load import load_config
    from qwen_train.cli.export import run_export

    given = model or transformer or config or set_
    named = load_config(config, set_, [model, transformer]).model if given else None
    return run_export(source, to, out, named, as_json=json)


@command(
    app,
    page="howto/publish-a-lora.md",
    examples=["qwen-train push out OWNER/NAME --dry-run", "qwen-train push out OWNER/NAME --private"],
)
def push(
    folder: Annotated[
        str | None,
        typer.Argument(
            help="The output folder of a run, or a checkpoint.",
            metavar="FOLDER",
            show_default="train.output_dir, else out",
        ),
    ] = None,
    repo: Annotated[
        str | None,
        typer.Argument(
            help="The repository on the Hugging Face hub, required: OWNER/NAME.", metavar="REPO", show_default=False
        ),
    ] = None,
    *,
    base_model: Annotated[
        str | None,
        typer.Option(
            help="The base model on the hub, if the run had it from a local folder.",
            metavar="REPO",
            rich_help_panel=MODEL,
        ),
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="Make the repository private.", rich_help_panel=OUTPUT)
    ] = False,
    revision: Annotated[
        str | None,
        typer.Option(help="The branch; created if there is none.", metavar="BRANCH", rich_help_panel=OUTPUT),
    ] = None,
    no_images: Annotated[
        bool,
        typer.Option("--no-images", help="Upload no validation images and no prompts.", rich_help_panel=OUTPUT),
    ] = False,
    keep_card: Annotated[
        bool, typer.Option("--keep-card", help="Leave the repository's README.md as it is.", rich_help_panel=OUTPUT)
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the files and the card, and upload nothing.", rich_help_panel=OUTPUT)
    ] = False,
    json: Json = False,
    config: ConfigFile = None,
    set_: Assignments = None,
) -> int:
    """Upload a trained LoRA to the Hugging Face hub, with a model card made from the run."""
    from qwen_cache.errors import ConfigError
    from qwen_cache.settings.load import load_config
    from qwen_train.cli.push import run_push

    folder, repo = (folder, repo) if repo else (None, folder)
    if repo is None or (folder is None and Path(repo).is_dir()):
        raise ConfigError("push needs the repository to upload to", do="name it: qwen-train push out OWNER/NAME")
    settings = load_config(config, set_, [Given("FOLDER", "train.output_dir", folder) if folder else None])
    return run_push(
        Path(settings.train.output_dir),
        repo.removeprefix("hf://"),
        base_model=base_model,
        private=private,
        revision=revision,
        with_images=not no_images,
        keep_card=keep_card,
        dry_run=dry_run,
        assignments=set_ or (),
        as_json=json,
    )


@command(
    app,
    "mask-head",
    page="howto/train-with-edit-masks.md",
    examples=[
        "qwen-train mask-head shards --out mask_head.safetensors",
        "qwen-train mask-head --set mask_head.steps=5000 --json",
    ],
)
def mask_head(
    cache: ReadPath = None,
    device: Annotated[
        Given | None,
        setting("mask_head.device", "--device", panel=DEVICES, metavar="DEVICE", help="The device for training."),
    ] = None,
    out: Annotated[Path, typer.Option(help="The path of the head.", metavar="FILE", rich_help_panel=OUTPUT)] = Path(
        "mask_head.safetensors"
    ),
    json: Json = False,
    config: ConfigFile = None,
    set_: Assignments = None,
) -> int:
    """Experimental: train a mask head on a cache with masks and attention. No part of the model is loaded."""
    from qwen_cache.settings.load import load_config
    from qwen_train.cli.mask_head import run_mask_head

    return run_mask_head(load_config(config, set_, [cache, device]), out, as_json=json)


def _only_cache(cache: Given | None) -> list[Given]:
    """The settings for a cache from the command line, which replaces all caches in qwen.yaml."""
    return [cache, Given("CACHE", "train.caches", [])] if cache else []


add_config_command(app)
app.callback()(version_option)


def main() -> Any:
    run_app(app, RENAMED)
