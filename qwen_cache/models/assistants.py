"""Training adapters by base model, LoRAs for `train.assistant_lora`: the published ones, and the verified ones.

`auto` takes an entry of `VERIFIED` alone, whose bytes a maintainer has hashed; CONTRIBUTING.md says how. The others are
named, so that a user can take one by its name and knows that nobody here has checked it.

Reports about Qwen-Image-2.1 without one: modelscope/DiffSynth-Studio issue 1706 (noise from LoRA and full training,
open). ostris/ai-toolkit issue 1054, a LoRA that did nothing, was a fault of a trainer.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_FILE = "pytorch_lora_weights.safetensors"
"""The file of a repository that is named alone, as diffusers calls it."""


@dataclass(frozen=True)
class Assistant:
    """A published training adapter."""

    bases: tuple[str, ...]
    """The repositories of the models that it is for."""
    repository: str
    file: str = DEFAULT_FILE
    licence: str | None = None
    """By its name on the hub; None if it states none."""

    @property
    def name(self) -> str:
        """The value of `train.assistant_lora` for its newest revision."""
        return self.repository if self.file == DEFAULT_FILE else f"{self.repository}/{self.file}"

    @property
    def licence_told(self) -> str:
        return f"licence {self.licence}" if self.licence else "without a stated licence"


@dataclass(frozen=True)
class Verified:
    """A training adapter whose bytes were hashed."""

    assistant: Assistant
    revision: str
    """The commit, of 40 hexadecimal digits."""
    sha256: str

    @property
    def name(self) -> str:
        """The value of `train.assistant_lora` for these bytes."""
        return f"{self.assistant.repository}@{self.revision}/{self.assistant.file}"


OF_21 = ("Qwen/Qwen-Image-2.1",)
PUBLISHED = (
    Assistant(OF_21, "SimpleTuner/Qwen-Image-2.1-training-assistant-v3", licence="qwen-research"),
    Assistant(
        OF_21,
        "ShootTheSound/Fizgig-Qwen-Image-2.1-Training-Adapter",
        "fizgig_qwen_image_2.1_training_adapter.safetensors",
    ),
)
"""The known ones, for each base the one first that `init` names: the one with a licence."""
VERIFIED: tuple[Verified, ...] = ()
"""The table of `auto`, at most one for a base. It is empty: neither hash could be had without access to the hub."""


def published_for(base: str) -> tuple[Assistant, ...]:
    """The published training adapters of this repository."""
    return tuple(each for each in PUBLISHED if base in each.bases)


def verified_for(base: str) -> Verified | None:
    """The entry that `auto` takes for this repository; None if there is none."""
    return next((each for each in VERIFIED if base in each.assistant.bases), None)


def verified_as(repository: str, revision: str, file: str) -> Verified | None:
    """The entry of these bytes; None if they were not verified."""
    return next((each for each in VERIFIED if each.name == f"{repository}@{revision}/{file}"), None)
