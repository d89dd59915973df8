"""A model's folder in diffusers' layout: its files, configurations and identity."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, ClassVar

import xxhash

from qwen_cache.errors import ModelError, first_line
from qwen_cache.format.identity import canonical_json, content_hash
from qwen_cache.models.config import Scheduler, check_config, check_values
from qwen_cache.models.family import NOT_YET, PIPELINES, SUPPORTED, Family, Pipeline, PipelineName, Template, family_of
from qwen_cache.models.single_file import (
    SingleFile,
    StoredTensor,
    check_packages,
    open_single_file,
    open_text_encoder,
    read_header,
)
from qwen_cache.storage.files import open_file, read_file
from qwen_cache.storage.remembered import BLOCK, find_fault, known_digest, remembered, remembered_digest
from qwen_cache.storage.remembered import NAME as CHECKSUMS
from qwen_cache.terminal import naming
from qwen_cache.text import parse_json, repeated

# ---- files -----------------------------------------------------------------------------------------------------------
# The files of a model's folder, checked before a library opens them.
#
# Links are followed, since the hub's cache consists of them. Refused by ModelError: pipes, sockets and devices, which
# would be waited for or read for ever; texts of a size that no model has; indexes of shards that name anything but
# files of their folder; and adapters, which transformers would load with the weights.

AGAIN = "download this component again"
INDEX = ".safetensors.index.json"
PIPELINE_INDEX = "model_index.json"
TEXTS = (".json", ".txt", ".jinja", ".model", ".tiktoken")
MAX_TEXT = 1 << 26  # bytes; the largest published tokenizer.json has 33 MB
ADAPTER = "adapter_config.json"
MORE_TEMPLATES = "additional_chat_templates"
"""The only folder in a component's that transformers looks into."""


def check_files(folder: Path) -> None:
    """ModelError unless libraries can be handed the folder of a component."""
    try:
        for path in _files(folder):
            _check_file(path)
    except OSError as error:
        raise ModelError(f"this file cannot be read: {error.strerror}", where=error.filename, do=AGAIN) from None


def read_text(path: Path) -> str:
    """A text of a model; OSError or ValueError if it cannot be read, ModelError if it is too long for one."""
    data = read_file(path, MAX_TEXT + 1)
    if len(data) > MAX_TEXT:
        raise _too_long(path, f"more than {MAX_TEXT}")
    return data.decode("utf-8")


def shards_of(index: Path) -> dict[str, str]:
    """The file of each tensor, by an index of shards; ModelError if it is none."""
    try:
        value = parse_json(read_text(index))
        files = value["weight_map"]
        if not isinstance(value["metadata"], dict) or not isinstance(files, dict):
            raise TypeError("weight_map and metadata are objects")
        for file in files.values():
            if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
                raise ValueError(f"{file!r} is no .safetensors file of its folder")
    except OSError as error:
        raise ModelError(f"this file cannot be read: {error.strerror}", where=index, do=AGAIN) from None
    except (ValueError, LookupError, TypeError) as error:
        found = f"no {error}" if isinstance(error, KeyError) else error
        expected = "an object with metadata and weight_map, which names a file of this folder for each tensor"
        raise ModelError("this is no index of shards", where=index, expected=expected, found=found, do=AGAIN) from None
    return files


def _files(folder: Path) -> Iterator[Path]:
    yield from sorted(folder.iterdir())
    if (folder / MORE_TEMPLATES).is_dir():
        yield from sorted((folder / MORE_TEMPLATES).iterdir())


def _check_file(path: Path) -> None:
    try:
        found = path.stat()
    except FileNotFoundError:  # a link of a broken download: whoever needs the file says so
        return
    if stat.S_ISDIR(found.st_mode):
        return
    if not stat.S_ISREG(found.st_mode):
        raise ModelError("this file cannot be read: not a regular file", where=path, do=AGAIN)
    if path.suffix in TEXTS and found.st_size > MAX_TEXT:
        raise _too_long(path, found.st_size)
    if path.name.endswith(INDEX):
        shards_of(path)
    if path.name == ADAPTER:
        what = "an adapter is beside the weights, and would be loaded with them"
        raise ModelError(what, where=path, do="merge it into the weights, or remove it")


