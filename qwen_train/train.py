"""Training, top to bottom: `prepare` sets a run up, `train` is the loop.

Loads the transformer and nothing else: no VAE, no text encoder, no pipeline. What it trains on comes from the cache;
what it writes is a LoRA for the stock pipeline. A run that is stopped and resumed equals one that was not.
"""

from __future__ import annotations

import json
import math
import os
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers.optimization import get_scheduler

from qwen_cache.config import CONFIG_NAME, Config
from qwen_cache.console import console, progress
from qwen_cache.format.cache import Cache, open_cache
from qwen_cache.format.directory import write_durably
from qwen_cache.format.errors import ConfigError, ModelError, TrainError
from qwen_cache.model_folder import ModelFolder, open_model
from qwen_train.batch_plan import sequence_settings
from qwen_train.batches import Batch, Batches
from qwen_train.checkpoint import Run, checkpoints, load_checkpoint, save_checkpoint
from qwen_train.flow import NoiseSchedule, flow_loss, interpolate
from qwen_train.lora import WEIGHTS_NAME, add_lora, save_lora
from qwen_train.metrics import MetricsLog
from qwen_train.on_the_fly import Feed
from qwen_train.stop import StopSignals
from qwen_train.transformer import QwenImageMultiResTransformer2DModel

