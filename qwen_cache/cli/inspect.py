"""Terminal front end of `qwen-cache inspect`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from qwen_cache.errors import ConfigError
from qwen_cache.inspect.compare import compare
from qwen_cache.inspect.flags import ImageSource, decoded_images, stored_images
from qwen_cache.inspect.page import check_page_path, write_page
from qwen_cache.inspect.summary import SourceComparison, survey
from qwen_cache.inspect.terminal import describe, print_sample, print_survey
from qwen_cache.settings.load import CONFIG_NAME, Config, load_config, load_saved
from qwen_cache.storage.remembered import rehashing
from qwen_cache.storage.remote import LocalCopies, is_remote, location
from qwen_cache.terminal import console, print_json
from qwen_cache.text import plain

THUMBNAILS = 200
"""Samples with images on a page, by default: some 10 MB."""
TOP = 12
"""Doubtful masks that are listed, by default."""


@dataclass(frozen=True)
class Inspection:
    """The options of the command."""

    cache: str
    settings: Config
    html: Path | None
    decode: bool
    thumbnails: int | None
    scan: bool
    source: str | None
    rehash: bool
    sample: str | None
    mask_head: Path | None
    top: int | None
    save_images: Path | None
    with_model: bool
    vae_device: str
    config: Path | None
    assignments: tuple[str, ...]
    as_json: bool


def run_inspect(options: Inspection) -> int:
    """Report what a cache holds; return the exit code."""
    check_options(options)
    settings = options.settings
    copies = LocalCopies.of_settings(settings.cache)
    if options.sample is not None:
        (print_json if options.as_json else print_sample)(describe(options.cache, options.sample, copies))
        return 0
    if options.html is not None:
        check_page_path(options.html, options.cache)
    with rehashing(options.rehash):
        surveyed = survey(options.cache, scan=options.scan, compare=_compare(options), copies=copies)
    doubtful = None
    if options.mask_head is not None:
        from qwen_cache.inspect.doubtful_masks import flagged, print_doubtful, review_masks

        top, device = options.top or TOP, options.vae_device
        doubtful = review_masks(options.cache, options.mask_head, top, device, options.save_images, settings)
        surveyed = flagged(surveyed, doubtful)
    if options.html is not None:
        write_page(options.html, surveyed, _image_source(options, settings), _thumbnails(options))
        console().print(f"wrote {plain(options.html)}", markup=False)
    if options.as_json:
        print_json(surveyed.to_json() | (doubtful.to_json() if doubtful else {}))
        return 0
    print_survey(surveyed)
    if doubtful:
        print_doubtful(doubtful)
    return 0


def check_options(options: Inspection) -> None:
    """Raise ConfigError for options that exclude each other."""
    if (options.save_images is not None or options.top is not None) and options.mask_head is None:
        raise ConfigError("--top and --save-images go with --mask-head", do="give --mask-head too")
    if (options.decode or options.thumbnails is not None) and options.html is None:
        raise ConfigError("--decode and --thumbnails go with --html", do="give --html FILE too")
    if options.rehash and options.source is None:
        raise ConfigError("--rehash goes with --source", do="give --source SOURCE too")
    others = {
        "--html": options.html,
        "--mask-head": options.mask_head,
        "--source": options.source,
        "--scan": options.scan,
        "--model": options.with_model,
    }
    given = [name for name, value in others.items() if value]
    if options.sample is not None and given:
        raise ConfigError("--sample shows one sample", found=", ".join(given), do="leave them out")
    if options.with_model and not (options.decode or options.save_images):
        raise ConfigError("--model goes with --decode or --save-images", do="give one of them too")


def _compare(options: Inspection) -> SourceComparison | None:
    """The comparison with the source of --source; None without it."""
    if options.source is None:
        return None
    settings = _settings_of_build(options.cache, options.config, options.assignments)
    return partial(compare, source=options.source, settings=settings)


def _image_source(options: Inspection, settings: Config) -> ImageSource:
    return decoded_images(settings, options.vae_device) if options.decode else stored_images


def _thumbnails(options: Inspection) -> int:
    """How many samples have images on the page; by default none of a remote cache: each would be downloaded."""
    if options.thumbnails is not None:
        return options.thumbnails
    return THUMBNAILS if options.decode or not is_remote(location(options.cache)) else 0


def _settings_of_build(cache: str, config: Path | None, assignments: Sequence[str]) -> Config:
    """Settings of `config`, else of the build's qwen.yaml in the cache, else of ./qwen.yaml; `assignments` override."""
    folder = location(cache)
    own = None if is_remote(folder) else folder / CONFIG_NAME
    return load_saved(own, assignments) if not config and own and own.is_file() else load_config(config, assignments)