def _too_long(path: Path, found: object) -> ModelError:
    return ModelError("no file of this kind is so long", where=path, expected=f"at most {MAX_TEXT} bytes", found=found)


# ---- folder ----------------------------------------------------------------------------------------------------------
# A diffusers folder of Qwen-Image(-Edit), on disk or on the hub: its pipeline, and a check of its components.
#
# Only the requested components are downloaded and checked: `build` never touches the transformer, a training run never
# the encoders. Imports neither torch nor diffusers.

ENCODERS = ("vae", "text_encoder", "processor")
"""The entries of a recipe that say which encoders made it; the last one is of tokenizer and processor."""
ENCODER_PARTS = ("vae", "text_encoder", "tokenizer", "processor")
"""The folders of the frozen encoders; a model has those of its pipeline."""
NUNCHAKU = "nunchaku_lite"
"""The quant_method in config.json of a transformer that diffusers runs by nunchaku's kernels: it can only generate."""
WEIGHTS = (".safetensors", "config.json")
"""Endings of the files that decide what a component computes."""
CONFIGURATION = (".json", ".txt", ".jinja")
"""Endings of the files that decide what a tokenizer or processor does."""
VAE_WEIGHTS = "diffusion_pytorch_model"
"""The name of a VAE's weights, without the ending: diffusers reads no others."""
VAE_DECODER = ("decoder.", "post_quant_conv.")
"""The beginnings of the names of tensors that latents do not depend on."""
NO_VALUES = ("_", "diffusers_version")
"""The beginnings of the keys of a config.json that say who wrote it."""


@dataclass(frozen=True)
class ModelFolder:
    """A local folder with `model_index.json`; `name` is what the user typed."""

    name: str
    path: Path
    pipeline: PipelineName
    transformer: str | None = None
    """A single file whose weights are used in place of those of the transformer's folder."""
    text_encoder: str | None = None
    """The same for the text encoder's."""
    other_vae: Path | None = None
    """The folder of a VAE whose decoder is used in place of that of the model's."""
    is_here: ClassVar[bool] = True
    """False for a model that only a server has."""

    def component(self, name: str) -> Path:
        """The folder of a component, such as `vae`."""
        return self.path / name

    @property
    def decoding_vae(self) -> Path:
        """The folder of the VAE that makes images of latents."""
        return self.other_vae or self.component("vae")

    @cached_property
    def transformer_file(self) -> SingleFile | None:
        """The single file in place of the transformer's weights; ModelError if it is not of this model."""
        config = self.component("transformer") / "config.json"
        return None if self.transformer is None else open_single_file(self.transformer, read_config(config))

    @cached_property
    def text_encoder_file(self) -> SingleFile | None:
        """The single file in place of the text encoder's weights; ModelError if it is not of this model."""
        config = self.component("text_encoder") / "config.json"
        return None if self.text_encoder is None else open_text_encoder(self.text_encoder, read_config(config))

    @property
    def transformer_weights(self) -> Path | SingleFile:
        """The place of the transformer's weights: the single file, or the component's folder."""
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
        """True if the transformer's weights are for nunchaku's kernels."""
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
        """The facts about the pipeline."""
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
        index = self.path / PIPELINE_INDEX
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
    name: str | None,
    components: Sequence[str],
    revision: str | None = None,
    transformer: str | None = None,
    vae: str | None = None,
    text_encoder: str | None = None,
    *,
    only_here: bool = False,
) -> ModelFolder:
    """Find a model, download missing `components`, and check that all of them exist; ModelError otherwise.

    With `only_here` nothing is downloaded, nor the hub asked for a newer version.

    With a single file as its `transformer` or `text_encoder`, of that folder only config.json is needed. `vae` names
    another VAE to decode with, if the model's is among the components.
    """
    name, files = check_name(name), {"transformer": transformer, "text_encoder": text_encoder}
    needs_all = {each: files.get(each) is None for each in components}
    patterns = [PIPELINE_INDEX, *(f"{each}/{'*' if whole else 'config.json'}" for each, whole in needs_all.items())]
    path = Path(name) if Path(name).is_dir() else _download(name, patterns, revision, only_here=only_here)
    index = path / PIPELINE_INDEX
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
    needed = _components_of(facts, components)
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
    other_vae = open_vae(vae) if vae is not None and "vae" in components else None
    text_encoder = text_encoder if "text_encoder" in components else None
    opened = ModelFolder(name, path, facts.name, transformer, text_encoder, other_vae)
    if "transformer" in components:
        check_packages(opened.transformer_file)  # and with it the file
    _ = opened.text_encoder_file  # checks it
    return opened


