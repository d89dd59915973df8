"""Terminal front end of `qwen-cache inspect`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from qwen_cache.console import console, print_json
from qwen_cache.errors import ConfigError
from qwen_cache.inspect.compare import compare, settings_of_build
from qwen_cache.inspect.images import Draw, drawing, stored
from qwen_cache.inspect.page import check_place, write_page
from qwen_cache.inspect.summary import Compare, describe, survey
from qwen_cache.inspect.terminal import print_overview, print_sample
from qwen_cache.settings.load import Config, load_config
from qwen_cache.storage.local_copies import LocalCopies
from qwen_cache.storage.url import location

THUMBNAILS = 200
"""Samples with images on a page, where nothing else is asked for: some 10 MB."""
TOP = 12


@dataclass(frozen=True)
class Inspection:
    """The options of the command."""

    cache: str
    html: Path | None
    decode: bool
    thumbnails: int | None
    scan: bool
    source: str | None
    sample: str | None
    mask_head: Path | None
    top: int | None
    save_images: Path | None
    model: str | None
    vae_device: str
    config: Path | None
    assignments: tuple[str, ...]
    as_json: bool


def run_inspect(asked: Inspection) -> int:
    """Report what a cache holds; the exit code."""
    check(asked)
    settings = load_config(asked.config, asked.assignments, model__path=asked.model)
    copies = LocalCopies.of_settings(settings.cache)
    if asked.sample is not None:
        (print_json if asked.as_json else print_sample)(describe(asked.cache, asked.sample, copies))
        return 0
    if asked.html is not None:
        check_place(asked.html, asked.cache)
    overview, opened = survey(asked.cache, scan=asked.scan, compare=_compare(asked), copies=copies)
    doubtful = None
    if asked.mask_head is not None:
        from qwen_cache.inspect.doubtful_masks import flagged, print_doubtful, review

        top = asked.top or TOP
        doubtful = review(asked.cache, asked.mask_head, top, asked.vae_device, asked.save_images, settings)
        overview = flagged(overview, doubtful)
    if asked.html is not None:
        write_page(asked.html, overview, opened, _draw(asked, settings), _thumbnails(asked))
        console().print(f"wrote {asked.html}", markup=False)
    if asked.as_json:
        print_json(overview | (doubtful.to_json() if doubtful else {}))
        return 0
    print_overview(overview)
    if doubtful:
        print_doubtful(doubtful)
    return 0


def check(asked: Inspection) -> None:
    """Refuse options that do not go together."""
    if (asked.save_images is not None or asked.top is not None) and asked.mask_head is None:
        raise ConfigError("--top and --save-images go with --mask-head", do="give --mask-head too")
    if (asked.decode or asked.thumbnails is not None) and asked.html is None:
        raise ConfigError("--decode and --thumbnails go with --html", do="give --html FILE too")
    others = {
        "--html": asked.html,
        "--mask-head": asked.mask_head,
        "--source": asked.source,
        "--scan": asked.scan,
        "--model": asked.model,
    }
    given = [name for name, value in others.items() if value]
    if asked.sample is not None and given:
        raise ConfigError("--sample shows one sample", found=", ".join(given), do="leave them out")
    if asked.model is not None and not (asked.decode or asked.save_images):
        raise ConfigError("--model goes with --decode or --save-images", do="give one of them too")


def _compare(asked: Inspection) -> Compare | None:
    """How the cache is compared with its source; None where it is not."""
    if asked.source is None:
        return None
    settings = settings_of_build(asked.cache, asked.config, asked.assignments)
    return partial(compare, source=asked.source, settings=settings)


def _draw(asked: Inspection, settings: Config) -> Draw:
    return drawing(settings, asked.vae_device) if asked.decode else stored


def _thumbnails(asked: Inspection) -> int:
    """How many samples get images on the page: none of a remote cache, where each would be fetched whole for it."""
    if asked.thumbnails is not None:
        return asked.thumbnails
    return THUMBNAILS if asked.decode or isinstance(location(asked.cache), Path) else 0
