"""Images of a run as they come: `qwen-train decode --watch`, and `validation.vae_device` in the run itself.

Watching needs only the folder, so any device or machine will do; it ends after the last step, or with Ctrl-C. The
report is renewed, and every image logged. A file that cannot be read yet is tried again; one that stays damaged is
named, and refused at the end.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qwen_cache.errors import ConfigError, TrainError
from qwen_cache.settings.load import CONFIG_NAME, Config, load_saved
from qwen_cache.terminal import console, plural
from qwen_cache.text import plain
from qwen_train.inference.decode import Decoder, Latents, not_decoded
from qwen_train.run import LOCK, found_latents, latents_files, step_of
from qwen_train.training.metrics import finish, log_decoded, start_image_run
from qwen_train.training.report import renew_report

POLL_SECONDS = 2.0
"""An image takes the transformer longer than this."""


def show_new_images(folder: Path, decoder: Decoder, trackers: Iterable[Any]) -> None:
    """`show_images` for all that are not decoded, within the run itself."""
    show_images(folder, decoder, not_decoded(latents_files(folder)), trackers)


def show_images(folder: Path, decoder: Decoder, images: Iterable[Latents], trackers: Iterable[Any]) -> None:
    """Decode images of the run in `folder`, log them and renew the report."""
    for image in images:
        log_decoded(trackers, image, decoder.decode(image))
    renew_report(folder)


@dataclass
class Watch:
    """The images of the run in `folder`, decoded by `decoder`."""

    folder: Path
    decoder: Decoder
    config: Config
    made: list[Path] = field(default_factory=list)
    """The PNGs so far."""
    _faulty: set[tuple[Path, int, int]] = field(default_factory=set)
    """Files that could not be read, with the size and time that they had."""
    _named: set[tuple[Path, int, int]] = field(default_factory=set)

    def run(self) -> None:
        """Decode until the run has ended or Ctrl-C; TrainError at the end for files that are still damaged."""
        trackers: list[Any] | None = None
        try:
            while True:
                has_ended = self._has_ended()  # asked first: what is written meanwhile is not missed
                if images := self._readable():
                    trackers = start_image_run(self.config, self.folder) if trackers is None else trackers
                    show_images(self.folder, self.decoder, images, trackers)
                    self.made += [image.png for image in images]
                    steps = sorted({step for image in images if (step := step_of(image.file)) is not None})
                    of = f"step {', '.join(map(str, steps))}" if steps else "the cache"
                    console().print(f"{plural(len(images), 'image')} of {of}", highlight=False)
                if has_ended:
                    break
                time.sleep(POLL_SECONDS)
        except KeyboardInterrupt:
            console().print("stopped; the same command continues", markup=False)
            return
        finally:
            finish(trackers or ())
        not_decoded(latents_files(self.folder))

    def _readable(self) -> list[Latents]:
        """The new images, without those of files that are damaged or still being copied."""
        images: list[Latents] = []
        for file in found_latents(self.folder):
            try:
                images += not_decoded([file])
            except TrainError as error:
                with suppress(OSError):  # a file is named if it has not changed since it could not be read
                    stat = file.stat()
                    state = file, stat.st_size, stat.st_mtime_ns
                    if state in self._faulty and state not in self._named:
                        console().print(f"warning: {plain(error)}", style="yellow", markup=False)
                        self._named.add(state)
                    self._faulty.add(state)
        return images

    def _has_ended(self) -> bool:
        """True if the last step is saved, which comes after its images, and no run holds the lock."""
        try:
            last = load_saved(self.folder / CONFIG_NAME).train.max_steps  # a resumed run may have raised it
        except (ConfigError, OSError):
            return False
        return (self.folder / f"checkpoint-{last}").is_dir() and not (self.folder / LOCK).exists()
