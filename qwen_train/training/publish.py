"""A trained result as a repository on the Hugging Face hub: its files, and a model card made from the run.

What is uploaded is a whitelist: the weights, generated validation images, and the card. The card has numbers, choices
and names of modules from the settings, the identity of the dataset, the names of files of weights, and the prompts of
the images that it shows; never a path or an address of this machine, nor images of the dataset. Damaged weights,
damaged images and a base without a name on the hub are refused. Needs no torch; only `upload` needs the network.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path, PureWindowsPath
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from PIL import Image
from safetensors import SafetensorError, safe_open

from qwen_cache.errors import ConfigError, QwenCacheError, TrainError, first_line
from qwen_cache.extras import __version__
from qwen_cache.format.cache import open_configured
from qwen_cache.format.identity import recipe_id
from qwen_cache.models.family import PIPELINES, Family, Pipeline, family_of
from qwen_cache.models.folder import read_config
from qwen_cache.settings.describe import describe
from qwen_cache.settings.load import CONFIG_NAME, Config, load_saved
from qwen_cache.storage.files import read_file
from qwen_cache.storage.hub_repository import Published, Repository, check_repository_name
from qwen_cache.storage.remembered import NAME as CHECKSUMS
from qwen_cache.storage.remembered import check_safetensors, find_fault, sealed
from qwen_cache.storage.remote import is_remote, location
from qwen_cache.text import plain
from qwen_train.lora.files import (
    LOHA,
    LOKR,
    LORA,
    OFT,
    ORIGIN,
    PREFIX,
    WEIGHTS_NAME,
    AdapterType,
    adapter_title,
    find_lora,
    settings_in,
    type_of_names,
)
from qwen_train.run import CHECKPOINT, RUN_FACTS_NAME, STEP, VALIDATION, png_of, recorded, run_of, varied
from qwen_train.training.report import UNREADABLE

CARD = "README.md"
IMAGES = "images"
"""The folder of the repository for the images that the card shows."""
MOST_IMAGES = 8
FULL = "transformer"
"""The folder of a full training's result."""
REPOSITORY = "https://github.com/qwen-cache/qwen-cache"
SECTIONS = ("train", "optimizer", "lr_scheduler", "model.quantization")
ALWAYS = ("train.method", "train.max_steps", "train.batch_size", "optimizer.learning_rate", "train.seed")
"""Settings that the card has even if they are the defaults."""
OF_LORA = ("train.lora.rank", "train.lora.oft_block_size", "train.lora.target_modules")
NAMES = ("train.lora.target_modules", "optimizer.name")
"""Settings that are text, and name parts of programs."""
BY_PEFT = (LOHA, OFT)
"""Types that diffusers does not load: their repository has peft's files, too."""
LOADING = {
    LORA: "pipe.load_lora_weights({repo})",
    LOKR: f'pipe.transformer.load_lora_adapter({{repo}}, weight_name="{WEIGHTS_NAME}")',  # it would look for a .bin
    LOHA: "PeftModel.from_pretrained(pipe.transformer, {repo})",
    OFT: "PeftModel.from_pretrained(pipe.transformer, {repo})",
}
"""How each type is added to a pipeline: docs/howto/generate-and-publish.md says which program loads which."""
POSITIONS = """
# diffusers 0.42 with transformers 5 encodes prompts with other positions of the images than in training.
def pass_image_tokens(encoder, args, kwargs):
    kwargs.setdefault("mm_token_type_ids", (kwargs["input_ids"] == encoder.config.image_token_id).int())
    return args, kwargs

pipe.text_encoder.register_forward_pre_hook(pass_image_tokens, with_kwargs=True)"""
"""For the pipelines that encode images without `mm_token_type_ids`: huggingface/diffusers issue 14194."""
ELSEWHERE = f"{REPOSITORY}/blob/main/docs/howto/generate-and-publish.md#the-same-image-in-other-programs"
OWN_SIDE = 1024
"""The pipelines generate at about the square of it, and resize control images to it."""


@dataclass(frozen=True)
class Adapter:
    """The facts in the file of an adapter."""

    type: AdapterType
    settings: dict[str, Any]
    """peft's."""
    origin: dict[str, Any]
    """The model and the cache that it was trained on."""