TRANSFORMER_PARTS = ("transformer", "scheduler")


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to start or to go on."""

    out: Path
    accelerator: Accelerator
    transformer: Any
    dtype: torch.dtype
    parameters: list[torch.nn.Parameter]
    run: Run
    batches: Batches


def train(config: Config, *, resume: bool = False, encode_from: str | None = None) -> Path:
    """Train as `config` says, on its cache or on what is encoded from the source `encode_from`; the path of the LoRA.

    Raises KeyboardInterrupt after SIGINT or SIGTERM, once the step that it was in is done and saved.
    """
    settings = config.train
    p = prepare(config, resume, encode_from)
    run, accelerator, optimizer, lr_scheduler = p.run, p.accelerator, p.run.optimizer, p.run.lr_scheduler
    stream = p.batches.starting_at(run.samples)
    log = MetricsLog(p.out, accelerator, config.logging, run.step)
    losses: list[float] = []
    saved, waited, began, before = run.step, 0.0, time.monotonic(), run.samples

    with closing(log), closing(stream), StopSignals() as stop, progress() as bar:
        task = bar.add_task("training", total=settings.max_steps, completed=run.step, count="")
        while run.step < settings.max_steps and not (not losses and any_process(accelerator, stop.requested)):
            asked = time.monotonic()
            batch = next(stream)
            waited += time.monotonic() - asked
            with accelerator.accumulate(p.transformer):
                loss = compute_loss(p.transformer, batch.to(accelerator.device, p.dtype))
                losses.append(batch.share * check_loss(loss, batch, run.step + 1))
                run.samples = batch.done
                accelerator.backward(batch.share * loss)  # the step's gradient is the mean over its samples
                if not accelerator.sync_gradients:
                    continue
                norm = accelerator.clip_grad_norm_(p.parameters, settings.max_grad_norm or math.inf)
                learning_rate = lr_scheduler.get_last_lr()[0]
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            run.step += 1
            took, mean = time.monotonic() - began, mean_of_processes(accelerator, sum(losses) / len(losses))
            log.write(
                run.step,
                loss=mean,
                learning_rate=learning_rate,
                grad_norm=float(norm),
                samples_per_second=(run.samples - before) / took,
                data_wait=waited / took,
            )
            count = f"{run.step}/{settings.max_steps}, loss {mean:.4f}, {took:.2f} s/step"
            bar.update(task, completed=run.step, count=count)
            losses, waited, began, before = [], 0.0, time.monotonic(), run.samples
            if run.step % settings.checkpointing_steps == 0:
                saved = save(p, settings.checkpoints_total_limit)
    if run.step > saved:
        save(p, settings.checkpoints_total_limit)
    if run.step < settings.max_steps:
        console().print(f"stopped after step {run.step}; `qwen-train run --resume` goes on from there")
        raise KeyboardInterrupt
    if accelerator.is_main_process:
        save_lora(run.transformer, p.out / WEIGHTS_NAME)
    return p.out / WEIGHTS_NAME


def save(p: Prepared, keep: int) -> int:
    """Write a checkpoint, from the main process; the step that it is of."""
    if p.accelerator.is_main_process:
        save_checkpoint(p.out, p.run, keep)
    p.accelerator.wait_for_everyone()
    return p.run.step


def any_process(accelerator: Accelerator, flag: bool) -> bool:
    """Whether `flag` is set in any process: all have to leave the loop after the same step."""
    if accelerator.num_processes == 1:
        return flag
    return bool(accelerator.reduce(torch.tensor(float(flag), device=accelerator.device)) > 0)


def mean_of_processes(accelerator: Accelerator, value: float) -> float:
    """The mean of what each process has, in every one of them."""
    if accelerator.num_processes == 1:
        return value
    return float(accelerator.reduce(torch.tensor(value, device=accelerator.device), reduction="mean"))


def compute_loss(transformer: Any, batch: Batch) -> torch.Tensor:
    """The flow-matching loss of a batch on the device of the transformer."""
    noisy = interpolate(batch.clean, batch.noise, batch.sigma, batch.is_target)
    velocity = transformer(
        hidden_states=noisy.to(batch.prompt_embeds.dtype),
        encoder_hidden_states=batch.prompt_embeds,
        encoder_hidden_states_mask=batch.prompt_embeds_mask,
        timestep=batch.sigma,
        img_shapes=[list(shapes) for shapes in batch.img_shapes],
        return_dict=False,
    )[0]
    return flow_loss(velocity, batch.clean, batch.noise, batch.weight)


def check_loss(loss: torch.Tensor, batch: Batch, step: int) -> float:
    """The loss as a number; TrainError names the samples when it is none."""
    value = float(loss.detach())
    if not math.isfinite(value):
        raise TrainError(
            f"the loss of step {step} is not a number",
            found=f"{value} for the samples {', '.join(batch.keys)}",
            do="lower optimizer.learning_rate, or look at these samples with `qwen-cache inspect`",
        )
    return value


def open_samples(config: Config, encode_from: str | None) -> Cache | Feed:
    """The cache; or the source `encode_from`, of which another process encodes each sample when it is needed."""
    if encode_from is None:
        return open_cache(
            config.cache.path,
            recipe=config.cache.recipe,
            local_copies=config.cache.local_copies,
            local_copies_size=config.cache.local_copies_size,
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        do = "build a cache: `qwen-cache build`"
        raise ConfigError("--encode-on-the-fly is for one training process", found=os.environ["WORLD_SIZE"], do=do)
    return Feed(config, encode_from)


def prepare(config: Config, resume: bool, encode_from: str | None = None) -> Prepared:
    """Load the transformer, add the LoRA, and find the checkpoint to go on from."""
    settings, out = config.train, Path(config.train.output_dir)
    if out.exists() and not out.is_dir():
        raise ConfigError("not a folder", where=out, do="set train.output_dir")
    earlier = checkpoints(out)
    if earlier and not resume:
        raise ConfigError(
            "this folder already holds a run",
            where=out,
            found=earlier[-1][1].name,
            do="go on with --resume, or set train.output_dir",
        )
    cache = open_samples(config, encode_from)
    model = open_model(config.model.path, TRANSFORMER_PARTS, config.model.revision)
    accelerator = Accelerator(
        mixed_precision=settings.mixed_precision,
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
        log_with=config.logging.tracker if config.logging.tracker != "none" else None,
        project_dir=str(out),
    )
    schedule = NoiseSchedule.of_config(
        json.loads((model.part("scheduler") / "scheduler_config.json").read_text(encoding="utf-8"))
    )
    batches = Batches(cache, settings, schedule, rank=accelerator.process_index, world_size=accelerator.num_processes)
    set_seed(settings.seed)
    dtype = torch.bfloat16 if settings.mixed_precision == "bf16" else torch.float32
    transformer = load_transformer(model, dtype)
    transformer.layout = settings.layout
    check_cache(cache, model, transformer)
    if isinstance(cache, Cache):
        check_empty_prompts(cache, settings.caption_dropout)
    if settings.gradient_checkpointing:
        transformer.enable_gradient_checkpointing()
    parameters = add_lora(transformer, settings.lora)
    transformer.train()
    optimizer, lr_scheduler = make_optimizer(config, parameters)
    transformer, optimizer = accelerator.prepare(transformer, optimizer)
    fixed = {"cache": cache.identity, "seed": settings.seed, "lora": settings.lora.model_dump(mode="json")}
    fixed |= sequence_settings(settings)
    run = Run(accelerator.unwrap_model(transformer), optimizer, lr_scheduler, fixed)
    if earlier:
        load_checkpoint(earlier[-1][1], run)
    if accelerator.is_main_process:
        out.mkdir(parents=True, exist_ok=True)
        write_durably(out / CONFIG_NAME, config.to_yaml().encode("utf-8"))
    accelerator.wait_for_everyone()
    print_plan(config, batches, parameters, accelerator, run.step)
    return Prepared(out, accelerator, transformer, dtype, parameters, run, batches)


def load_transformer(model: ModelFolder, dtype: torch.dtype) -> Any:
    """The transformer of the model, frozen."""
    try:
        transformer, info = QwenImageMultiResTransformer2DModel.from_pretrained(
            model.part("transformer"), torch_dtype=dtype, use_safetensors=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"the transformer cannot be loaded: {error}", where=model.part("transformer")) from None
    if info["missing_keys"]:
        raise ModelError(
            "weights are missing",
            where=model.part("transformer"),
            found=sorted(info["missing_keys"])[0],
            do="download this part again",
        )
    return transformer


def make_optimizer(config: Config, parameters: list[torch.nn.Parameter]) -> tuple[torch.optim.Optimizer, Any]:
    """AdamW and the learning rate's schedule."""
    o, s = config.optimizer, config.lr_scheduler
    optimizer = torch.optim.AdamW(parameters, lr=o.learning_rate, betas=o.betas, weight_decay=o.weight_decay, eps=o.eps)
    try:
        lr_scheduler = get_scheduler(
            s.name,
            optimizer,
            num_warmup_steps=s.warmup_steps,
            num_training_steps=config.train.max_steps,
            num_cycles=s.num_cycles,
            power=s.power,
        )
    except ValueError as error:
        raise ConfigError(f"lr_scheduler: {error}") from None
    return optimizer, lr_scheduler


