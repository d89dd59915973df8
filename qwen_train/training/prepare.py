"""Setting up a run: transformer, data and optimizer on their devices, and what is printed before the first step."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from qwen_cache.batching import BEGIN, Begin, Summary
from qwen_cache.errors import ConfigError, DeviceError, ModelError
from qwen_cache.models.devices import choose_device, torch_dtype, total_memory
from qwen_cache.models.family import family_of_transformer
from qwen_cache.models.folder import ModelFolder
from qwen_cache.models.hardware import device_title, host_memory
from qwen_cache.settings.load import CONFIG_NAME, Config, load_saved
from qwen_cache.settings.sections import TrainConfig
from qwen_cache.storage.files import make_folder, write_durably
from qwen_cache.terminal import console, human_bytes, plural, verbatim
from qwen_cache.text import plain
from qwen_train.data.batches import Batches
from qwen_train.data.checks import check_cache, unused_parts, unusual_controls
from qwen_train.data.samples import Samples, open_samples
from qwen_train.data.validation_cache import check_validation_cache
from qwen_train.flow import NoiseSchedule
from qwen_train.lora.adapter import add_assistant, read_assistant, start_from
from qwen_train.lora.files import adapter_title, find_start, sha256_of
from qwen_train.lora.reader import read_lora
from qwen_train.memory.choice import (
    CHECKPOINTING,
    CHOSEN,
    QUANTISATION,
    Candidate,
    Machine,
    Open,
    candidates,
    choose,
)
from qwen_train.memory.cost import card_of
from qwen_train.memory.exhausted import memory_for_training
from qwen_train.memory.pieces import Device
from qwen_train.memory.plan import largest_batch, largest_image
from qwen_train.memory.prediction import PARTS, SAFE, changed, predict_memory, spread
from qwen_train.model.combinations import with_layout
from qwen_train.model.compilation import compile_blocks, uncompile_blocks, with_compile
from qwen_train.model.kernels import Choice, capability_of, checked, choose_kernel, refuse_kernel
from qwen_train.model.loading import tabulate
from qwen_train.model.placement import Ema, check_plain, held_bytes, offload_blocks, wrap
from qwen_train.run import RUN_FACTS_NAME, VALIDATION_IMAGES, Launch
from qwen_train.training.checkpoint import Run, load_checkpoint, restoring
from qwen_train.training.follow import Follower
from qwen_train.training.metrics import takes_images
from qwen_train.training.optimizers import apply_settings, make_optimizer, optimizer_class, schedule_warning
from qwen_train.training.processes import all_gather_object, connect, together
from qwen_train.training.start import ASSISTANT_LORA, CACHE, TRANSFORMER, Start, fixed_settings
from qwen_train.training.validation import (
    Validation,
    ValidationImages,
    forget_validation,
    make_validation,
    make_validation_images,
    noised_samples,
)
from qwen_train.weights import (
    checkpoint_blocks,
    compute_dtype,
    load_transformer,
    prepare_for_training,
    trainable,
)

# ---- run summary -----------------------------------------------------------------------------------------------------
# The summary that a run prints before training, and the facts for its report: data, batches, steps, memory.


def print_plan(
    config: Config,
    batches: Batches,
    plan: Summary,
    parameters: list[torch.nn.Parameter],
    accelerator: Accelerator,
    step: int,
    images: ValidationImages | None,
    attention: Choice | None,
) -> None:
    """Print what will be trained, by which kernel of attention, and which images show it."""
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
    if attention:
        out.print(f"[bold]attention[/] {verbatim(attention)}", highlight=False)
    if t.assistant_lora is not None:
        use = "" if not images else ", images with it" if v.assistant_lora else ", images without it"
        out.print(f"[bold]assistant[/] {verbatim(t.assistant_lora)}: frozen, left out of the result{use}")
    out.print(f"[bold]batches[/]  {plan}", highlight=False)
    parts = zip(t.caches, cache.parts(batches.training), strict=False)  # encoding on the fly reads no caches
    if taught := sum(len(part.samples) for entry, part in parts if entry.teacher):
        out.print(f"[bold]teacher[/]  the model without the LoRA, for {plural(taught, 'sample')}", highlight=False)
    if t.dpo.beta is not None:
        of_dpo = f"DPO with beta {t.dpo.beta:g}, and as reference the model without the LoRA"
        out.print(f"[bold]pairs[/]    a target and a rejected image in each sample: {of_dpo}", highlight=False)
    if t.slider.direction:
        of_images = "strength 1 learns the targets, -1 the rejected images"
        of_prompts = f"{t.slider.guidance_strength:g} times the difference between two prompts of each sample"
        out.print(f"[bold]slider[/]   {of_images if t.slider.direction == 'images' else of_prompts}", highlight=False)
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
    """A line on what training would do to a distilled model; None for another. ModelError as `sample_sigmas`."""
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
        before = load_saved(earlier).flat()
    except ConfigError:
        return []
    return [f"{name} {before[name]} → {value}" for name, value in config.flat().items() if before[name] != value]


def print_memory(
    config: Config,
    batches: Batches,
    transformer: dict[str, Any],
    device: str,
    validation_cache: Samples | None,
    processes: int,
) -> None:
    """Print the memory of the largest batch, or of the largest image if that takes more; with FSDP2 that of a process.

    Only where `qwen-train plan` can predict it.
    """
    if not batches.cache.has_index:
        return
    batch, _ = largest_batch(batches.cache, batches.config, batches)
    image = largest_image(validation_cache)
    with suppress(ModelError):  # a quantisation that is not known
        kind: Device = "cpu" if device == "cpu" else "accelerator"
        memory = predict_memory(transformer, config, batch, kind, image, processes)
        sizes = {words: getattr(memory, part) for part, words in PARTS.items()}
        parts = ", ".join(f"{words} {human_bytes(size)}" for words, size in sizes.items() if size)
        console().print(f"[bold]memory[/]   about {human_bytes(memory.total)}: {parts}", highlight=False)


def print_choice(chosen: Candidate, config: Config, given: Config, layers: int) -> None:
    """Print how the model is held in memory, where that was left to the run."""
    if given.train.memory == "auto":
        console().print(f"[bold]memory[/]   train.memory=auto: {verbatim(chosen.words(given))}", highlight=False)
    but = " but for their attention" if chosen.keeps_attention else ""
    host = f", and {human_bytes(chosen.host_memory)} of host memory" if chosen.host_memory else ""
    recomputed = f"{chosen.recomputed} of {layers} blocks are recomputed{but}"
    console().print(f"[bold]memory[/]   about {human_bytes(chosen.memory)}{host}: {recomputed}", highlight=False)


def run_facts(p: Prepared, plan: Summary) -> bytes:
    """The report's facts about the data and the run, as JSON."""
    cache, accelerator = p.batches.cache, p.accelerator
    facts = {
        "cache": str(cache.folder),
        "identity": cache.identity,
        "pipeline": " and ".join(cache.pipelines),
        "samples": len(cache),
        "samples_for_validation": len(p.batches.validation),
        VALIDATION_IMAGES: p.images.count if p.images else 0,
        "samples_in_an_epoch": plan.in_epoch,
        "batches_in_an_epoch": plan.batches,
        "tokens_of_a_batch": plan.tokens,
        "padding": f"{100 * plan.padding:.1f} %",
        "trainable_parameters": sum(parameter.numel() for parameter in p.parameters),
        "device": f"{accelerator.num_processes} × {accelerator.device.type}",
    }
    return json.dumps(facts, indent=1).encode("utf-8")


