"""Training, top to bottom: `prepare` sets a run up, `Steps` trains, `train_started` is the loop around it.

Loads only the transformer: no VAE, no text encoder, no pipeline. It reads the cache, and writes weights that the stock
pipeline loads. A run that is stopped and resumed equals an uninterrupted one. `preflight` has made all checks that
need no torch. An error of one process before the first step ends all of them, and is printed once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from rich.progress import Progress

from qwen_cache.console import console, progress, verbatim
from qwen_cache.models.devices import choose_device, torch_dtype
from qwen_cache.models.folder import read_config
from qwen_cache.plain_text import plain
from qwen_cache.settings.load import CONFIG_NAME, Config
from qwen_cache.settings.train import TrainConfig
from qwen_cache.storage.durable import make_folder, write_durably
from qwen_train.checkpoint import Run, load_checkpoint, restoring, save_checkpoint, save_result
from qwen_train.data.batches import Batch, Batches
from qwen_train.data.planning import check_cache, unusual_controls
from qwen_train.data.samples import open_samples
from qwen_train.data.validation_cache import check_validation_cache
from qwen_train.flow import NoiseSchedule
from qwen_train.launch import Launch
from qwen_train.lora.adapter import start_from
from qwen_train.lora.assistant import ASSISTANT, add_assistant, read_assistant, without
from qwen_train.loss import compute_loss, with_teacher, zero_loss
from qwen_train.memory.exhausted import memory_for_training
from qwen_train.metrics import MetricsLog, StepStats, Throughput, progress_text
from qwen_train.model.ema import Ema
from qwen_train.model.modulation import tabulate
from qwen_train.model.offload import offload_blocks
from qwen_train.model.sharding import check_shardable, full_tensor, wrap
from qwen_train.nonfinite import NonFiniteGuard
from qwen_train.optimizers import (
    apply_settings,
    evaluation_weights,
    make_optimizer,
    optimizer_class,
    schedule_warning,
)
from qwen_train.preflight import starting
from qwen_train.processes import all_gather_object, connect, together
from qwen_train.report import RUN_FACTS_NAME, renew_report
from qwen_train.resumable import ASSISTANT_LORA, CACHE, TRANSFORMER, fixed_settings
from qwen_train.run_summary import distilled_warning, print_memory, print_plan, run_facts, settings_changed
from qwen_train.signals import Signals, any_process
from qwen_train.start import Start
from qwen_train.tracked_images import takes_images
from qwen_train.validation import Validation, evaluating, make_validation, noised_samples
from qwen_train.validation_images import ValidationImages, make_validation_images
from qwen_train.weights import compute_dtype, load_transformer, prepare_for_training, trainable, with_layout

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
    images: ValidationImages | None
    decoder: Any
    """The `Decoder` of validation.vae_device, whose module knows the VAE; None without, and in all but one process."""


def train(config: Config, *, resume: bool = False, encode_from: str | None = None) -> Path:
    """Train on the cache of `config`, or on samples encoded from the source `encode_from`; the path of the result.

    Raises KeyboardInterrupt after SIGINT or SIGTERM, once the current step is finished and saved.
    """
    with starting(config, Launch.of_environment(), resume=resume, source=encode_from) as start:
        return train_started(start)


def train_started(start: Start) -> Path:
    """`train` for a run that has passed the checks of `preflight`."""
    p = prepare(start)
    run, accelerator, settings = p.run, p.accelerator, p.config.train
    log, stream = MetricsLog(p.out, accelerator, p.config, run.step), p.batches.starting_at(run.consumed_samples)
    memory = memory_for_training(accelerator.device)
    with closing(log), closing(stream), memory, Signals() as signals, progress() as bar:
        saved = take_steps(p, log, Steps(p, stream), signals, bar)
    if run.step > saved:
        save(p)
    if run.step < settings.max_steps:
        console().print(f"stopped after step {run.step}; to continue:\n  {plain(start.resume_command)}", markup=False)
        leave(accelerator)
        raise KeyboardInterrupt
    path = save_result(p.out, run, p.dtype if settings.method == "full" else torch.float32)
    if accelerator.is_main_process:
        renew_report(p.out)
    leave(accelerator)
    return path


def take_steps(p: Prepared, log: MetricsLog, steps: Steps, signals: Signals, bar: Progress) -> int:
    """Train, validate, log and save until the last step or a signal to stop; the step of the last checkpoint."""
    run, settings, saved, stop = p.run, p.config.train, p.run.step, False
    is_left = run.step < settings.max_steps
    task = bar.add_task("training", total=settings.max_steps, completed=run.step, count="", visible=is_left)
    if run.step == 0 and p.images:
        bar.update(task, count="generating images before the first step")  # a baseline for later images
        generate_images(p, p.images)
    while run.step < settings.max_steps and not stop:
        values = steps.next()
        count = progress_text(run.step, settings.max_steps, values, steps.throughput)
        bar.update(task, completed=run.step, count=count)
        validation_losses = validate(p)
        log.write(run.step, values | validation_losses, always=bool(validation_losses))
        stop = any_process(p.accelerator, signals.stop)
        save_requested = any_process(p.accelerator, signals.take_save())
        if save_requested or run.step % settings.checkpointing_steps == 0:
            log.sync()
            saved = save(p)
        if save_requested:
            bar.console.print(f"saved checkpoint-{saved}", highlight=False)
    return saved


class Steps:
    """The optimizer steps of a run, one after the other."""

    def __init__(self, p: Prepared, stream: Generator[Batch]) -> None:
        self.p, self.stream = p, stream
        self.guard = NonFiniteGuard(p.config.train.on_nan == "skip")
        self.throughput = Throughput(p.batches.plan.in_epoch)

    def next(self) -> dict[str, float]:
        """Train batches until a step is taken; its metrics."""
        run, stats, began, before = self.p.run, StepStats(), time.monotonic(), self.p.run.consumed_samples
        while True:
            wait_began = time.monotonic()
            batch = next(self.stream)
            stats.waited += time.monotonic() - wait_began
            with self.p.accelerator.accumulate(self.p.transformer):
                self._backward(batch, stats)
                if not self.p.accelerator.sync_gradients:
                    continue
                total = stats.reduced(self.p.accelerator)
                norm = self._gradient_norm(total)
                gradient = f"the gradient of step {run.step + 1}"
                if total.loss_scale and not self.guard.skips(self.p.accelerator, gradient, norm, stats.labels):
                    learning_rate = self._update()
                    break
                run.optimizer.zero_grad()  # drop the whole step; the next batches repeat it
                stats = StepStats(waited=stats.waited, skipped_batches=stats.skipped_batches)
        run.step += 1
        took, trained = time.monotonic() - began, run.consumed_samples - before
        self.throughput.add(trained, took)
        values = {
            "loss": total.loss / total.loss_scale,
            "learning_rate": learning_rate,
            "grad_norm": norm,
            "tokens_per_second": total.tokens / took,
            "samples_per_second": trained / took,
            "data_wait": total.waited / took,
        }
        return values | ({"skipped_batches": total.skipped_batches} if self.guard.skip else {})

    def _backward(self, batch: Batch, stats: StepStats) -> None:
        """Add the gradient of a batch; the step's gradient is the mean over its samples."""
        p, run = self.p, self.p.run
        batch, settings = batch.to(p.accelerator.device, p.dtype), p.config.train
        loss = compute_loss(p.transformer, with_teacher(run.transformer, batch, settings, p.accelerator), settings)
        value, run.consumed_samples = float(loss.detach()), batch.consumed_samples
        if self.guard.skips(p.accelerator, f"the loss of step {run.step + 1}", value, batch.labels):
            loss, stats.skipped_batches = zero_loss(p.transformer, batch), stats.skipped_batches + 1
        else:
            stats.add(batch, value)
        p.accelerator.backward(batch.loss_scale * loss)

    def _gradient_norm(self, total: StepStats) -> float:
        """Clip the gradient; its norm before clipping."""
        settings = self.p.config.train
        if total.skipped_batches and total.loss_scale:  # the mean over the remaining samples
            scale_gradients(self.p.parameters, batches_per_step(self.p, settings) / total.loss_scale)
        clipped_to = settings.max_grad_norm or math.inf
        return float(full_tensor(self.p.accelerator.clip_grad_norm_(self.p.parameters, clipped_to)))

    def _update(self) -> float:
        """Update the weights; the learning rate of this step."""
        run = self.p.run
        learning_rate = float(run.lr_scheduler.get_last_lr()[0])
        run.optimizer.step()
        if run.ema:
            run.ema.update()
        run.lr_scheduler.step()
        run.optimizer.zero_grad()
        return learning_rate


