"""Training, top to bottom: `Steps` trains, `take_steps` is the loop around it; `training/prepare.py` sets up a run.

Loads only the transformer: no VAE, no text encoder, no pipeline. It reads the cache, and writes weights that the stock
pipeline loads. A run that is stopped and resumed equals an uninterrupted one. `training/start.py` has made all checks
that need no torch. An error of one process before the first step ends all of them, and is printed once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float
from rich.progress import Progress
from torch import Tensor

from qwen_cache.errors import QwenCacheError, TrainError, first_line
from qwen_cache.settings.load import Config
from qwen_cache.settings.sections import TrainConfig
from qwen_cache.storage.files import write_durably
from qwen_cache.terminal import console, plural, progress
from qwen_cache.text import plain
from qwen_train.data.batches import Batch
from qwen_train.lora.adapter import ASSISTANT, TRAINED, at_strength, without
from qwen_train.memory.exhausted import memory_for_training
from qwen_train.model.compilation import is_of_compiler
from qwen_train.model.placement import full_tensor
from qwen_train.run import GENERATE, RUN_FACTS_NAME, SAMPLE, SAVE, Launch, Requests, Signals, ToEncode
from qwen_train.training.checkpoint import save_checkpoint, save_result
from qwen_train.training.loss import (
    NonFiniteGuard,
    compute_loss,
    pair_losses,
    with_direction,
    with_reference,
    with_teacher,
    zero_loss,
)
from qwen_train.training.metrics import MetricsLog, StepStats, Throughput, progress_text
from qwen_train.training.optimizers import evaluation_weights
from qwen_train.training.prepare import Prepared, make_batches, note_commits, plan_summary, prepare, run_facts
from qwen_train.training.processes import each_in_any_process, leave, together
from qwen_train.training.report import renew_report
from qwen_train.training.start import Start, starting
from qwen_train.training.validation import Validation, ValidationImages, evaluating, mean_losses, preferences


def train(config: Config, *, resume: bool = False, to_encode: ToEncode | None = None) -> Path:
    """Train on the cache of `config`, or on samples that are encoded for it; the path of the result.

    Raises KeyboardInterrupt after SIGINT or SIGTERM, once the current step is finished and saved.
    """
    with starting(config, Launch.of_environment(), resume=resume, to_encode=to_encode) as start:
        return train_started(start)


def train_started(start: Start) -> Path:
    """`train` for a run that has passed the checks of `training/start.py`."""
    p = prepare(start)
    run, accelerator, settings = p.run, p.accelerator, p.config.train
    log = MetricsLog(p.out, accelerator, p.config, run.step)
    memory = memory_for_training(accelerator.device)
    with closing(log), closing(Steps(p)) as steps, memory, Signals() as signals, progress() as bar:
        take_steps(p, log, steps, signals, start.requests, bar)
    if run.step > p.saved:
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


def take_steps(p: Prepared, log: MetricsLog, steps: Steps, signals: Signals, requests: Requests, bar: Progress) -> None:
    """Train, validate, log and save until the last step or a signal to stop; generate and save when asked to."""
    run, settings, stop = p.run, p.config.train, False
    is_left = run.step < settings.max_steps
    task = bar.add_task("training", total=settings.max_steps, completed=run.step, count="", visible=is_left)
    if run.step == 0 and (p.images or p.validation):
        bar.update(task, count="validating before the first step")  # a baseline
        if losses := validate(p):
            log.write(0, losses, always=True)
    while run.step < settings.max_steps and not stop:
        values = steps.next()
        count = progress_text(run.step, settings.max_steps, values, steps.throughput)
        bar.update(task, completed=run.step, count=count)
        if p.images and p.images.due(run.step):
            bar.update(task, count=f"{count}\ngenerating images")
        validation_losses, is_new = validate(p), p.follower is not None and p.follower.begins(run.step)
        log.write(run.step, values | validation_losses, always=bool(validation_losses) or is_new)
        asked = signals.stop, requests.take(SAVE), requests.take(SAMPLE)
        stop, save_requested, images_requested = each_in_any_process(p.accelerator, asked)
        if save_requested or run.step % settings.checkpointing_steps == 0:
            log.sync()
            save(p)
        if save_requested:
            bar.console.print(f"saved checkpoint-{p.saved}", highlight=False)
            requests.take(SAVE)  # in one of several processes it may arrive a step later
        if images_requested and not stop:
            bar.update(task, count=f"{count}\ngenerating images")
            bar.console.print(images_now(p), highlight=False)
            requests.take(SAMPLE)


class Steps:
    """The optimizer steps of a run, one after the other."""

    def __init__(self, p: Prepared) -> None:
        self.p = p
        skip = p.config.train.on_nan == "skip"
        self.losses, self.gradients = NonFiniteGuard(skip), NonFiniteGuard(skip)
        self.throughput = Throughput(p.batches.plan.in_epoch)
        self.stream: Generator[Batch] | None = None

    def close(self) -> None:
        if self.stream:
            self.stream.close()

    def next(self) -> dict[str, float]:
        """A step, and its metrics. It begins again without what the run chose by itself and what has failed: blocks
        and attention that are not recomputed, by lack of memory, and compiled blocks."""
        run, consumed, micro_batches = self.p.run, self.p.run.consumed_samples, self.p.accelerator.step
        try:
            return self._step()
        except torch.OutOfMemoryError:
            if not self.p.recompute_more():
                raise
            told = "ran out of memory: more is recomputed from here on"
        except RuntimeError as error:
            if not is_of_compiler(error):
                raise
            reason = first_line(getattr(error, "inner_exception", error))
            if not self.p.stop_compiling():
                do = "set train.compile=false"
                raise TrainError("the blocks could not be compiled", found=reason, do=do) from error
            told = f"could not be compiled ({reason}): blocks are not compiled from here on"
        self.close()
        self.stream, run.consumed_samples, self.p.accelerator.step = None, consumed, micro_batches
        run.optimizer.zero_grad()
        console().print(plain(f"step {run.step + 1} {told}"), markup=False)
        return self.next()

    def _step(self) -> dict[str, float]:
        """Train batches until a step is taken; its metrics."""
        run, stats, began, before = self.p.run, StepStats(), time.monotonic(), self.p.run.consumed_samples
        while True:
            wait_began = time.monotonic()
            batch = self._next_batch()
            stats.waited += time.monotonic() - wait_began
            with self.p.accelerator.accumulate(self.p.transformer):
                self._backward(batch, stats)
                if not self.p.accelerator.sync_gradients:
                    continue
                total = stats.reduced(self.p.accelerator)
                norm = self._gradient_norm(total)
                gradient = f"the gradient of step {run.step + 1}"
                if total.loss_scale and not self.gradients.skips(self.p.accelerator, gradient, norm, stats.labels):
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
        values |= {"cache_samples": len(self.p.batches.cache)} if self.p.follower else {}
        return values | ({"skipped_batches": total.skipped_batches} if self.losses.skip else {})

    def _next_batch(self) -> Batch:
        """The next batch; a stream ends with an epoch if the next one may be of another commit, else never."""
        while True:
            if self.stream and (batch := next(self.stream, None)):
                return batch
            take_in_commit(self.p)
            self.throughput.in_epoch = self.p.batches.plan.in_epoch
            self.stream = self.p.batches.starting_at(self.p.run.consumed_samples)

    def _backward(self, batch: Batch, stats: StepStats) -> None:
        """Add the gradient of a batch; the step's gradient is the mean over its samples."""
        p, run = self.p, self.p.run
        batch, settings = batch.to(p.accelerator.device, p.dtype), p.config.train
        taught = with_teacher(run.transformer, batch, settings, p.accelerator)
        directed = with_direction(run.transformer, taught, settings, p.accelerator)
        with at_strength(run.transformer, TRAINED, batch.strength):  # blocks are recomputed in the backward pass
            loss = compute_loss(p.transformer, with_reference(run.transformer, directed, settings), settings)
            value, run.consumed_samples = float(loss.detach()), batch.consumed_samples
            if self.losses.skips(p.accelerator, f"the loss of step {run.step + 1}", value, batch.labels):
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


