"""A trained result as a repository on the Hugging Face hub: its files, and a model card made from the run.

What is uploaded is a whitelist: the weights, generated validation images, and the card. The card has numbers, choices
and names of modules from the settings, the identity of the dataset, and the prompts of the images that it shows; never
a path or an address of this machine, nor images of the dataset. Damaged weights, damaged images and a base without a
name on the hub are refused. Needs no torch; only `upload` needs the network.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils._validators import validate_repo_id
from PIL import Image
from safetensors import SafetensorError, safe_open

from qwen_cache.errors import ConfigError, QwenCacheError, TrainError, first_line
from qwen_cache.format.cache import open_configured
from qwen_cache.format.identity import recipe_id
from qwen_cache.models.family import PIPELINES, Family, Pipeline, family_of
from qwen_cache.models.folder import read_config
from qwen_cache.plain_text import plain
from qwen_cache.settings.describe import describe
from qwen_cache.settings.load import CONFIG_NAME, Config, load_config
from qwen_cache.storage.checksums import NAME as CHECKSUMS
from qwen_cache.storage.checksums import check_safetensors, find_fault
from qwen_cache.storage.url import Url, location
from qwen_cache.version import __version__
from qwen_train.latents import STEP, VALIDATION
from qwen_train.lora.files import WEIGHTS_NAME, find_lora
from qwen_train.lora.types import LOKR, LORA, OFT, TYPES, AdapterType
from qwen_train.report import RUN_FACTS_NAME, UNREADABLE
from qwen_train.run_folder import NAME as CHECKPOINT

CARD = "README.md"
METADATA_KEY = "lora_adapter_metadata"
TRANSPORT: type[BaseException] = HfHubHTTPError.__bases__[0]
"""The errors of connections: httpx's in huggingface_hub 1, httpx2's in 2."""
IMAGES = "images"
"""The folder of the repository for the images that the card shows."""
MOST_IMAGES = 8
FULL = "transformer"
"""The folder of a full training's result."""
REPOSITORY = "https://github.com/qwen-cache/qwen-cache"
SECTIONS = ("train", "optimizer", "lr_scheduler", "model.quantization")
ALWAYS = ("train.method", "train.max_steps", "train.batch_size", "optimizer.learning_rate", "train.seed")
"""Settings that the card has even if they are the defaults."""
LOADED_BY = {
    LORA: 'pipe.load_lora_weights("{repo}")',
    LOKR: f'pipe.transformer.load_lora_adapter("{{repo}}", weight_name="{WEIGHTS_NAME}")',
}
"""How diffusers 0.42 loads each type of adapter; it loads no LoHa and no OFT."""
NAMES = ("train.lora.target_modules", "optimizer.name")
"""Settings that are text, and name parts of programs."""


