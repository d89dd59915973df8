"""Images of cached samples for the page: thumbnails from the cache (`stored_images`), or decoded by the VAE.

Only decoding (`decoded_images`) needs torch and a model.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from qwen_cache.format.cache import Sample
from qwen_cache.inspect.tensors import numbers
from qwen_cache.settings.load import Config
from qwen_cache.sources.images import cut_thumbnails, is_transparent, over_white

THUMBNAIL = 256  # pixels of the longer side
QUALITY = 85
RED, OPACITY = (255, 0, 0), 0.5


class TitledImage(NamedTuple):
    """An image file for the page."""

    title: str
    data: bytes
    kind: Literal["jpeg", "webp"]


ImageSource = Callable[[Sample], Sequence[TitledImage]]
"""Makes the images of a sample; an empty list where the sample has none."""


def no_images(sample: Sample) -> list[TitledImage]:
    """The images of a page without images."""
    return []


def data_url(image: TitledImage) -> str:
    """The image as a URL that contains it."""
    return f"data:image/{image.kind};base64,{b64encode(image.data).decode('ascii')}"


def stored_images(sample: Sample) -> list[TitledImage]:
    """The images of a sample from its thumbnails."""
    return titled_images(sample, stored_thumbnails(sample)) if "thumbnails" in sample else []


def stored_thumbnails(sample: Sample) -> list[Image.Image]:
    """The thumbnails of a sample that has them, the target first if there is one."""
    return cut_thumbnails(sample.buffer("thumbnails"), sample.row.meta.stored_shapes, sample.key)


def decoded_images(settings: Config, device: str) -> ImageSource:
    """An image source that decodes latents with the VAE of `settings.model`."""

    from qwen_cache.encode.decode import decode_images, load_vae
    from qwen_cache.models.devices import choose_device, torch_dtype
    from qwen_cache.models.folder import open_model

    vae_device = choose_device(device, "--vae-device")
    folder = open_model(settings.model.path, ("vae",), settings.model.revision)
    vae = load_vae(folder, vae_device, torch_dtype(settings.predict.dtype))

    def decode(sample: Sample) -> list[TitledImage]:
        shapes = sample.img_shapes
        images = decode_images(vae, sample["image_latents"], shapes[:1]) if "image_latents" in sample else []
        images += decode_images(vae, sample["control_latents"], shapes[1:]) if shapes[1:] else []
        return titled_images(sample, images)

    return decode


def titled_images(sample: Sample, images: Sequence[Image.Image]) -> list[TitledImage]:
    """Files of the controls and, where they are, the target and the edit mask; `images` starts with the target."""
    targets = images[:1] if "image_latents" in sample else []
    controls = images[len(targets) :]
    shown = [(f"control {i}" if controls[1:] else "control", each) for i, each in enumerate(controls, 1)]
    shown += [("target", target) for target in targets]
    if "edit_mask" in sample:
        mask = numbers(sample, "edit_mask").reshape(sample.img_shapes[0][1:])
        shown.append(("edit mask", overlaid(targets[0], mask)))
    return [TitledImage(title, *_encoded(image)) for title, image in shown]


def overlaid(image: Image.Image, mask: npt.NDArray[np.float32]) -> Image.Image:
    """The image in grey with a mask [h, w] in red over it; each cell is the square that the loss masks.

    White is behind what is transparent.
    """
    opacity = Image.fromarray((255 * OPACITY * mask).astype(np.uint8)).resize(image.size, Image.Resampling.NEAREST)
    shown = over_white(image).convert("L").convert("RGB")  # so that only the mask is red
    shown.paste(RED, (0, 0), opacity)
    return shown


def _encoded(image: Image.Image) -> tuple[bytes, Literal["jpeg", "webp"]]:
    """A JPEG, or a WebP if the image is transparent anywhere."""
    kind: Literal["jpeg", "webp"] = "webp" if is_transparent(image) else "jpeg"
    small = image.copy() if kind == "webp" else image.convert("RGB")
    small.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.LANCZOS)
    data = BytesIO()
    small.save(data, kind, quality=QUALITY)
    return data.getvalue(), kind