def take_in_commit(p: Prepared) -> None:
    """At the end of an epoch take in what was committed to the cache meanwhile; every process takes part.

    A commit that is refused ends the run, once its steps are saved.
    """
    done, plan = p.run.consumed_samples, p.batches.plan
    if p.follower is None or not plan.enters_an_epoch(done, batches_per_step(p, p.config.train)):
        return
    make = partial(make_batches, p.start, p.config, p.accelerator)
    try:
        made = p.follower.look(plan.next_begin(done), p.run.step + 1, make)
    except QwenCacheError:
        if p.run.step > p.saved:
            save(p)
        raise
    if made:
        p.batches, p.validation, p.images = made
        note_commits(p.run, p.follower)
        if p.accelerator.is_main_process:
            write_durably(p.out / RUN_FACTS_NAME, run_facts(p, plan_summary(p)))


def save(p: Prepared) -> None:
    """Write a checkpoint; every process takes part."""
    save_checkpoint(p.out, p.run, p.config.train.checkpoints_total_limit)
    if p.accelerator.is_main_process:
        renew_report(p.out)
    p.saved = p.run.step


def validate(p: Prepared) -> dict[str, float]:
    """Validation losses, and images, if qwen.yaml schedules them after this step; {} without losses."""
    losses = dict[str, float]()
    if p.validation and p.validation.measures_loss(p.run.step, p.config.train.max_steps):
        strengths = (1.0, -1.0) if p.config.train.slider.direction else (1.0,)
        with evaluation_weights(p.run.optimizer), evaluating(p.transformer):
            measured = torch.stack([losses_at(p, p.validation, each) for each in strengths]).mean(dim=0)
            gained = None if p.config.train.dpo.beta is None else gained_by_targets(p, p.validation, measured)
        pairs = None if gained is None else pair_losses(measured, gained, p.config.train.dpo)
        if p.accelerator.is_main_process:
            p.validation.write(p.out, p.run.step, measured, pairs)
        losses = mean_losses(measured) | ({} if gained is None else preferences_told(p.run.step, gained))
    if p.images and p.images.due(p.run.step):
        generate_images(p, p.images)
    return losses