@dataclass(frozen=True)
class Published:
    """A repository before it is uploaded."""

    files: dict[str, Path | bytes]
    """By path in the repository."""
    card: str

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes of each file."""
        return {
            name: len(data) if isinstance(data, bytes) else data.stat().st_size for name, data in self.files.items()
        }


@dataclass(frozen=True)
class RunFacts:
    """What the folder of a run says about its result."""

    folder: Path
    """The folder with the weights: that of the run, or of a checkpoint."""
    config: Config
    facts: dict[str, Any]
    """about.json"""
    is_lora: bool
    pipeline: Pipeline
    base_model: str
    """Its repository on the hub."""

    @property
    def run(self) -> Path:
        """The folder of the run."""
        return _run_of(self.folder)

    @property
    def adapter(self) -> AdapterType | None:
        """The type of the adapter; None after full training."""
        return TYPES[self.config.train.lora.type] if self.is_lora else None

    @property
    def family(self) -> Family:
        return family_of(self.pipeline.name)


@dataclass(frozen=True)
class ShownImage:
    """A generated image and its prompt."""

    name: str
    data: bytes
    prompt: str


def repository_of(run: RunFacts, repo: str, *, with_images: bool = True, with_card: bool = True) -> Published:
    """The files for the repository `repo`; without `with_card` its README.md stays as it is.

    TrainError or ConfigError for what cannot be published.
    """
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ConfigError("not the name of a repository", expected="OWNER/NAME", found=first_line(error)) from None
    files: dict[str, Path | bytes] = dict(_weights(run))
    images = _images(run.run) if with_images else []
    files |= {f"{IMAGES}/{image.name}": image.data for image in images}
    text = _card(run, repo, images)
    card: dict[str, Path | bytes] = {CARD: text.encode("utf-8")} if with_card else {}
    return Published(card | files, text)


def _run_of(folder: Path) -> Path:
    return folder.parent if CHECKPOINT.fullmatch(folder.resolve().name) else folder


def read_run(folder: Path, base_model: str | None = None, assignments: Sequence[str] = ()) -> RunFacts:
    """The facts of the run in `folder`, or of a checkpoint's run; `assignments` override its settings.

    TrainError or ConfigError for a folder without a result, a damaged LoRA, and a base without a name on the hub.
    """
    is_lora = (folder / WEIGHTS_NAME).is_file() or not (folder / FULL).is_dir()
    origin: dict[str, Any] = {}
    if is_lora:
        origin = _origin(find_lora(folder))
    run = _run_of(folder)
    if not (run / CONFIG_NAME).is_file() or not (run / RUN_FACTS_NAME).is_file():
        expected, do = (
            f"{CONFIG_NAME} and {RUN_FACTS_NAME}",
            "name the output folder of a run, or one of its checkpoints",
        )
        raise TrainError("this is not the folder of a run", where=run, expected=expected, do=do)
    config, facts = load_config(run / CONFIG_NAME, assignments), read_config(run / RUN_FACTS_NAME)
    name = origin.get("pipeline") or facts.get("pipeline")
    if name not in PIPELINES:
        raise TrainError("the run names no known pipeline", where=run, expected=" or ".join(PIPELINES), found=name)
    pipeline = PIPELINES[str(name)]
    base = base_model or str(origin.get("model") or config.model.path or "")
    return RunFacts(folder, config, facts, is_lora, pipeline, _checked_base(base, base_model, pipeline))


def _origin(file: Path) -> dict[str, Any]:
    """The model and cache recorded in a LoRA file (`lora/adapter.py`, which needs torch); {} if there are none."""
    try:
        check_safetensors(file, TrainError)
        with safe_open(file, framework="np") as opened:
            origin = json.loads((opened.metadata() or {}).get(METADATA_KEY, "{}")).get("trained_on")
    except (OSError, SafetensorError, ValueError, AttributeError) as error:
        raise TrainError(f"the LoRA cannot be read: {first_line(error)}", where=file) from None
    return origin if isinstance(origin, dict) else {}


def _checked_base(base: str, given: str | None, pipeline: Pipeline) -> str:
    """The base's repository; ConfigError for a local folder, whose name on the hub nobody knows."""
    with suppress(HFValidationError):
        validate_repo_id(base)
        if base.count("/") == 1 and (given or not Path(base).exists()):
            return base
    do = f"name the repository that it is, or comes from: --base-model {pipeline.models[0]}"
    what = "the base model has no name on the hub"
    raise ConfigError(what, expected="OWNER/NAME", found=given or Path(base).name or "none", do=do)


# ---- files -----------------------------------------------------------------------------------------------------------