@dataclass(frozen=True)
class RunFacts:
    """The facts in the folder of a run about its result."""

    folder: Path
    """The folder with the weights: that of the run, or of a checkpoint."""
    config: Config
    facts: dict[str, Any]
    """about.json"""
    adapter: Adapter | None
    """None after full training."""
    pipeline: Pipeline
    base_model: str
    """Its repository on the hub."""

    @property
    def run(self) -> Path:
        """The folder of the run."""
        return run_of(self.folder)

    @property
    def family(self) -> Family:
        return family_of(self.pipeline.name)

    @property
    def edits(self) -> bool:
        """True if it takes controls; where the pipeline can do without, if the validation images have them."""
        if self.pipeline.min_controls or self.pipeline.max_controls == 0:
            return self.pipeline.min_controls > 0
        return any((self.run / VALIDATION / "controls").glob("*"))

    @property
    def single_file(self) -> str | None:
        """The name of the file with the transformer's weights, if they are not the base's own."""
        return _name(self.config.model.transformer)

    @property
    def assistant(self) -> str | None:
        """The name of the file of `train.assistant_lora`, and its address on the hub if it is there."""
        origin = self.adapter.origin if self.adapter else {}
        name, address = _name(origin.get("assistant_lora")), origin.get("assistant_lora_from")
        return f"{name}, {_code_span(address)}" if name and address else name


@dataclass(frozen=True)
class ShownImage:
    """A generated image and its prompt."""

    name: str
    data: bytes
    prompt: str
    parameters: Mapping[str, float]
    """The value in which several images with this prompt differ: `true_cfg_scale` or `lora_weight`."""


def repository_of(run: RunFacts, repo: str, *, with_images: bool = True, with_card: bool = True) -> Published:
    """The files for the repository `repo`; without `with_card` its README.md stays as it is.

    TrainError or ConfigError for what cannot be published.
    """
    if repo.count("/") != 1:
        raise ConfigError("not the name of a repository", expected="OWNER/NAME", found=repo)
    check_repository_name(repo)
    files: dict[str, Path | bytes] = dict(_weights(run))
    images = _images(run) if with_images else []
    files |= {f"{IMAGES}/{image.name}": image.data for image in images}
    text = _card(run, repo, images)
    card: dict[str, Path | bytes] = {CARD: text.encode("utf-8")} if with_card else {}
    return Published(card | files, text)


def _name(path: object) -> str | None:
    """The last part of a path of any system."""
    return _code_span(PureWindowsPath(str(path)).name) if path else None


def _code_span(text: object) -> str:
    """Text for between backticks."""
    return plain(text).replace("`", "'")


def read_run(folder: Path, base_model: str | None = None, assignments: Sequence[str] = ()) -> RunFacts:
    """The facts of the run in `folder`, or of a checkpoint's run; `assignments` override its settings.

    TrainError or ConfigError for a folder without a result, a damaged LoRA, and a base without a name on the hub.
    """
    is_full = (folder / FULL).is_dir() and not (folder / WEIGHTS_NAME).is_file()
    adapter: Adapter | None = None
    origin: dict[str, Any] = {}
    if not is_full:
        file = find_lora(folder)
        try:
            check_safetensors(file, TrainError)
            with safe_open(file, framework="np") as opened:
                settings, kind = settings_in(opened.metadata()), type_of_names(opened.keys())
        except (OSError, SafetensorError, ValueError) as error:
            raise TrainError(f"the LoRA cannot be read: {first_line(error)}", where=file) from None
        written = settings.pop(ORIGIN, {})
        origin = written if isinstance(written, dict) else {}
        settings = {name.removeprefix(f"{PREFIX}."): value for name, value in settings.items()}
        adapter = Adapter(kind, settings, origin)
    run = run_of(folder)
    if not (run / CONFIG_NAME).is_file() or not (run / RUN_FACTS_NAME).is_file():
        expected, do = (
            f"{CONFIG_NAME} and {RUN_FACTS_NAME}",
            "name the output folder of a run, or one of its checkpoints",
        )
        raise TrainError("this is not the folder of a run", where=run, expected=expected, do=do)
    config, facts = load_saved(run / CONFIG_NAME, assignments), read_config(run / RUN_FACTS_NAME)
    name = origin.get("pipeline") or facts.get("pipeline")
    if name not in PIPELINES:
        raise TrainError("the run names no known pipeline", where=run, expected=" or ".join(PIPELINES), found=name)
    pipeline = PIPELINES[str(name)]
    base = base_model or str(origin.get("model") or config.model.path or "")
    is_named = False
    with suppress(ConfigError):
        check_repository_name(base)
        is_named = base.count("/") == 1 and bool(base_model or not Path(base).exists())
    if not is_named:
        do = f"name the repository that it is, or comes from: --base-model {pipeline.models[0]}"
        what = "the base model has no name on the hub"
        raise ConfigError(what, expected="OWNER/NAME", found=base_model or Path(base).name or "none", do=do)
    return RunFacts(folder, config, facts, adapter, pipeline, base)


