"""Many pictures with one loading of the model: jobs, with and without the LoRA; and samples of a cache.

All prompts are encoded before the transformer is loaded, and only those of pictures that are not there yet. Refused: a
source with a row called like what is made beside its pictures, and a cache of another model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from PIL import Image

from qwen_cache.console import counting
from qwen_cache.encode.decode import decode_pictures
from qwen_cache.errors import ConfigError, SourceError
from qwen_cache.format.cache import Cache, Sample
from qwen_cache.format.identity import content_hash
from qwen_cache.models.folder import ModelFolder
from qwen_cache.settings.inference import PredictConfig
from qwen_cache.sources.detect import Problem
from qwen_cache.sources.places import File
from qwen_train.inference.cached import draw_cached, guidance_from_cache, initial_latents
from qwen_train.inference.devices import Devices, memory_for
from qwen_train.inference.grid import Row
from qwen_train.inference.jobs import Done, Job, hash_in, paths_of, pictures_of, run_jobs, waiting
from qwen_train.inference.loras import WeightedLora, check_loras
from qwen_train.inference.pipeline import load_pipeline
from qwen_train.inference.predict import check_count, check_settings, draw
from qwen_train.inference.prompts import PromptEncoder
from qwen_train.signals import Signals
from qwen_train.weights import check_cache

WITHOUT = "-without-lora"
PARTS_FOR_A_CACHE = ("vae", "transformer", "scheduler")
PARTS = (*PARTS_FOR_A_CACHE, "text_encoder", "tokenizer", "processor")


def draw_jobs(
    model: ModelFolder,
    jobs: Sequence[Job],
    folder: Path,
    config: PredictConfig,
    devices: Devices,
    *,
    loras: Sequence[WeightedLora],
    merge: bool,
    quantization: str,
    compare: bool,
    pages: Sequence[Path] = (),
) -> Done:
    """A PNG for each job in `folder`; to compare, one without the LoRAs too, called -without-lora.

    `pages` are written by the caller when all is drawn.
    """
    for job in jobs:
        check_count(model, len(job.controls))
    check_settings(model, config, devices)
    check_loras(model, loras, merge, quantization, tabulated=config.tabulated_modulation)
    plain = {"model": fingerprint(model), "quantization": quantization, "predict": what_counts(config)}
    with_loras = {"loras": [[content_hash(lora.file.read_bytes()), lora.weight] for lora in loras], "merge": merge}
    turns: list[tuple[list[Job], dict[str, Any]]] = [(list(jobs), {**plain, **(with_loras if loras else {})})]
    if compare and loras:
        turns.append(([replace(job, name=job.name + WITHOUT) for job in jobs], plain))
    everything = [job for turn, _ in turns for job in turn]
    check_places(everything, folder, pages)
    todo = [job for turn, about in turns for job in waiting(turn, folder, about)]
    embeds = encode(model, todo, config, devices)
    pipeline: Any = None
    if todo:
        pipeline = load_pipeline(model, config, devices, quantization=quantization, loras=loras, merge=merge)

    def drawn(job: Job) -> Image.Image:
        if job.name not in embeds:
            raise SourceError("the picture was there and is gone", where=job.name, do="run the same command again")
        there = {name: tensor.to(devices.transformer) for name, tensor in embeds[job.name].items()}
        picture: Image.Image = draw(pipeline, pictures_of(job), there, config, one_of_many=True).pictures[0]
        return picture

    made = Done([], [], [])
    for number, (turn, about) in enumerate(turns):
        if number and pipeline is not None:
            pipeline.disable_lora()
        done = run_jobs(turn, drawn, folder, about)
        made = Done(made.written + done.written, made.skipped + done.skipped, made.failed + done.failed)
    return made


def check_places(jobs: Sequence[Job], folder: Path, pages: Sequence[Path]) -> None:
    """Nothing that is drawn takes the place of another picture, or of one that is drawn about."""
    for page in filter(os.path.lexists, pages):
        hash_in(page)  # it was drawn here
    places = {path.resolve() for path in paths_of(jobs, folder)}
    if taken := places & {page.resolve() for page in pages}:
        raise SourceError("a row is called like the page beside its picture", where=min(taken), do="rename the row")
    for job in jobs:
        for picture in (*job.controls, *([job.target] if job.target else [])):
            if isinstance(picture, File) and Path(str(picture)).resolve() in places:
                raise ConfigError(
                    "a picture would be drawn over one that it is about", where=picture, do="name another --out"
                )


def encode(
    model: ModelFolder, jobs: Sequence[Job], config: PredictConfig, devices: Devices
) -> dict[str, dict[str, torch.Tensor]]:
    """What the pipeline takes in place of each job's prompts, on the CPU; no encoder is left behind.

    A job whose pictures cannot be read has none: it will fail when it is drawn.
    """
    encoder = PromptEncoder(model, devices.text, getattr(torch, config.dtype), config.offload)
    negative_prompt = config.negative_prompt if config.true_cfg_scale > 1 else None
    found = {}
    with counting("encoding prompts", len(jobs)) as advance:
        for job in jobs:
            try:
                found[job.name] = encoder.arguments(pictures_of(job), job.prompt, negative_prompt)
            except SourceError:
                found[job.name] = {}
            advance(1)
    encoder.free()
    return found


def compared(jobs: Sequence[Job], folder: Path, *, with_lora: bool, failed: Sequence[Problem]) -> list[tuple[Job, Row]]:
    """What was drawn, beside what it was drawn from and what it should be."""
    rows = []
    lost = {name for job in jobs for name in (job.name, job.name + WITHOUT) if any(_is_about(p, name) for p in failed)}
    for job in jobs:
        paths = [folder / f"{job.name}{suffix}.png" for suffix in (("", WITHOUT) if with_lora else ("",))]
        if not all(path.is_file() for path in paths) or lost & {job.name, job.name + WITHOUT}:
            continue
        pictures = [Image.open(path).convert("RGB") for path in paths]
        new, old = (pictures[0], pictures[1]) if with_lora else (None, pictures[0])
        target = pictures_of(replace(job, controls=(job.target,)))[0] if job.target else None
        rows.append((job, Row(tuple(pictures_of(job)), old, new, target)))
    return rows


def _is_about(problem: Problem, name: str) -> bool:
    return problem.where == name or problem.where.startswith(f"{name}: ")


def what_counts(config: PredictConfig) -> dict[str, Any]:
    """The settings without those that change no picture."""
    idle = {"offload"} | ({"true_cfg_scale"} if config.negative_prompt is None else set())
    return config.model_dump(mode="json", exclude=idle | ({"num_inference_steps"} if config.sigmas else set()))


def fingerprint(model: ModelFolder) -> str:
    """Of a model's files by name, size and time: reading them would take longer than drawing."""
    folders = [model.part(name) for name in PARTS if (model.path / name).is_dir()]
    files = [(folder.name, path) for folder in folders for path in sorted(folder.iterdir()) if path.is_file()]
    stats = [(part, path.name, path.stat()) for part, path in files]
    return content_hash(json.dumps([[part, name, s.st_size, s.st_mtime_ns] for part, name, s in stats]).encode())


