"""LoRA files: kinds of adapters, file names, metadata. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from qwen_cache.errors import ConfigError, TrainError, first_line
from qwen_cache.models.assistants import published_for, verified_as, verified_for
from qwen_cache.settings.load import Config
from qwen_cache.settings.sections import LoraConfig, TrainConfig
from qwen_cache.storage.files import open_file
from qwen_cache.storage.remembered import remembered
from qwen_cache.terminal import console, human_bytes, naming
from qwen_cache.text import parse_json, plain

# ---- types -----------------------------------------------------------------------------------------------------------
# The types of adapters, without torch: their names in files and messages, and what they cannot be combined with.
#
#     lora   ΔW = alpha / r · B A (arXiv 2106.09685)
#     lokr   ΔW = alpha / r · W1 ⊗ W2, either of them a product of two matrices (LyCORIS, arXiv 2309.14859)
#     loha   ΔW = alpha / r · (W1a W1b) ⊙ (W2a W2b) (FedPara, arXiv 2108.06098)
#     oft    W' = W Rᵀ, with R block-diagonal and orthogonal (arXiv 2306.07280); no rank and no scale
#
# All are peft's. Refused: a quantised base whose packed weights have lost their shape, and OFT under FSDP2.


@dataclass(frozen=True)
class AdapterType:
    title: str
    """The name in messages."""
    prefix: str
    """The beginning of the names of its tensors, after the module and a dot."""
    function: tuple[str, ...]
    """peft's settings that decide, beside the shapes of the tensors, which function they are."""

    @property
    def name(self) -> str:
        """In `train.lora.type`."""
        return self.title.lower()

    @property
    def peft_type(self) -> str:
        return self.title.upper()


PATTERNS = ("rank_pattern", "alpha_pattern")
LORA = AdapterType("LoRA", "lora_", ("r", "lora_alpha", "use_rslora", "use_dora", *PATTERNS))
LOKR = AdapterType("LoKr", "lokr_", ("r", "alpha", *PATTERNS))
LOHA = AdapterType("LoHa", "hada_", ("r", "alpha", *PATTERNS))
OFT = AdapterType("OFT", "oft_", ("oft_block_size", "coft", "eps", "use_cayley_neumann"))
TYPES = {each.name: each for each in (LORA, LOKR, LOHA, OFT)}
"""By their name in `train.lora.type`."""


def adapter_title(lora: LoraConfig) -> str:
    """The adapter in words, as `LoRA of rank 16`; an article fits before it."""
    title, others = TYPES[lora.type].title, sorted(set(lora.rank_pattern.values()) - {lora.rank})
    if lora.type == OFT.name:
        return f"block-diagonal {title} of {lora.oft_block_size} inputs"
    return f"{title} of rank {lora.rank}" + "".join(f", {rank}" for rank in others)


def type_of(settings: Mapping[str, Any]) -> AdapterType:
    """The type by peft's settings; LoRA where they have none, and ValueError for another of peft's types."""
    name = settings.get("peft_type", LORA.peft_type)
    found = [each for each in TYPES.values() if each.peft_type == name]  # peft's own value is an enum of strings
    if not found:
        raise ValueError(f"an adapter of type {name} is none of {', '.join(each.title for each in TYPES.values())}")
    return found[0]


def type_of_names(names: Iterable[str]) -> AdapterType:
    """The type by the names of its tensors; LoRA where no other type is recognised."""
    for name in names:
        for each in TYPES.values():
            if f".{each.prefix}" in name:
                return each
    return LORA


def check_adapter(config: Config, transformer: Mapping[str, Any]) -> None:
    """Raise ConfigError if the adapter of `train.lora` cannot be trained with these settings on this config.json."""
    settings = config.train
    if settings.method != "lora":
        return
    title = TYPES[settings.lora.type].title
    do = "set train.lora.type=lora, or model.quantization to int8 or fp8 with the unquantised model"
    check_base(TYPES[settings.lora.type], config.model.quantization, transformer, "train.lora.type", do)
    if settings.lora.type == "oft" and settings.fsdp:
        raise ConfigError(
            f"{title} rotates in float32, and train.fsdp gathers its weights in bfloat16",
            where="train.lora.type",
            do="set train.fsdp=false, or another train.lora.type",
        )


