"""The sections of qwen.yaml that `qwen-train run` reads, and `mask_head`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from qwen_cache.settings.batching import BatchConfig
from qwen_cache.settings.section import Beta, Fraction, NotNegative, Positive, Section


class LoraConfig(Section):
    rank: Positive = 16
    """The rank of the update matrices."""
    lora_alpha: float | None = None
    """The update is scaled by lora_alpha / rank; the rank when not given."""
    lora_dropout: Fraction = 0.0
    """Dropout in front of the update."""
    target_modules: list[str] | str = ["to_q", "to_k", "to_v", "to_out.0"]
    """Names of modules, or one regular expression, as peft takes them."""
    use_rslora: bool = False
    """Scale by lora_alpha / √rank (arXiv 2312.03732)."""
    use_dora: bool = False
    """Learn the size of each weight vector apart from its direction (arXiv 2402.09353); for unquantised weights."""
    init_lora_weights: Literal["gaussian", True] = "gaussian"
    """Of A, with B zero: gaussian, as diffusers' trainers, or true for peft's own (Kaiming, uniform)."""
    weights: str | None = None
    """A LoRA to begin with, of the same rank, alpha and target modules: its file, or the folder that `run` wrote."""


class WeightedCache(Section):
    path: str
    """The folder of the cache, or a URL."""
    recipe: str | None = None
    """The name of the recipe, where it holds more than one."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """How often a sample comes in an epoch: 2 repeats each, 0.5 takes half of them, the other half in the next."""


class TrainConfig(BatchConfig):
    output_dir: str = "out"
    """Where checkpoints and the LoRA go."""
    method: Literal["lora", "full"] = "lora"
    """lora: an adapter. full: every weight, kept in float32; the result goes to output_dir/transformer."""
    caches: list[WeightedCache] = []
    """Several caches in place of cache.path: [{path: a, weight: 2}, {path: b, weight: 0.5}]."""
    max_steps: Positive = 1000
    """Optimizer steps."""
    gradient_accumulation_steps: Positive = 1
    """Forward passes before each optimizer step."""
    gradient_checkpointing: bool | Positive = True
    """Recompute activations in the backward pass: a third more time, a small part of the memory; n: each nth block."""
    offload_blocks: NotNegative = 0
    """How many of the blocks wait in the host's memory for their turn to compute; LoRA with checkpointing only."""
    tabulated_modulation: bool = False
    """Read the modulation from a table, made once, in place of loading its weights, a third of all; bf16 LoRA only."""
    compile: bool = False
    """torch.compile of the blocks: minutes at the start, then faster steps."""
    fsdp: bool = False
    """Several processes hold the weights in parts (FSDP2), in place of all weights each (DDP)."""
    ema_decay: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Keep an exponential moving average of what is trained, saved beside it with _ema in its name; 0: none."""
    mixed_precision: Annotated[Literal["bf16", "no"], BeforeValidator(lambda v: "no" if v is False else v)] = "bf16"
    """bf16: products and frozen weights in bfloat16, what is trained and optimizer in float32. no: all in float32."""
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """Gradients are clipped to this norm; 0 leaves them alone."""
    caption_dropout: Fraction = 0.1
    """How often a sample is trained with its own empty prompt."""
    timestep_sampling: Literal["uniform", "logit_normal", "mode"] = "logit_normal"
    """How u is drawn before the resolution's shift."""
    logit_mean: float = 0.0
    """Mean of logit_normal."""
    logit_std: float = 1.0
    """Standard deviation of logit_normal."""
    mode_scale: Annotated[float, Field(ge=-1, le=1.75)] = 1.29
    """Scale of mode; beyond these bounds its density leaves (0, 1)."""
    weighting: Literal["none", "sigma_sqrt", "cosmap"] = "none"
    """What a sample's noise level counts in the loss, as diffusers has it: a factor, not normalised."""
    loss_mean: Literal["samples", "tokens"] = "samples"
    """What counts the same in an optimizer step: every sample, or every token of their targets."""
    edit_mask_weight: Annotated[float, Field(gt=0)] = 1.0
    """Weight of tokens inside the edit mask, against 1 outside; normalised by the sum of weights."""
    checkpointing_steps: Positive = 500
    """A checkpoint every so many steps; the last step makes one too."""
    on_nan: Literal["stop", "skip"] = "stop"
    """What a loss that is not a number does: stop the run, or leave that batch out of its step."""
    checkpoints_total_limit: NotNegative = 3
    """How many of the newest checkpoints to keep; 0 keeps all."""
    lora: LoraConfig = LoraConfig()


class MaskHeadConfig(Section):
    """`qwen-train mask-head`."""

    steps: Positive = 3000
    batch_size: Positive = 8
    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    """For a few hundred masks, 1e-3 learns faster."""
    base: Positive = 64
    """The width of its first stage: 64 makes 7.6 M parameters on the 784 heads of the 7B encoder."""
    size: Positive = 64
    """The longer side of the masks that it draws, in cells."""
    validation_split: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Which part of the targets is held out, by their hash."""
    device: str = "auto"
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0


class OptimizerConfig(Section):
    name: str = "adamw"
    """adamw, adamw8bit (bitsandbytes), adafactor, prodigy (prodigyopt), or the import path of a class."""
    arguments: dict[str, Any] = {}
    """More of what that class takes, such as {momentum: 0.9}."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    """prodigy finds its own, which this scales: set 1."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    weight_decay: Annotated[float, Field(ge=0)] = 1e-2
    eps: Annotated[float, Field(gt=0)] = 1e-8


class LrSchedulerConfig(Section):
    name: Literal["constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial"] = (
        "constant"
    )
    """As diffusers names them."""
    warmup_steps: NotNegative = 0
    num_cycles: Positive = 1
    """For cosine_with_restarts."""
    power: float = 1.0
    """For polynomial."""


class LoggingConfig(Section):
    tracker: Literal[
        "tensorboard", "wandb", "trackio", "aim", "comet_ml", "mlflow", "clearml", "dvclive", "swanlab", "none"
    ] = "tensorboard"
    """Where curves go, by accelerate: tensorboard into train.output_dir/logs; the others need their own package."""
    project: str = "qwen-train"
    """The project in the tracker; tensorboard has none."""
    run_name: str | None = None
    """The run in the tracker, the name of train.output_dir when not given; for tensorboard a folder in logs."""
    every_steps: Positive = 1
    """Which steps are written to metrics.jsonl and the tracker: every one, or every nth."""


class ValidationConfig(Section):
    every_steps: Positive | None = None
    """The loss of samples outside training, every so many steps; never when not given."""
    samples: Positive = 16
    """Of how many of them."""
    pictures: NotNegative = 0
    """Of how many of them the transformer draws pictures, as latents for `qwen-train decode`."""
    picture_steps: Positive = 500
    """Pictures every so many steps."""
    num_inference_steps: Annotated[int, Field(ge=2)] = 20
    """Denoising steps of a picture."""
    true_cfg_scale: Annotated[float, Field(ge=1)] = 1.0
    """Classifier-free guidance against the sample's own empty prompt; 1 is without, in half the time."""