# ---- prepare ---------------------------------------------------------------------------------------------------------
# A run set up: the transformer loaded, the adapter added, the checkpoint to continue from loaded, all of it announced.
#
# Loads only the transformer: no VAE (unless the run decodes its images), no text encoder, no pipeline. An error of one
# process ends all of them, and is printed once. `start.py` has made all checks that need no torch.


@dataclass
class Prepared:
    """A run that is ready to start or to continue. Taking in a commit replaces batches, validation and images."""

    start: Start
    config: Config
    """With the layout that was chosen, and what train.memory and train.compile have become."""
    out: Path
    accelerator: Accelerator
    transformer: Any
    dtype: torch.dtype
    parameters: list[torch.nn.Parameter]
    run: Run
    batches: Batches
    validation: Validation | None
    images: ValidationImages | None
    decoder: Any
    """The `Decoder` of validation.vae_device, whose module knows the VAE; None without, and in all but one process."""
    follower: Follower | None
    """With train.follow, which looks for new commits of the cache."""
    saved: int
    """The step of the last checkpoint."""

    def stop_compiling(self) -> bool:
        """Compute without compiled blocks from now on; False where that changes nothing, was not left to the run by
        train.compile=auto, or there are other processes."""
        transformer = self.run.transformer
        alone = self.accelerator.num_processes == 1
        if not (alone and transformer.is_compiled and self.start.config.train.compile == "auto"):
            return False
        recomputed = transformer.recomputed_blocks
        uncompile_blocks(transformer)
        checkpoint_blocks(transformer, [i for i, b in enumerate(transformer.transformer_blocks) if b in recomputed])
        return True

    def recompute_more(self) -> bool:
        """Recompute attention from now on, and with train.gradient_checkpointing=auto all blocks, after the memory did
        not suffice; False if that changes nothing, or there are other processes, which would wait for this one."""
        transformer = self.run.transformer
        if self.accelerator.num_processes > 1:
            return False
        kept = transformer.is_compiled and transformer.keeps_attention and bool(transformer.recomputed_blocks)
        transformer.keeps_attention = False
        layers = len(transformer.transformer_blocks)
        chosen = self.config.train.gradient_checkpointing == "auto" and len(transformer.recomputed_blocks) < layers
        if chosen:
            checkpoint_blocks(transformer, range(layers))
        return kept or chosen