def _components_of(facts: Pipeline, components: Sequence[str]) -> list[str]:
    """The components that a model of this pipeline has: not all have both a tokenizer and a processor."""
    return [each for each in components if each not in ENCODER_PARTS or each in facts.encoder_parts]


def find_here(name: str, components: Sequence[str], revision: str | None = None) -> Path | None:
    """The folder of a model of whose `components` all that its pipeline has are on this machine; None if one is not.
    Nothing is downloaded."""
    path = Path(name)
    if not path.is_dir():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        try:
            path = Path(snapshot_download(name, revision=revision, local_files_only=True))
        except (HFValidationError, LocalEntryNotFoundError, OSError):
            return None
    index = path / PIPELINE_INDEX
    if not index.is_file():
        return None
    facts = None
    with suppress(ModelError):  # which opening the model raises again
        facts = PIPELINES.get(str(read_config(index).get("_class_name")))
    needed = components if facts is None else _components_of(facts, components)
    return path if all(is_whole(path / each) for each in needed) else None


def is_whole(folder: Path) -> bool:
    """True if a component is here, with its weights, if it has any, in all files that an index of shards names."""
    if not folder.is_dir() or ((folder / "config.json").exists() and not any(folder.glob("*.safetensors"))):
        return False
    return all((folder / name).is_file() for index in folder.glob(f"*{INDEX}") for name in shards_of(index).values())


def open_vae(name: str) -> Path:
    """The folder of a VAE as diffusers stores it, alone or in a model, downloaded if there is none; ModelError if it
    cannot be."""
    check_name(name)
    files = ["config.json", f"{VAE_WEIGHTS}*.safetensors", f"*{INDEX}"]
    patterns = [*files, *(f"vae/{each}" for each in files)]
    folder = Path(name) if Path(name).is_dir() else _download(name, patterns, None)
    found = folder / "vae" if (folder / "vae").is_dir() else folder
    if not (found / "config.json").is_file():
        do = "name the folder of a VAE as diffusers saves it, or that of a model with one"
        raise ModelError("there is no VAE here", where=name, expected="config.json", do=do)
    check_files(found)
    return found


def fingerprint(
    folders: Sequence[Path],
    endings: tuple[str, ...] = WEIGHTS,
    on_bytes: Callable[[int], None] = lambda _: None,
    *,
    read: bool = True,
) -> str:
    """One hash over the names and contents of the files in these folders with these endings, wherever they are.

    Files are read again only when they have changed; `on_bytes` gets the number of bytes just read. Unless `read` is
    true, none is read: empty if one is not remembered. ModelError for one that cannot be read, such as the link of a
    broken download.
    """
    files = [path for folder in folders for path in sorted(folder.iterdir()) if path.name.endswith(endings)]
    try:
        digests = [
            [f"{path.parent.name}/{path.name}", remembered_digest(path, on_bytes) if read else known_digest(path)]
            for path in files
        ]
    except OSError as error:
        raise ModelError(f"this file cannot be read: {error.strerror}", where=error.filename, do=AGAIN) from None
    return content_hash(canonical_json(digests)) if all(digest for _, digest in digests) else ""


