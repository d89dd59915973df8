"""Image files: opened, and written atomically; formats and paths by name.

Transparency is kept where the format has it. Other formats get the image over white, with a message, since they are
chosen for programs that want no transparency.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

from PIL import Image

from qwen_cache.errors import ConfigError
from qwen_cache.models.family import Family
from qwen_cache.sources.images import open_rgb_file, open_rgba_file, over_white
from qwen_cache.storage.files import make_folder, write_durably
from qwen_cache.terminal import console
from qwen_cache.text import plain
from qwen_train.inference.jobs import PAGE_HASH, png_metadata

FORMATS = {"PNG": True, "WEBP": True, "TIFF": True, "JPEG": False, "BMP": False}
"""Whether a format keeps transparency; other programs ignore that of a BMP."""


def open_images(paths: Sequence[Path], family: Family) -> list[Image.Image]:
    """Open image files in the mode of the family, as a build does; SourceError for one that cannot be read."""
    open_file = {"RGB": open_rgb_file, "RGBA": open_rgba_file}[family.image_mode]
    return [open_file(path) for path in paths]


def image_format(out: Path) -> str:
    """Pillow's name for the format of a file name's extension; ConfigError for another extension."""
    extensions = Image.registered_extensions()
    image_format = extensions.get(out.suffix.lower())
    if image_format not in FORMATS:
        raise ConfigError("not an image format", where="--out", expected=".png, .jpg or .webp", found=out)
    return image_format


def image_paths(out: Path, count: int) -> list[Path]:
    """The paths of `count` images: `out`, or numbered (out-1.png, out-2.png) if several."""
    return [out] if count == 1 else [out.with_stem(f"{out.stem}-{number}") for number in range(1, count + 1)]


def save_images(images: Sequence[Image.Image], out: Path) -> list[Path]:
    """Write the images to their paths, each atomically.

    A PNG records that it was generated here, so `run_jobs` may replace it.
    """
    make_folder(out.parent)
    kind, paths = image_format(out), image_paths(out, len(images))
    for path, image in zip(paths, images, strict=True):
        data = BytesIO()
        shown = image if FORMATS[kind] else over_white(image)
        shown.save(data, kind, **({"pnginfo": png_metadata(PAGE_HASH)} if kind == "PNG" else {}))
        write_durably(path, data.getvalue())
        if shown is not image and image.getchannel("A").getextrema() != (255, 255):
            console().print(
                f"{plain(path)}: {kind} has no transparency, so it is over white; a .png keeps it", markup=False
            )
    return paths