def prepare(start: Start) -> Prepared:
    """Load the transformer, add the LoRA, and load the checkpoint to continue from if there is one."""
    connect(start.launch)
    settings, report_to = start.config.train, start.config.logging.report_to
    accelerator = Accelerator(
        mixed_precision=settings.mixed_precision,
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
        log_with=report_to if report_to != "none" else None,
        project_dir=str(start.out),
    )
    with together():
        optimizer_class(start.config)  # refused before the transformer is loaded
    before = start.out if start.newest else None
    config = with_layout(start.config, accelerator.device, before)
    with together():
        config, not_compiled = with_compile(config, accelerator.device, config.train.max_steps, before)
        by_segments = goes_by_segments(config, start.model)
        refuse_kernel(config.train, accelerator.device, by_segments=by_segments)
    set_seed(settings.seed)
    follower = Follower.beginning(start, is_main=accelerator.is_main_process) if settings.follow else None
    samples, begin = (follower.samples, follower.taken[-1].begin) if follower else (None, Begin())
    machine = this_machine(accelerator, start.launch) if is_left_open(config.train) else None
    with memory_for_training(accelerator.device):
        with together():
            batches, validation, images = make_batches(start, config, accelerator, samples, begin)
            config, chosen = choose_memory(start, config, batches, machine)
            settings = config.train
            attention = choose_attention(config, batches, accelerator.device, start.model) if by_segments else None
            transformer = load_for_training(start, config, batches, accelerator, chosen)
            if attention:
                transformer.attention_kernel = attention.kernel
            decoder = load_decoder(start, config) if accelerator.is_main_process else None
        if settings.tabulated_modulation:
            held_out = validation.samples if validation else ()
            sigmas = [noised.draws[0].sigma for sample in held_out for noised in noised_samples(sample)]
            tabulate(transformer, start.model.transformer_weights, batches.schedule, sigmas)
        if settings.offload_blocks:
            offload_blocks(transformer, settings.offload_blocks, accelerator.device)
        transformer = wrap(accelerator, transformer, settings)
    (weights, assistant), differing = all_gather_object((start.weights, start.assistant_hash))[0], list[str]()
    hashes = {TRANSFORMER: weights, CACHE: start.cache_identity or batches.cache.identity} | (
        {ASSISTANT_LORA: assistant} if assistant else {}
    )
    with together():
        run = start_run(config, accelerator.unwrap_model(transformer), accelerator, hashes)
    run.origin = {"model": start.model.public_name, "pipeline": start.model.pipeline, "cache": batches.cache.identity}
    if start.assistant:
        run.origin["assistant_lora"] = f"{start.assistant.file.name}, {assistant}"
        run.origin["assistant_lora_sha256"] = sha256_of(start.assistant.file)
        if start.assistant.address:
            run.origin["assistant_lora_from"] = start.assistant.address
    if start.model.transformer is not None:
        run.origin["transformer"] = Path(start.model.transformer).name
    if start.newest:
        differing = settings_changed(start.out / CONFIG_NAME, as_written(config, start.config))
        load_checkpoint(start.newest, run)
        with together(), restoring(start.newest):
            apply_settings(config, run.optimizer, run.lr_scheduler)
    parameters, dtype = trainable(run.transformer), compute_dtype(settings)
    if follower:
        note_commits(run, follower)
    state = transformer, dtype, parameters, run, batches, validation, images, decoder, follower, run.step
    p = Prepared(start, config, start.out, accelerator, *state)
    with together():
        if accelerator.is_main_process:
            if not_compiled:
                console().print(plain(f"blocks are not compiled: {not_compiled}"), markup=False)
            announce(p, start, differing, attention, chosen)
    return p