def encoder_folders(model: ModelFolder, entry: str) -> Sequence[Path]:
    """The folders of the files whose hash a recipe has under this entry, one of `ENCODERS`."""
    parts = ("tokenizer", "processor") if entry == "processor" else (entry,)
    return [model.component(each) for each in model.facts.encoder_parts if each in parts]


def encoder_fingerprint(
    model: ModelFolder, entry: str, on_bytes: Callable[[int], None] = lambda _: None, *, read: bool = True
) -> str:
    """The hash that a recipe has under this entry, one of `ENCODERS`; arguments as in `fingerprint`."""
    if entry == "processor":
        return fingerprint(encoder_folders(model, entry), CONFIGURATION, on_bytes, read=read)
    file = model.text_encoder if entry == "text_encoder" else None
    return component_fingerprint(model.component(entry), file, on_bytes, read=read)


def component_fingerprint(
    folder: Path, file: str | None, on_bytes: Callable[[int], None] = lambda _: None, *, read: bool = True
) -> str:
    """The `fingerprint` of a component; with a single `file` in place of its weights, one of config.json and the file,
    whatever its name."""
    if file is None:
        return fingerprint([folder], on_bytes=on_bytes, read=read)
    paths = (folder / "config.json", Path(file))
    try:
        digests = [remembered_digest(path, on_bytes) if read else known_digest(path) for path in paths]
    except OSError as error:
        raise ModelError(f"this file cannot be read: {error.strerror}", where=error.filename) from None
    return content_hash(canonical_json(digests)) if all(digests) else ""


def vae_encoder_fingerprint(folder: Path) -> str:
    """One hash over what decides a VAE's latents: its tensors but those of the decoder, and its config.

    Names of files, the order of tensors and the version of the library that saved them make no difference. Empty for a
    folder without its files, which loading refuses. Files are read again only when they have changed. ModelError or
    OSError if one cannot be read.
    """
    index = folder / f"{VAE_WEIGHTS}{INDEX}"
    indexes = [index] if index.is_file() else []
    names = sorted(set(shards_of(index).values())) if indexes else [f"{VAE_WEIGHTS}.safetensors"]
    config, files = folder / "config.json", [folder / name for name in names]
    if not all(file.is_file() for file in (config, *files)):
        return ""
    return remembered("VAE encoder", [config, *indexes, *files], lambda: _hash_vae_encoder(config, files))


def _hash_vae_encoder(config: Path, files: Sequence[Path]) -> str:
    tensors = {}
    for path in files:
        with naming(path), open(open_file(path), "rb") as file:
            for name, tensor in read_header(path).tensors.items():
                if not name.startswith(VAE_DECODER):
                    tensors[name] = [tensor.dtype, list(tensor.shape), _hash_tensor(file, tensor)]
    values = {name: value for name, value in read_config(config).items() if not name.startswith(NO_VALUES)}
    return content_hash(canonical_json({"config": values, "tensors": tensors}))


def _hash_tensor(file: IO[bytes], tensor: StoredTensor) -> str:
    digest = xxhash.xxh3_128()
    file.seek(tensor.begin)
    for begin in range(tensor.begin, tensor.end, BLOCK):
        digest.update(file.read(min(BLOCK, tensor.end - begin)))
    return digest.hexdigest()


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


def _download(name: str, patterns: list[str], revision: str | None, *, only_here: bool = False) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, local_files_only=only_here))
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelError("neither a folder here nor a repository on the hub", where=name, do=str(error)) from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        what = f"no such folder here, and the hub could not be reached: {first_line(error)}"
        raise ModelError(what, where=name) from None
