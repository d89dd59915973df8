"""Image files: opened, and written whole or not at all; their format and their paths by name."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

from PIL import Image

from qwen_cache.errors import ConfigError
from qwen_cache.sources.images import open_rgb_file
from qwen_cache.storage.durable import write_durably
from qwen_train.inference.jobs import marked

FORMATS = ("PNG", "JPEG", "WEBP", "TIFF", "BMP")


def open_images(paths: Sequence[Path]) -> list[Image.Image]:
    """Image files as RGB, as a build opens them; SourceError for one that cannot be read."""
    return [open_rgb_file(path) for path in paths]


def image_format(out: Path) -> str:
    """Pillow's name of the format that the file name ends with; ConfigError for any other ending."""
    extensions = Image.registered_extensions()
    found = extensions.get(out.suffix.lower())
    if found not in FORMATS:
        raise ConfigError("not an image format", where="--out", expected=".png, .jpg or .webp", found=out)
    return found


def image_paths(out: Path, count: int) -> list[Path]:
    """The paths of `count` images: `out`, or numbered (out-1.png, out-2.png) where there are several."""
    return [out] if count == 1 else [out.with_stem(f"{out.stem}-{number}") for number in range(1, count + 1)]


def save_images(images: Sequence[Image.Image], out: Path) -> list[Path]:
    """Write the images to their paths, each whole or not at all.

    A PNG records that it was generated here, so `run_jobs` may replace it.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    kind, paths = image_format(out), image_paths(out, len(images))
    for path, image in zip(paths, images, strict=True):
        data = BytesIO()
        image.save(data, kind, **({"pnginfo": marked("by itself")} if kind == "PNG" else {}))
        write_durably(path, data.getvalue())
    return paths
