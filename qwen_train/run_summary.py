"""The summary that a run prints before training, and the facts for its report: data, batches, steps, memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from qwen_cache.batching import Summary
from qwen_cache.errors import ConfigError
from qwen_cache.models.folder import ModelFolder
from qwen_cache.settings.load import Config, load_config
from qwen_cache.terminal import console, human_bytes, plural, verbatim
from qwen_train.data.batches import Batches
from qwen_train.data.samples import Samples
from qwen_train.lora.types import adapter_title
from qwen_train.memory.predict import PARTS, largest_batch, largest_image, predict_memory
from qwen_train.validation_images import ValidationImages


def print_plan(
    config: Config,
    batches: Batches,
    plan: Summary,
    parameters: list[torch.nn.Parameter],
    accelerator: Accelerator,
    step: int,
    images: ValidationImages | None,
) -> None:
    """Print what will be trained, and which images show it."""
    t, cache, v, out = config.train, batches.cache, config.validation, console()
    pipelines = " and ".join(cache.pipelines)
    per_step = plan.samples_per_batch * t.gradient_accumulation_steps * accelerator.num_processes
    epochs = t.max_steps * per_step / plan.in_epoch
    out.print(f"[bold]cache[/]    {verbatim(cache.folder)}: {len(cache)} samples, {verbatim(pipelines)}")
    if t.follow:
        out.print("         still growing: new commits are taken in at the ends of epochs", highlight=False)
    method = adapter_title(t.lora) if t.method == "lora" else "every weight"
    trainable = sum(parameter.numel() for parameter in parameters)
    out.print(f"[bold]training[/] {method}, {trainable:,} trainable parameters, on {accelerator.device}")
    if t.assistant_lora is not None:
        use = "" if not images else ", images with it" if v.assistant_lora else ", images without it"
        out.print(f"[bold]assistant[/] {verbatim(t.assistant_lora)}: frozen, left out of the result{use}")
    out.print(f"[bold]batches[/]  {plan}", highlight=False)
    parts = zip(t.caches, cache.parts(batches.training), strict=False)  # encoding on the fly reads no caches
    if taught := sum(len(part.samples) for entry, part in parts if entry.teacher):
        out.print(f"[bold]teacher[/]  the model without the LoRA, for {plural(taught, 'sample')}", highlight=False)
    out.print(
        f"[bold]steps[/]    {t.max_steps} of {plural(round(per_step, 1), 'sample')}: {epochs:.1f} epochs",
        highlight=False,
    )
    if held_out := len(batches.validation):
        losses = f"their loss every {plural(v.validation_steps, 'step')}" if v.validation_steps else "never measured"
        out.print(f"[bold]held out[/] {plural(held_out, 'sample')} for validation: {losses}")
    if images:
        out.print(f"[bold]images[/]   {images.summary}", highlight=False)
    if t.edit_mask_weight != 1 and cache.has_index:
        out.print(f"[bold]masks[/]    {cache.edit_masks()} of {plural(len(cache), 'sample')}", highlight=False)
    if step:
        left = "" if step < t.max_steps else ": nothing is left to train; raise train.max_steps to continue"
        out.print(f"[bold]resume[/]   after step {step}{left}")


def distilled_warning(model: ModelFolder) -> str | None:
    """What training would do to a distilled model, in one line; None for another. ModelError as `sample_sigmas`."""
    sigmas = model.sample_sigmas
    if sigmas is None:
        return None
    return (
        f"warning: {model.name} is distilled (a schedule of {plural(len(sigmas), 'sigma')}), and plain flow-matching "
        "training undoes the distillation: train a LoRA on the undistilled model, and use it with this one; or with a "
        "LoRA that undoes the distillation as train.assistant_lora"
    )


def settings_changed(earlier: Path, config: Config) -> list[str]:
    """The settings that differ from the earlier ones, as text; none where the earlier ones cannot be read."""
    try:
        before = load_config(earlier).flat()
    except ConfigError:
        return []
    return [f"{name} {before[name]} → {value}" for name, value in config.flat().items() if before[name] != value]


def print_memory(
    config: Config, batches: Batches, transformer: dict[str, Any], device: str, validation_cache: Samples | None
) -> None:
    """Print the memory of the largest batch, or of the largest image if that takes more.

    Only where `qwen-train plan` can predict it.
    """
    if not batches.cache.has_index or config.train.fsdp:
        return
    batch, _ = largest_batch(batches)
    image = largest_image(validation_cache)
    memory = predict_memory(transformer, config, batch, "cpu" if device == "cpu" else "accelerator", image)
    sizes = {words: getattr(memory, part) for part, words in PARTS.items()}
    parts = ", ".join(f"{words} {human_bytes(size)}" for words, size in sizes.items() if size)
    console().print(f"[bold]memory[/]   about {human_bytes(memory.total)}: {parts}", highlight=False)


def run_facts(batches: Batches, plan: Summary, parameters: list[torch.nn.Parameter], accelerator: Accelerator) -> bytes:
    """The report's facts about the data and the run, as JSON."""
    cache = batches.cache
    facts = {
        "cache": str(cache.folder),
        "identity": cache.identity,
        "pipeline": " and ".join(cache.pipelines),
        "samples": len(cache),
        "samples_for_validation": len(batches.validation),
        "samples_in_an_epoch": plan.in_epoch,
        "batches_in_an_epoch": plan.batches,
        "tokens_of_a_batch": plan.tokens,
        "padding": f"{100 * plan.padding:.1f} %",
        "trainable_parameters": sum(parameter.numel() for parameter in parameters),
        "device": f"{accelerator.num_processes} × {accelerator.device.type}",
    }
    return json.dumps(facts, indent=1).encode("utf-8")
