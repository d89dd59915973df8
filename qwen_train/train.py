"""Training, top to bottom: `prepare` sets a run up, `train` is the loop.

Loads only the transformer: no VAE, no text encoder, no pipeline. It reads the cache, and writes weights that the stock
pipeline loads. A run that is stopped and resumed equals an uninterrupted one. A second run in the same output folder is
refused while the first lasts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import parse_flag_from_env, set_seed

from qwen_cache.batching.batch_plan import sequence_settings
from qwen_cache.console import console, counting, progress, verbatim
from qwen_cache.errors import ConfigError, TrainError
from qwen_cache.format.manifest import MANIFEST_NAME
from qwen_cache.models.folder import WEIGHTS, ModelFolder, fingerprint, open_model, read_config
from qwen_cache.plain_text import plain
from qwen_cache.settings.load import CONFIG_NAME, Config
from qwen_cache.settings.train import TrainConfig
from qwen_cache.storage.durable import LockHeldError, NoLocksError, locked, make_folder, write_durably
from qwen_train.checkpoint import (
    TRANSFORMER,
    Run,
    checkpoints,
    load_checkpoint,
    restoring,
    save_checkpoint,
    save_result,
)
from qwen_train.data.batches import Batch, Batches
from qwen_train.data.samples import Samples, open_samples
from qwen_train.flow import NoiseSchedule, flow_loss, interpolate
from qwen_train.lora.adapter import start_from
from qwen_train.memory.exhausted import memory_for_training
from qwen_train.metrics import MetricsLog, StepStats, Throughput, check_tracker, progress_text
from qwen_train.model.ema import Ema
from qwen_train.model.modulation import tabulate
from qwen_train.model.offload import offload_blocks
from qwen_train.model.sharding import all_gather_object, full_tensor, wrap
from qwen_train.nonfinite import NonFiniteGuard
from qwen_train.optimizers import apply_settings, make_optimizer
from qwen_train.report import RUN_FACTS_NAME, renew_report
from qwen_train.run_summary import distilled_warning, print_memory, print_plan, run_facts, settings_changed
from qwen_train.signals import Signals, any_process
from qwen_train.validation import Validation, evaluating, make_validation, noised_samples
from qwen_train.weights import (
    check_cache,
    compute_dtype,
    load_transformer,
    prepare_for_training,
    trainable,
    with_layout,
)

TRANSFORMER_PARTS = ("transformer", "scheduler")
LOCK = ".lock"
GLOO_SECONDS = 0.5  # long enough for a waiting thread to get the interpreter, on a busy machine too


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to start or to continue."""

    config: Config
    """With the layout that was chosen."""
    out: Path
    accelerator: Accelerator
    transformer: Any
    dtype: torch.dtype
    parameters: list[torch.nn.Parameter]
    run: Run
    batches: Batches
    validation: Validation | None


def train(config: Config, *, resume: bool = False, encode_from: str | None = None) -> Path:
    """Train on the cache of `config`, or on samples encoded from the source `encode_from`; the path of the result.

    Raises KeyboardInterrupt after SIGINT or SIGTERM, once the current step is finished and saved.
    """
    with only_run(Path(config.train.output_dir)):
        return _train(config, resume, encode_from)


