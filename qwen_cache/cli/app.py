"""The command line of `qwen-cache`. Every handler imports its work inside, so that `--help` answers at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from qwen_cache.console import run_app

app = typer.Typer(
    name="qwen-cache",
    help="Run the frozen encoders of Qwen-Image-Edit once, and keep what they say as a dataset.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)

CachePath = Annotated[str, typer.Argument(help="The folder of the cache.", metavar="[CACHE]", show_default="shards")]
ReadPath = Annotated[
    str, typer.Argument(help="The folder of the cache, or its URL.", metavar="[CACHE]", show_default="shards")
]
Version = Literal["v1", "v2"]
RENAMED = {
    "build": {"--part": "--slice"},
    "inspect": {"--gallery": "--thumbnails", "--images": "--save-images", "--worst": "--top"},
}
"""Options by the name that they had."""
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]


@app.command()
def build(
    source: Annotated[
        str | None, typer.Argument(help="A folder, table or tars of images, or a URL; data.source when not given.")
    ] = None,
    out: Annotated[str | None, typer.Option(help="The folder of the cache.", show_default="shards")] = None,
    model: Annotated[str | None, typer.Option(help="A diffusers folder, or a repository on the hub.")] = None,
    vae_device: Annotated[str | None, typer.Option(help="Where the VAE runs: cuda:1, or cuda:0,cuda:1.")] = None,
    text_device: Annotated[str | None, typer.Option(help="Where the text encoder runs: cuda:2.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16 or float32: computed in, and stored as.")] = None,
    format: Annotated[str | None, typer.Option(help="v2 or v1.", show_default="v2")] = None,
    on_error: Annotated[str | None, typer.Option(help="stop or skip: what an unusable sample does.")] = None,
    edit_mask: Annotated[
        str | None,
        typer.Option(help="Where edit masks come from: none, file or diff; experimental: head or auto."),
    ] = None,
    mask_head: Annotated[
        str | None, typer.Option(help="Experimental: the mask head for --edit-mask head or auto.")
    ] = None,
    slice_: Annotated[
        str | None, typer.Option("--slice", help="Build one slice of the rows, such as 3/16, in a job array.")
    ] = None,
    ray: Annotated[
        str | None, typer.Option(help="Encode on a Ray cluster: its address, or local.", metavar="ADDRESS|local")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="The settings.", show_default="qwen.yaml")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="section.key=value, over the settings.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be encoded, and why; write nothing.")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="With --dry-run: exit with 1 when there is work.")] = False,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="With --dry-run: encode a few samples, unsaved, and say how long all take."),
    ] = False,
    json: Json = False,
) -> int:
    """Encode what SOURCE has and the cache does not."""
    from qwen_cache.cli.build import run_build
    from qwen_cache.errors import ConfigError
    from qwen_cache.settings.load import load_config
    from qwen_cache.storage.url import local_folder

    edit_mask, _, head = edit_mask.partition("=") if edit_mask else (None, "", "")
    if head and edit_mask not in ("head", "auto"):
        found = f"--edit-mask {edit_mask}={head}"
        raise ConfigError(f"--edit-mask {edit_mask} takes no head", found=found, do="give --edit-mask head")
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
    """Encode what is asked for on stdin; for `qwen-train run --encode-on-the-fly`."""
    from qwen_cache.cli.encode_worker import run_encode_worker
    from qwen_cache.settings.load import parse_config

    return run_encode_worker(parse_config(settings), source)


@app.command()
def verify(cache: ReadPath = "shards", json: Json = False) -> int:
    """Check every byte of a cache against what was written."""
    from qwen_cache.cli.verify import run_verify

    return run_verify(cache, as_json=json)


@app.command()
def inspect(
    cache: ReadPath = "shards",
    html: Annotated[Path | None, typer.Option(help="Write a page with everything, and a list of all samples.")] = None,
    decode: Annotated[
        bool, typer.Option("--decode", help="With --html: images decoded by the VAE instead of the thumbnails.")
    ] = False,
    thumbnails: Annotated[
        int | None,
        typer.Option(
            help="With --html: show the images of this many samples.",
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
            help="Report whether the cache is up to date with this source. For the effect of another model or other "
            "settings, use `build --dry-run`."
        ),
    ] = None,
    sample: Annotated[
        str | None, typer.Option(help="Show one sample, by its name, its key, or the start of its key.", metavar="KEY")
    ] = None,
    mask_head: Annotated[
        Path | None, typer.Option(help="Experimental: list the edit masks that differ most from this mask head's.")
    ] = None,
    top: Annotated[int | None, typer.Option(help="With --mask-head: how many.", min=1, show_default="12")] = None,
    save_images: Annotated[
        Path | None, typer.Option(help="With --mask-head: write a PNG of them, 24 at most, decoded by the VAE.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="With --decode or --save-images: a diffusers folder, or a repository.")
    ] = None,
    vae_device: Annotated[str, typer.Option(help="The device of the VAE and of the mask head.")] = "auto",
    config: Annotated[
        Path | None, typer.Option(help="The settings.", show_default="qwen.yaml; with --source, those of the build")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="section.key=value, over the settings.")] = None,
    json: Json = False,
) -> int:
    """Report what a cache holds."""
    from qwen_cache.cli.inspect import Inspection, run_inspect

    asked = Inspection(
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
    return run_inspect(asked)


@app.command()
def migrate(
    old: Annotated[Version, typer.Argument(help="v1 or v2: what the cache is.", metavar="v1|v2")],
    new: Annotated[Version, typer.Argument(help="v1 or v2: what it shall be.", metavar="v1|v2")],
    cache: CachePath = "shards",
    out: Annotated[str | None, typer.Option(help="Where to; the same folder when not given.")] = None,
    config: Annotated[Path | None, typer.Option(help="The settings.", show_default="qwen.yaml")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="section.key=value, over the settings.")] = None,
    json: Json = False,
) -> int:
    """Bring a cache from one format version to another, without the encoders."""
    from qwen_cache.cli.migrate import run_migrate
    from qwen_cache.settings.load import load_config

    settings = load_config(config, set_ or (), cache__path=out or cache)
    return run_migrate(settings, cache, int(old[1:]), int(new[1:]), as_json=json)


@app.command()
def merge(
    caches: Annotated[list[str], typer.Argument(help="The caches to take samples from.")],
    out: Annotated[str, typer.Option(help="The cache to make, or to add to.")],
    select: Annotated[
        list[str] | None, typer.Option(help="Only samples of such names: 'cats/*', or @FILE with a name per line.")
    ] = None,
    compression: Annotated[
        str | None, typer.Option(help="none or zstd: how samples shall be stored.", show_default="as they lie")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="The settings.", show_default="qwen.yaml")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="section.key=value, over the settings.")] = None,
    json: Json = False,
) -> int:
    """Make one cache of several, or of some of the samples of one."""
    from qwen_cache.cli.merge import run_merge
    from qwen_cache.settings.load import load_config

    settings = load_config(config, set_ or (), cache__path=out, cache__compression=compression)
    return run_merge(settings, caches, select or [], as_json=json)


@app.command("import")
def import_(
    tool: Annotated[
        Literal["qflux", "musubi", "diffusion-pipe"],
        typer.Argument(help="Which trainer made it.", metavar="qflux|musubi|diffusion-pipe"),
    ],
    source: Annotated[Path, typer.Argument(help="The folder of its cache.")],
    out: Annotated[str, typer.Option(help="The folder of the cache to be made.")],
    model: Annotated[
        str, typer.Option(help="Which model wrote it, such as Qwen/Qwen-Image-Edit-2509: recorded as claimed.")
    ],
    pipeline: Annotated[str | None, typer.Option(help="Its diffusers pipeline, where --model does not tell.")] = None,
    dtype: Annotated[
        Literal["bfloat16", "float32"] | None, typer.Option(help="Stored as.", show_default="what holds it exactly")
    ] = None,
    image_size: Annotated[
        list[str] | None, typer.Option(help="qflux: WIDTHxHEIGHT of the resized images; each size that occurs.")
    ] = None,
    captions: Annotated[Path | None, typer.Option(help="qflux: the folder of the prompts' .txt files.")] = None,
    on_error: Annotated[str | None, typer.Option(help="stop or skip: what an unusable sample does.")] = None,
    config: Annotated[Path | None, typer.Option(help="The settings.", show_default="qwen.yaml")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="section.key=value, over the settings.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Read everything and say what would be imported; write nothing.")
    ] = False,
    json: Json = False,
) -> int:
    """Make a cache of one that another trainer made, without the encoders."""
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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be removed.")] = False,
    json: Json = False,
) -> int:
    """Remove what the dataset does not name: replaced shards, and samples of builds that were given up."""
    from qwen_cache.cli.gc import run_gc

    return run_gc(cache, dry_run=dry_run, as_json=json)


@app.command()
def ground(
    image: Annotated[list[Path], typer.Option(help="The image; repeat it for more, the mask is about the first.")],
    phrase: Annotated[
        str | None, typer.Option(help="The words to look for: within --prompt, where that is given.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="An instruction; without --phrase the words in [[ ]] count, or all.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The mask, a PNG; beside it NAME-overlay.png shows it.")] = Path("mask.png"),
    head: Annotated[
        Path | None, typer.Option(help="What `qwen-train mask-head` made; a heat map when not given.")
    ] = None,
    sam: Annotated[Path | None, typer.Option(help="A folder of SAM or SAM 2 that sharpens the mask.")] = None,
    model: Annotated[str | None, typer.Option(help="A diffusers folder, or a repository on the hub.")] = None,
    text_device: Annotated[str | None, typer.Option(help="Where the text encoder runs: cuda:1.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16 or float32: computed in.")] = None,
    config: Annotated[Path | None, typer.Option(help="The settings.", show_default="qwen.yaml")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="section.key=value, over the settings.")] = None,
) -> int:
    """Show where in an image the text encoder looks for some words. Only the text encoder is loaded."""
    from qwen_cache.cli.ground import Words, run_ground
    from qwen_cache.settings.load import load_config

    settings = load_config(config, set_ or (), model__path=model, cache__text_device=text_device, cache__dtype=dtype)
    return run_ground(settings, image, Words.of(phrase, prompt), out, head, sam)


@app.command()
def doctor(
    path: Annotated[str, typer.Option(help="Where the cache shall be: a folder, there or not.")] = "shards",
    json: Json = False,
) -> int:
    """Look at this machine: what is there, what is missing, and how to get it."""
    from qwen_cache.cli.doctor import run_doctor

    return run_doctor(path, as_json=json)


def _version(value: bool) -> None:
    if value:
        from qwen_cache.console import version_lines

        print(version_lines("qwen-cache"))
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
