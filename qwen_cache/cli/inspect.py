"""`inspect`: what a cache holds, as text, JSON or a page."""

from __future__ import annotations

from collections.abc import Sequence, Set
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from qwen_cache.errors import ConfigError
from qwen_cache.options import (
    DEVICES,
    JSON,
    MODEL,
    OUTPUT,
    READ_CACHE,
    SET,
    SETTINGS,
    command,
    flag,
    option,
    setting,
)
from qwen_cache.settings.given import Given
from qwen_cache.terminal import console, print_json, print_next, typed_again
from qwen_cache.text import plain

if TYPE_CHECKING:
    from qwen_cache.inspect.summary import SourceComparison

WITH_HTML = "The page of --html"
WITH_MASK_HEAD = "Doubtful masks (experimental)"
THUMBNAILS = 200
"""Samples with images on a page, by default: some 10 MB."""
TOP = 12
"""Doubtful masks that are listed, by default."""

SAMPLE = option(OUTPUT, "Show one sample, by name, key or start of the key.", "NAME")
SCAN = flag("--scan", OUTPUT, "Read every tensor; flag odd masks, odd numbers and near-duplicate targets.")
SOURCE = option(
    OUTPUT,
    "Report whether the cache is up to date with this source. `build --dry-run` reports the effect of another model or "
    "other settings.",
    "SOURCE",
)
REHASH = flag("--rehash", OUTPUT, "With --source: read every image again, changed or not.")
HTML = option(WITH_HTML, "Write a page with the report and a list of all samples.", "FILE")
DECODE = flag("--decode", WITH_HTML, "Decode images with the VAE instead of showing thumbnails.")
SHOWN = option(
    WITH_HTML,
    "Maximum number of samples shown with images.",
    "INT",
    shown=f"{THUMBNAILS}; of a remote cache without --decode, 0",
    min=0,
)
MASK_HEAD = option(WITH_MASK_HEAD, "List the edit masks that differ most from this mask head's.", "FILE")
LISTED = option(WITH_MASK_HEAD, "Number of masks listed.", "INT", shown=str(TOP), min=1)
IMAGES = option(WITH_MASK_HEAD, "Write these samples as one PNG, 24 at most, decoded by the VAE.", "FILE")
VAE_MODEL = setting(
    "model.path",
    MODEL,
    "With --decode or --save-images: a diffusers folder, or a repository on the hub.",
    "MODEL",
    name="--model",
)
CONFIG_OF_BUILD = option(SETTINGS, "The settings file.", "FILE", shown="qwen.yaml; with --source, that of the build")


@command(
    page="howto/look-after-a-cache.md",
    examples=["qwen-cache inspect --html page.html", "qwen-cache inspect shards --sample cats/017"],
    renamed={"--gallery": "--thumbnails", "--pictures": "--save-images", "--worst": "--top"},
)
def inspect(
    cache: Given | None = READ_CACHE,
    sample: str | None = SAMPLE,
    scan: bool = SCAN,
    source: str | None = SOURCE,
    rehash: bool = REHASH,
    json: bool = JSON,
    html: Path | None = HTML,
    decode: bool = DECODE,
    thumbnails: int | None = SHOWN,
    mask_head: Path | None = MASK_HEAD,
    top: int | None = LISTED,
    save_images: Path | None = IMAGES,
    model: Given | None = VAE_MODEL,
    vae_device: str = option(DEVICES, "The device of the VAE and the mask head.", "DEVICE", default="auto"),
    config: Path | None = CONFIG_OF_BUILD,
    set_: list[str] | None = SET,
) -> int:
    """Report what a cache holds."""
    from qwen_cache.inspect import page, summary, terminal
    from qwen_cache.inspect.flags import decoded_images, stored_images
    from qwen_cache.settings.load import load_config
    from qwen_cache.storage.remembered import rehashing
    from qwen_cache.storage.remote import LocalCopies

    settings = load_config(config, set_, [cache, model])
    path, copies = settings.cache.path, LocalCopies.of_settings(settings.cache)
    values: dict[str, object] = {"--sample": sample, "--scan": scan, "--source": source, "--rehash": rehash}
    values |= {"--html": html, "--decode": decode, "--thumbnails": thumbnails, "--model": model, "--top": top}
    values |= {"--mask-head": mask_head, "--save-images": save_images}
    _check({name for name, value in values.items() if value is not None and value is not False})
    if sample is not None:
        described, shown = terminal.describe(path, sample, copies)
        print_json(described) if json else terminal.print_sample(described, shown)
        return 0
    if html is not None:
        page.check_page_path(html, path)
    with rehashing(rehash):
        surveyed = summary.survey(path, scan=scan, compare=_comparison(path, source, config, set_ or ()), copies=copies)
    doubtful = None
    if mask_head is not None:
        from qwen_cache.inspect.doubtful_masks import flagged, print_doubtful, review_masks

        doubtful = review_masks(path, mask_head, top or TOP, vae_device, save_images, settings)
        surveyed = flagged(surveyed, doubtful)
    if html is not None:
        images = decoded_images(settings, vae_device) if decode else stored_images
        page.write_page(html, surveyed, images, _thumbnails(path, decode) if thumbnails is None else thumbnails)
        console().print(f"wrote {plain(html)}", markup=False)
    if json:
        print_json(surveyed.to_json() | (doubtful.to_json() if doubtful else {}))
    else:
        terminal.print_survey(surveyed, in_full=html is None)
        if doubtful:
            print_doubtful(doubtful)
        name = path.rstrip("/").rpartition("/")[2] or "cache"
        page_of = [] if html else [typed_again("qwen-cache", added=["--html", f"{name}.html"])]
        print_next(*page_of, ["qwen-train", "plan", path])
    return 0


def _check(given: Set[str]) -> None:
    """Raise ConfigError for options that exclude each other."""
    if given & {"--top", "--save-images"} and "--mask-head" not in given:
        raise ConfigError("--top and --save-images go with --mask-head", do="give --mask-head too")
    if given & {"--decode", "--thumbnails"} and "--html" not in given:
        raise ConfigError("--decode and --thumbnails go with --html", do="give --html FILE too")
    if "--rehash" in given and "--source" not in given:
        raise ConfigError("--rehash goes with --source", do="give --source SOURCE too")
    others = [name for name in ("--html", "--mask-head", "--source", "--scan", "--model") if name in given]
    if "--sample" in given and others:
        raise ConfigError("--sample shows one sample", found=", ".join(others), do="leave them out")
    if "--model" in given and not given & {"--decode", "--save-images"}:
        raise ConfigError("--model goes with --decode or --save-images", do="give one of them too")


def _comparison(
    cache: str, source: str | None, config: Path | None, assignments: Sequence[str]
) -> SourceComparison | None:
    """The comparison with the source of --source, by the settings of `config`, else of the qwen.yaml in the cache, else
    of ./qwen.yaml; `assignments` override. None without a source.
    """
    if source is None:
        return None
    from qwen_cache.inspect.compare import compare
    from qwen_cache.settings.load import CONFIG_NAME, load_config, load_saved
    from qwen_cache.storage.remote import is_remote, location

    folder = location(cache)
    own = None if is_remote(folder) else folder / CONFIG_NAME
    if own and own.is_file() and not config:
        settings = load_saved(own, assignments)
    else:
        settings = load_config(config, assignments)
    return partial(compare, source=source, settings=settings)


def _thumbnails(cache: str, decode: bool) -> int:
    """How many samples have images on the page; by default none of a remote cache: each would be downloaded."""
    from qwen_cache.storage.remote import is_remote, location

    return THUMBNAILS if decode or not is_remote(location(cache)) else 0