def leave(accelerator: Accelerator) -> None:
    """Close the connection between the processes once it is idle.

    To release the tensors that it gathered last, gloo's thread needs the interpreter. DDP's destructor holds the
    interpreter while it waits for that thread (torch 2.13), forever unless the thread gets a moment first.
    """
    accelerator.wait_for_everyone()
    if accelerator.num_processes > 1:
        time.sleep(GLOO_SECONDS)
    accelerator.end_training()


def save(p: Prepared) -> int:
    """Write a checkpoint and return its step; every process takes part."""
    save_checkpoint(p.out, p.run, p.config.train.checkpoints_total_limit)
    if p.accelerator.is_main_process:
        renew_report(p.out)
    return p.run.step


def validate(p: Prepared) -> dict[str, float]:
    """Validation losses, and images, if qwen.yaml schedules them after this step; {} without losses."""
    losses = dict[str, float]()
    if p.validation and p.validation.measures_loss(p.run.step):
        device = p.accelerator.device
        with evaluation_weights(p.run.optimizer), evaluating(p.transformer):
            losses = p.validation.losses(
                lambda batch: compute_loss(p.transformer, batch.to(device, p.dtype)), p.accelerator
            )
    if p.images and p.images.due(p.run.step):
        generate_images(p, p.images)
    return losses