@contextmanager
def only_run(out: Path) -> Iterator[None]:
    """Keep other runs out of the output folder until the end of the block, by a lock that the main process holds.

    Raises TrainError in every process if another run has the lock, OSError if the folder cannot be made. Where files
    cannot be locked the run goes ahead, with a warning: all its files are written whole and checked when read, so a
    second run costs time but cannot mix up a checkpoint. A new folder that is still empty at the end is removed.
    """
    if out.exists() and not out.is_dir():
        raise ConfigError("not a folder", where=out, do="set train.output_dir")
    if (out / MANIFEST_NAME).exists():
        raise ConfigError("this folder is a cache", where=out, do="set train.output_dir to another")
    problem: str | OSError | None = None
    is_new = not out.exists()
    with ExitStack() as held:
        if PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU")).is_main_process:  # as Accelerator asks for it
            try:
                make_folder(out)
                if is_new:
                    held.callback(_remove_empty, out)
                held.enter_context(locked(out / LOCK, remove=True))
            except LockHeldError as error:
                problem = error.holder
            except NoLocksError as error:
                (out / LOCK).unlink(missing_ok=True)
                text = f"warning: {out}: files cannot be locked here ({error.strerror}): start no second run in it"
                console().print(text, style="yellow", markup=False)
            except OSError as error:
                problem = error
        problem = all_gather_object(problem)[0]
        if isinstance(problem, OSError):
            raise problem
        if problem:
            do = "wait for it, or stop it first; or set another train.output_dir"
            raise TrainError("another run is writing to this folder", where=out, found=problem, do=do)
        yield


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _train(config: Config, resume: bool, encode_from: str | None) -> Path:
    p = prepare(config, resume, encode_from)
    config, settings = p.config, p.config.train
    run, accelerator, optimizer, lr_scheduler = p.run, p.accelerator, p.run.optimizer, p.run.lr_scheduler
    stream = p.batches.starting_at(run.consumed_samples)
    log = MetricsLog(p.out, accelerator, config, run.step)
    guard, throughput = NonFiniteGuard(settings.on_nan == "skip"), Throughput(p.batches.plan.in_epoch)
    saved, stop = run.step, False

    memory = memory_for_training(accelerator.device)
    with closing(log), closing(stream), memory, Signals() as signals, progress() as bar:
        is_left = run.step < settings.max_steps
        task = bar.add_task("training", total=settings.max_steps, completed=run.step, count="", visible=is_left)
        if run.step == 0 and p.validation and p.validation.generates_images(0):
            bar.update(task, count="generating images before the first step")  # to compare the later ones with
            generate_images(p, p.validation)
        stats, began, before = StepStats(), time.monotonic(), run.consumed_samples
        while run.step < settings.max_steps and not stop:
            wait_began = time.monotonic()
            batch = next(stream)
            stats.waited += time.monotonic() - wait_began
            with accelerator.accumulate(p.transformer):
                batch = batch.to(accelerator.device, p.dtype)
                loss = compute_loss(p.transformer, batch)
                value, run.consumed_samples = float(loss.detach()), batch.consumed_samples
                if guard.skips(accelerator, f"the loss of step {run.step + 1}", value, batch.labels):
                    loss, stats.skipped_batches = zero_loss(p.transformer, batch), stats.skipped_batches + 1
                else:
                    stats.add(batch, value)
                accelerator.backward(batch.loss_scale * loss)  # the step's gradient is the mean over its samples
                if not accelerator.sync_gradients:
                    continue
                total = stats.reduced(accelerator)
                if total.skipped_batches and total.loss_scale:  # the mean over the remaining samples
                    scale_gradients(p.parameters, batches_per_step(p, settings) / total.loss_scale)
                norm = float(full_tensor(accelerator.clip_grad_norm_(p.parameters, settings.max_grad_norm or math.inf)))
                gradient = f"the gradient of step {run.step + 1}"
                if not total.loss_scale or guard.skips(accelerator, gradient, norm, stats.labels):
                    optimizer.zero_grad()  # drop the whole step; the next batches repeat it
                    stats = StepStats(waited=stats.waited, skipped_batches=stats.skipped_batches)
                    continue
                learning_rate = lr_scheduler.get_last_lr()[0]
                optimizer.step()
                if run.ema:
                    run.ema.update()
                lr_scheduler.step()
                optimizer.zero_grad()
            run.step += 1
            took, trained = time.monotonic() - began, run.consumed_samples - before
            values = {
                "loss": total.loss / total.loss_scale,
                "learning_rate": learning_rate,
                "grad_norm": norm,
                "tokens_per_second": total.tokens / took,
                "samples_per_second": trained / took,
                "data_wait": total.waited / took,
            }
            if guard.skip:
                values["skipped_batches"] = total.skipped_batches
            throughput.add(trained, took)
            bar.update(task, completed=run.step, count=progress_text(run.step, settings.max_steps, values, throughput))
            validation_losses = validate(p)
            log.write(run.step, values | validation_losses, always=bool(validation_losses))
            stop = any_process(accelerator, signals.stop)
            save_requested = any_process(accelerator, signals.take_save())
            if save_requested or run.step % settings.checkpointing_steps == 0:
                log.sync()
                saved = save(p, settings.checkpoints_total_limit)
            if save_requested and accelerator.is_main_process:
                bar.console.print(f"saved checkpoint-{saved}", highlight=False)
            stats, began, before = StepStats(), time.monotonic(), run.consumed_samples
    if run.step > saved:
        save(p, settings.checkpoints_total_limit)
    if run.step < settings.max_steps:
        console().print(f"stopped after step {run.step}; `qwen-train run --resume` continues from there")
        leave(accelerator)
        raise KeyboardInterrupt
    path = save_result(p.out, run, p.dtype if settings.method == "full" else torch.float32)
    if accelerator.is_main_process:
        renew_report(p.out)
    leave(accelerator)
    return path


