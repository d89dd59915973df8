"""Terminal front end of `qwen-train decode`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qwen_cache.errors import ConfigError
from qwen_cache.extras import require
from qwen_cache.format.manifest import MANIFEST_NAME
from qwen_cache.models.folder import open_model
from qwen_cache.settings.given import Given
from qwen_cache.settings.load import CONFIG_NAME, Config, load_config, load_saved
from qwen_cache.terminal import console, counting, plural, print_done, print_json
from qwen_cache.text import plain
from qwen_train.run import METRICS_NAME, in_one_process, latents_files, latents_folder
from qwen_train.training.start import check_tracker

AWAIT_SECONDS = 2.0

if TYPE_CHECKING:
    from qwen_train.inference.decode import Decoder


def run_decode(
    folder: Path | None,
    given: Sequence[Given | None],
    vae_device: str,
    config: Path | None,
    assignments: Sequence[str],
    *,
    watch: bool,
    as_json: bool,
) -> int:
    """Decode the latents of validation images, with `watch` as they come; the exit code."""
    require("torch")
    in_one_process("decode")
    if folder is not None and (folder / MANIFEST_NAME).exists():
        do = "name the output folder of a run; `qwen-cache inspect --html` shows the images of a cache"
        raise ConfigError("this folder is a cache", where=folder, do=do)
    if watch:
        folder = folder or Path(load_config(config, assignments, given).train.output_dir)
        made = _watch(folder, given, vae_device, config, assignments)
    else:
        settings = _settings(folder, given, config, assignments)
        folder = folder or Path(settings.train.output_dir)
        latents_files(folder)
        decoder = _decoder(settings, vae_device)
        from qwen_train.inference.decode import not_decoded
        from qwen_train.training.report import write_report

        images = not_decoded(latents_files(folder))
        with counting("decoding", len(images)) as advance:
            for image in images:
                decoder.decode(image)
                advance(1)
        if (folder / METRICS_NAME).is_file():
            write_report(folder)
        made = [image.png for image in images]
    if as_json:
        print_json({"folder": str(folder), "images": [str(path) for path in made]})
        return 0
    print_done(f"{plural(len(made), 'new image')} in {latents_folder(folder)}")
    return 0


def _settings(
    folder: Path | None, given: Sequence[Given | None], config: Path | None, assignments: Sequence[str]
) -> Config:
    """The settings of the file that is named, else those of the run."""
    saved = folder / CONFIG_NAME if folder is not None and (folder / CONFIG_NAME).is_file() else None
    return load_saved(saved, assignments, given) if saved and not config else load_config(config, assignments, given)


def _decoder(settings: Config, vae_device: str) -> Decoder:
    model = open_model(settings.model.path, ("vae",), settings.model.revision, vae=settings.model.vae)
    from qwen_cache.models.devices import choose_device, torch_dtype
    from qwen_train.inference.decode import Decoder

    return Decoder(model, choose_device(vae_device, "--vae-device"), torch_dtype(settings.predict.dtype))


def _watch(
    folder: Path, given: Sequence[Given | None], vae_device: str, config: Path | None, assignments: Sequence[str]
) -> list[Path]:
    _await_run(folder)
    settings = _settings(folder, given, config, assignments)
    check_tracker(settings.logging.report_to)
    decoder = _decoder(settings, vae_device)
    from qwen_train.training.watch import Watch

    watch = Watch(folder, decoder, settings)
    watch.run()
    return watch.made


def _await_run(folder: Path) -> None:
    """Return once the run in `folder` has begun; ConfigError if there is something else."""
    if folder.is_file() or (folder.is_dir() and not _may_become_a_run(folder)):
        raise ConfigError("--watch follows a run, and there is none here", where=folder, expected=CONFIG_NAME)
    if not (folder / CONFIG_NAME).is_file():
        console().print(f"waiting for a run in {plain(folder)}", markup=False, highlight=False)
    while not (folder / CONFIG_NAME).is_file():
        time.sleep(AWAIT_SECONDS)


def _may_become_a_run(folder: Path) -> bool:
    return (folder / CONFIG_NAME).is_file() or all(path.name.startswith(".") for path in folder.iterdir())
