"""The command line of `qwen-cache`. Handlers import their work inside, so that `--help` is fast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from qwen_cache.options import (
    DEVICES,
    INPUT,
    MODEL,
    OUTPUT,
    SETTINGS,
    Assignments,
    CachePath,
    ConfigFile,
    Group,
    Json,
    Model,
    ReadPath,
    add_config_command,
    command,
    run_app,
    setting,
    setting_argument,
    version_option,
)
from qwen_cache.settings.given import Given

app = typer.Typer(
    name="qwen-cache",
    help="Run the frozen encoders of Qwen-Image-Edit once, and cache their outputs as a dataset.",
    cls=Group,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)

Version = Literal["v1", "v2"]
RENAMED = {
    "build": {"--part": "--slice"},
    "inspect": {"--gallery": "--thumbnails", "--pictures": "--save-images", "--worst": "--top"},
    "push": {"--no-gallery": "--no-images"},
}
"""Old names of options, by command."""
OutCache = Annotated[
    Given | None, setting("cache.path", "--out", panel=OUTPUT, metavar="FOLDER", help="The folder or URL of the cache.")
]
NewCache = Annotated[
    Given,
    setting("cache.path", "--out", panel=OUTPUT, metavar="FOLDER", help="The cache to create or extend."),
]
VaeDevice = Annotated[
    Given | None,
    setting(
        "cache.vae_device",
        "--vae-device",
        panel=DEVICES,
        metavar="DEVICE",
        help="The device of the VAE, such as cuda:0, or several: cuda:0,cuda:1.",
    ),
]
TextDevice = Annotated[
    Given | None,
    setting(
        "cache.text_device",
        "--text-device",
        panel=DEVICES,
        metavar="DEVICE",
        help="The device of the text encoder, such as cuda:1, or several: cuda:1,cuda:2.",
    ),
]
Dtype = Annotated[
    Given | None,
    setting("cache.dtype", "--dtype", panel=MODEL, help="The dtype in which the text encoder computes."),
]
OnError = Annotated[
    Given | None,
    setting("data.on_error", "--on-error", panel=INPUT, help="How to handle unusable samples."),
]


@command(
    app,
    page="tutorial.md",
    examples=["qwen-cache init data", "qwen-cache init data.parquet --model Qwen/Qwen-Image-2.1 --out run.yaml"],
)
def init(
    source: Annotated[
        Given | None,
        setting_argument("data.source", "SOURCE", help="A folder, table or tars of images, or a URL."),
    ] = None,
    model: Annotated[
        Given | None,
        setting(
            "model.path",
            "--model",
            panel=MODEL,
            metavar="MODEL",
            help="A diffusers folder, or a repository on the hub.",
            default="one that takes as many control images as the samples have",
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="The settings file to write.", metavar="FILE", rich_help_panel=OUTPUT)
    ] = Path("qwen.yaml"),
    force: Annotated[
        bool, typer.Option("--force", help="Replace the file if it exists.", rich_help_panel=OUTPUT)
    ] = False,
    json: Json = False,
    set_: Assignments = None,
) -> int:
    """Write a small commented qwen.yaml for the data in SOURCE and the devices of this machine."""
    from qwen_cache.cli.init import run_init
    from qwen_cache.settings.load import overridden

    return run_init(overridden({}, assignments=set_, given=[source, model]), out, force=force, as_json=json)


@command(
    app,
    page="sources.md",
    examples=[
        "qwen-cache build data --model Qwen/Qwen-Image-Edit-2509",
        "qwen-cache build data --vae-device cuda:0 --text-device cuda:1 --dry-run",
    ],
)
def build(
    source: Annotated[
        Given | None,
        setting_argument(
            "data.source",
            "SOURCE",
            help="A folder, table or tars of images, or a URL.",
            default="data.source of qwen.yaml, else data",
        ),
    ] = None,
    model: Model = None,
    dtype: Annotated[
        Given | None,
        setting("cache.dtype", "--dtype", panel=MODEL, help="The dtype in which to compute and store."),
    ] = None,
    targets: Annotated[
        Given | None,
        setting(
            "data.columns.target",
            "--targets",
            panel=INPUT,
            metavar="NAME",
            help="The folder, column or tar part with the targets, such as after.",
        ),
    ] = None,
    controls: Annotated[
        list[str] | None,
        typer.Option(
            help="The folder, column or tar part with the controls; repeat it for more.",
            metavar="NAME",
            rich_help_panel=INPUT,
        ),
    ] = None,
    on_error: OnError = None,
    edit_mask: Annotated[
        Given | None,
        setting(
            "data.edit_mask",
            "--edit-mask",
            panel=INPUT,
            help="How to make edit masks for rows without one; head and auto are experimental.",
        ),
    ] = None,
    mask_head: Annotated[
        Given | None,
        setting(
            "data.mask_head",
            "--mask-head",
            panel=INPUT,
            metavar="FILE",
            help="Experimental: the mask head of --edit-mask head or auto.",
        ),
    ] = None,
    slice_: Annotated[
        Given | None,
        setting(
            "data.slice",
            "--slice",
            panel=INPUT,
            metavar="K/N",
            help="Build one slice of the rows, such as 3/16, for job arrays.",
        ),
    ] = None,
    validation: Annotated[
        Given | None,
        setting(
            "validation.source",
            "--validation",
            panel=INPUT,
            metavar="SOURCE",
            help="Prompts, with controls or without, to generate images from while training.",
        ),
    ] = None,
    only_validation: Annotated[
        bool,
        typer.Option("--only-validation", help="Build the validation cache and nothing else.", rich_help_panel=INPUT),
    ] = False,
    rehash: Annotated[
        bool,
        typer.Option("--rehash", help="Read every image and the weights again, changed or not.", rich_help_panel=INPUT),
    ] = False,
    watch: Annotated[
        float | None,
        typer.Option(
            "--watch",
            min=0.1,
            help="Keep the encoders loaded, look for new rows every SECONDS, and encode them, until Ctrl-C.",
            metavar="SECONDS",
            rich_help_panel=INPUT,
        ),
    ] = None,
    vae_device: VaeDevice = None,
    text_device: TextDevice = None,
    ray: Annotated[
        str | None,
        typer.Option(
            help="Encode on a Ray cluster: auto, its address, or local.", metavar="ADDRESS", rich_help_panel=DEVICES
        ),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(
            "--at",
            help="Encode on a server that runs `qwen-cache serve`; QWEN_CACHE_TOKEN has its token.",
            metavar="URL",
            rich_help_panel=DEVICES,
        ),
    ] = None,
    out: OutCache = None,
    reuse: Annotated[
        list[str] | None,
        typer.Option(
            help="Copy samples that this cache has, in place of encoding them; repeat it for more.",
            metavar="CACHE",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    format: Annotated[
        Given | None, setting("cache.format", "--format", panel=OUTPUT, help="The format version to write.")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Report what would be encoded and why; write nothing.", rich_help_panel=OUTPUT),
    ] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="With --dry-run: exit with 1 if there is work.", rich_help_panel=OUTPUT),
    ] = False,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="With --dry-run: encode a few samples without storing them, and estimate the time.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    replace_recipe: Annotated[
        bool,
        typer.Option(
            "--replace",
            help="Encode all samples again if model or settings differ from the cache's.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Encode the damaged samples of the cache again, and nothing else.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    json: Json = False,
    config: ConfigFile = None,
    set_: Assignments = None,
) -> int:
    """Encode new and changed samples from SOURCE into the cache."""
    from qwen_cache.cli.build import check_at, run_build, run_watch
    from qwen_cache.settings.load import load_config
    from qwen_cache.storage.remembered import rehashing
    from qwen_cache.storage.stores import destination

    columns = (targets, Given("--controls", "data.columns.control", controls) if controls else None)
    masks = (edit_mask, mask_head)
    caches = Given("--reuse", "cache.reuse", reuse) if reuse else None
    devices, places = (vae_device, text_device), (out, caches, format)
    given = (source, model, dtype, *columns, on_error, *masks, slice_, validation, *devices, *places)
    settings = load_config(config, set_, given)
    destination(settings.cache.path)  # before anything slow
    if at is not None:
        own = {"vae_device": vae_device, "text_device": text_device}
        check_at(model=model, **own, ray=ray, measure=measure, repair=repair)
    if watch is not None:
        single = {"--ray": ray, "--dry-run": dry_run, "--repair": repair, "--replace": replace_recipe}
        single |= {"--only-validation": only_validation, "--rehash": rehash, "--json": json}
        return run_watch(settings, at, watch, [option for option, value in single.items() if value])
    with rehashing(rehash):
        return run_build(
            settings,
            None,
            ray=ray,
            at=at,
            dry_run=dry_run,
            check=check,
            measure=measure,
            replace_recipe=replace_recipe,
            repair=repair,
            only_validation=only_validation,
            as_json=json,
        )


@app.command("encode-worker", hidden=True)
def encode_worker(settings: str) -> int:
    """A server for one trainer, `qwen-train run --encode-on-the-fly`; it ends with stdin."""
    from qwen_cache.cli.serve import run_encode_worker
    from qwen_cache.settings.load import parse_config

    return run_encode_worker(parse_config(settings))


@command(
    app,
    page="howto/encode-for-a-team.md",
    examples=[
        "qwen-cache serve --vae-device cuda:0 --text-device cuda:1",
        "qwen-cache serve --out s3://team/shards --listen 0.0.0.0:8077 --token-file t",
    ],
)
def serve(
    listen: Annotated[
        Given | None,
        setting("serve.listen", "--listen", panel=INPUT, metavar="HOST:PORT", help="Where to listen."),
    ] = None,
    token_file: Annotated[
        Given | None,
        setting(
            "serve.token_file",
            "--token-file",
            panel=INPUT,
            metavar="FILE",
            help="A file with the token that requests must have; required unless only this machine can connect.",
        ),
    ] = None,
    source: Annotated[
        Given | None,
        setting(
            "serve.source",
            "--source",
            panel=INPUT,
            metavar="SOURCE",
            help="A source whose rows clients name in place of sending them; read when the server starts.",
        ),
    ] = None,
    model: Model = None,
    dtype: Annotated[
        Given | None,
        setting("cache.dtype", "--dtype", panel=MODEL, help="The dtype in which to compute and store."),
    ] = None,
    vae_device: VaeDevice = None,
    text_device: TextDevice = None,
    out: OutCache = None,
    no_store: Annotated[
        bool,
        typer.Option(
            "--no-store", help="Keep the newest samples in memory, and write no cache.", rich_help_panel=OUTPUT
        ),
    ] = False,
    json: Json = False,
    config: ConfigFile = None,
    set_: Assignments = None,
) -> int:
    """Keep the encoders loaded, and encode over HTTP what clients send."""
    from qwen_cache.cli.serve import run_serve
    from qwen_cache.settings.load import load_config

    unstored = Given("--no-store", "serve.store", False) if no_store else None
    given = (listen, token_file, source, model, dtype, vae_device, text_device, out, unstored)
    return run_serve(load_config(config, set_, given), as_json=json)


@command(
    app,
    page="howto/use-the-web-ui.md",
    examples=["qwen-cache ui", "qwen-cache ui my-project --allow /mnt/photographs --no-browser"],
)
def ui(
    folder: Annotated[
        Path, typer.Argument(help="The folder of a project: its images, qwen.yaml, caches and runs.", metavar="FOLDER")
    ] = Path(),
    allow: Annotated[
        list[Path] | None,
        typer.Option(
            help="A further folder that may be read and written; repeat it for more.",
            metavar="FOLDER",
            rich_help_panel=INPUT,
        ),
    ] = None,
    port: Annotated[
        int,
        typer.Option(
            help="The port on this machine; 0: any that is free.", metavar="PORT", min=0, rich_help_panel=INPUT
        ),
    ] = 8078,
    no_browser: Annotated[
        bool, typer.Option("--no-browser", help="Print the address, and open no browser.", rich_help_panel=OUTPUT)
    ] = False,
    json: Json = False,
) -> int:
    """Open a folder in a local web page: correct the data, build, train, watch and generate."""
    from qwen_cache.cli.ui import run_ui

    return run_ui(folder, allow or (), port, browser=not no_browser, as_json=json)


SPOT_CHECK = "Encode some samples again (with --re-encode)"


@command(
    app,
    page="howto/share-a-cache.md",
    examples=["qwen-cache verify s3://bucket/shards --json", "qwen-cache verify shards --re-encode 20 --source data"],
)
def verify(
    cache: ReadPath = None,
    re_encode: Annotated[
        int | None,
        typer.Option(
            help="Instead of checking every byte, encode N random samples again from their images and compare.",
            metavar="N",
            min=1,
            rich_help_panel=SPOT_CHECK,
        ),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            help="The images and prompts of the cache.",
            metavar="SOURCE",
            show_default="data.source of the qwen.yaml in the cache",
            rich_help_panel=SPOT_CHECK,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Choose the same samples as an earlier check with this seed.",
            metavar="INT",
            min=0,
            show_default="another one each time",
            rich_help_panel=SPOT_CHECK,
        ),
    ] = None,
    model: Annotated[
        Given | None,
        setting(
            "model.path",
            "--model",
            panel=SPOT_CHECK,
            metavar="MODEL",
            help="The model of the cache: a diffusers folder, or a repository on the hub.",
            default="model.path of the qwen.yaml in the cache",
        ),
    ] = None,
    vae_device: VaeDevice = None,
    text_device: TextDevice = None,
    json: Json = False,
    config: ConfigFile = None,
    set_: Assignments = None,
) -> int:
    """Check every byte of a cache against its hashes, or some samples against their images."""
    from qwen_cache.errors import ConfigError
    from qwen_cache.settings.load import load_config

    path = load_config(config, set_, [cache]).cache.path
    options = {"--source": source, "--seed": seed, "--model": model}
    options |= {"--vae-device": vae_device, "--text-device": text_device}
    if re_encode is not None:
        from qwen_cache.cli.spot_check import SpotCheck, run_spot_check

        given = (model, vae_device, text_device, Given("CACHE", "cache.path", path))
        return run_spot_check(path, SpotCheck(re_encode, source, seed, config, set_ or (), given, json))
    if unused := [name for name, value in options.items() if value is not None]:
        raise ConfigError("these options go with --re-encode", found=", ".join(unused), do="give --re-encode N too")
    from qwen_cache.cli.verify import run_verify

    return run_verify(path, as_json=json)


WITH_HTML = "The page of --html"
WITH_MASK_HEAD = "Doubtful masks (experimental)"


@command(
    app,
    page="howto/find-bad-samples.md",
    examples=["qwen-cache inspect --html page.html", "qwen-cache inspect shards --sample cats/017"],
)
def inspect(
    cache: ReadPath = None,
    sample: Annotated[
        str | None,
        typer.Option(help="Show one sample, by name, key or start of the key.", metavar="NAME", rich_help_panel=OUTPUT),
    ] = None,
    scan: Annotated[
        bool,
        typer.Option(
            "--scan",
            help="Read every tensor; flag odd masks, odd numbers and near-duplicate targets.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    source: Annotated[
        str | None,
        typer.Option(
            help="Report whether the cache is up to date with this source. `build --dry-run` reports the effect of "
            "another model or other settings.",
            metavar="SOURCE",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    rehash: Annotated[
        bool,
        typer.Option("--rehash", help="With --source: read every image again, changed or not.", rich_help_panel=OUTPUT),
    ] = False,
    json: Json = False,
    html: Annotated[
        Path | None,
        typer.Option(
            help="Write a page with the report and a list of all samples.", metavar="FILE", rich_help_panel=WITH_HTML
        ),
    ] = None,
    decode: Annotated[
        bool,
        typer.Option(
            "--decode", help="Decode images with the VAE instead of showing thumbnails.", rich_help_panel=WITH_HTML
        ),
    ] = False,
    thumbnails: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of samples shown with images.",
            metavar="INT",
            min=0,
            show_default="200; of a remote cache without --decode, 0",
            rich_help_panel=WITH_HTML,
        ),
    ] = None,
    mask_head: Annotated[
        Path | None,
        typer.Option(
            help="List the edit masks that differ most from this mask head's.",
            metavar="FILE",
            rich_help_panel=WITH_MASK_HEAD,
        ),
    ] = None,
    top: Annotated[
        int | None,
        typer.Option(
            help="Number of masks listed.", metavar="INT", min=1, show_default="12", rich_help_panel=WITH_MASK_HEAD
        ),
    ] = None,
    save_images: Annotated[
        Path | None,
        typer.Option(
            help="Write these samples as one PNG, 24 at most, decoded by the VAE.",
            metavar="FILE",
            rich_help_panel=WITH_MASK_HEAD,
        ),
    ] = None,
    model: Annotated[
        Given | None,
        setting(
            "model.path",
            "--model",
            panel=MODEL,
            metavar="MODEL",
            help="With --decode or --save-images: a diffusers folder, or a repository on the hub.",
        ),
    ] = None,
    vae_device: Annotated[
        str, typer.Option(help="The device of the VAE and the mask head.", metavar="DEVICE", rich_help_panel=DEVICES)
    ] = "auto",
    config: Annotated[
        Path | None,
        typer.Option(
            help="The settings file.",
            metavar="FILE",
            show_default="qwen.yaml; with --source, that of the build",
            rich_help_panel=SETTINGS,
        ),
    ] = None,
    set_: Assignments = None,
) -> int:
    """Report what a cache holds."""
    from qwen_cache.cli.inspect import Inspection, run_inspect
    from qwen_cache.settings.load import load_config

    settings = load_config(config, set_, [cache, model])
    options = Inspection(
        cache=settings.cache.path,
        settings=settings,
        html=html,
        decode=decode,
        thumbnails=thumbnails,
        scan=scan,
        source=source,
        rehash=rehash,
        sample=sample,
        mask_head=mask_head,
        top=top,
        save_images=save_images,
        with_model=model is not None,
        vae_device=vae_device,
        config=config,
        assignments=tuple(set_ or ()),
        as_json=json,
    )
    return run_inspect(options)


@command(
    app,
    page="howto/migrate-and-merge.md",
    examples=["qwen-cache migrate v1 v2", "qwen-cache migrate v2 v1 shards --out shards-v1"],
)
def migrate(
    old: Annotated[Version, typer.Argument(help="Format version of the cache.", metavar="FROM")],
    new: Annotated[Version, typer.Argument(help="Target format version.", metavar="TO")],
    cache: CachePath = None,
    out: Annotated[
        str | None,
        typer.Option(
            help="The folder to write.", metavar="FOLDER", show_default="CACHE itself", rich_help_panel=OUTPUT
        ),
    ] = None,
    json: Json = False,
    config: ConfigFile = None,
    set_: Assignments = None,
) -> int:
    """Convert a cache to another format version, without the encoders."""
    from qwen_cache.cli.merge import run_migrate
    from qwen_cache.settings.load import load_config

    path = load_config(config, set_, [cache]).cache.path
    settings = load_config(config, set_, [cache, Given("--out", "cache.path", out) if out else None])
    return run_migrate(settings, path, int(old[1:]), int(new[1:]), as_json=json)


@command(
    app,
    page="howto/migrate-and-merge.md",
    examples=[
        "qwen-cache merge shards-a shards-b --out shards",
        "qwen-cache merge shards --select 'cats/*' --out cats",
    ],
)
def merge(
    caches: Annotated[list[str], typer.Argument(help="The caches to merge.", metavar="CACHE")],
    *,
    select: Annotated[
        list[str] | None,
        typer.Option(
            help="Only samples with these names: 'cats/*', or @FILE with a name per line.",
            metavar="NAMES",
            rich_help_panel=INPUT,
        ),
    ] = None,
    out: NewCache,
    compression: Annotated[
        Given | None,
        setting(
            "cache.compression",
            "--compression",
            panel=OUTPUT,
            help="Compression of the merged cache.",
            default="unchanged",
        ),
    ] = None,
    json: Json = False,
    config: ConfigFile = None,
    set_: Assignments = None,
) -> int:
    """Merge caches into one, or copy selected samples of one."""
    from qwen_cache.cli.merge import run_merge
    from qwen_cache.settings.load import load_config

    return run_merge(load_config(config, set_, [out, compression]), caches, select or [], as_json=json)


@command(
    app,
    page="howto/export-a-cache.md",
    examples=[
        "qwen-cache export shards --to qflux --out qflux --on-error skip",
        "qwen-cache export s3://team/shards --to musubi --out musubi \\\n"
        "     --leave-out empty_prompt_embeds --leave-out edit_mask",
    ],
)
def export(
    cache: ReadPath = None,
    on_error: OnError = None,
    *,
    to: Annotated[
        Literal["musubi", "diffusion-pipe", "diffsynth", "qflux"],
        typer.Option("--to", help="The trainer to export for.", rich_help_panel=OUTPUT),
    ],
    out: Annotated[Path, typer.Option(help="A new folder.", metavar="FOLDER", rich_help_panel=OUTPUT)],
    leave_out: Annotated[
        list[str] | None,
        typer.Option(
            help="Export without a tensor that the trainer cannot hold; repeat it for each.",
            metavar="TENSOR",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    zero_cond_t: Annotated[
        bool,
        typer.Option(
            "--zero-cond-t",
            help="The transformer is that of Qwen-Image-Edit-2511, which diffsynth stores.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Report what would be exported; write nothing.", rich_help_panel=OUTPUT),
    ] = False,
    json: Json = False,
    config: ConfigFile = None,
    set_: Assignments = None,
) -> int:
    """Write a cache as the files of another trainer, without the encoders."""
    from qwen_cache.cli.trainers import run_export
    from qwen_cache.settings.load import load_config

    return run_export(
        load_config(config, set_, [cache, on_error]),
        to,
        out,
        leave_out=leave_out or [],
        zero_cond_t=zero_cond_t,
        dry_run=dry_run,
        as_json=json,
    )


@command(
    app,
    "import",
    page="howto/import-a-cache.md",
    examples=[
        "qwen-cache import musubi cache --out shards --model Qwen/Qwen-Image-Edit-2509",
        "qwen-cache import qflux cache --out shards --model Qwen/Qwen-Image-Edit \\\n"
        "     --image-size 832x480 --captions data/control_images",
    ],
)
def import_(
    tool: Annotated[
        Literal["qflux", "musubi", "diffusion-pipe"],
        typer.Argument(help="The trainer that wrote the cache.", metavar="TOOL"),
    ],
    source: Annotated[Path, typer.Argument(help="The folder of that cache.", metavar="SOURCE")],
    *,
    model: Annotated[
        str,
        typer.Option(
            help="The model that wrote it, such as Qwen/Qwen-Image-Edit-2509. Recorded as claimed.",
            metavar="MODEL",
            rich_help_panel=MODEL,
        ),
    ],
    pipeline: Annotated[
        str | None,
        typer.Option(
            help="Its diffusers pipeline, if --model does not determine it.", metavar="CLASS", rich_help_panel=MODEL
        ),
    ] = None,
    image_size: Annotated[
        list[str] | None,
        typer.Option(
            help="qflux: the size of the resized images; repeat it for each.",
            metavar="WIDTHxHEIGHT",
            rich_help_panel=INPUT,
        ),
    ] = None,
    captions: Annotated[
        Path | None,
        typer.Option(
            help="qflux: the folder with the .txt files of the prompts.", metavar="FOLDER", rich_help_panel=INPUT
        ),
    ] = None,
    on_error: OnError = None,
    out: NewCache,
    dtype: Annotated[
        Literal["bfloat16", "float32"] | None,
        typer.Option(help="The dtype to store.", show_default="the one that is exact", rich_help_panel=OUTPUT),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Read everything and report what would be imported; write nothing.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    json: Json = False,
    config: ConfigFile = None,
    set_: Assignments = None,
) -> int:
    """Import the cache of another trainer, without the encoders."""
    from qwen_cache.cli.trainers import run_import
    from qwen_cache.settings.load import load_config

    return run_import(
        load_config(config, set_, [out, on_error]),
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


@command(
    app, page="howto/migrate-and-merge.md", examples=["qwen-cache gc --dry-run", "qwen-cache gc s3://bucket/shards"]
)
def gc(
    cache: ReadPath = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="List what would be deleted; delete nothing.", rich_help_panel=OUTPUT),
    ] = False,
    grace_hours: Annotated[
        float | None,
        typer.Option(
            "--grace-hours",
            min=0,
            metavar="HOURS",
            help="In object storage, spare files younger than this, and all of a build that wrote one as young.",
            show_default="24",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    json: Json = False,
    config: ConfigFile = None,
    set_: Assignments = None,
) -> int:
    """Delete unreferenced shards and leftovers of aborted builds."""
    from qwen_cache.cli.gc import run_gc
    from qwen_cache.settings.load import load_config

    path = load_config(config, set_, [cache]).cache.path
    return run_gc(path, grace_hours=grace_hours, dry_run=dry_run, as_json=json)


@command(
    app,
    page="howto/share-a-cache.md",
    examples=[
        "qwen-cache push hf://datasets/OWNER/NAME --dry-run",
        "qwen-cache push shards OWNER/NAME --license cc-by-4.0 \\\n     --source-license 'CC BY 4.0, by Jane Doe'",
    ],
)
def push(
    cache: Annotated[
        str | None,
        typer.Argument(help="The folder of the cache.", metavar="CACHE", show_default="cache.path, else shards"),
    ] = None,
    repo: Annotated[
        str | None,
        typer.Argument(
            help="The dataset on the Hugging Face hub, required: hf://datasets/OWNER/NAME.",
            metavar="REPO",
            show_default=False,
        ),
    ] = None,
    *,
    base_model: Annotated[
        str | None,
        typer.Option(
            help="The model on the hub, if the cache was built with a local folder.",
            metavar="REPO",
            rich_help_panel=MODEL,
        ),
    ] = None,
    licence: Annotated[
        str | None,
        typer.Option(
            "--license",
            help="The licence of the dataset, by its name on the hub: cc-by-4.0, other, …",
            metavar="NAME",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    source_licence: Annotated[
        str | None,
        typer.Option(
            "--source-license",
            help="The licence of the images and prompts, in any words.",
            metavar="TEXT",
            rich_help_panel=OUTPUT,
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
        typer.Option("--no-images", help="Show no samples on the card.", rich_help_panel=OUTPUT),
    ] = False,
    keep_card: Annotated[
        bool, typer.Option("--keep-card", help="Leave the repository's README.md as it is.", rich_help_panel=OUTPUT)
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the files and the card, and upload nothing.", rich_help_panel=OUTPUT)
    ] = False,
    preview: Annotated[
        Path | None,
        typer.Option(
            help="Write the card and the gallery into this folder, and upload nothing.",
            metavar="FOLDER",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    json: Json = False,
    config: ConfigFile = None,
    set_: Assignments = None,
) -> int:
    """Publish a cache as a dataset on the Hugging Face hub, with a card."""
    from qwen_cache.cli.push import PushOptions, run_push
    from qwen_cache.errors import ConfigError
    from qwen_cache.settings.load import load_config

    cache, repo = (cache, repo) if repo else (None, cache)
    if repo is None or (cache is None and Path(repo).is_dir()):
        do = "name it: qwen-cache push shards hf://datasets/OWNER/NAME"
        raise ConfigError("push needs the dataset to publish to", do=do)
    path = load_config(config, set_, [Given("CACHE", "cache.path", cache) if cache else None]).cache.path
    options = PushOptions(
        base_model=base_model,
        licence=licence,
        source_licence=source_licence,
        private=private,
        revision=revision,
        with_gallery=not no_images,
        keep_card=keep_card,
        dry_run=dry_run,
        preview=preview,
        as_json=json,
    )
    return run_push(path, repo, options)


@command(
    app,
    page="howto/write-captions.md",
    examples=["qwen-cache caption data --dry-run", "qwen-cache caption data/metadata.csv --text-device cuda:0,cuda:1"],
)
def caption(
    source: Annotated[
        str | None,
        typer.Argument(
            help="A folder or table of images, on this machine.",
            metavar="SOURCE",
            show_default="data.source of qwen.yaml, else data",
        ),
    ] = None,
    model: Model = None,
    captioner: Annotated[
        Given | None,
        setting(
            "caption.model",
            "--captioner",
            panel=MODEL,
            metavar="FOLDER",
            help="Another Qwen2.5-VL or Qwen3-VL to write the captions.",
            default="the model's own text encoder",
        ),
    ] = None,
    dtype: Dtype = None,
    on_error: OnError = None,
    text_device: TextDevice = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The copy of a table, beside it.",
            metavar="FILE",
            show_default="NAME-captioned",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Caption every sample, also over existing prompts.", rich_help_panel=OUTPUT),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Count what is missing; write nothing.", rich_help_panel=OUTPUT)
    ] = False,
    json: Json = False,
    config: ConfigFile = None,
    set_: Assignments = None,
) -> int:
    """Write missing prompts with a vision-language model, into files to correct before they are built."""
    from qwen_cache.cli.caption import run_caption
    from qwen_cache.settings.load import load_config

    settings = load_config(config, set_, [model, captioner, dtype, on_error, text_device])
    return run_caption(settings, source, out, replace=replace, dry_run=dry_run, as_json=json)


@command(
    app,
    page="howto/train-with-edit-masks.md",
    examples=[
        "qwen-cache ground --image photo.jpg --phrase 'the red car'",
        "qwen-cache ground --image photo.jpg --prompt 'remove [[the car]]' \\\n"
        "     --head mask_head.safetensors --out mask.png",
    ],
)
def ground(
    image: Annotated[
        list[Path],
        typer.Option(
            help="The image; repeat it for more. The mask is for the first.", metavar="FILE", rich_help_panel=INPUT
        ),
    ],
    phrase: Annotated[
        str | None,
        typer.Option(help="The words to find; with --prompt, a part of it.", metavar="TEXT", rich_help_panel=INPUT),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            help="An edit prompt. Without --phrase: the words in [[ ]], or all.", metavar="TEXT", rich_help_panel=INPUT
        ),
    ] = None,
    model: Model = None,
    dtype: Dtype = None,
    head: Annotated[
        Path | None,
        typer.Option(
            help="A mask head of `qwen-train mask-head`. Without it: a heat map.",
            metavar="FILE",
            rich_help_panel=MODEL,
        ),
    ] = None,
    sam: Annotated[
        Path | None,
        typer.Option(help="A folder with SAM or SAM 2, to refine the mask.", metavar="FOLDER", rich_help_panel=MODEL),
    ] = None,
    text_device: TextDevice = None,
    out: Annotated[
        Path,
        typer.Option(
            help="The PNG of the mask; NAME-overlay.png shows it over the image.",
            metavar="FILE",
            rich_help_panel=OUTPUT,
        ),
    ] = Path("mask.png"),
    json: Json = False,
    config: ConfigFile = None,
    set_: Assignments = None,
) -> int:
    """Experimental: show where in an image the text encoder attends for a phrase. Loads only the text encoder."""
    from qwen_cache.cli.ground import GroundingQuery, run_ground
    from qwen_cache.settings.load import load_config

    settings = load_config(config, set_, [model, text_device, dtype])
    return run_ground(settings, image, GroundingQuery.of(phrase, prompt), out, head, sam, as_json=json)


@command(app, page="howto/troubleshooting.md", examples=["qwen-cache doctor", "qwen-cache doctor --path /data/shards"])
def doctor(
    path: Annotated[
        Given | None,
        setting(
            "cache.path",
            "--path",
            panel=INPUT,
            metavar="FOLDER",
            help="The folder of the cache, which need not exist yet.",
        ),
    ] = None,
    json: Json = False,
    config: ConfigFile = None,
    set_: Assignments = None,
) -> int:
    """Check this machine: what is installed, what is missing, and how to get it."""
    from qwen_cache.cli.doctor import run_doctor
    from qwen_cache.settings.load import load_config

    folder = load_config(config, set_, [path]).cache.path
    if path is None and "://" in folder:  # doctor checks local disks only
        folder = "shards"
    return run_doctor(folder, as_json=json)


add_config_command(app)
app.callback()(version_option)


def main() -> Any:
    run_app(app, RENAMED)