def this_machine(accelerator: Accelerator, launch: Launch) -> Machine | None:
    """The devices of all processes, the smallest memory for each; None where one does not say how much it has."""
    device = accelerator.device
    _, host = host_memory()
    found = total_memory(device), None if host is None else SAFE * host / launch.local_world_size
    memories, hosts = zip(*all_gather_object(found), strict=True)
    if None in memories:
        return None
    memory = min(memories)
    on_host = None if None in hosts else min(hosts)
    return Machine(card_of(device_title(str(device)), memory), SAFE * memory, on_host, accelerator.num_processes)


def is_left_open(settings: TrainConfig) -> bool:
    """True if settings leave it to the run how the model is held in memory, or whether attention is recomputed."""
    return settings.memory == "auto" or settings.gradient_checkpointing == "auto" or settings.compile is True


def choose_memory(
    start: Start, config: Config, batches: Batches, machine: Machine | None
) -> tuple[Config, Candidate | None]:
    """The settings with what train.memory=auto, train.gradient_checkpointing=auto and train.compile=auto leave to the
    run, and the candidate that was chosen; None where nothing is left open, or the memory cannot be predicted.

    Raises DeviceError if train.memory=auto finds nothing that fits.
    """
    settings, of_model = config.train, start.model.transformer_config
    is_auto, compiles = settings.memory == "auto", tuple[Any, ...]([settings.compile])
    if not is_left_open(settings):
        return config, None
    if machine is None or not batches.cache.has_index:
        why = "the device does not say how much memory it has" if machine is None else "the samples have no index"
        if is_auto and start.launch.is_main:
            console().print(f"train.memory=auto chooses nothing: {why}", highlight=False)
        return config, None
    if settings.compile and start.config.train.compile == "auto":
        compiles = (True, False)
    left_open = Open.of_run(config, machine, compiles, is_new=start.newest is None)
    batch, image = largest_batch(batches.cache, batches.config, batches)[0], largest_image(start.validation_cache)
    try:
        found = list(candidates(of_model, config, batch, machine, left_open, image))
    except ModelError:  # a quantisation that is not known
        return config, None
    choice = choose(found, config, machine)
    if is_auto and not choice.best and not choice.nearest.fits(replace(machine, memory=machine.memory / SAFE)):
        raise nothing_fits(choice.nearest, config, machine)
    chosen = choice.best[0] if choice.best else choice.nearest
    values = dict(chosen.settings)
    # left to the run, which recomputes more if the memory does not suffice
    values[CHECKPOINTING] = "auto" if is_auto else settings.gradient_checkpointing
    return changed(config, values), chosen


