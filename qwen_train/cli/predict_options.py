"""The options of `qwen-train predict`, and which of them exclude each other, found before anything is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qwen_cache.errors import ConfigError
from qwen_cache.settings.load import Config
from qwen_cache.settings.sections import PredictConfig
from qwen_cache.storage.files import make_folder
from qwen_train.inference.images import image_format, image_paths

WAYS = (("--prompt",), ("--image", "--prompt"), ("--source",), ("--prompt", "--source"), ("--from-cache",))
"""The valid combinations of options that select what to generate."""


@dataclass(frozen=True)
class PredictOptions:
    """The options of the command besides settings and devices."""

    out: Path
    images: Sequence[Path] = ()
    prompts: Sequence[str] = ()
    source: str | None = None
    cache: str | None = None
    keys: Sequence[str] = ()
    loras: Sequence[str] = ()
    """`PATH` or `PATH:weight`."""
    devices: tuple[str, str | None, str | None, str | None] = ("auto", None, None, None)
    """The device of all components; then of VAE, text encoder and transformer, where they differ."""
    merge: bool = False
    compare: bool = False
    grid: Sequence[str] = ()
    """`AXIS=V1,V2,…`, for columns and rows."""
    save_interrupted: bool = False
    as_json: bool = False

    @property
    def into_folder(self) -> bool:
        """Whether --out is a folder: with --source always, with --from-cache unless it is the name of an image."""
        return bool(self.source) or (self.cache is not None and not self.out.suffix)

    @property
    def is_one(self) -> bool:
        """Whether to make one call of the pipeline, instead of a folder of images."""
        return len(self.prompts) == 1 and not (self.compare or self.source or self.grid)


# ---- checks ----------------------------------------------------------------------------------------------------------


def check(settings: Config, options: PredictOptions) -> None:
    """Raise ConfigError for options that exclude each other, before anything is read."""
    given = {
        "--image": options.images,
        "--prompt": options.prompts,
        "--source": options.source,
        "--from-cache": options.cache,
    }
    ways = tuple(name for name, value in given.items() if value)
    if ways not in WAYS:
        expected = "; or ".join(" and ".join(way) for way in WAYS)
        raise ConfigError("nothing to generate", expected=expected, found=" and ".join(ways) or "nothing")
    if bool(options.cache) != bool(options.keys):
        raise ConfigError(
            "--from-cache CACHE goes with --key KEY", do="name a sample; `qwen-cache inspect --html` lists them"
        )
    if options.compare and options.merge:
        raise ConfigError("a merged LoRA cannot be turned off again", found="--compare and --merge", do="choose one")
    if options.grid:
        _check_grid(settings, options)
    images = settings.predict.num_images_per_prompt
    if images > 1 and not options.is_one:
        found = f"--num-images-per-prompt {images}"
        raise ConfigError("several images per prompt need a single prompt", found=found)
    if options.save_interrupted and not options.is_one:
        raise ConfigError("--save-interrupted is for one image", do="leave it out: finished images are kept")
    if options.source:
        _check_folder(options.out, options.source)
    elif not options.into_folder:
        _check_files(options, images)


def _check_grid(settings: Config, options: PredictOptions) -> None:
    """Raise ConfigError for what a grid excludes."""
    one = "give one --prompt, with --image or without"
    excluded = {
        "--source": (options.source, one),
        "--from-cache": (options.cache, one),
        "a second --prompt": (options.prompts[1:], one),
        "--compare": (options.compare, "leave it out: --grid lora_weight=0,1 is without and with the LoRA"),
        f"--num-images-per-prompt {settings.predict.num_images_per_prompt}": (
            settings.predict.num_images_per_prompt > 1,
            "leave it out: --grid seed=0,1,2 starts from several noises",
        ),
        "--save-interrupted": (options.save_interrupted, "leave it out: finished images are kept"),
    }
    for name, (given, do) in excluded.items():
        if given:
            raise ConfigError(f"--grid and {name} exclude each other", do=do)


def _check_folder(out: Path, source: str) -> None:
    """Raise ConfigError unless --out is a folder outside the source."""
    if out.suffix:
        raise ConfigError("--source generates into a folder", where="--out", found=out, do="give --out FOLDER")
    if Path(source).is_dir() and out.resolve().is_relative_to(Path(source).resolve()):
        what = "the output folder is inside --source: the next run would read its own results"
        raise ConfigError(what, where="--out", do="name another folder")


def _check_files(options: PredictOptions, images: int) -> None:
    """Raise ConfigError unless --out can be written, and is none of the control images."""
    image_format(options.out)
    make_folder(options.out.parent)
    given = {image.resolve() for image in options.images}
    for path in image_paths(options.out, max(images, len(options.keys))):
        if path.is_dir():
            raise ConfigError("a folder has the name of the image", where=path, do="choose another --out")
        if path.resolve() in given:
            raise ConfigError("the image would replace its own control image", where=path)
    if not options.is_one and not options.cache and options.out.suffix.lower() != ".png":
        raise ConfigError("resumable output must be .png", where="--out", found=options.out)


def check_guidance(config: PredictConfig, true_cfg_scale: float | None) -> None:
    """Raise ConfigError for a guidance scale without a negative prompt, which the stock pipelines ignore."""
    if true_cfg_scale is not None and true_cfg_scale > 1 and config.negative_prompt is None:
        raise ConfigError(
            "without a negative prompt there is nothing to guide away from",
            found=f"--true-cfg-scale {true_cfg_scale:g}",
            do='give one: --negative-prompt " "',
        )