# ---- from a cache ----------------------------------------------------------------------------------------------------


def draw_samples(
    model: ModelFolder,
    cache: Cache,
    samples: Sequence[Sample],
    config: PredictConfig,
    devices: Devices,
    *,
    loras: Sequence[WeightedLora],
    merge: bool,
    quantization: str,
    compare: bool,
) -> Iterator[Row]:
    """Each sample drawn from its embeddings; to compare, without the LoRAs too, and its own pictures decoded."""
    guidance = guidance_from_cache(config.negative_prompt, config.true_cfg_scale)
    check_settings(model, config, devices)
    check_loras(model, loras, merge, quantization, tabulated=config.tabulated_modulation)
    check_cache(cache, model, json.loads((model.part("transformer") / "config.json").read_text(encoding="utf-8")))
    dtype = getattr(torch, config.dtype)
    pipeline = load_pipeline(model, config, devices, quantization=quantization, loras=loras, merge=merge)
    turns = 2 if compare and loras else 1
    steps = len(config.sigmas or ()) or config.num_inference_steps
    with Signals() as signals, counting("drawing", len(samples) * turns * steps) as advance:

        def on_step(_: int) -> None:
            advance(1)
            if signals.stop:
                raise KeyboardInterrupt

        def drawn(sample: Sample) -> Image.Image:
            with memory_for("denoising", devices.transformer):
                latents = draw_cached(
                    sample,
                    pipeline.transformer,
                    FlowMatchEulerDiscreteScheduler.from_config(pipeline.scheduler.config),
                    num_inference_steps=config.num_inference_steps,
                    true_cfg_scale=guidance,
                    sigmas=config.sigmas,
                    latents=initial_latents(sample, config.seed, dtype),
                    device=devices.transformer,
                    dtype=dtype,
                    on_step=on_step,
                )
            return decode_pictures(pipeline.vae, latents, sample.img_shapes[:1])[0]

        for sample in samples:
            row = Row(with_lora=drawn(sample)) if loras else Row(without_lora=drawn(sample))
            if turns == 2:
                pipeline.disable_lora()
                row = replace(row, without_lora=drawn(sample))
                pipeline.enable_lora()
            yield with_its_own_pictures(row, sample, pipeline.vae) if compare else row
    pipeline.maybe_free_model_hooks()


def with_its_own_pictures(row: Row, sample: Sample, vae: Any) -> Row:
    """Beside what is drawn, the controls and the target, decoded."""
    target, controls = sample.img_shapes[:1], sample.img_shapes[1:]
    decoded = decode_pictures(vae, sample["control_latents"], controls) if controls else []
    return replace(row, controls=tuple(decoded), target=decode_pictures(vae, sample["image_latents"], target)[0])
