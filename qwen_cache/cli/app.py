"""The command line of `qwen-cache`. Handlers import their work inside, so that `--help` is fast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from qwen_cache.command_line import run_app, version_option

app = typer.Typer(
    name="qwen-cache",
    help="Run the frozen encoders of Qwen-Image-Edit once, and cache their outputs as a dataset.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)

CachePath = Annotated[str, typer.Argument(help="The folder of the cache.", metavar="[CACHE]", show_default="shards")]
ReadPath = Annotated[
    str, typer.Argument(help="The folder or URL of the cache.", metavar="[CACHE]", show_default="shards")
]
Version = Literal["v1", "v2"]
RENAMED = {
    "build": {"--part": "--slice"},
    "inspect": {"--gallery": "--thumbnails", "--pictures": "--save-images", "--worst": "--top"},
}
"""Old names of options, by command."""
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else.")]


@app.command()
def build(
    source: Annotated[
        str | None, typer.Argument(help="A folder, table or tar files with images, or a URL. Default: data.source.")
    ] = None,
    out: Annotated[str | None, typer.Option(help="The folder of the cache.", show_default="shards")] = None,
    model: Annotated[str | None, typer.Option(help="A diffusers folder, or a repository on the hub.")] = None,
    vae_device: Annotated[
        str | None, typer.Option(help="Device of the VAE: cuda:1, or several: cuda:0,cuda:1.")
    ] = None,
    text_device: Annotated[str | None, typer.Option(help="Device of the text encoder, such as cuda:2.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16 or float32, for computing and storing.")] = None,
    format: Annotated[str | None, typer.Option(help="Format version: v2 or v1.", show_default="v2")] = None,
    on_error: Annotated[str | None, typer.Option(help="What to do with unusable samples: stop or skip.")] = None,
    edit_mask: Annotated[
        str | None,
        typer.Option(help="Origin of edit masks: none, file or diff; experimental: head or auto."),
    ] = None,
    mask_head: Annotated[
        str | None, typer.Option(help="Experimental: the mask head of --edit-mask head or auto.")
    ] = None,
    slice_: Annotated[
        str | None, typer.Option("--slice", help="Build one slice of the rows, such as 3/16, for job arrays.")
    ] = None,
    ray: Annotated[
        str | None, typer.Option(help="Encode on a Ray cluster: its address, or local.", metavar="ADDRESS|local")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="The settings file.", show_default="qwen.yaml")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Override a setting: section.key=value.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be encoded, and why; write nothing.")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="With --dry-run: exit with 1 if there is work.")] = False,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="With --dry-run: encode a few samples without storing them, and estimate the time."
        ),
    ] = False,
    json: Json = False,
) -> int:
    """Encode the samples of SOURCE that the cache lacks."""
    from qwen_cache.cli.build import run_build
    from qwen_cache.console import console
    from qwen_cache.errors import ConfigError
    from qwen_cache.settings.load import load_config
    from qwen_cache.storage.url import local_folder

    edit_mask, _, head = edit_mask.partition("=") if edit_mask else (None, "", "")  # head=PATH: the old spelling
    if head and edit_mask not in ("head", "auto"):
        found = f"--edit-mask {edit_mask}={head}"
        raise ConfigError(f"--edit-mask {edit_mask} takes no mask head", found=found, do="give --edit-mask head")
    if head:
        console().print(f"--edit-mask {edit_mask}=PATH is called --edit-mask {edit_mask} --mask-head PATH now")
    settings = load_config(
        config,
        set_ or (),
        model__path=model,
        cache__path=out,
        cache__vae_device=vae_device,
        cache__text_device=text_device,
        cache__dtype=dtype,
        cache__format=format,
        data__on_error=on_error,
        data__edit_mask=edit_mask,
        data__mask_head=mask_head or head or None,
        data__slice=slice_,
    )
    local_folder(settings.cache.path)
    return run_build(settings, source, ray=ray, dry_run=dry_run, check=check, measure=measure, as_json=json)


@app.command("encode-worker", hidden=True)
def encode_worker(source: str, settings: str) -> int:
    """Encode samples on request from stdin; for `qwen-train run --encode-on-the-fly`."""
    from qwen_cache.cli.encode_worker import run_encode_worker
    from qwen_cache.settings.load import parse_config

    return run_encode_worker(parse_config(settings), source)


@app.command()
def verify(cache: ReadPath = "shards", json: Json = False) -> int:
    """Check every byte of a cache against its hashes."""
    from qwen_cache.cli.verify import run_verify

    return run_verify(cache, as_json=json)


@app.command()
def inspect(
    cache: ReadPath = "shards",
    html: Annotated[Path | None, typer.Option(help="Write a page with the report and a list of all samples.")] = None,
    decode: Annotated[
        bool, typer.Option("--decode", help="With --html: decode images with the VAE instead of showing thumbnails.")
    ] = False,
    thumbnails: Annotated[
        int | None,
        typer.Option(
            help="With --html: show images of this many samples.",
            min=0,
            show_default="200; 0 for a remote cache without --decode",
        ),
    ] = None,
    scan: Annotated[
        bool, typer.Option("--scan", help="Read every tensor; flag odd masks, odd numbers and near-duplicate targets.")
    ] = False,
    source: Annotated[
        str | None,
        typer.Option(
            help="Report whether the cache is up to date with this source. `build --dry-run` reports the effect of "
            "another model or other settings."
        ),
    ] = None,
    sample: Annotated[
        str | None, typer.Option(help="Show one sample, by name, key or start of the key.", metavar="KEY")
    ] = None,
    mask_head: Annotated[
        Path | None, typer.Option(help="Experimental: list the edit masks that differ most from this mask head's.")
    ] = None,
    top: Annotated[
        int | None, typer.Option(help="With --mask-head: list this many masks.", min=1, show_default="12")
    ] = None,
    save_images: Annotated[
        Path | None,
        typer.Option(help="With --mask-head: write a PNG of these samples, at most 24, decoded by the VAE."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="With --decode or --save-images: a diffusers folder, or a repository on the hub.")
    ] = None,
    vae_device: Annotated[str, typer.Option(help="Device of the VAE and the mask head.")] = "auto",
    config: Annotated[
        Path | None,
        typer.Option(help="The settings file.", show_default="qwen.yaml; with --source, that of the build"),
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Override a setting: section.key=value.")] = None,
    json: Json = False,
) -> int:
    """Report what a cache holds."""
    from qwen_cache.cli.inspect import Inspection, run_inspect

    options = Inspection(
        cache=cache,
        html=html,
        decode=decode,
        thumbnails=thumbnails,
        scan=scan,
        source=source,
        sample=sample,
        mask_head=mask_head,
        top=top,
        save_images=save_images,
        model=model,
        vae_device=vae_device,
        config=config,
        assignments=tuple(set_ or ()),
        as_json=json,
    )
    return run_inspect(options)


@app.command()
def migrate(
    old: Annotated[Version, typer.Argument(help="Format version of the cache.", metavar="v1|v2")],
    new: Annotated[Version, typer.Argument(help="Format version to write.", metavar="v1|v2")],
    cache: CachePath = "shards",
    out: Annotated[str | None, typer.Option(help="The folder to write. Default: the same folder.")] = None,
    config: Annotated[Path | None, typer.Option(help="The settings file.", show_default="qwen.yaml")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Override a setting: section.key=value.")] = None,
    json: Json = False,
) -> int:
    """Convert a cache to another format version, without the encoders."""
    from qwen_cache.cli.migrate import run_migrate
    from qwen_cache.settings.load import load_config

    settings = load_config(config, set_ or (), cache__path=out or cache)
    return run_migrate(settings, cache, int(old[1:]), int(new[1:]), as_json=json)


@app.command()
def merge(
    caches: Annotated[list[str], typer.Argument(help="The caches to merge.")],
    out: Annotated[str, typer.Option(help="The cache to create, or to extend.")],
    select: Annotated[
        list[str] | None, typer.Option(help="Only samples with these names: 'cats/*', or @FILE with a name per line.")
    ] = None,
    compression: Annotated[
        str | None, typer.Option(help="Compression of the merged cache: none or zstd.", show_default="unchanged")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="The settings file.", show_default="qwen.yaml")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Override a setting: section.key=value.")] = None,
    json: Json = False,
) -> int:
    """Merge caches into one, or copy selected samples of one."""
    from qwen_cache.cli.merge import run_merge
    from qwen_cache.settings.load import load_config

    settings = load_config(config, set_ or (), cache__path=out, cache__compression=compression)
    return run_merge(settings, caches, select or [], as_json=json)


@app.command("import")
def import_(
    tool: Annotated[
        Literal["qflux", "musubi", "diffusion-pipe"],
        typer.Argument(help="The trainer that wrote the cache.", metavar="qflux|musubi|diffusion-pipe"),
    ],
    source: Annotated[Path, typer.Argument(help="The folder of that cache.")],
    out: Annotated[str, typer.Option(help="The folder of the new cache.")],
    model: Annotated[
        str, typer.Option(help="The model that wrote it, such as Qwen/Qwen-Image-Edit-2509. Recorded as claimed.")
    ],
    pipeline: Annotated[
        str | None, typer.Option(help="Its diffusers pipeline, if --model does not determine it.")
    ] = None,
    dtype: Annotated[
        Literal["bfloat16", "float32"] | None,
        typer.Option(help="The dtype to store.", show_default="the one that is exact"),
    ] = None,
    image_size: Annotated[
        list[str] | None, typer.Option(help="qflux: WIDTHxHEIGHT of the resized images; repeat it for each size.")
    ] = None,
    captions: Annotated[Path | None, typer.Option(help="qflux: the folder with the .txt files of the prompts.")] = None,
    on_error: Annotated[str | None, typer.Option(help="What to do with unusable samples: stop or skip.")] = None,
    config: Annotated[Path | None, typer.Option(help="The settings file.", show_default="qwen.yaml")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Override a setting: section.key=value.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Read everything and print what would be imported; write nothing.")
    ] = False,
    json: Json = False,
) -> int:
    """Import the cache of another trainer, without the encoders."""
    from qwen_cache.cli.import_ import run_import
    from qwen_cache.settings.load import load_config

    settings = load_config(config, set_ or (), cache__path=out, data__on_error=on_error)
    return run_import(
        settings,
        tool,
        source,
        model=model,
        pipeline=pipeline,
        dtype=dtype,
        image_sizes=image_size or [],
        captions=captions,
        dry_run=dry_run,
        as_json=json,
    )


@app.command()
def gc(
    cache: CachePath = "shards",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be removed; remove nothing.")] = False,
    json: Json = False,
) -> int:
    """Remove files that are not part of the dataset: replaced shards, and samples of abandoned builds."""
    from qwen_cache.cli.gc import run_gc

    return run_gc(cache, dry_run=dry_run, as_json=json)


@app.command()
def ground(
    image: Annotated[list[Path], typer.Option(help="The image; repeat it for more. The mask is for the first.")],
    phrase: Annotated[str | None, typer.Option(help="The words to find; with --prompt, a part of it.")] = None,
    prompt: Annotated[
        str | None, typer.Option(help="An edit prompt. Without --phrase: the words in [[ ]], or all.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The PNG of the mask; NAME-overlay.png shows it over the image.")] = Path(
        "mask.png"
    ),
    head: Annotated[
        Path | None, typer.Option(help="A mask head of `qwen-train mask-head`. Without it: a heat map.")
    ] = None,
    sam: Annotated[Path | None, typer.Option(help="A folder with SAM or SAM 2, to refine the mask.")] = None,
    model: Annotated[str | None, typer.Option(help="A diffusers folder, or a repository on the hub.")] = None,
    text_device: Annotated[str | None, typer.Option(help="Device of the text encoder, such as cuda:1.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16 or float32, for computing.")] = None,
    config: Annotated[Path | None, typer.Option(help="The settings file.", show_default="qwen.yaml")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Override a setting: section.key=value.")] = None,
) -> int:
    """Experimental: show where in an image the text encoder attends for a phrase. Loads only the text encoder."""
    from qwen_cache.cli.ground import GroundingQuery, run_ground
    from qwen_cache.settings.load import load_config

    settings = load_config(config, set_ or (), model__path=model, cache__text_device=text_device, cache__dtype=dtype)
    return run_ground(settings, image, GroundingQuery.of(phrase, prompt), out, head, sam)


@app.command()
def doctor(
    path: Annotated[str, typer.Option(help="The folder of the cache, which need not exist yet.")] = "shards",
    json: Json = False,
) -> int:
    """Check this machine: what is installed, what is missing, and how to get it."""
    from qwen_cache.cli.doctor import run_doctor

    return run_doctor(path, as_json=json)


app.callback()(version_option)


def main() -> Any:
    run_app(app, RENAMED)