def losses_at(p: Prepared, validation: Validation, strength: float) -> Float[Tensor, "N 4"]:
    """The validation losses of the LoRA at a strength, which is -1 only for sliders: then of what it learns there."""
    settings = p.config.train

    def loss_of(batch: Batch) -> Tensor:
        batch = replace(batch.to(p.accelerator.device, p.dtype), strength=strength)
        return compute_loss(p.transformer, with_direction(p.run.transformer, batch, settings, p.accelerator))

    with at_strength(p.run.transformer, TRAINED, strength):
        return validation.losses(loss_of, p.accelerator, rejected=strength < 0 and settings.trains_rejected)


def gained_by_targets(p: Prepared, validation: Validation, losses: Float[Tensor, "N 4"]) -> Float[Tensor, "N 4"]:
    """How much more the LoRA has added to the loss of the target of each held-out pair than to that of its rejected
    image, so that less is better; `losses` are those of the targets."""

    def loss_of(batch: Batch) -> Tensor:
        return compute_loss(p.transformer, batch.to(p.accelerator.device, p.dtype))

    rejected = validation.losses(loss_of, p.accelerator, rejected=True)
    with without(p.transformer, TRAINED):
        reference = [validation.losses(loss_of, p.accelerator, rejected=which) for which in (False, True)]
    return (losses - reference[0]) - (rejected - reference[1])


def preferences_told(step: int, gained: Float[Tensor, "N 4"]) -> dict[str, float]:
    """The accuracy of preference and its margin, which are printed."""
    values, pairs = preferences(gained), plural(len(gained), "held-out pair")
    accuracy, margin = values.values()
    text = f"step {step}: preference accuracy {accuracy:.2f}, margin {margin:+.2g}, of {pairs}"
    console().print(text, highlight=False)
    return values


def images_now(p: Prepared) -> str:
    """Generate the images of this step because they are asked for, unless they are there; a line that says so."""
    if p.images is None:
        return f"no images to generate: {GENERATE}"
    if not p.images.due(p.run.step):
        generate_images(p, p.images)
    return f"generated the images of step {p.run.step}"


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
                decode_images(p)


def decode_images(p: Prepared) -> None:
    """Decode the images that were generated; on the CPU from the first one on that does not fit on the device."""
    from qwen_train.training.watch import show_new_images

    try:
        show_new_images(p.out, p.decoder, p.accelerator.trackers)
        return
    except torch.OutOfMemoryError:
        if p.decoder.device.type == "cpu":
            raise
    told = f"{p.decoder.device} has too little memory to decode images beside training: they are decoded on the CPU"
    console().print(told, highlight=False)
    p.decoder = replace(p.decoder, device=torch.device("cpu"))
    show_new_images(p.out, p.decoder, p.accelerator.trackers)


def batches_per_step(p: Prepared, settings: TrainConfig) -> int:
    """Micro-batches per optimizer step, over all processes; their loss scales sum to this number."""
    return settings.gradient_accumulation_steps * p.batches.world_size


def scale_gradients(parameters: list[torch.nn.Parameter], factor: float) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)
