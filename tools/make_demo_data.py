"""Write a small editing dataset of real photographs, ready for `qwen-cache build`.

    python tools/make_demo_data.py OUT

    OUT/control_images/NAME.png            the control (or .jpg); NAME_control_1.png: a second control
    OUT/control_images/NAME_mask.png       white where the target was edited
    OUT/target_images/NAME.png, NAME.txt   the target, and the prompt

The photographs come with the installed scikit-image and scikit-learn, which name their authors and licences; nothing is
downloaded. Sizes, orientations and formats are mixed: JPEG and PNG, grey, an alpha channel, an EXIF rotation, a prompt
in Chinese, a long one. The name of a sample is that of the function that returns it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFilter, ImageOps

from qwen_cache.errors import SourceError
from qwen_cache.extras import install_command

LANCZOS = Image.Resampling.LANCZOS
ORIENTATION = 0x0112  # the EXIF tag
TURN_RIGHT = 6  # its value for "rotate by 90° clockwise to display"


@dataclass(frozen=True)
class Photograph:
    image: Image.Image
    extension: str = ".jpg"
    rotated: bool = False  # stored rotated, with the EXIF flag for it

    def save(self, stem: Path) -> None:
        image = self.image
        options: dict[str, object] = {"quality": 92} if self.extension == ".jpg" else {}
        if self.rotated:
            image = image.transpose(Image.Transpose.ROTATE_90)
            exif = Image.Exif()
            exif[ORIENTATION] = TURN_RIGHT
            options["exif"] = exif
        image.save(stem.with_name(stem.name + self.extension), **options)


@dataclass(frozen=True)
class Sample:
    prompt: str
    controls: tuple[Photograph, ...]
    target: Photograph
    mask: Image.Image | None = None

    def save(self, out: Path, name: str) -> None:
        for number, control in enumerate(self.controls):
            control.save(out / "control_images" / (f"{name}_control_{number}" if number else name))
        if self.mask is not None:
            Photograph(self.mask, ".png").save(out / "control_images" / f"{name}_mask")
        self.target.save(out / "target_images" / name)
        (out / "target_images" / f"{name}.txt").write_text(self.prompt + "\n", encoding="utf-8")


def make_demo_data(out: Path) -> Path:
    """Write all samples to the folder `out`, overwrite existing files, and return `out`."""
    out = Path(out)
    for folder in ("control_images", "target_images"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    for sample in SAMPLES:
        sample().save(out, sample.__name__)
    return out


def installed(package: str, path: str) -> Path:
    """A file of an installed package, without importing it."""
    try:
        return Path(distribution(package).locate_file(path))
    except PackageNotFoundError:
        raise SourceError(f"{package} is not installed", do=install_command("demo")) from None


def photograph(name: str) -> Image.Image:
    if name in ("china.jpg", "flower.jpg"):
        path = installed("scikit-learn", f"sklearn/datasets/images/{name}")
    else:
        path = installed("scikit-image", f"skimage/data/{name}")
    with Image.open(path) as image:
        return image.copy()


def china_black_and_white() -> Sample:
    china = photograph("china.jpg")
    return Sample("Make the photograph black and white.", (Photograph(china),), Photograph(china.convert("L")))


def china_pencil_drawing() -> Sample:
    tower = photograph("china.jpg").crop((40, 0, 380, 427))
    grey, around = (
        np.asarray(image, dtype=np.float32) + 1
        for image in (tower.convert("L"), tower.convert("L").filter(ImageFilter.GaussianBlur(5)))
    )
    # A pencil marks pixels that are darker than their surroundings; the power is its pressure.
    drawing = Image.fromarray((255 * np.minimum(1, grey / around) ** 1.6).astype(np.uint8))
    prompt = (
        "Turn this photograph of the pavilion into a pencil drawing on white paper. Keep the building where it is, "
        "with all of its storeys, its curved roofs, its railings and the ornament on top, and keep the trees around "
        "its foot, but leave out every colour: only dark strokes along the edges and a little hatching in the shadows "
        "should remain, and the sky should be nothing but empty paper."
    )
    return Sample(prompt, (Photograph(tower),), Photograph(drawing, ".png"))


def flower_close_up() -> Sample:
    flower = photograph("flower.jpg")
    close_up = flower.crop((154, 65, 458, 385)).resize((456, 480), LANCZOS)
    return Sample("Crop to the flower, so that it fills the image.", (Photograph(flower),), Photograph(close_up))


def flower_on_yellow() -> Sample:
    """The control is a cut-out: white and transparent except for the flower, the only orange thing."""
    flower = photograph("flower.jpg").crop((140, 50, 470, 390))
    red, _, blue = flower.split()
    alpha = ImageChops.subtract(red, blue).point(lambda value: 255 if value > 40 else 0)
    bloom = Image.new("L", flower.size)
    ImageDraw.Draw(bloom).ellipse((22, 25, 310, 318), fill=255)
    alpha = ImageChops.darker(alpha, bloom).filter(ImageFilter.MedianFilter(9)).filter(ImageFilter.GaussianBlur(1))
    cut_out = Image.new("RGB", flower.size, "white")
    cut_out.paste(flower, mask=alpha)
    target = Image.new("RGB", flower.size, (250, 214, 90))
    target.paste(flower, mask=alpha)
    cut_out.putalpha(alpha)
    return Sample("Put the flower on a plain yellow background.", (Photograph(cut_out, ".png"),), Photograph(target))


def coffee_upside_down() -> Sample:
    coffee = photograph("coffee.png")
    return Sample(
        "Turn the photograph upside down.",
        (Photograph(coffee, ".png"),),
        Photograph(coffee.transpose(Image.Transpose.ROTATE_180), ".png"),
    )


def coffee_blue_cup() -> Sample:
    """Swaps red and blue within the mask: the china without the white rim of the cup and the spoon."""
    coffee = photograph("coffee.png")
    mask = Image.new("L", coffee.size)
    draw = ImageDraw.Draw(mask)
    draw.ellipse((76, 58, 480, 389), fill=255)  # the saucer, and where it deviates from an ellipse
    draw.polygon([(112, 126), (140, 98), (160, 83), (182, 71), (186, 90), (140, 130)], fill=255)
    draw.ellipse((174, 17, 406, 207), fill=0)  # the rim and the coffee
    # The spoon, behind and in front of the cup.
    draw.polygon([(396, 60), (424, 70), (416, 108), (408, 128), (403, 128)], fill=0)
    draw.polygon([(389, 194), (384, 234), (398, 256), (358, 252), (372, 234), (382, 206)], fill=0)
    draw.ellipse((325, 247, 407, 327), fill=0)
    soft = mask.filter(ImageFilter.GaussianBlur(1))
    mask = soft.point(lambda value: 255 if value else 0)  # every pixel that changes
    red, green, blue = coffee.split()
    target = Image.composite(Image.merge("RGB", (blue, green, red)), coffee, soft)
    return Sample(
        "Make the red cup and its saucer blue.", (Photograph(coffee, ".png"),), Photograph(target, ".png"), mask
    )


def cat_sepia() -> Sample:
    cat = photograph("chelsea.png")
    sepia = ImageOps.colorize(ImageOps.autocontrast(cat.convert("L")), black="#1e120a", mid="#9a7250", white="#fbeed3")
    return Sample("把这张猫的照片变成复古的棕褐色老照片。", (Photograph(cat, ".png"),), Photograph(sepia))


def cat_beside_astronaut() -> Sample:
    cat, astronaut = photograph("chelsea.png"), photograph("astronaut.png")
    halves = [ImageOps.contain(image, (640, 248), LANCZOS) for image in (cat, astronaut)]
    both = Image.new("RGB", (sum(half.width for half in halves), 248))
    both.paste(halves[0], (0, 0))
    both.paste(halves[1], (halves[0].width, 0))
    return Sample(
        "Put image 1 beside image 2, at the same height.",
        (Photograph(cat), Photograph(astronaut.resize((384, 384), LANCZOS), ".png")),
        Photograph(both),
    )


def rocket_under_galaxies() -> Sample:
    rocket = photograph("rocket.jpg").resize((576, 384), LANCZOS)
    galaxies = photograph("hubble_deep_field.jpg").resize((576, 502), LANCZOS)
    red, _, blue = rocket.split()
    sky = ImageChops.subtract(blue, red).point(lambda value: 255 if value > 12 else 0)  # every blue pixel
    sky = sky.filter(ImageFilter.MedianFilter(5)).filter(ImageFilter.GaussianBlur(1))
    night = Image.composite(ImageChops.screen(rocket, galaxies.crop((0, 0, 576, 384))), rocket, sky)
    return Sample(
        "Fill the evening sky of image 1 with the galaxies of image 2.",
        (Photograph(rocket), Photograph(galaxies)),
        Photograph(night),
    )


def rocket_mirrored() -> Sample:
    rocket = photograph("rocket.jpg").crop((0, 0, 360, 427))
    return Sample("Mirror the image from left to right.", (Photograph(rocket),), Photograph(ImageOps.mirror(rocket)))


def astronaut_poster() -> Sample:
    astronaut = photograph("astronaut.png").crop((0, 0, 400, 512))
    colours = astronaut.filter(ImageFilter.MedianFilter(7)).quantize(
        9, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE
    )
    poster = colours.convert("RGB").filter(ImageFilter.ModeFilter(5))
    return Sample(
        "Turn the portrait into a poster with only a few flat colours.",
        (Photograph(astronaut, rotated=True),),
        Photograph(poster, ".png"),
    )


def cameraman_at_sunset() -> Sample:
    cameraman = photograph("camera.png").resize((448, 448), LANCZOS)
    sunset = ImageOps.colorize(cameraman, black="#1b1030", mid="#c8553d", white="#ffe3a0", midpoint=120)
    return Sample("Colour the old photograph like a sunset.", (Photograph(cameraman, ".png"),), Photograph(sunset))


def motorcycle_blurred_background() -> Sample:
    """Blurred by distance: the photograph comes with a disparity map."""
    motorcycle = photograph("motorcycle_left.png")
    with np.load(installed("scikit-image", "skimage/data/motorcycle_disp.npz")) as arrays:
        nearness = arrays["arr_0"]
    near = Image.fromarray(np.where(np.isfinite(nearness) & (nearness > 36), 255, 0).astype(np.uint8))
    near = near.filter(ImageFilter.MedianFilter(9)).filter(ImageFilter.GaussianBlur(2))
    target = Image.composite(motorcycle, motorcycle.filter(ImageFilter.GaussianBlur(7)), near)
    size = (600, 405)
    return Sample(
        "Blur the background and keep the motorcycle sharp.",
        (Photograph(motorcycle.resize(size, LANCZOS)),),
        Photograph(target.resize(size, LANCZOS)),
    )


SAMPLES: tuple[Callable[[], Sample], ...] = (
    china_black_and_white,
    china_pencil_drawing,
    flower_close_up,
    flower_on_yellow,
    coffee_upside_down,
    coffee_blue_cup,
    cat_sepia,
    cat_beside_astronaut,
    rocket_under_galaxies,
    rocket_mirrored,
    astronaut_poster,
    cameraman_at_sunset,
    motorcycle_blurred_background,
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Write a small editing dataset of photographs that come with packages."
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write")
    out = parser.parse_args().out
    try:
        print(make_demo_data(out))
    except SourceError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
