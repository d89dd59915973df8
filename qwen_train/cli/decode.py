"""`decode`: the latents of validation images as PNGs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qwen_cache.errors import ConfigError
from qwen_cache.extras import require
from qwen_cache.options import (
    CONFIG,
    DEVICES,
    INPUT,
    JSON,
    MODEL_PATH,
    SET,
    VAE,
    command,
    flag,
    option,
    setting_argument,
)
from qwen_cache.settings.given import Given
from qwen_cache.terminal import console, counting, plural, print_done, print_json, print_next, verbatim
from qwen_cache.text import plain

AWAIT_SECONDS = 2.0

if TYPE_CHECKING:
    from qwen_cache.settings.load import Config
    from qwen_train.inference.decode import Decoder


@command(
    page="howto/watch-and-resume.md",
    examples=["qwen-train decode", "qwen-train decode runs/cats --watch --vae-device cuda:1"],
)
def decode(
    folder: Given | None = setting_argument(
        "train.output_dir", "FOLDER", "The output folder of a run, or a folder of latents."
    ),
    model: Given | None = MODEL_PATH,
    vae: Given | None = VAE,
    vae_device: str = option(DEVICES, "The device of the VAE.", "DEVICE", default="auto"),
    watch: bool = flag("--watch", INPUT, "Decode images as they come, until the run has ended or Ctrl-C."),
    json: bool = JSON,
    config: Path | None = CONFIG,
    set_: list[str] | None = SET,
) -> int:
    """Decode the latents of validation images to PNGs, and show them in report.html. Only the VAE is loaded."""
    require("torch")
    from qwen_cache.format.manifest import MANIFEST_NAME
    from qwen_cache.settings.load import load_config
    from qwen_train.run import METRICS_NAME, REPORT_NAME, in_one_process, latents_files, latents_folder

    in_one_process("decode")
    path, given, assignments = Path(folder.value) if folder else None, [model, vae], set_ or ()
    if path is not None and (path / MANIFEST_NAME).exists():
        do = "name the output folder of a run; `qwen-cache inspect --html` shows the images of a cache"
        raise ConfigError("this folder is a cache", where=path, do=do)
    if watch:
        path = path or Path(load_config(config, assignments, given).train.output_dir)
        made = _watch(path, given, vae_device, config, assignments)
    else:
        settings = _settings(path, given, config, assignments)
        path = path or Path(settings.train.output_dir)
        latents_files(path)
        made = _decode(path, _decoder(settings, vae_device))
    if json:
        print_json({"folder": str(path), "images": [str(each) for each in made]})
        return 0
    print_done(f"{plural(len(made), 'new image')} in {latents_folder(path)}")
    if (path / METRICS_NAME).is_file():
        console().print(f"report: {verbatim(path / REPORT_NAME)}", highlight=False)
        print_next(["qwen-train", "best", str(path)])
    return 0


def _settings(
    folder: Path | None, given: Sequence[Given | None], config: Path | None, assignments: Sequence[str]
) -> Config:
    """The settings, with the model and the dtype of the run in `folder` unless the command names others."""
    from qwen_cache.models.recorded import with_recorded_model
    from qwen_cache.settings.load import CONFIG_NAME, load_config, load_saved, overridden

    settings = load_config(config, assignments, given)
    if folder is None or config or not (folder / CONFIG_NAME).is_file():
        return settings
    dtype = load_saved(folder / CONFIG_NAME).predict.dtype
    typed = overridden({"predict": {"dtype": dtype}}, assignments=assignments, given=given)
    settings = settings.model_copy(update={"model": typed.model, "predict": typed.predict})
    return with_recorded_model(settings, folder, ("vae",), deciding=("revision", "vae"))


def _decoder(settings: Config, vae_device: str) -> Decoder:
    from qwen_cache.models.folder import open_model

    named = settings.model
    model = open_model(named.path, ("vae",), named.revision, vae=named.vae, only_here=named.only_here)
    from qwen_cache.models.devices import choose_device, torch_dtype
    from qwen_train.inference.decode import Decoder

    return Decoder(model, choose_device(vae_device, "--vae-device"), torch_dtype(settings.predict.dtype))


def _decode(folder: Path, decoder: Decoder) -> list[Path]:
    from qwen_train.inference.decode import not_decoded
    from qwen_train.run import METRICS_NAME, latents_files
    from qwen_train.training.report import write_report

    images = not_decoded(latents_files(folder))
    with counting("decoding", len(images)) as advance:
        for image in images:
            decoder.decode(image)
            advance(1)
    if (folder / METRICS_NAME).is_file():
        write_report(folder)
    return [image.png for image in images]


def _watch(
    folder: Path, given: Sequence[Given | None], vae_device: str, config: Path | None, assignments: Sequence[str]
) -> list[Path]:
    from qwen_train.training.start import check_tracker

    _await_run(folder)
    settings = _settings(folder, given, config, assignments)
    check_tracker(settings.logging.report_to)
    _note_tracker(folder, settings)
    decoder = _decoder(settings, vae_device)
    from qwen_train.training.watch import Watch

    watch = Watch(folder, decoder, settings)
    watch.run()
    return watch.made


def _note_tracker(folder: Path, settings: Config) -> None:
    """Say where the run logs, if its images are not logged there: nothing is sent because a folder says so."""
    from qwen_cache.settings.load import CONFIG_NAME, load_saved

    its = load_saved(folder / CONFIG_NAME).logging.report_to
    if its not in (settings.logging.report_to, "none"):
        text = f"note: this run logs to {plain(its)}; --set logging.report_to={plain(its)} logs its images there, too"
        console().print(text, markup=False, highlight=False)


def _await_run(folder: Path) -> None:
    """Return once the run in `folder` has begun; ConfigError if there is something else."""
    from qwen_cache.settings.load import CONFIG_NAME

    saved = folder / CONFIG_NAME
    is_other = folder.is_dir() and any(not path.name.startswith(".") for path in folder.iterdir())
    if folder.is_file() or (is_other and not saved.is_file()):
        raise ConfigError("--watch follows a run, and there is none here", where=folder, expected=CONFIG_NAME)
    if not saved.is_file():
        console().print(f"waiting for a run in {plain(folder)}", markup=False, highlight=False)
    while not saved.is_file():
        time.sleep(AWAIT_SECONDS)