def nothing_fits(nearest: Candidate, config: Config, machine: Machine) -> DeviceError:
    """The error of train.memory=auto, with what comes nearest."""
    return DeviceError(
        "train.memory=auto: nothing fits that leaves the result the same",
        expected=f"at most {human_bytes(machine.memory)}, and in host memory {human_bytes(machine.host_memory or 0)}",
        found=f"{human_bytes(nearest.memory)}, and in host memory {human_bytes(nearest.host_memory)}, with "
        + nearest.words(config),
        do="`qwen-train plan --fit` names quantisations that fit, for train.memory_quantization; or set a smaller "
        "train.max_tokens",
    )


def as_written(config: Config, given: Config) -> Config:
    """The settings of a run as its folder has them: what train.memory=auto chooses is left to it, so that a resumed run
    chooses for its own GPU; but not a quantisation."""
    if config.train.memory != "auto":
        return config
    flat = given.flat()
    return changed(config, {name: flat[name] for name in CHOSEN if name != QUANTISATION})


def make_batches(
    start: Start, config: Config, accelerator: Accelerator, samples: Samples | None = None, begin: Begin = BEGIN
) -> tuple[Batches, Validation | None, ValidationImages | None]:
    """The batches of this process from `begin` on, and the losses and images that are scheduled.

    `samples` takes the place of those of `start`.
    """
    samples = samples or start.samples or open_samples(config, start.to_encode)
    if start.samples is None and start.validation_cache is not None:
        check_validation_cache(start.validation_cache, samples, config.validation)
    scheduler = start.model.scheduler_config
    schedule, ranks = NoiseSchedule.of_config(scheduler), accelerator.num_processes
    rank = accelerator.process_index
    batches = Batches(samples, config.train, schedule, rank=rank, world_size=ranks, begin=begin)
    images = make_validation_images(config, batches, start.validation_cache, scheduler)
    return batches, make_validation(config, batches), images


def announce(
    p: Prepared, start: Start, differing: list[str], attention: Choice | None, chosen: Candidate | None
) -> None:
    """Write the settings and facts of the run, remove what it repeats, and print them."""
    plan = plan_summary(p)
    make_folder(p.out)
    forget_validation(p.out, p.run.step)
    write_durably(p.out / CONFIG_NAME, as_written(p.config, start.config).to_yaml().encode("utf-8"))
    write_durably(p.out / RUN_FACTS_NAME, run_facts(p, plan))
    print_plan(p.config, p.batches, plan, p.parameters, p.accelerator, p.run.step, p.images, attention)
    samples = p.batches.cache
    with_controls = int((samples.token_counts()[0] > samples.target_tokens()).sum())
    notices = (
        distilled_warning(start.model) if start.assistant is None else None,
        unusual_controls(start.model, with_controls, len(samples)),
        *unused_parts(samples, p.config.train),
        schedule_warning(p.config, p.run.optimizer),
    )
    for line in filter(None, notices):
        console().print(plain(line), markup=False)
    if differing:
        console().print(f"[bold]changed[/] from here on: {verbatim(', '.join(differing))}")
    transformer = start.model.transformer_config
    if chosen:
        print_choice(chosen, p.config, start.config, int(transformer["num_layers"]))
    else:
        device, processes = p.accelerator.device.type, p.accelerator.num_processes
        print_memory(p.config, p.batches, transformer, device, start.validation_cache, processes)
    if p.config.train.fsdp and p.accelerator.num_processes > 1:
        held, whole = held_bytes(p.transformer)
        out = f"this process holds {human_bytes(held)} of {human_bytes(whole)} of weights"
        console().print(f"[bold]sharded[/]  {out}", highlight=False)