def _weights(run: RunFacts) -> Iterator[tuple[str, Path | bytes]]:
    """The files of the weights. A config.json loses the path that diffusers writes into it, and with it the list of
    checksums its meaning."""
    if run.is_lora:
        yield WEIGHTS_NAME, run.folder / WEIGHTS_NAME
        return
    folder = run.folder / FULL
    listed = folder if (folder / CHECKSUMS).is_file() else run.folder
    if fault := find_fault(listed):
        raise fault.error(TrainError, "publish a copy that is whole, or train again")
    for path in sorted(path for path in folder.iterdir() if path.is_file() and path.name != CHECKSUMS):
        name = f"{FULL}/{path.name}"
        if path.name == "config.json":
            config = {key: value for key, value in read_config(path).items() if key != "_name_or_path"}
            yield name, (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
        else:
            yield name, path


def _images(run: Path) -> list[ShownImage]:
    """The images of the newest step that is decoded, in the order of their names."""
    decoded = {path.parent for path in (run / VALIDATION).glob("step-*/*.png")}
    steps = sorted((int(match[1]), path) for path in decoded if (match := STEP.fullmatch(path.name)))
    return [_image(path) for path in sorted(steps[-1][1].glob("*.png"))[:MOST_IMAGES]] if steps else []


def _image(path: Path) -> ShownImage:
    """An image with its pixels alone: no other content of the file is published."""
    latents = path.with_suffix(".safetensors")
    prompt = ""
    if latents.is_file():
        check_safetensors(latents, TrainError)
        with safe_open(latents, framework="np") as file:
            prompt = (file.metadata() or {}).get("prompt", "")
    data = BytesIO()
    try:
        with warnings.catch_warnings(action="ignore"), Image.open(path, formats=["PNG"]) as image:
            image.load()
            Image.frombytes(image.mode, image.size, image.tobytes()).save(data, "PNG")
    except UNREADABLE as error:
        do = "delete it, and run `qwen-train decode` again; or add --no-images"
        raise TrainError(f"this image cannot be read: {first_line(error)}", where=path, do=do) from None
    return ShownImage(path.name, data.getvalue(), prompt)


# ---- the card --------------------------------------------------------------------------------------------------------


def _card(run: RunFacts, repo: str, images: list[ShownImage]) -> str:
    """The model card: metadata for the hub, and Markdown."""
    trigger = _trigger_word(run)
    licence = run.family.licence
    link = f"https://huggingface.co/{run.pipeline.models[0]}/blob/main/LICENSE"
    extra: dict[str, Any] = {"instance_prompt": trigger} if trigger else {}
    extra |= {"widget": [_widget(image) for image in images]} if images else {}
    is_known = licence == "apache-2.0"  # else one that the hub does not list
    data = ModelCardData(
        base_model=run.base_model,
        library_name="diffusers",
        license=licence if is_known else "other",
        license_name=None if is_known else licence,
        license_link=None if is_known else link,
        pipeline_tag=_pipeline_tag(run),
        tags=[*_type_tags(run), "diffusers", "qwen-image", "qwen-cache"],
        base_model_relation="adapter" if run.is_lora else "finetune",
        **extra,
    )
    parts = [f"# {repo.rpartition('/')[2]}", _introduction(run, trigger, link)]
    parts += ["<Gallery />"] if images else []
    parts += _usage(run, repo)
    parts += ["## Training", _table([("setting", "value"), *_settings(run)])]
    parts += ["## Dataset", _table([("", "value"), *_dataset(run)])]
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n"))


def _type_tags(run: RunFacts) -> list[str]:
    """The type of the adapter; for `lora` the hub shows how to load it with `load_lora_weights`."""
    if run.adapter is None:
        return []
    return [run.adapter.name, *(["template:sd-lora"] if run.adapter is LORA else [])]


def _widget(image: ShownImage) -> dict[str, Any]:
    return {"text": image.prompt or " ", "output": {"url": f"{IMAGES}/{image.name}"}}


def _introduction(run: RunFacts, trigger: str | None, link: str) -> str:
    what = "The transformer of a full fine-tuning of"
    if run.adapter is not None:
        what = f"{'An' if run.adapter is OFT else 'A'} {run.adapter.title} for"
    base, licence = f"[{run.base_model}](https://huggingface.co/{run.base_model})", run.family.licence
    text = f"{what} {base}, trained by [qwen-cache]({REPOSITORY}) {__version__}."
    text += f" The trigger word is `{plain(trigger)}`." if trigger else ""
    if licence != "apache-2.0":
        text += (
            f"\n\nThe base is under the [{licence}]({link}) licence, which allows **no commercial use**. It holds for "
            "these weights too."
        )
    return text


def _pipeline_tag(run: RunFacts) -> str:
    edits = run.pipeline.min_controls > 0
    if run.pipeline.min_controls == 0 and run.pipeline.max_controls != 0:
        edits = any((run.run / VALIDATION / "controls").glob("*"))
    return "image-to-image" if edits else "text-to-image"


def _usage(run: RunFacts, repo: str) -> list[str]:
    """A heading, and how to generate with the weights: with diffusers if it loads them."""
    if run.adapter is None or run.adapter in LOADED_BY:
        return ["## Use it with diffusers", f"```python\n{_code(run, repo)}\n```"]
    name = repo.rpartition("/")[2]
    image = "--image photo.jpg " if run.pipeline.min_controls else ""
    return [
        "## Use it with qwen-cache",
        f"diffusers does not load a {run.adapter.title}.",
        f"```sh\nhf download {repo} {WEIGHTS_NAME} --local-dir {name}\n"
        f'qwen-train predict --model {run.base_model} --lora {name} {image}--prompt "…"\n```',
    ]


def _code(run: RunFacts, repo: str) -> str:
    pipeline = run.pipeline.name
    load = f'"{run.base_model}", dtype=torch.bfloat16'
    if run.adapter is not None:
        return (
            f"import torch\nfrom diffusers import {pipeline}\n\n"
            f'pipe = {pipeline}.from_pretrained({load}).to("cuda")\n{LOADED_BY[run.adapter].format(repo=repo)}'
        )
    kind = run.family.transformer
    return (
        f"import torch\nfrom diffusers import {pipeline}, {kind}\n\n"
        f'transformer = {kind}.from_pretrained("{repo}", subfolder="{FULL}", dtype=torch.bfloat16)\n'
        f'pipe = {pipeline}.from_pretrained({load}, transformer=transformer).to("cuda")'
    )


def _settings(run: RunFacts) -> Iterator[tuple[str, str]]:
    """The settings that decide the result, without those that could hold a path, in the order of qwen.yaml."""
    defaults, values = Config().flat(), run.config.flat()
    shown = {*ALWAYS, *(["train.lora.target_modules"] if run.adapter else [])}
    shown |= {"train.lora.rank"} if run.adapter not in (None, OFT) else set()
    for name, value in values.items():
        wanted = name in shown or (name.startswith(SECTIONS) and value != defaults.get(name))
        wanted = wanted and (run.is_lora or not name.startswith("train.lora."))
        if wanted and value is not None and _is_harmless(name, value):
            yield f"`{name}`", plain(", ".join(map(str, value)) if isinstance(value, list) else str(value))


def _is_harmless(name: str, value: object) -> bool:
    """Whether a setting is no free text: a number, a switch, one of a few choices, or a name in a program."""
    if name in NAMES:
        return True
    if isinstance(value, list):
        return all(_is_harmless(name, each) for each in value)
    return isinstance(value, int | float) or (isinstance(value, str) and value in describe(name).choices)


def _dataset(run: RunFacts) -> Iterator[tuple[str, str]]:
    """The identity of the dataset, and the recipe of a cache that is still here and the same."""
    yield "cache", f"`{run.facts.get('identity', 'unknown')}`"
    for name in ("samples", "samples_for_validation", "samples_in_an_epoch"):
        if isinstance(value := run.facts.get(name), int | float):
            yield name.replace("_", " "), str(value)
    with suppress(QwenCacheError, OSError):
        path = location(run.config.cache.path)
        if run.config.train.caches or isinstance(path, Url):
            return
        cache = open_configured(run.config.cache)
        if cache.identity == run.facts.get("identity"):
            yield "recipe", f"`{recipe_id(cache.recipe.recipe)}`"
            yield "dtype", f"{cache.recipe.recipe.get('dtype')}"


def _trigger_word(run: RunFacts) -> str | None:
    """The trigger word of the run's settings, or the one that all its caches were built with, except the teacher's."""
    if word := run.config.data.trigger_word:
        return word.strip()
    caches = [entry.path for entry in run.config.train.caches if not entry.teacher] or [run.config.cache.path]
    words = {_trigger_word_of(cache) for cache in caches}
    return words.pop() if len(words) == 1 else None


def _trigger_word_of(cache: str) -> str | None:
    """The trigger word that a cache on this machine was built with."""
    with suppress(QwenCacheError, OSError):
        if not isinstance(location(cache), Url) and (settings := Path(cache) / CONFIG_NAME).is_file():
            return (load_config(settings).data.trigger_word or "").strip() or None
    return None


def _table(rows: list[tuple[str, str]]) -> str:
    head, *body = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([head, "| --- | --- |", *body])


# ---- upload ----------------------------------------------------------------------------------------------------------


def upload(published: Published, repo: str, *, private: bool, revision: str | None) -> str:
    """Upload all files in one commit, into a repository that is created if there is none; the commit's address.

    QwenCacheError if the hub refuses, or with `private` if the repository exists and is public.
    """
    api = HfApi(library_name="qwen-cache", library_version=__version__)
    operations = [
        CommitOperationAdd(path_in_repo=name, path_or_fileobj=data if isinstance(data, bytes) else str(data))
        for name, data in published.files.items()
    ]
    try:
        api.create_repo(repo, private=private or None, exist_ok=True)
        if private and not api.model_info(repo).private:
            do = "make it private on its page, name another, or leave out --private"
            raise ConfigError("this repository is public", where=repo, expected="a private one", do=do)
        if revision:
            api.create_branch(repo, branch=revision, exist_ok=True)
        commit = api.create_commit(repo, operations, commit_message="Upload from qwen-train", revision=revision)
        return str(commit.commit_url)
    except HfHubHTTPError as error:
        raise _refused(repo, error) from None
    except (TRANSPORT, OfflineModeIsEnabled, ConnectionError, TimeoutError) as error:
        do = "check the connection and HF_ENDPOINT, and run the same command again"
        raise QwenCacheError("the hub cannot be reached", where=repo, found=first_line(error), do=do) from None
    except (OSError, RuntimeError, ValueError) as error:  # of a single file, with its reason as the cause
        found, do = first_line(error.__cause__ or error), "run the same command again: what is there is not sent again"
        raise QwenCacheError("the upload failed", where=repo, found=found, do=do) from None


def _refused(repo: str, error: HfHubHTTPError) -> QwenCacheError:
    """What the hub's answer means."""
    code = error.response.status_code if error.response is not None else 0
    what, do = {
        401: ("the hub does not know you", "log in with `hf auth login`, or set HF_TOKEN"),
        403: ("you may not write to this repository", "use a token with write access, or name another owner"),
        404: ("the hub has no such repository or revision, or hides it from you", "check the name and the token"),
    }.get(code, ("the hub refused the upload", "run the same command again; huggingface.co/status says how it is"))
    found = f"status {code}: {first_line(error.server_message or error)}"
    return QwenCacheError(what, where=repo, found=found, do=do)