def check_cache(cache: Cache | Feed, model: ModelFolder, transformer: Any) -> None:
    """Refuse a cache that this transformer cannot have been meant for."""
    if not len(cache):
        raise TrainError("the cache has no samples", where=cache.folder, do="run `qwen-cache build`")
    pipeline = cache.recipe.recipe.get("pipeline")
    if pipeline != model.pipeline:
        raise ModelError(
            "the cache was made for another kind of model",
            where=cache.folder,
            expected=model.pipeline,
            found=pipeline,
            do="train the model that it was made for, or build a cache for this one",
        )
    if (width := cache.prompt_embeds_width) != transformer.config.joint_attention_dim:
        raise ModelError(
            "the cache's prompt embeddings do not fit the transformer",
            where=cache.folder,
            expected=f"width {transformer.config.joint_attention_dim}",
            found=f"width {width}",
            do="build the cache with the text encoder of this model",
        )


def check_empty_prompts(cache: Cache, caption_dropout: float) -> None:
    """Refuse caption dropout where samples lack what it needs: an imported cache need not have it."""
    missing = cache.table["empty_prompt_embeds"].null_count
    if caption_dropout and missing:
        raise TrainError(
            "caption dropout needs the embeddings of the empty prompt, which this cache lacks",
            where=cache.folder,
            found=f"{missing} of {len(cache)} samples without them, train.caption_dropout={caption_dropout}",
            do="set train.caption_dropout=0, or run `qwen-cache build` on the pictures",
        )


def print_plan(
    config: Config, batches: Batches, parameters: list[torch.nn.Parameter], accelerator: Accelerator, done: int
) -> None:
    """What will be trained, before it is."""
    if not accelerator.is_main_process:
        return
    t, cache = config.train, batches.cache
    plan, out = batches.plan.summary(), console()
    per_step = plan.samples_per_batch * t.gradient_accumulation_steps * accelerator.num_processes
    epochs = t.max_steps * per_step / plan.in_epoch
    out.print(f"[bold]cache[/]   {cache.folder}: {len(cache)} samples, {cache.recipe.recipe.get('pipeline')}")
    trainable = sum(parameter.numel() for parameter in parameters)
    out.print(f"[bold]LoRA[/]    rank {t.lora.rank}, {trainable:,} trainable parameters, on {accelerator.device}")
    out.print(f"[bold]batches[/] {plan}", highlight=False)
    out.print(
        f"[bold]steps[/]   {t.max_steps} of {round(per_step, 1):,g} samples: {epochs:.1f} epochs", highlight=False
    )
    if done:
        out.print(f"[bold]resume[/]  after step {done}")