# ---- files -----------------------------------------------------------------------------------------------------------


def _weights(run: RunFacts) -> Iterator[tuple[str, Path | bytes]]:
    """The files of the weights. A config.json loses the path that diffusers writes into it, and with it the list of
    checksums its meaning."""
    if run.adapter:
        yield WEIGHTS_NAME, run.folder / WEIGHTS_NAME
        if run.adapter.type in BY_PEFT:  # the same as the two files that `PeftModel` takes: only names change
            config = {**run.adapter.settings, "peft_type": run.adapter.type.peft_type, "inference_mode": True}
            yield "adapter_config.json", json.dumps(config, indent=2, sort_keys=True).encode("utf-8")
            data = (run.folder / WEIGHTS_NAME).read_bytes()
            end = 8 + int.from_bytes(data[:8], "little")
            header = {name: value for name, value in json.loads(data[8:end]).items() if name != "__metadata__"}
            renamed = {f"base_model.model.{name.removeprefix(f'{PREFIX}.')}": value for name, value in header.items()}
            text = json.dumps(renamed).encode("utf-8")
            sizes = len(text).to_bytes(8, "little")
            yield "adapter_model.safetensors", b"".join(sealed(sizes + text + data[end:]))
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


def _images(run: RunFacts) -> list[ShownImage]:
    """The images of the newest step that is decoded, up to that of a checkpoint, in the order of their names."""
    decoded = {path.parent for path in (run.run / VALIDATION).glob("step-*/*.png")}
    steps = sorted((int(match[1]), path) for path in decoded if (match := STEP.fullmatch(path.name)))
    if checkpoint := CHECKPOINT.fullmatch(run.folder.resolve().name):
        steps = [each for each in steps if each[0] <= int(checkpoint[1])]
    if not steps:
        return []
    folder = steps[-1][1]
    words = {png: each for file in sorted(folder.glob("*.safetensors")) for png, each in _words(file)}
    known, others = [png for png in words if png.is_file()], sorted({*folder.glob("*.png")} - words.keys())
    return [_image(path, *words.get(path, ("", {}))) for path in [*known, *others][:MOST_IMAGES]]


def _words(latents: Path) -> Iterator[tuple[Path, tuple[str, Mapping[str, float]]]]:
    """The PNG of each image of a file, with its prompt, and what differs if there are several."""
    try:
        check_safetensors(latents, TrainError)
        with safe_open(latents, framework="np") as file:
            metadata = file.metadata() or {}
        name, values = varied(metadata)
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        what = f"the prompt of an image cannot be read: {first_line(error)}"
        raise TrainError(what, where=latents, do="delete this file and its images; or add --no-images") from None
    for number, parameters in enumerate([{name: value} for value in values] or [{}]):
        yield png_of(latents, number), (metadata.get("prompt", ""), parameters)


def _image(path: Path, prompt: str, parameters: Mapping[str, float]) -> ShownImage:
    """An image with its pixels alone: no other content of the file is published."""
    data = BytesIO()
    try:
        with warnings.catch_warnings(action="ignore"), Image.open(BytesIO(read_file(path)), formats=["PNG"]) as image:
            image.load()
            Image.frombytes(image.mode, image.size, image.tobytes()).save(data, "PNG")
    except UNREADABLE as error:
        do = "delete it, and run `qwen-train decode` again; or add --no-images"
        raise TrainError(f"this image cannot be read: {first_line(error)}", where=path, do=do) from None
    return ShownImage(path.name, data.getvalue(), prompt, parameters)