def leave(accelerator: Accelerator) -> None:
    """Close the connection between the processes once it is idle.

    To release the tensors that it gathered last, gloo's thread needs the interpreter. DDP's destructor holds the
    interpreter while it waits for that thread (torch 2.13), forever unless the thread gets a moment first.
    """
    accelerator.wait_for_everyone()
    if accelerator.num_processes > 1:
        time.sleep(GLOO_SECONDS)
    accelerator.end_training()


def save(p: Prepared, keep: int) -> int:
    """Write a checkpoint and return its step; every process takes part."""
    save_checkpoint(p.out, p.run, keep)
    if p.accelerator.is_main_process:
        renew_report(p.out)
    return p.run.step


def validate(p: Prepared) -> dict[str, float]:
    """Validation losses, and images, if qwen.yaml schedules them after this step; {} without losses."""
    v, losses = p.validation, dict[str, float]()
    if v is None:
        return losses
    if v.measures_loss(p.run.step):
        device = p.accelerator.device
        with evaluating(p.transformer):
            losses = v.losses(lambda batch: compute_loss(p.transformer, batch.to(device, p.dtype)), p.accelerator)
    if v.generates_images(p.run.step):
        generate_images(p, v)
    return losses


def generate_images(p: Prepared, validation: Validation) -> None:
    """The validation images of this step; every process takes part."""
    with evaluating(p.transformer):
        validation.generate_images(p.out, p.run.step, p.transformer, p.accelerator, p.dtype)


def batches_per_step(p: Prepared, settings: TrainConfig) -> int:
    """Micro-batches per optimizer step, over all processes; their loss scales sum to this number."""
    return settings.gradient_accumulation_steps * p.batches.world_size


def scale_gradients(parameters: list[torch.nn.Parameter], factor: float) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


def compute_loss(transformer: Any, batch: Batch) -> torch.Tensor:
    """The flow-matching loss of a batch, which is on the transformer's device."""
    sigma = batch.sigma if batch.token_sigma is None else batch.token_sigma
    noisy = interpolate(batch.clean, batch.noise, sigma, batch.is_target)
    layout = {} if batch.image_positions is None else {"image_positions": batch.image_positions}
    velocity = transformer(
        hidden_states=noisy.to(batch.prompt_embeds.dtype),
        encoder_hidden_states=batch.prompt_embeds,
        encoder_hidden_states_mask=batch.prompt_embeds_mask,
        timestep=batch.sigma,
        img_shapes=batch.img_shapes,
        return_dict=False,
        **layout,
    )[0]
    return flow_loss(velocity, batch.clean, batch.noise, batch.weight, batch.sample_weight)


def zero_loss(transformer: Any, batch: Batch) -> torch.Tensor:
    """The loss of a skipped batch: zero, with zero gradients, computed on zeros.

    Processes wait for one another's gradients, so the backward pass cannot be skipped.
    """
    latents, prompt_embeds = torch.zeros_like(batch.clean), torch.zeros_like(batch.prompt_embeds)
    return 0 * compute_loss(transformer, replace(batch, clean=latents, noise=latents, prompt_embeds=prompt_embeds))


def prepare(config: Config, resume: bool, encode_from: str | None = None) -> Prepared:
    """Load the transformer, add the LoRA, and load the newest checkpoint if there is one."""
    settings, out = config.train, Path(config.train.output_dir)
    earlier = checkpoints(out)
    if earlier and not resume:
        raise ConfigError(
            "this folder already holds a run",
            where=out,
            found=earlier[-1][1].name,
            do="continue with --resume, or set train.output_dir",
        )
    check_tracker(config.logging.report_to)
    cache = open_samples(config, encode_from)
    model = open_model(config.model.path, TRANSFORMER_PARTS, config.model.revision)
    distilled = distilled_warning(model)
    accelerator = Accelerator(
        mixed_precision=settings.mixed_precision,
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
        log_with=config.logging.report_to if config.logging.report_to != "none" else None,
        project_dir=str(out),
    )
    config = with_layout(config, accelerator.device, out if earlier else None)
    settings = config.train
    transformer_config = read_config(model.component("transformer") / "config.json")
    scheduler = read_config(model.component("scheduler") / "scheduler_config.json")
    schedule = NoiseSchedule.of_config(scheduler)
    batches = Batches(cache, settings, schedule, rank=accelerator.process_index, world_size=accelerator.num_processes)
    validation = make_validation(config, batches, scheduler)
    weights = hash_transformer(model, accelerator)
    set_seed(settings.seed)
    with memory_for_training(accelerator.device):
        transformer = load_for_training(config, model, cache, accelerator.device, is_new=not earlier)
        if settings.tabulated_modulation:
            held_out = validation.samples if validation else ()
            sigmas = [noised.draws[0].sigma for sample in held_out for noised in noised_samples(sample)]
            tabulate(transformer, model.component("transformer"), schedule, sigmas)
        if settings.offload_blocks:
            offload_blocks(transformer, settings.offload_blocks, accelerator.device)
        transformer = wrap(accelerator, transformer, settings)
    run = start_run(config, accelerator.unwrap_model(transformer), accelerator, cache.identity, weights)
    run.origin = {"model": public_name(model), "pipeline": model.pipeline, "cache": cache.identity}
    changed = settings_changed(out / CONFIG_NAME, config) if earlier else []
    if earlier:
        load_checkpoint(earlier[-1][1], run)
        with restoring(earlier[-1][1]):
            apply_settings(config, run.optimizer, run.lr_scheduler)
    parameters = trainable(run.transformer)
    if accelerator.is_main_process:
        plan = batches.plan.summary(batches.world_size, settings.gradient_accumulation_steps)
        make_folder(out)
        write_durably(out / CONFIG_NAME, config.to_yaml().encode("utf-8"))
        write_durably(out / RUN_FACTS_NAME, run_facts(batches, plan, parameters, accelerator))
        print_plan(config, batches, plan, parameters, accelerator, run.step)
        if distilled:
            console().print(plain(distilled), markup=False)
        if changed:
            console().print(f"[bold]changed[/] from here on: {verbatim(', '.join(changed))}")
        print_memory(config, batches, transformer_config, accelerator.device.type)
    accelerator.wait_for_everyone()
    return Prepared(
        config, out, accelerator, transformer, compute_dtype(settings), parameters, run, batches, validation
    )


