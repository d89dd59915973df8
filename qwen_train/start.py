"""A run that has passed the checks of `preflight.py` and has not loaded torch yet."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from qwen_cache.models.folder import ModelFolder
from qwen_cache.settings.load import Config
from qwen_train.data.commits import TakenIn
from qwen_train.data.mixture import Mixture
from qwen_train.data.samples import Samples
from qwen_train.launch import Launch
from qwen_train.lora.files import WeightedLora
from qwen_train.run_settings import ToEncode, resume_command


@dataclass(frozen=True)
class Start:
    """A run that has passed these checks and holds the lock of its output folder."""

    config: Config
    launch: Launch
    model: ModelFolder
    samples: Samples | None
    """None for a run that encodes, which reads its source later."""
    to_encode: ToEncode | None
    """The source of a run that encodes."""
    validation_cache: Mixture | None
    """Whose samples are generated during training."""
    newest: Path | None
    """The checkpoint to continue from."""
    weights: str
    """The hash of the transformer's files; empty except in the main process, which is the only one to read them."""
    assistant: WeightedLora | None = None
    """The LoRA of `train.assistant_lora`."""
    assistant_hash: str = ""
    """Of its file, and its weight; empty as `weights` is, and without an assistant."""
    taken: tuple[TakenIn, ...] = ()
    """The commits that the run has taken in until its newest checkpoint, with `train.follow`."""

    @property
    def out(self) -> Path:
        """The output folder."""
        return Path(self.config.train.output_dir)

    @property
    def cache_identity(self) -> str | None:
        """What a resumed run must share of its samples; None where they are not known yet."""
        if self.config.train.follow and isinstance(self.samples, Mixture):
            return self.samples.lasting_identity
        return self.samples.identity if self.samples else None

    @property
    def resume_command(self) -> str:
        """The command line that continues this run."""
        return resume_command(self.out, self.launch, to_encode=self.to_encode)