def generate_images(p: Prepared, images: ValidationImages) -> None:
    """The images of this step, by the averaged weights if there are any; every process takes part."""
    averaged = p.run.ema.swapped() if p.run.ema else evaluation_weights(p.run.optimizer)
    assisted = nullcontext() if p.config.validation.assistant_lora else without(p.transformer, ASSISTANT)
    with averaged, evaluating(p.transformer), assisted:
        images.write(p.out, p.run.step, p.transformer, p.accelerator, p.dtype)
    if p.config.validation.vae_device:
        p.accelerator.wait_for_everyone()  # for the images of all processes
        with together():
            if p.decoder:
                from qwen_train.watch import show_new_images

                show_new_images(p.out, p.decoder, p.accelerator.trackers)


def batches_per_step(p: Prepared, settings: TrainConfig) -> int:
    """Micro-batches per optimizer step, over all processes; their loss scales sum to this number."""
    return settings.gradient_accumulation_steps * p.batches.world_size


def scale_gradients(parameters: list[torch.nn.Parameter], factor: float) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


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
    config = with_layout(start.config, accelerator.device, start.out if start.newest else None)
    set_seed(settings.seed)
    with memory_for_training(accelerator.device):
        with together():
            batches, validation, images = make_batches(start, config, accelerator)
            transformer = load_for_training(start, config, batches, accelerator)
            decoder = load_decoder(start, config) if accelerator.is_main_process else None
        if settings.tabulated_modulation:
            held_out = validation.samples if validation else ()
            sigmas = [noised.draws[0].sigma for sample in held_out for noised in noised_samples(sample)]
            tabulate(transformer, start.model.transformer_weights, batches.schedule, sigmas)
        if settings.offload_blocks:
            offload_blocks(transformer, settings.offload_blocks, accelerator.device)
        transformer = wrap(accelerator, transformer, settings)
    (weights, assistant), changed = all_gather_object((start.weights, start.assistant_hash))[0], list[str]()
    hashes = {TRANSFORMER: weights, CACHE: batches.cache.identity} | ({ASSISTANT_LORA: assistant} if assistant else {})
    with together():
        run = start_run(config, accelerator.unwrap_model(transformer), accelerator, hashes)
    run.origin = {"model": start.model.public_name, "pipeline": start.model.pipeline, "cache": batches.cache.identity}
    if start.assistant:
        run.origin["assistant_lora"] = f"{start.assistant.file.name}, {assistant}"
    if start.model.transformer is not None:
        run.origin["transformer"] = Path(start.model.transformer).name
    if start.newest:
        changed = settings_changed(start.out / CONFIG_NAME, config)
        load_checkpoint(start.newest, run)
        with together(), restoring(start.newest):
            apply_settings(config, run.optimizer, run.lr_scheduler)
    parameters, dtype = trainable(run.transformer), compute_dtype(settings)
    p = Prepared(
        config, start.out, accelerator, transformer, dtype, parameters, run, batches, validation, images, decoder
    )
    with together():
        if accelerator.is_main_process:
            announce(p, start, changed)
    return p