def check_base(
    kind: AdapterType, quantization: str, transformer: Mapping[str, Any], where: Path | str, do: str
) -> None:
    """Raise ConfigError if an adapter of this type cannot be added to weights with this quantisation."""
    if kind in (LOKR, LOHA) and (packed := _packed(quantization, transformer)):
        what = f"a {kind.title} needs the shape of each weight, which packed weights have lost"
        raise ConfigError(what, where=where, found=packed, do=do)


def _packed(quantization: str, transformer: Mapping[str, Any]) -> str | None:
    """Which weights are packed, in words; None if none are."""
    saved = transformer.get("quantization_config") or {}
    if quantization == "nf4":
        return "model.quantization=nf4"
    if saved.get("quant_method") == "gguf":
        return "GGUF weights"
    return "4-bit weights in config.json" if '"load_in_4bit": true' in json.dumps(saved) else None


# ---- files -----------------------------------------------------------------------------------------------------------
# Find the file of a LoRA, and what its header says, without torch, so that a path without one is refused before
# anything is loaded.

ADDRESS = re.compile("[a-z][a-z0-9+.-]+:/")
"""The beginning of an address, of which a path has kept one slash."""
WEIGHTS_NAME = "pytorch_lora_weights.safetensors"
"""The LoRA in the output folder of a run, by the name that diffusers' pipelines look for."""
PREFIX = "transformer"
"""The beginning, before a dot, of the names of its tensors and of peft's settings in its header."""
METADATA_KEY = "lora_adapter_metadata"
"""The key at which diffusers' loader reads peft's settings, such as rank and alpha, as JSON text."""
COMFYUI_METADATA_KEY = "peft_config"
"""The key for a file with ComfyUI's names: under diffusers' key, diffusers' loader would apply the header's alpha on
top of each module's own."""
PEFT_WEIGHTS_NAME, PEFT_CONFIG_NAME = "adapter_model.safetensors", "adapter_config.json"
"""The files in a folder of peft."""
ORIGIN = "trained_on"
"""Key in that JSON text: the model, its pipeline and the identity of the cache."""

ON_HUB = re.compile(
    r"(?P<repository>\w[\w.-]*/\w[\w.-]*(?<!\.safetensors))(?:@(?P<revision>[\w.-]+))?"
    r"(?:/(?P<file>[^\\]+\.safetensors))?"
)
"""A repository on the hub or a file of it, of its newest revision or another."""
AUTO = "auto"
"""The value of `train.assistant_lora` for the verified training adapter of the model."""


@dataclass(frozen=True)
class WeightedLora:
    """A LoRA file and its weight."""

    file: Path
    weight: float = 1.0
    address: str = ""
    """`owner/repository@commit/file` of one that is on the hub."""


def parse_lora(text: str) -> WeightedLora:
    """Parse `PATH` or `PATH:weight`, the path of a file or of a run's folder."""
    path, weight = split_weight(text)
    return WeightedLora(find_lora(Path(path)), weight)


def split_weight(text: str) -> tuple[str, float]:
    """`NAME:weight` as name and weight.

    The weight is 1 without a number after the last colon, and for a path that exists with its colon.
    """
    if os.path.exists(text):  # False for what cannot be a path, where Path.exists would raise
        return text, 1.0
    name, _, number = text.rpartition(":")
    try:
        weight = float(number)
    except ValueError:
        weight = math.nan
    return (name, weight) if name and math.isfinite(weight) else (text, 1.0)


def _file_at(path: Path) -> Path:
    """The path of a file: `path`, or in a folder that of a run, or else that of peft."""
    if not path.is_dir():
        return path
    own, pefts = path / WEIGHTS_NAME, path / PEFT_WEIGHTS_NAME
    return pefts if pefts.is_file() and not own.is_file() else own