def plan_summary(p: Prepared) -> Summary:
    return p.batches.plan.summary(p.batches.world_size, p.config.train.gradient_accumulation_steps)


def goes_by_segments(config: Config, model: ModelFolder) -> bool:
    """True if attention is computed segment by segment: for packed rows, and for all rows of a joint sequence."""
    return config.train.layout == "packed" or family_of_transformer(model.transformer_config).joint_sequence


def choose_attention(config: Config, batches: Batches, device: torch.device, model: ModelFolder) -> Choice | None:
    """The kernel of attention, checked on the device; None where the device or the precision leaves no choice.

    Every start of a run chooses again: another kernel changes the last bits alone.
    """
    capability, settings, of_model = capability_of(device), config.train, model.transformer_config
    if capability is None or capability < (8, 0) or settings.mixed_precision != "bf16":
        return None
    tokens = batches.plan.tokens[:, batches.training]
    lengths = len(np.unique(tokens.sum(0)))
    if settings.caption_dropout:
        lengths += len(np.unique(tokens[0]))  # with the empty prompt: as many, or fewer
    per_step = settings.gradient_accumulation_steps * batches.plan.summary().samples_per_batch
    choice = choose_kernel(settings.attention, capability, lengths, settings.max_steps * per_step)
    return checked(choice, device, int(of_model["num_attention_heads"]), int(of_model["attention_head_dim"]))


def load_for_training(
    start: Start, config: Config, batches: Batches, accelerator: Accelerator, chosen: Candidate | None
) -> Any:
    """The transformer in training mode; `train.lora.weights` applies to a new run only."""
    settings, folder = config.train, start.model.component("transformer")
    assistant = read_assistant(start.assistant, settings, folder) if start.assistant else None
    first = settings.lora.weights if settings.method == "lora" and start.newest is None else None
    if first is not None:
        read_lora(find_start(Path(first)))  # refused before the transformer is loaded
    in_parts = settings.fsdp and accelerator.num_processes > 1
    transformer = load_transformer(start.model, config, accelerator.device, in_parts=in_parts)
    if start.samples is None:
        check_cache(batches.cache, start.model, transformer.config)
    prepare_for_training(transformer, settings)
    if in_parts:
        check_plain(transformer)
    transformer.keeps_attention = chosen is not None and chosen.keeps_attention
    if chosen and settings.gradient_checkpointing == "auto":
        checkpoint_blocks(transformer, spread(chosen.recomputed, len(transformer.transformer_blocks)))
    if first is not None:
        start_from(transformer, Path(first))
    if assistant:
        add_assistant(transformer, assistant, compute_dtype(settings))
    if settings.compile:
        compile_blocks(transformer)
    return transformer


def load_decoder(start: Start, config: Config) -> Any:
    """The VAE on validation.vae_device; None without."""
    if not (device := config.validation.vae_device):
        return None
    from qwen_train.inference.decode import Decoder

    decoder = Decoder(start.model, choose_device(device, "validation.vae_device"), torch_dtype(config.predict.dtype))
    takes_images(config.logging.report_to)
    return decoder


def start_run(config: Config, transformer: Any, accelerator: Accelerator, hashes: dict[str, str]) -> Run:
    """The run at step 0: its optimizer, and the settings and hashes that a checkpoint must share with it."""
    settings, parameters = config.train, trainable(transformer)
    optimizer, lr_scheduler = make_optimizer(config, parameters)
    fixed = {**hashes, **fixed_settings(config)}
    ema = Ema(parameters, settings.ema_decay) if settings.ema_decay else None
    set_seed(settings.seed, device_specific=True)  # each process samples its own dropout
    optimizer = accelerator.prepare_optimizer(optimizer)
    optimizer.train()  # where there are two modes
    return Run(transformer, optimizer, lr_scheduler, fixed, ema=ema)


def note_commits(run: Run, follower: Follower) -> None:
    """Record in the checkpoints of a run and its result the commits that it has taken in."""
    run.commits, run.origin["cache"] = [each.to_json() for each in follower.taken], follower.samples.identity