def make_batches(
    start: Start, config: Config, accelerator: Accelerator
) -> tuple[Batches, Validation | None, ValidationImages | None]:
    """The batches of this process, and the losses and images that are scheduled."""
    samples = start.samples or open_samples(config, start.source)
    if start.samples is None and start.validation_cache is not None:
        check_validation_cache(start.validation_cache, samples, config.validation)
    scheduler = read_config(start.model.component("scheduler") / "scheduler_config.json")
    schedule, ranks = NoiseSchedule.of_config(scheduler), accelerator.num_processes
    batches = Batches(samples, config.train, schedule, rank=accelerator.process_index, world_size=ranks)
    images = make_validation_images(config, batches, start.validation_cache, scheduler)
    return batches, make_validation(config, batches), images


def announce(p: Prepared, start: Start, changed: list[str]) -> None:
    """Write the settings and facts of the run, and print them."""
    plan = p.batches.plan.summary(p.batches.world_size, p.config.train.gradient_accumulation_steps)
    make_folder(p.out)
    write_durably(p.out / CONFIG_NAME, p.config.to_yaml().encode("utf-8"))
    write_durably(p.out / RUN_FACTS_NAME, run_facts(p.batches, plan, p.parameters, p.accelerator))
    print_plan(p.config, p.batches, plan, p.parameters, p.accelerator, p.run.step, p.images)
    samples = p.batches.cache
    with_controls = int((samples.token_counts()[0] > samples.target_tokens()).sum())
    notices = (
        distilled_warning(start.model) if start.assistant is None else None,
        unusual_controls(start.model, with_controls, len(samples)),
        schedule_warning(p.config, p.run.optimizer),
    )
    for line in filter(None, notices):
        console().print(plain(line), markup=False)
    if changed:
        console().print(f"[bold]changed[/] from here on: {verbatim(', '.join(changed))}")
    transformer = start.model.transformer_config
    print_memory(p.config, p.batches, transformer, p.accelerator.device.type, start.validation_cache)


def load_for_training(start: Start, config: Config, batches: Batches, accelerator: Accelerator) -> Any:
    """The transformer in training mode; `train.lora.weights` applies to a new run only."""
    settings, folder = config.train, start.model.component("transformer")
    assistant = read_assistant(start.assistant, settings, folder) if start.assistant else None
    transformer = load_transformer(start.model, config, accelerator.device)
    if start.samples is None:
        check_cache(batches.cache, start.model, transformer.config)
    check_shardable(transformer, settings, accelerator.num_processes)
    prepare_for_training(transformer, settings)
    if settings.method == "lora" and settings.lora.weights is not None and start.newest is None:
        start_from(transformer, Path(settings.lora.weights))
    if assistant:
        add_assistant(transformer, assistant, compute_dtype(settings))
    if settings.compile:
        transformer.compile_repeated_blocks()
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