def load_for_training(config: Config, model: ModelFolder, cache: Samples, device: torch.device, *, is_new: bool) -> Any:
    """The transformer in training mode; `train.lora.weights` applies to a new run only."""
    settings = config.train
    transformer = load_transformer(model, config, device)
    check_cache(cache, model, transformer.config)
    if cache.has_index:
        check_empty_prompts(cache, settings.caption_dropout)
    prepare_for_training(transformer, settings)
    if settings.method == "lora" and settings.lora.weights is not None and is_new:
        start_from(transformer, Path(settings.lora.weights))
    if settings.compile:
        transformer.compile_repeated_blocks()
    return transformer


def hash_transformer(model: ModelFolder, accelerator: Accelerator) -> str:
    """The hash of the transformer's files, which the main process reads if they have changed since the last run."""
    digest, folder = "", model.component("transformer")
    if accelerator.is_main_process:
        total = sum(path.stat().st_size for path in folder.iterdir() if path.name.endswith(WEIGHTS) and path.exists())
        with counting("hashing the transformer", total, in_bytes=True, transient=True) as advance:
            digest = fingerprint([folder], on_bytes=advance)
    return all_gather_object(digest)[0]


def start_run(config: Config, transformer: Any, accelerator: Accelerator, cache: str, weights: str) -> Run:
    """The run at step 0: its optimizer, and the settings that a checkpoint must share with it."""
    settings, parameters = config.train, trainable(transformer)
    optimizer, lr_scheduler = make_optimizer(config, parameters)
    fixed: dict[str, Any] = {TRANSFORMER: weights, "model.quantization": config.model.quantization}
    fixed |= {"cache": cache, "seed": settings.seed, "train.method": settings.method}
    if settings.method == "lora":
        fixed["lora"] = settings.lora.model_dump(mode="json", exclude={"weights"})
    fixed |= {"optimizer.name": config.optimizer.name, "train.ema_decay": settings.ema_decay}
    fixed |= sequence_settings(settings)
    ema = Ema(parameters, settings.ema_decay) if settings.ema_decay else None
    set_seed(settings.seed, device_specific=True)  # each process samples its own dropout
    return Run(transformer, accelerator.prepare_optimizer(optimizer), lr_scheduler, fixed, ema=ema)


def check_empty_prompts(cache: Samples, caption_dropout: float) -> None:
    """Refuse caption dropout where samples lack the empty prompt; an imported cache may lack it."""
    missing = cache.column("empty_prompt_embeds").null_count
    if caption_dropout and missing:
        raise TrainError(
            "caption dropout needs the embeddings of the empty prompt, which this cache lacks",
            where=cache.folder,
            found=f"{missing} of {len(cache)} samples without them, train.caption_dropout={caption_dropout}",
            do="set train.caption_dropout=0, or run `qwen-cache build` on the images",
        )


def public_name(model: ModelFolder) -> str:
    """The model's name in files that users share: of a local path, only the last part."""
    return model.name if not Path(model.name).exists() else Path(model.name).resolve().name