# ---- the card --------------------------------------------------------------------------------------------------------


def _card(run: RunFacts, repo: str, images: list[ShownImage]) -> str:
    """The model card: metadata for the hub, and Markdown."""
    trigger = recorded(run.config, "trigger_word")
    licence = run.family.licence
    link = f"https://huggingface.co/{run.pipeline.models[0]}/blob/main/LICENSE"
    extra: dict[str, Any] = {"instance_prompt": trigger} if trigger else {}
    for image in images:
        parameters = {"parameters": dict(image.parameters)} if image.parameters else {}
        output = {"url": f"{IMAGES}/{image.name}"}
        extra.setdefault("widget", []).append({"text": image.prompt or " ", **parameters, "output": output})
    # Under the tag `lora` the hub shows how a pipeline loads one, which is wrong for other types.
    tags = [run.adapter.type.name, "template:sd-lora"] if run.adapter else []
    is_known = licence == "apache-2.0"  # else one that the hub does not list
    data = ModelCardData(
        base_model=run.base_model,
        library_name="diffusers",
        license=licence if is_known else "other",
        license_name=None if is_known else licence,
        license_link=None if is_known else link,
        pipeline_tag="image-to-image" if run.edits else "text-to-image",
        tags=[*tags, "diffusers", "qwen-image", "qwen-cache"],
        base_model_relation="adapter" if run.adapter else "finetune",
        **extra,
    )
    parts = [f"# {repo.rpartition('/')[2]}", _introduction(run, trigger, link)]
    parts += ["<Gallery />"] if images else []
    parts += ["## Use it with diffusers", f"```python\n{_code(run, repo)}\n```"]
    parts += ["## Generate with it", _table([("setting", "value"), *_generation(run, images)]), _elsewhere(run)]
    parts += ["## Training", _table([("setting", "value"), *_settings(run)])]
    parts += ["## Dataset", _table([("", "value"), *_dataset(run)])]
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n"))


def _introduction(run: RunFacts, trigger: str | None, link: str) -> str:
    what, lora = "The transformer of a full fine-tuning of", run.config.train.lora
    if run.adapter:
        what = f"{'An' if run.adapter.type is OFT else 'A'} {adapter_title(lora)} for"
    base, licence = f"[{run.base_model}](https://huggingface.co/{run.base_model})", run.family.licence
    text = f"{what} {base}, trained by [qwen-cache]({REPOSITORY}) {__version__}."
    text += f" The trigger word is `{plain(trigger)}`." if trigger else ""
    if file := run.single_file:
        text += f"\n\nThe transformer that it was trained on is not that repository's, but the file `{file}`."
    if assistant := run.assistant:
        text += f"\n\nIt was trained beside the assistant LoRA `{assistant}`, which is not part of it."
    if licence != "apache-2.0":
        text += (
            f"\n\nThe base is under the [{licence}]({link}) licence, which allows **no commercial use**. It holds for "
            "these weights too."
        )
    return text


def _code(run: RunFacts, repo: str) -> str:
    pipeline = run.pipeline.name
    load = f'"{run.base_model}", dtype=torch.bfloat16'
    if run.adapter:
        imports = f"import torch\nfrom diffusers import {pipeline}\n"
        imports += "from peft import PeftModel\n" if run.adapter.type in BY_PEFT else ""
        loading = LOADING[run.adapter.type].format(repo=f'"{repo}"')
        code = f'{imports}\npipe = {pipeline}.from_pretrained({load}).to("cuda")\n{loading}'
        return code + _positions(run)
    kind = run.family.transformer
    code = (
        f"import torch\nfrom diffusers import {pipeline}, {kind}\n\n"
        f'transformer = {kind}.from_pretrained("{repo}", subfolder="{FULL}", dtype=torch.bfloat16)\n'
        f'pipe = {pipeline}.from_pretrained({load}, transformer=transformer).to("cuda")'
    )
    return code + _positions(run)


def _positions(run: RunFacts) -> str:
    """Code for a pipeline that would encode prompts otherwise than training did; maybe empty."""
    return f"\n{POSITIONS}" if run.pipeline.min_controls else ""


