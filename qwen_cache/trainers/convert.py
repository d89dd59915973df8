"""`import` and `export`: the tools by name, from their files to a cache, and back."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch

from qwen_cache.errors import ConfigError, ModelError, Problem, SourceError
from qwen_cache.extras import __version__
from qwen_cache.format import directory
from qwen_cache.format.cache import Cache
from qwen_cache.format.identity import Inputs, canonical_json, content_hash, recipe_id
from qwen_cache.format.index import IndexRow
from qwen_cache.format.manifest import DEFAULT_RECIPE, Manifest
from qwen_cache.format.rows import ListedSample, ListedSamples
from qwen_cache.format.sample import (
    LATENT_CHANNELS,
    SLIDER_EMBEDS,
    TENSORS,
    SampleMeta,
    TensorSpec,
    shared_rows,
    token_count,
)
from qwen_cache.format.shard import compress
from qwen_cache.format.update import Existing, Update, carry_out, open_staging, plan_update
from qwen_cache.models.family import PIPELINES, QWEN_IMAGE
from qwen_cache.models.folder import ModelFolder, open_model
from qwen_cache.settings.load import Config
from qwen_cache.storage.files import whole_folder
from qwen_cache.storage.remote import LocalCopies, Location
from qwen_cache.storage.stores import destination
from qwen_cache.terminal import plural
from qwen_cache.trainers import diffsynth, diffusion_pipe, musubi, qflux
from qwen_cache.trainers.files import (
    EXACT_IN,
    FOR_PEOPLE,
    Export,
    FoundSample,
    ImportedSample,
    NamedSample,
    Options,
    Refusal,
    Tool,
)

# ---- writer ----------------------------------------------------------------------------------------------------------
# Import: write the samples of an importer as a dataset. Each is read twice, so that tensors are never kept in memory.
#
#     plan (read, check, hash → keys) → update → staging (read again, write) → one commit
#
# An interrupted import continues where it stopped and gives the same bytes; a second one does nothing. The source does
# not record which model made it, so the recipe has the model as `claimed`. Without images to hash, the inputs of a
# sample are hashes of its tensors (schemas/FORMAT.md, F10): any change of a tensor changes the key.

ImportedTool = Literal["qflux", "musubi", "diffusion-pipe"]
Dtype = Literal["bfloat16", "float32"]
FIND = {"qflux": qflux.find, "musubi": musubi.find, "diffusion-pipe": diffusion_pipe.find}
IMPORTER_VERSION = 1
FORMAT_VERSION = 2
PUBLISHED = {repository: pipeline.name for pipeline in PIPELINES.values() for repository in pipeline.models}


@dataclass(frozen=True)
class ImportJob:
    """The settings of one import."""

    config: Config
    tool: ImportedTool
    source: Path
    model: ModelFolder
    """The claimed model; never opened."""
    options: Options
    dtype: Dtype | None
    """None: the dtype of the first sample."""

    @property
    def folder(self) -> Location:
        return destination(self.config.cache.path)

    @property
    def recipe_name(self) -> str:
        return self.config.cache.recipe or DEFAULT_RECIPE

    def find(self) -> Iterator[FoundSample | SourceError]:
        return FIND[self.tool](self.source, self.options)

    def recipe(self, dtype: Dtype) -> dict[str, Any]:
        """The known facts, besides their tensors, that the samples depend on."""
        return {
            "imported_from": self.tool,
            "importer_version": IMPORTER_VERSION,
            "claimed": {"model": self.model.name, "pipeline": self.model.pipeline},
            "pipeline": self.model.pipeline,
            "dtype": dtype,
        }


@dataclass(frozen=True)
class PlannedImport:
    """A sample of the new dataset."""

    key: str
    source: FoundSample
    prompt: str
    bytes: int
    has_empty_prompt: bool
    source_rows: int = 1


@dataclass(frozen=True)
class ImportPlan:
    """All samples by key, in order, and the problems of those that cannot be used."""

    recipe: dict[str, Any]
    samples: dict[str, PlannedImport]
    problems: list[SourceError]

    @property
    def dtype(self) -> torch.dtype:
        return {"bfloat16": torch.bfloat16, "float32": torch.float32}[self.recipe["dtype"]]


def prepare(
    config: Config, tool: ImportedTool, source: Path, model: ModelFolder, options: Options, dtype: Dtype | None
) -> ImportJob:
    """Check the settings before anything is read; ConfigError or SourceError."""
    if config.cache.format != f"v{FORMAT_VERSION}":
        raise ConfigError(
            f"import writes format v{FORMAT_VERSION}",
            found=f"cache.format={config.cache.format}",
            do=f"import, then run `qwen-cache migrate v{FORMAT_VERSION} {config.cache.format}`",
        )
    if tool != "qflux" and options != Options():
        raise ConfigError(f"--image-size and --captions are for qflux; {tool} stores both")
    if not source.is_dir():
        raise SourceError("no such folder", where=source, do="give the folder of the cache to import")
    if directory.is_same(source, destination(config.cache.path)):
        raise ConfigError("a cache cannot be imported into itself", where=source, do="choose another folder with --out")
    if tool == "musubi":
        source = musubi.locate(source)
    return ImportJob(config, tool, source, model, options, dtype)


def claimed_model(name: str, pipeline: str | None) -> ModelFolder:
    """The model that made the cache, according to the user; a published name or a local folder gives its pipeline."""
    known = open_model(name, ()).pipeline if Path(name).is_dir() else PUBLISHED.get(name)
    names = [each.name for each in QWEN_IMAGE.pipelines]
    claimed = next((each for each in names if each == pipeline), None)
    if pipeline is not None and claimed is None:
        raise ModelError("no such pipeline", expected=" or ".join(names), found=pipeline)
    if known and known not in names:
        raise ModelError(
            "caches of this model cannot be imported: they have other tensors than a build of it",
            where=name,
            expected=" or ".join(names),
            found=known,
            do="run `qwen-cache build` on the images",
        )
    if known and claimed and known != claimed:
        raise ModelError("--model and --pipeline contradict each other", where=name, expected=known, found=claimed)
    if not (chosen := known or claimed):
        raise ModelError(
            "the pipeline of this model is unknown",
            where=name,
            do=f"add --pipeline with one of {', '.join(names)}",
        )
    return ModelFolder(name, Path(name), chosen)


def make_plan(job: ImportJob, on_bytes: Callable[[int], None] = lambda _: None) -> ImportPlan:
    """Read every sample once: its key, or its problem. `on_bytes` is called with the bytes of each sample."""
    plan = ImportPlan(job.recipe(job.dtype or "float32"), {}, [])
    width = 0
    for each in job.find():
        try:
            if isinstance(each, SourceError):
                raise each
            sample = each.read()
            if not plan.samples:
                is_bfloat16 = all(tensor.dtype == torch.bfloat16 for tensor in sample.tensors.values())
                exact: Dtype = "bfloat16" if is_bfloat16 else "float32"
                plan = replace(plan, recipe=job.recipe(job.dtype or exact))
                width = sample.tensors["prompt_embeds"].shape[1]
            _check(sample, each.where, job.model, plan.dtype, width)
            meta, _ = describe(sample, recipe_id(plan.recipe), plan.dtype)
        except SourceError as error:
            plan.problems.append(error)
            continue
        size = sum(spec.nbytes for spec in meta.tensors.values())
        on_bytes(size)
        earlier = plan.samples.get(meta.key)
        planned = PlannedImport(meta.key, each, meta.prompt, size, "empty_prompt_embeds" in meta.tensors)
        plan.samples[meta.key] = replace(earlier, source_rows=earlier.source_rows + 1) if earlier else planned
    return plan


def make_update(job: ImportJob, plan: ImportPlan, existing: Existing) -> Update:
    """The new dataset: the other recipes unchanged, then this one."""
    manifest = existing.manifest
    if manifest.format_version != FORMAT_VERSION:
        do = f"run `qwen-cache migrate v1 v{FORMAT_VERSION}`, or import into another folder"
        raise ConfigError("this cache has another format version", where=job.folder, found="v1", do=do)
    earlier = manifest.recipes.get(job.recipe_name)
    if earlier and earlier.recipe.get("imported_from") != job.tool:
        raise ConfigError(
            f"recipe {job.recipe_name!r} of this cache is not an import from {job.tool}, and would be replaced",
            where=job.folder,
            do="import into another folder, or set cache.recipe to another name",
        )
    existing.check_name(job.recipe_name, plan.recipe, job.folder)
    ours = (ListedSample(sample.source.name, key, sample.source_rows) for key, sample in plan.samples.items())
    return plan_update(job.folder, existing, FORMAT_VERSION, existing.others(job.recipe_name) + ListedSamples.of(ours))


def run(
    job: ImportJob, plan: ImportPlan, update: Update, on_sample: Callable[[int], None] = lambda _: None
) -> Manifest:
    """Write and commit; the caller holds `directory.writing(job.folder)`.

    `on_sample` is called with a number of written samples: first those of an earlier run together, then one by one.
    """
    cache = job.config.cache
    staging = open_staging(update, recipe_id(plan.recipe), int(cache.shard_size), copies=LocalCopies.of_settings(cache))

    def write(key: str) -> None:
        source = plan.samples[key].source
        meta, data = describe(source.read(), recipe_id(plan.recipe), plan.dtype)
        if meta.key != key:
            do = "run the import again"
            raise SourceError("this sample changed while it was imported", where=source.where, do=do)
        staging.add(*compress(meta, data, cache.compression))

    recipes = {**update.existing.recipes, job.recipe_name: plan.recipe}
    written_by = {"qwen-cache": __version__, "torch": version("torch")}
    return carry_out(update, staging, write, recipes, written_by, on_sample)


def describe(sample: ImportedSample, recipe: str, dtype: torch.dtype) -> tuple[SampleMeta, dict[str, memoryview]]:
    """The sample as stored in `dtype`: its metadata, and the bytes of its tensors."""
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
        controls = [content_hash(_bytes(each)) for each in torch.split(tensors["control_latents"], lengths)]
    everything = {
        "img_shapes": [list(shape) for shape in sample.img_shapes],
        "prefix_length": prefix_length,
        "tensors": {name: spec.to_json() for name, spec in specs.items()},
    }
    inputs = Inputs(content_hash(canonical_json(everything)), tuple(controls), None)
    return SampleMeta(recipe, inputs, sample.prompt, sample.img_shapes, prefix_length, specs), data


def _check(sample: ImportedSample, where: str, model: ModelFolder, dtype: torch.dtype, width: int) -> None:
    """SourceError if the model cannot have made the sample, or the dataset cannot store it."""
    controls, most = len(sample.img_shapes) - 1, model.max_controls
    if bool(controls) != model.takes_controls or (most is not None and controls > most):
        raise SourceError(
            f"{model.pipeline} cannot have made this sample",
            where=where,
            expected="no control" if most == 0 else "1 control" if most == 1 else "at least 1 control",
            found=plural(controls, "control"),
            do="name the model that made this cache with --model",
        )
    for name, tensor in sample.tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            do = "float16 cannot hold Qwen2.5-VL's activations beyond 65504; run `qwen-cache build` on the images"
            raise SourceError(f"{name} has NaN or Inf", where=where, found=tensor.dtype, do=do)
        if EXACT_IN[tensor.dtype] == torch.float32 and dtype == torch.bfloat16:
            do = "import everything with --dtype float32"
            raise SourceError(f"bfloat16 would lose digits of {name}", where=where, found=tensor.dtype, do=do)
    # Latents have the tokens of `img_shapes`, and all embeddings have one width.
    latents = {"image_latents": sample.img_shapes[:1], "control_latents": sample.img_shapes[1:]}
    expected = {name: [token_count(shapes), LATENT_CHANNELS] for name, shapes in latents.items() if shapes}
    found = {name: list(tensor.shape) for name, tensor in sample.tensors.items() if name in latents}
    if found != expected:
        what = f"the latents do not fit the image sizes {[list(shape) for shape in sample.img_shapes]}"
        raise SourceError(what, where=where, expected=expected, found=found)
    widths = {tensor.shape[1] for name, tensor in sample.tensors.items() if name not in latents}
    if widths != {width}:
        raise SourceError("the embeddings have another width", where=where, expected=width, found=sorted(widths))


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


# ---- writer ----------------------------------------------------------------------------------------------------------
# Plan an export from the index alone, then write it as one folder that appears when it is whole.

ToolName = Literal["musubi", "diffusion-pipe", "diffsynth", "qflux"]
TOOLS: dict[ToolName, Tool] = {
    "musubi": musubi.TOOL,
    "diffusion-pipe": diffusion_pipe.TOOL,
    "diffsynth": diffsynth.TOOL,
    "qflux": qflux.TOOL,
}
NO_TARGET = Refusal("it has no target: an image to generate cannot be trained", "leave it out")
MAX_STEM = 150  # bytes: with a key and what tools append, below the 255 of a file name
OF_OTHERS = re.compile(r"(control_\d+|_mask)$", re.IGNORECASE)
"""The ends of names that qwen-image-finetune takes for further images of another sample."""


@dataclass(frozen=True)
class ExportPlan:
    """The files that an export writes."""

    cache: Cache
    tool: Tool
    stems: dict[int, str]
    """The stem of the files of each sample, by its position."""
    problems: list[Problem]
    """Samples that the tool cannot hold."""
    left_out: Counter[str]
    """In how many of its samples each tensor is left out."""
    bytes: int
    refusal: ConfigError | None
    """For tensors that the tool cannot hold and that are not to be left out."""


def plan_export(cache: Cache, name: ToolName, leave_out: Sequence[str]) -> ExportPlan:
    """Read the index. ConfigError for a cache that the tool's models cannot read, and for an unknown `leave_out`."""
    tool = TOOLS[name]
    pipelines = {pipeline.name for pipeline in QWEN_IMAGE.pipelines}
    if (found := cache.recipe.recipe.get("pipeline")) not in pipelines:
        what = f"{tool.title} has no trainer for caches of this model"
        raise ConfigError(what, where=cache.folder, expected=" or ".join(sorted(pipelines)), found=found)
    known = {"empty_prompt_embeds", "edit_mask", "rejected_latents", *SLIDER_EMBEDS}
    if unknown := [each for each in leave_out if each not in known]:
        what, expected = "this tensor cannot be left out", " or ".join(sorted(known))
        raise ConfigError(what, where="--leave-out", expected=expected, found=unknown[0])
    rows, problems, left_out, size = dict[int, IndexRow](), list[Problem](), Counter[str](), 0
    refusal_of = tool.refusing(row.meta for row in cache.rows() if "image_latents" in row.meta.tensors)
    for i, row in enumerate(cache.rows()):
        if refusal := refusal_of(row.meta) if "image_latents" in row.meta.tensors else NO_TARGET:
            problems.append(Problem(row.label, refusal.what, refusal.do))
            continue
        rows[i] = row
        left_out.update(row.meta.tensors.keys() - tool.holds - FOR_PEOPLE)
        size += sum(spec.nbytes for name, spec in row.meta.tensors.items() if name in tool.holds)
    return ExportPlan(cache, tool, _stems(rows), problems, left_out, size, _left_out(tool, left_out, leave_out))


