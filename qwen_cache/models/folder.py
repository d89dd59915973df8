"""A diffusers folder of Qwen-Image(-Edit), on disk or on the hub: its pipeline, and a check of its components.

Only the requested components are downloaded and checked: `build` never touches the transformer, a training run never
the encoders. Imports neither torch nor diffusers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from qwen_cache.errors import ModelError, first_line
from qwen_cache.format.identity import canonical_json, content_hash
from qwen_cache.models.config_values import Scheduler, check_config, check_values
from qwen_cache.models.family import NOT_YET, PIPELINES, SUPPORTED, Family, Pipeline, PipelineName, family_of
from qwen_cache.models.files import AGAIN, check_files, read_text
from qwen_cache.models.single_file import SingleFile, check_packages, open_single_file
from qwen_cache.models.template import Template
from qwen_cache.storage.remembered import NAME as CHECKSUMS
from qwen_cache.storage.remembered import find_fault, remembered_digest
from qwen_cache.text import repeated

ENCODER_PARTS = ("vae", "text_encoder", "tokenizer", "processor")
"""The folders of the frozen encoders; a model has those of its pipeline."""
NUNCHAKU = "nunchaku_lite"
"""The quant_method in config.json of a transformer that diffusers runs by nunchaku's kernels: it can only generate."""
WEIGHTS = (".safetensors", "config.json")
"""Endings of the files that decide what a component computes."""


@dataclass(frozen=True)
class ModelFolder:
    """A local folder with `model_index.json`; `name` is what the user typed."""

    name: str
    path: Path
    pipeline: PipelineName
    transformer: str | None = None
    """A single file whose weights are used in place of those of the transformer's folder."""
    is_here: ClassVar[bool] = True
    """False for a model that only a server has."""

    def component(self, name: str) -> Path:
        """The folder of a component, such as `vae`."""
        return self.path / name

    @cached_property
    def transformer_file(self) -> SingleFile | None:
        """The single file in place of the transformer's weights; ModelError if it is not of this model."""
        config = self.component("transformer") / "config.json"
        return None if self.transformer is None else open_single_file(self.transformer, read_config(config))

    @property
    def transformer_weights(self) -> Path | SingleFile:
        """Where the transformer's weights are: the single file, or the component's folder."""
        return self.transformer_file or self.component("transformer")

    @property
    def transformer_config(self) -> dict[str, Any]:
        """The transformer's config.json; with a single file, its `quantization_config` is that of the file."""
        config = read_config(self.component("transformer") / "config.json")
        return config if self.transformer_file is None else self.transformer_file.config(config)

    @property
    def scheduler_config(self) -> dict[str, Any]:
        """scheduler_config.json; ModelError if it is not one of FlowMatchEulerDiscreteScheduler."""
        path = self.component("scheduler") / "scheduler_config.json"
        config = read_config(path)
        check_values(Scheduler, config, path)  # whatever class it names
        return config

    @property
    def needs_nunchaku(self) -> bool:
        """Whether the transformer's weights are for nunchaku's kernels."""
        saved = self.transformer_config.get("quantization_config") or {}
        return bool(saved.get("quant_method") == NUNCHAKU)

    @property
    def public_name(self) -> str:
        """The name in files that users share: of a local path, only the last part."""
        return self.name if not Path(self.name).exists() else Path(self.name).resolve().name

    @property
    def family(self) -> Family:
        return family_of(self.pipeline)

    @property
    def facts(self) -> Pipeline:
        """What is known of the pipeline."""
        return PIPELINES[self.pipeline]

    @property
    def template(self) -> Template:
        """The template of samples with controls, if the model takes any."""
        return self.facts.template

    @property
    def tokenizer(self) -> Path:
        """The folder of the tokenizer."""
        return self.component(self.facts.tokenizer)

    @property
    def needs_controls(self) -> bool:
        return self.facts.min_controls > 0

    @property
    def takes_controls(self) -> bool:
        return self.facts.max_controls != 0

    @property
    def text_width(self) -> int:
        """The width of the text encoder's embeddings."""
        config = read_config(self.component("text_encoder") / "config.json")
        return int((config.get("text_config") or config)["hidden_size"])

    @property
    def sample_sigmas(self) -> tuple[float, ...] | None:
        """The noise levels that a distilled model samples with, from model_index.json; None for other models.

        Raises ModelError unless they are numbers above 0 and up to 1.
        """
        index = self.path / "model_index.json"
        sigmas = read_config(index).get("sample_sigmas")
        if sigmas is None:
            return None
        if not isinstance(sigmas, list) or not sigmas or not all(map(_is_sigma, sigmas)):
            raise ModelError(
                "sample_sigmas are no noise levels",
                where=index,
                expected="a list of numbers above 0 and up to 1, or null",
                found=json.dumps(sigmas),
                do="restore the file from the model's repository",
            )
        return tuple(map(float, sigmas))

    @property
    def max_controls(self) -> int | None:
        """The most control images that the pipeline takes; None: any number."""
        return self.facts.max_controls