def _generation(run: RunFacts, images: list[ShownImage]) -> Iterator[tuple[str, str]]:
    """The settings of its pipeline, and how the images of the card were generated."""
    defaults, validation, is_21 = run.family.predict_defaults, run.config.validation, run.family.joint_sequence
    yield "`num_inference_steps`", f"{defaults['num_inference_steps']}; a distilled base has its own"
    scale = defaults["true_cfg_scale"]
    guided = f'{scale:g}, with `negative_prompt=" "`: without one there is no guidance'
    yield "`true_cfg_scale`", guided if scale > 1 else f"{scale:g}, which is no guidance"
    size = f"about {OWN_SIDE}² pixels"
    if run.edits:
        size += ", in the shape of the last control; controls are resized to as many"
    yield f"`height`, `width`{', `output_resolution`' if is_21 else ''}", size
    if run.adapter and run.adapter.type is not OFT:
        yield f"strength of the {run.adapter.type.title}", "1"
    if images:
        scales = ", ".join(f"{each:g}" for each in validation.true_cfg_scale)
        made = f"`num_inference_steps` {validation.num_inference_steps}, `true_cfg_scale` {scales}"
        yield (
            "the images above",
            made + (" with an empty negative prompt" if max(validation.true_cfg_scale) > 1 else ""),
        )


def _elsewhere(run: RunFacts) -> str:
    """Warnings: sizes that the pipelines do not have, and what other programs do otherwise."""
    said, areas = list[str](), recorded(run.config, "vae_image_size")
    sides = [round(math.sqrt(area)) for area in areas or ()]
    if shapes := recorded(run.config, "resolution"):
        trained = ", ".join(f"{width}×{height}" for width, height in shapes)
    else:
        trained = ", ".join(f"about {side}²" for side in sides if side != OWN_SIDE)
    if trained and run.family.joint_sequence:
        said.append(f"It was trained at {trained} pixels: set `output_resolution` to that side.")
    elif trained:
        said.append(f"It was trained at {trained} pixels: give `height` and `width` of that size.")
        if run.edits:
            said.append(f"The pipeline resizes controls to about {OWN_SIDE}² all the same.")
    others = "sizes of controls, shift, guidance" if run.edits else "shift, guidance"
    said.append(
        f"Other programs, ComfyUI among them, differ in {others}: [the settings that come nearest]({ELSEWHERE})."
    )
    return "\n".join(f"- {each}" for each in said)


def _settings(run: RunFacts) -> Iterator[tuple[str, str]]:
    """The settings that decide the result, without those that could hold a path, in the order of qwen.yaml."""
    defaults, values = Config().flat(), run.config.flat()
    shown = {*ALWAYS, *(OF_LORA if run.adapter else ())}
    without = "train.lora." if not run.adapter else "train.lora.rank" if run.adapter.type == OFT else "train.lora.oft_"
    if checkpoint := CHECKPOINT.fullmatch(run.folder.resolve().name):
        yield "checkpoint", f"step {int(checkpoint[1]):,}"
    for name, value in values.items():
        wanted = name in shown or (name.startswith(SECTIONS) and value != defaults.get(name))
        wanted = wanted and not name.startswith(without)
        if wanted and value is not None and _is_harmless(name, value):
            yield f"`{name}`", plain(", ".join(map(str, value)) if isinstance(value, list) else str(value))


def _is_harmless(name: str, value: object) -> bool:
    """True if a setting is no free text: a number, a switch, one of a few choices, or a name in a program."""
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
        if run.config.train.caches or is_remote(path):
            return
        cache = open_configured(run.config.cache)
        if cache.identity == run.facts.get("identity"):
            yield "recipe", f"`{recipe_id(cache.recipe.recipe)}`"
            yield "dtype", f"{cache.recipe.recipe.get('dtype')}"


def _table(rows: list[tuple[str, str]]) -> str:
    head, *body = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([head, "| --- | --- |", *body])


# ---- upload ----------------------------------------------------------------------------------------------------------


def upload(published: Published, repo: str, *, private: bool, revision: str | None) -> str:
    """Upload all files in one commit, into a repository that is created if there is none; the commit's address.

    QwenCacheError if the hub refuses, or with `private` if the repository exists and is public.
    """
    repository = Repository(repo, "model", revision)
    repository.create(private=private)
    return repository.commit(published.files, "Upload from qwen-train")