def write_export(
    plan: ExportPlan, out: Path, *, zero_cond_t: bool = False, on_sample: Callable[[], None] = lambda: None
) -> None:
    """Write the folder `out`, which appears when it is whole. ConfigError if it exists and is not empty."""
    check_folder(out)
    recipe = plan.cache.recipe.recipe
    with whole_folder(out) as folder:
        samples = _Samples(plan)
        takes_controls = recipe["pipeline"] != "QwenImagePipeline"
        plan.tool.write(Export(samples, folder, out.resolve(), takes_controls, zero_cond_t, on_sample))


def check_folder(out: Path) -> None:
    """ConfigError unless `out` is new, or an empty folder."""
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists():
        raise ConfigError("this folder is not empty", where=out, do="choose another one with --out, or delete it")


class _Samples(Sequence[NamedSample]):
    """The samples of a plan, read when they are used."""

    def __init__(self, plan: ExportPlan) -> None:
        self._cache, self._stems = plan.cache, list(plan.stems.items())

    def __len__(self) -> int:
        return len(self._stems)

    def __getitem__(self, index: int) -> NamedSample:  # type: ignore[override]
        position, stem = self._stems[index]
        return NamedSample(stem, self._cache[position])


def _left_out(tool: Tool, left_out: Counter[str], named: Sequence[str]) -> ConfigError | None:
    missing = sorted(left_out.keys() - set(named) - tool.unused.keys())
    if not missing:
        return None
    counts = " and ".join(f"{name} of {plural(left_out[name], 'sample')}" for name in missing)
    options = " ".join(f"--leave-out {name}" for name in missing)
    return ConfigError(f"{tool.title} cannot hold {counts}", do=f"export without them: add {options}")


def _stems(rows: dict[int, IndexRow]) -> dict[int, str]:
    """Names that are safe in any file system, and unique there, also where it ignores case.

    The key is added to equal names, and to those that could be the name of another sample's file.
    """
    names, keys = {i: _safe(row.name) for i, row in rows.items()}, {row.meta.key for row in rows.values()}
    often = Counter(map(_folded, names.values()))

    def stem(i: int, name: str) -> str:
        is_free = often[_folded(name)] == 1 and not OF_OTHERS.search(name)
        return name if is_free and name.rpartition("-")[2].casefold() not in keys else f"{name}-{rows[i].meta.key}"

    return {i: stem(i, name) for i, name in names.items()}


def _folded(name: str) -> str:
    """Equal for names that are one file to some file system: without case, in Unicode's composed form."""
    return unicodedata.normalize("NFC", name.casefold())


def _safe(name: str) -> str:
    safe = re.sub(r"[^\w.-]+", "-", unicodedata.normalize("NFC", name))
    return safe.encode()[:MAX_STEM].decode(errors="ignore").strip(".-") or "sample"