def read_config(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model, such as config.json, with the values that its class can have; else
    ModelError."""
    twice: list[str] = []

    def noted(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice.extend(repeated(pairs))
        return dict(pairs)

    try:
        value = json.loads(read_text(path), object_pairs_hook=noted)
        if not isinstance(value, dict):
            raise TypeError("it is not a JSON object")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else first_line(error)
        raise ModelError(f"this file cannot be read: {reason}", where=path, do=AGAIN) from None
    check_config(value, path, twice)
    return value


def _is_sigma(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1


def open_model(
    name: str | None, components: Sequence[str], revision: str | None = None, transformer: str | None = None
) -> ModelFolder:
    """Find a model, download missing `components`, and check that all of them exist; ModelError otherwise.

    With a single file as its `transformer`, of the transformer's folder only config.json is needed.
    """
    name = check_name(name)
    whole = [each for each in components if each != "transformer" or transformer is None]
    patterns = ["model_index.json", *(f"{each}/*" for each in whole)]
    patterns += ["transformer/config.json"] if len(whole) < len(components) else []
    path = Path(name) if Path(name).is_dir() else _download(name, patterns, revision)
    index = path / "model_index.json"
    if not index.is_file():
        do = "name the folder that contains vae/, text_encoder/ and transformer/, or a repository on the hub"
        raise ModelError("not a diffusers model folder: it has no model_index.json", where=path, do=do)
    pipeline = read_config(index).get("_class_name")
    facts = PIPELINES.get(str(pipeline))
    if facts is None:
        model = NOT_YET.get(str(pipeline))
        what = f"{model} is not supported yet" if model else "this pipeline is not supported"
        do = f"use one of {SUPPORTED}"
        raise ModelError(what, where=index, expected=" or ".join(PIPELINES), found=pipeline, do=do)
    encoders = facts.encoder_parts
    needed = [each for each in components if each not in ENCODER_PARTS or each in encoders]
    if missing := [each for each in needed if not (path / each).is_dir()]:
        folders = ", ".join(sorted(p.name for p in path.iterdir() if p.is_dir())) or "no folders"
        raise ModelError(
            f"the model has no {' and no '.join(missing)}",
            where=path,
            expected=", ".join(needed),
            found=folders,
            do="download the whole model, or name another with --model",
        )
    for each in needed:
        check_files(path / each)
    opened = ModelFolder(name, path, facts.name, transformer)
    if "transformer" in components:
        check_packages(opened.transformer_file)  # and with it the file
    return opened


def fingerprint(
    folders: Sequence[Path], endings: tuple[str, ...] = WEIGHTS, on_bytes: Callable[[int], None] = lambda _: None
) -> str:
    """One hash over the names and contents of the files in these folders with these endings, wherever they are.

    Files are read again only when they have changed; `on_bytes` gets the number of bytes just read. ModelError for one
    that cannot be read, such as the link of a broken download.
    """
    files = [path for folder in folders for path in sorted(folder.iterdir()) if path.name.endswith(endings)]
    try:
        digests = [[f"{path.parent.name}/{path.name}", remembered_digest(path, on_bytes)] for path in files]
    except OSError as error:
        raise ModelError(f"this file cannot be read: {error.strerror}", where=error.filename, do=AGAIN) from None
    return content_hash(canonical_json(digests))


def check_component(folder: Path) -> None:
    """Raise ModelError if a component that this project wrote has changed since; another one cannot be checked."""
    if (folder / CHECKSUMS).is_file() and (fault := find_fault(folder, remembered_digest)):
        do = f"restore the folder from a copy; if it was changed on purpose, remove its {CHECKSUMS}"
        raise fault.error(ModelError, do)


def check_name(name: str | None) -> str:
    """The name of a model that is a folder here, or can be a repository on the hub; ModelError otherwise."""
    if name is None:
        raise ModelError("no model is named", do="give --model FOLDER_OR_REPOSITORY, or model.path in qwen.yaml")
    if Path(name).is_dir():
        return name
    if name.count("/") != 1 or name.startswith((".", "/", "~")) or Path(name).is_file():
        raise ModelError(
            "this is a file, not a folder" if Path(name).is_file() else "no such folder",
            where=name,
            do="give the folder of a model, or a repository such as Qwen/Qwen-Image-Edit-2509",
        )
    return name


def open_language_model(name: str) -> Path:
    """The folder of a vision-language model as transformers stores it, downloaded if there is none; ModelError if it
    cannot be."""
    check_name(name)
    patterns = ["*.json", "*.txt", "*.jinja", "*.safetensors"]
    folder = Path(name) if Path(name).is_dir() else _download(name, patterns, None)
    check_files(folder)
    return folder


def _download(name: str, patterns: list[str], revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelError("neither a folder here nor a repository on the hub", where=name, do=str(error)) from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        what = f"no such folder here, and the hub could not be reached: {first_line(error)}"
        raise ModelError(what, where=name) from None