def find_lora(source: Path) -> Path:
    """The LoRA file: `source`, or the one in the folder of a run or of peft; TrainError if there is none."""
    if ADDRESS.match(str(source)):
        do = "download it, such as with `hf download`, and name the file"
        raise TrainError("a LoRA is a file of this machine, not behind an address", where=source, do=do)
    file = _file_at(source)
    if (source / "transformer").is_dir() and not file.is_file():
        do = f"they are in {source / 'transformer'}, as from_pretrained and other programs take them"
        raise TrainError("this run trained all weights", where=source, do=do)
    if not file.is_file() or file.suffix != ".safetensors":
        expected = f"{WEIGHTS_NAME} or a .safetensors file"
        do = "name the output folder of a finished run, or the file of a LoRA"
        raise TrainError("no LoRA here", where=source, expected=expected, do=do)
    return file


def find_start(path: Path) -> Path:
    """The file of `train.lora.weights`; ConfigError if there is none."""
    file = _file_at(path)
    if file.is_file():
        return file
    expected, do = f"{WEIGHTS_NAME}, or another file", "name the output folder of a finished run, or the file of a LoRA"
    raise ConfigError("train.lora.weights: no LoRA here", where=path, expected=expected, do=do)


def with_assistant(config: Config) -> Config:
    """The settings with the verified training adapter of `model.path` in place of `train.assistant_lora=auto`.

    ConfigError if there is none. Full training, which takes no assistant, is refused by `find_assistant`.
    """
    name, weight = split_weight(config.train.assistant_lora or "")
    if name != AUTO or config.train.method == "full":
        return config
    base = str(config.model.path)
    entry = verified_for(base)
    if entry is None:
        raise _none_verified(base)
    return _naming(config, entry.name, weight)


def pinned(config: Config, assistant: WeightedLora | None) -> Config:
    """The settings with the commit of an assistant on the hub, so that the run has its bytes whenever it is resumed."""
    return _naming(config, assistant.address, assistant.weight) if assistant and assistant.address else config


def _naming(config: Config, name: str, weight: float) -> Config:
    """The settings with this `train.assistant_lora`."""
    value = name if weight == 1 else f"{name}:{weight:g}"
    return config.model_copy(update={"train": config.train.model_copy(update={"assistant_lora": value})})


def _none_verified(base: str) -> ConfigError:
    """The error for a base without an adapter in the table of `auto`, which names those that are published."""
    others = [f"train.assistant_lora={each.name} ({each.licence_told})" for each in published_for(base)]
    if not others:
        what = "train.assistant_lora=auto: no training adapter of this model is known"
        return ConfigError(what, where=base, do="name a LoRA, or leave train.assistant_lora out")
    return ConfigError(
        "train.assistant_lora=auto: no training adapter of this model was verified, so none is chosen",
        where=base,
        do=f"name one yourself: {', or '.join(others)}; or leave train.assistant_lora out",
    )


def find_assistant(settings: TrainConfig) -> WeightedLora | None:
    """The LoRA of `train.assistant_lora`, downloaded with a message if it is on the hub; None if none is set.

    Raises ConfigError for full training, if there is no such LoRA, and if a verified one has other bytes.
    """
    if settings.assistant_lora is None:
        return None
    if settings.method == "full":
        raise ConfigError(
            "train.assistant_lora is left out of the result, which full training cannot do",
            found="train.method=full",
            do="set train.method=lora; or train weights that it is merged into: `qwen-train export --to merged`",
        )
    name, weight = split_weight(settings.assistant_lora)
    path = Path(name)
    on_hub = None if path.exists() else ON_HUB.fullmatch(name)
    if on_hub:
        file, address = _download(on_hub["repository"], on_hub["file"] or WEIGHTS_NAME, on_hub["revision"])
        return WeightedLora(file, weight, address)
    file = _file_at(path)
    if not file.is_file() or file.suffix != ".safetensors":
        raise ConfigError(
            "train.assistant_lora: no LoRA here",
            where=path,
            expected=f"{WEIGHTS_NAME} or a .safetensors file",
            do="name the file of a LoRA, the output folder of a run, or owner/repository/file on the hub",
        )
    return WeightedLora(file, weight)


