"""Import: make a dataset of what an importer finds. Each sample is read twice, so that no tensor is ever kept.

    plan (read, check, hash → keys) → update → staging (read again, write) → one commit

An import that dies goes on where it was and gives the same bytes; a second one does nothing. Which model wrote the
source is not in it: the recipe says so, as `claimed`. There are no images to hash either, so the inputs of a sample
are hashed over its tensors (schemas/FORMAT.md, F10): whatever changes in one changes the key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch

from qwen_cache.errors import ConfigError, ModelError, SourceError
from qwen_cache.format.identity import Inputs, canonical_json, content_hash, recipe_id
from qwen_cache.format.manifest import DEFAULT_RECIPE, Manifest
from qwen_cache.format.sample import LATENT_CHANNELS, TENSORS, SampleMeta, shared_rows, token_count
from qwen_cache.format.shard import compress
from qwen_cache.format.tensor import TensorSpec
from qwen_cache.format.update import Existing, Listed, Update, carry_out, open_staging, plan_update
from qwen_cache.importers import diffusion_pipe, musubi, qflux
from qwen_cache.importers.source import EXACT_IN, Found, Imported, Options
from qwen_cache.models.folder import PIPELINES, ModelFolder, PipelineName, open_model
from qwen_cache.settings.load import Config
from qwen_cache.storage.url import local_folder
from qwen_cache.version import __version__

Tool = Literal["qflux", "musubi", "diffusion-pipe"]
Dtype = Literal["bfloat16", "float32"]
FIND = {"qflux": qflux.find, "musubi": musubi.find, "diffusion-pipe": diffusion_pipe.find}
IMPORTER_VERSION = 1
FORMAT_VERSION = 2
PUBLISHED: dict[str, PipelineName] = {
    "Qwen/Qwen-Image": "QwenImagePipeline",
    "Qwen/Qwen-Image-Edit": "QwenImageEditPipeline",
    "Qwen/Qwen-Image-Edit-2509": "QwenImageEditPlusPipeline",
    "Qwen/Qwen-Image-Edit-2511": "QwenImageEditPlusPipeline",
}


@dataclass(frozen=True)
class Job:
    """What the user asked for."""

    config: Config
    tool: Tool
    source: Path
    model: ModelFolder
    """As claimed; never opened."""
    options: Options
    dtype: Dtype | None
    """None: that of the first sample."""

    @property
    def folder(self) -> Path:
        return local_folder(self.config.cache.path)

    @property
    def recipe_name(self) -> str:
        return self.config.cache.recipe or DEFAULT_RECIPE

    def find(self) -> Iterator[Found | SourceError]:
        return FIND[self.tool](self.source, self.options)

    def recipe(self, dtype: Dtype) -> dict[str, Any]:
        """What the samples depend on besides their tensors, as far as it can be known."""
        return {
            "imported_from": self.tool,
            "importer_version": IMPORTER_VERSION,
            "claimed": {"model": self.model.name, "pipeline": self.model.pipeline},
            "pipeline": self.model.pipeline,
            "dtype": dtype,
        }


@dataclass(frozen=True)
class Planned:
    """A sample to be in the dataset."""

    key: str
    found: Found
    prompt: str
    bytes: int
    has_empty_prompt: bool
    source_rows: int = 1


@dataclass(frozen=True)
class Plan:
    """Everything that was found: samples by key, in order, and what cannot be used."""

    recipe: dict[str, Any]
    samples: dict[str, Planned]
    problems: list[SourceError]

    @property
    def dtype(self) -> torch.dtype:
        return {"bfloat16": torch.bfloat16, "float32": torch.float32}[self.recipe["dtype"]]


def prepare(config: Config, tool: Tool, source: Path, model: ModelFolder, options: Options, dtype: Dtype | None) -> Job:
    """Check what was asked for, before anything is read."""
    if config.cache.format != f"v{FORMAT_VERSION}":
        raise ConfigError(
            f"import writes format v{FORMAT_VERSION}",
            found=f"cache.format={config.cache.format}",
            do=f"import, and then run `qwen-cache migrate v{FORMAT_VERSION} {config.cache.format}`",
        )
    if tool != "qflux" and options != Options():
        raise ConfigError(f"--image-size and --captions are for qflux; {tool} stores both")
    if not source.is_dir():
        raise SourceError("no such folder", where=source, do="give the folder of the cache to be imported")
    return Job(config, tool, source, model, options, dtype)


def claimed_model(name: str, pipeline: str | None) -> ModelFolder:
    """The model that the user says wrote the cache; its pipeline follows from a published name or a local folder."""
    known = open_model(name, ()).pipeline if Path(name).is_dir() else PUBLISHED.get(name)
    claimed = next((each for each in PIPELINES if each == pipeline), None)
    if pipeline is not None and claimed is None:
        raise ModelError("no such pipeline", expected=" or ".join(PIPELINES), found=pipeline)
    if known and claimed and known != claimed:
        raise ModelError("--model and --pipeline contradict each other", where=name, expected=known, found=claimed)
    if not (chosen := known or claimed):
        raise ModelError(
            "it is not known which pipeline this model is for",
            where=name,
            do=f"add --pipeline {PIPELINES[1]}, or whichever it is of {', '.join(PIPELINES)}",
        )
    return ModelFolder(name, Path(name), chosen)


def make_plan(job: Job, on_bytes: Callable[[int], None] = lambda _: None) -> Plan:
    """Read everything once: keys, and what is wrong with which samples."""
    plan = Plan(job.recipe(job.dtype or "float32"), {}, [])
    width = 0
    for found in job.find():
        try:
            if isinstance(found, SourceError):
                raise found
            sample = found.read()
            if not plan.samples:
                plan, width = replace(plan, recipe=job.recipe(job.dtype or _natural(sample))), _width(sample)
            _check(sample, found.where, job.model, plan.dtype, width)
            meta, _ = describe(sample, recipe_id(plan.recipe), plan.dtype)
        except SourceError as error:
            plan.problems.append(error)
            continue
        size = sum(spec.nbytes for spec in meta.tensors.values())
        on_bytes(size)
        earlier = plan.samples.get(meta.key)
        planned = Planned(meta.key, found, meta.prompt, size, "empty_prompt_embeds" in meta.tensors)
        plan.samples[meta.key] = replace(earlier, source_rows=earlier.source_rows + 1) if earlier else planned
    return plan


def make_update(job: Job, plan: Plan, existing: Existing) -> Update:
    """The dataset that the import shall make: the other recipes as they are, then this one."""
    manifest = existing.manifest
    if manifest.format_version != FORMAT_VERSION:
        do = f"run `qwen-cache migrate v1 v{FORMAT_VERSION}`, or import into another folder"
        raise ConfigError("this cache is of another format version", where=job.folder, found="v1", do=do)
    earlier = manifest.recipes.get(job.recipe_name)
    if earlier and earlier.recipe.get("imported_from") != job.tool:
        raise ConfigError(
            f"recipe {job.recipe_name!r} of this cache is not an import of {job.tool}, and would be replaced",
            where=job.folder,
            do="import into another folder, or set cache.recipe to another name",
        )
    existing.check_name(job.recipe_name, plan.recipe, job.folder)
    ours = [Listed(sample.found.name, key, sample.source_rows) for key, sample in plan.samples.items()]
    return plan_update(job.folder, existing, FORMAT_VERSION, [*existing.others(job.recipe_name), *ours])


def run(job: Job, plan: Plan, update: Update, on_sample: Callable[[int], None] = lambda _: None) -> Manifest:
    """Write and commit; the caller holds `directory.writing(job.folder)`.

    `on_sample` hears how many samples are written: at once those that an earlier run left, then one by one.
    """
    staging = open_staging(update, recipe_id(plan.recipe), int(job.config.cache.shard_size))

    def write(key: str) -> None:
        staging.add(*compress(*_read_again(plan, key), job.config.cache.compression))

    recipes = {**update.existing.recipes, job.recipe_name: plan.recipe}
    written_by = {"qwen-cache": __version__, "torch": version("torch")}
    return carry_out(update, staging, write, recipes, written_by, on_sample)


def describe(sample: Imported, recipe: str, dtype: torch.dtype) -> tuple[SampleMeta, dict[str, memoryview]]:
    """The sample as it is stored in `dtype`: its metadata, and the bytes of its tensors."""
    tensors = {name: sample.tensors[name].to(dtype) for name in TENSORS[FORMAT_VERSION] if name in sample.tensors}
    prefix_length = 0
    if "empty_prompt_embeds" in tensors:
        prompt, empty = tensors["prompt_embeds"], tensors["empty_prompt_embeds"]
        prefix_length = shared_rows(_bytes(prompt), _bytes(empty), prompt.shape[1] * dtype.itemsize, least=1)
        tensors["empty_prompt_embeds"] = tensors["empty_prompt_embeds"][prefix_length:]
    data = {name: _bytes(tensor) for name, tensor in tensors.items()}
    dtype_name = {torch.bfloat16: "BF16", torch.float32: "F32"}[dtype]
    specs = {name: TensorSpec(dtype_name, tuple(t.shape), content_hash(data[name])) for name, t in tensors.items()}
    controls = []
    if "control_latents" in tensors:
        lengths = [token_count([shape]) for shape in sample.img_shapes[1:]]
        controls = [content_hash(_bytes(part)) for part in torch.split(tensors["control_latents"], lengths)]
    everything = {
        "img_shapes": [list(shape) for shape in sample.img_shapes],
        "prefix_length": prefix_length,
        "tensors": {name: spec.to_json() for name, spec in specs.items()},
    }
    inputs = Inputs(content_hash(canonical_json(everything)), tuple(controls), None)
    return SampleMeta(recipe, inputs, sample.prompt, sample.img_shapes, prefix_length, specs), data


def _read_again(plan: Plan, key: str) -> tuple[SampleMeta, dict[str, memoryview]]:
    found = plan.samples[key].found
    meta, data = describe(found.read(), recipe_id(plan.recipe), plan.dtype)
    if meta.key != key:
        raise SourceError("this sample changed while it was imported", where=found.where, do="run the import again")
    return meta, data


def _check(sample: Imported, where: str, model: ModelFolder, dtype: torch.dtype, width: int) -> None:
    """SourceError when the model cannot have made the sample, or the dataset could not hold it."""
    controls, most = len(sample.img_shapes) - 1, model.max_controls
    if bool(controls) != model.takes_controls or (most is not None and controls > most):
        raise SourceError(
            f"{model.pipeline} cannot have made this sample",
            where=where,
            expected="no control" if most == 0 else "1 control" if most == 1 else "at least 1 control",
            found=f"{controls} of them",
            do="claim the model that wrote this cache with --model",
        )
    for name, tensor in sample.tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            do = "float16 cannot hold Qwen2.5-VL's activations beyond 65504; run `qwen-cache build` on the images"
            raise SourceError(f"{name} has NaN or Inf", where=where, found=tensor.dtype, do=do)
        if EXACT_IN[tensor.dtype] == torch.float32 and dtype == torch.bfloat16:
            do = "import everything with --dtype float32"
            raise SourceError(f"bfloat16 would lose digits of {name}", where=where, found=tensor.dtype, do=do)
    _check_shapes(sample, where, width)


def _check_shapes(sample: Imported, where: str, width: int) -> None:
    """Tokens as `img_shapes` says, embeddings of one width."""
    latents = {"image_latents": sample.img_shapes[:1], "control_latents": sample.img_shapes[1:]}
    expected = {name: [token_count(shapes), LATENT_CHANNELS] for name, shapes in latents.items() if shapes}
    found = {name: list(tensor.shape) for name, tensor in sample.tensors.items() if name in latents}
    if found != expected:
        raise SourceError(
            f"latents and the sizes of the images, {[list(shape) for shape in sample.img_shapes]}, do not fit",
            where=where,
            expected=expected,
            found=found,
        )
    widths = {tensor.shape[1] for name, tensor in sample.tensors.items() if name not in latents}
    if widths != {width}:
        raise SourceError("embeddings of another width", where=where, expected=width, found=sorted(widths))


def _natural(sample: Imported) -> Dtype:
    """The smallest dtype that holds this sample exactly."""
    return "bfloat16" if all(t.dtype == torch.bfloat16 for t in sample.tensors.values()) else "float32"


def _width(sample: Imported) -> int:
    return sample.tensors["prompt_embeds"].shape[1]


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data