def assistant_bytes(settings: TrainConfig, itemsize: int, modules: str = "") -> int:
    """The bytes of `train.assistant_lora`, by the header of its file, each value in `itemsize`; 0 without one.

    Of the modules with `modules` in their names.
    """
    if (source := find_assistant(settings)) is None:
        return 0
    try:
        with safe_open(source.file, framework="np") as file:
            names = [name for name in file.keys() if modules in name]  # noqa: SIM118 (no dict)
            values = sum(math.prod(file.get_slice(name).get_shape()) for name in names)
    except (SafetensorError, OSError) as error:
        raise TrainError(f"this is not a LoRA file: {first_line(error)}", where=source.file) from None
    return int(values * itemsize)


def _download(repository: str, file: str, revision: str | None) -> tuple[Path, str]:
    """A file of a repository on the hub, and its address with its commit; a message says what is downloaded.

    ConfigError if it cannot be, and if it is in the table of `auto` with another hash.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError

    where = f"{repository}{f'@{revision}' if revision else ''}/{file}"
    try:
        found = hf_hub_download(repository, file, revision=revision, dry_run=True)
        commit = found.commit_hash
        if found.will_download:
            size = human_bytes(found.file_size) if found.file_size else "of unknown size"
            what = f"downloading the assistant LoRA {repository}/{file} from the hub: {size}, revision {commit}"
            console().print(plain(what), markup=False, highlight=False)
        path = Path(hf_hub_download(repository, file, revision=commit))
    except LocalEntryNotFoundError:
        command = f"hf download {repository} {file}{f' --revision {revision}' if revision else ''}"
        what = "train.assistant_lora: no such file here, and the hub cannot be reached"
        do = f"download it where there is a network, with `{command}`, or name a file that exists here"
        raise ConfigError(what, where=where, do=do) from None
    except (EntryNotFoundError, HFValidationError, OSError) as error:  # OSError: other answers of the hub
        what = f"train.assistant_lora: no such file here, and none from the hub: {first_line(error)}"
        do = "name a file that exists here, or owner/repository/file on the hub"
        raise ConfigError(what, where=where, do=do) from None
    entry = verified_as(repository, commit, file)
    if entry is not None and (digest := sha256_of(path)) != entry.sha256:
        raise ConfigError(
            "this is not the file that was verified",
            where=path,
            expected=f"sha256 {entry.sha256}",
            found=digest,
            do="remove it and start again; if it comes back, do not use it, and report it",
        )
    return path, f"{repository}@{commit}/{file}"


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, as the hub shows it; read again only when the file has changed."""

    def compute() -> str:
        with naming(path), open(open_file(path), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    return remembered("sha256", [path], compute)


def settings_in(header: Mapping[str, str] | None, key: str = METADATA_KEY) -> dict[str, Any]:
    """The JSON object under `key` in a file's metadata; {} without one, ValueError for something else."""
    settings = parse_json((header or {}).get(key, "{}"))
    if not isinstance(settings, dict):
        raise ValueError(f"{key} in its metadata is not a JSON object")  # noqa: TRY004 (callers name the file)
    return settings


def origin_of(path: Path) -> dict[str, Any]:
    """The model and cache recorded in a LoRA file; {} for a file of another trainer."""
    with safe_open(path, framework="np") as file, suppress(ValueError):
        origin = settings_in(file.metadata()).get(ORIGIN)
        return origin if isinstance(origin, dict) else {}
    return {}


def check_export(form: str, out: Path) -> None:
    """ConfigError if a LoRA in this form cannot be written to `out`."""
    folder = {"merged": "merged weights go", "peft": "peft's files go"}
    if form not in folder and (out.suffix != ".safetensors" or out.is_dir()):
        expected, do = "a name that ends in .safetensors", "name a file, such as --out lora.safetensors"
        raise ConfigError("a LoRA is one file", where="--out", expected=expected, found=out, do=do)
    if form in folder and out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"{folder[form]} into a new folder", where="--out", found=f"{out}, which is not empty")
