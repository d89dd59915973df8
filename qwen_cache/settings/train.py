"""The sections of qwen.yaml that `qwen-train run` reads, and `mask_head`."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from qwen_cache.errors import ConfigError
from qwen_cache.settings.batching import BatchConfig
from qwen_cache.settings.section import Beta, Fraction, Names, NotNegative, Positive, Scales, Section


def _regular_expression(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from None
    return text


Module = Annotated[str, AfterValidator(_regular_expression)]
"""A module by the end of its name, or a regular expression for that, as in peft."""
RANKS = {"rank", "lora_alpha", "rank_pattern", "alpha_pattern"}
TAKES = {
    "lora": RANKS | {"lora_dropout", "use_rslora", "use_dora", "init_lora_weights"},
    "lokr": RANKS | {"rank_dropout", "module_dropout", "init_weights", "decompose_both", "decompose_factor"},
    "loha": RANKS | {"rank_dropout", "module_dropout"},
    "oft": {"module_dropout", "oft_block_size", "coft", "eps", "use_cayley_neumann"},
}
"""The settings that each type of adapter takes, beside `target_modules` and `weights`."""


class LoraConfig(Section):
    type: Literal["lora", "lokr", "loha", "oft"] = "lora"
    """The adapter: LoRA, LoKr (LyCORIS, arXiv 2309.14859), LoHa (FedPara, arXiv 2108.06098) or OFT (arXiv
    2306.07280). A setting that the type does not take is refused."""
    rank: Positive = 16
    """The rank of the update matrices; OFT has none."""
    lora_alpha: float | None = None
    """The update is scaled by lora_alpha / rank; by default equal to rank."""
    rank_pattern: dict[Module, Positive] = {}
    """Other ranks by module, as in peft: {to_q: 32, 'transformer_blocks.[0-9].attn.to_v': 8}. The end of a name or a
    regular expression; the first that matches counts. Each module is scaled by its alpha / its rank."""
    alpha_pattern: dict[Module, float] = {}
    """Other lora_alpha by module, named as in rank_pattern."""
    lora_dropout: Fraction = 0.0
    """Dropout before the update."""
    target_modules: list[str] | str = ["to_q", "to_k", "to_v", "to_out.0"]
    """Module names, or one regular expression, as in peft."""
    use_rslora: bool = False
    """Scale by lora_alpha / √rank (arXiv 2312.03732)."""
    use_dora: bool = False
    """Learn the magnitude of weight vectors apart from their direction (arXiv 2402.09353); unquantised weights only."""
    init_lora_weights: Literal["gaussian", True] = "gaussian"
    """Initialization of A (B is zero): gaussian as in diffusers' trainers, true for peft's own (Kaiming uniform)."""
    rank_dropout: Fraction = 0.0
    """LoKr, LoHa: probability of dropping a row of the update."""
    module_dropout: Fraction = 0.0
    """LoKr, LoHa: probability of dropping the update of a whole module; OFT: of a block."""
    init_weights: Literal["lycoris", True] = True
    """LoKr: true begins with W1 = 0, as peft; lycoris with W2 = 0, as LyCORIS and the trainers that follow it."""
    decompose_factor: Annotated[int, Field(ge=-1)] = -1
    """LoKr: the size of W1, where it divides the layer's; -1: the two factors as close to each other as possible."""
    decompose_both: bool = False
    """LoKr: make W1 a product of two matrices as well, where the rank is less than half its size."""
    oft_block_size: Annotated[int, Field(ge=2)] = 32
    """OFT: inputs that are rotated together; it must divide the inputs of every target module."""
    coft: bool = False
    """OFT: constrain each rotation to eps, as the paper's COFT."""
    eps: Annotated[float, Field(gt=0)] = 6e-5
    """OFT: the bound of coft."""
    use_cayley_neumann: bool = True
    """OFT: compute each rotation by five terms of a series, which is faster than the exact inverse."""
    weights: str | None = None
    """An adapter to start from, of the same type, rank, alpha and target modules: its file, or the output folder of a
    run."""

    @model_validator(mode="after")
    def _taken(self) -> Self:
        """ConfigError for a setting that this type of adapter would ignore."""
        for name, field in type(self).model_fields.items():
            if name in TAKES[self.type] | {"type", "target_modules", "weights"} or getattr(self, name) == field.default:
                continue
            kinds = " or ".join(kind for kind, taken in TAKES.items() if name in taken)
            raise ConfigError(
                f"train.lora.{name} is not a setting of this type of adapter",
                expected=f"train.lora.type={kinds}",
                found=f"train.lora.type={self.type} and {name}={getattr(self, name)}",
                do=f"leave train.lora.{name} out, or set another train.lora.type",
            )
        return self


class WeightedCache(Section):
    path: str
    """The folder of the cache, or a URL."""
    recipe: str | None = None
    """The name of the recipe, if the cache holds several."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """How often a sample is trained per epoch: 2 repeats each, 0.5 alternates between the two halves."""
    teacher: bool = False
    """Train these samples towards what the model predicts without the LoRA, not towards their images, so that the LoRA
    changes nothing for them: prior preservation."""
    loss_weight: Annotated[float, Field(gt=0)] = 1.0
    """A factor of the loss of these samples."""


class TrainConfig(BatchConfig):
    output_dir: str = "out"
    """The folder for checkpoints and the LoRA."""
    method: Literal["lora", "full"] = "lora"
    """lora: an adapter. full: every weight, kept in float32; the result goes to output_dir/transformer."""
    stochastic_rounding: bool = False
    """For full: keep weights, gradients and moments in bfloat16, in half the memory; updates are rounded at random, up
    or down, so that small ones count on average. By torchao; with optimizer.name adamw or adamw8bit, one process."""
    caches: list[WeightedCache] = []
    """Several caches in place of cache.path: [{path: a, weight: 2}, {path: b, weight: 0.5}]. An entry may also have
    recipe, loss_weight (a factor of the loss of its samples), and teacher: true, which keeps what the model does."""
    follow: bool = False
    """Train while the cache is built: wait for its first commit, and take in new ones at the ends of epochs. max_steps
    and the learning rate's schedule count steps, whatever the commits."""
    assistant_lora: str | None = None
    """A second, frozen LoRA that is active in training and left out of the result: a file, the output folder of a run,
    or owner/repository[/file] on the hub, each with an optional :weight."""
    max_steps: Positive = 1000
    """Optimizer steps."""
    gradient_accumulation_steps: Positive = 1
    """Forward passes before each optimizer step."""
    gradient_checkpointing: bool | Positive = True
    """Recompute activations in the backward pass: a third more time, much less memory. n: every nth block."""
    offload_blocks: NotNegative = 0
    """Blocks that stay in host memory until they compute; for LoRA with gradient checkpointing. Two of them fit on the
    device at once, so memory is saved from 3 on."""
    tabulated_modulation: bool = False
    """Read the modulation from a table, computed once, instead of loading its weights (a third of a 20B model). LoRA in
    bfloat16 only; not for Qwen-Image-2.1."""
    compile: bool = False
    """torch.compile of the blocks: minutes at the start, then faster steps."""
    fsdp: bool = False
    """Shard the weights over the processes (FSDP2) instead of replicating them (DDP)."""
    ema_decay: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Decay of an exponential moving average of the trained weights, saved with _ema in its name; 0: none."""
    mixed_precision: Annotated[Literal["bf16", "no"], BeforeValidator(lambda v: "no" if v is False else v)] = "bf16"
    """bf16: matrix products and frozen weights in bfloat16, trained weights and optimizer in float32. no: float32."""
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """Clip gradients to this norm; 0 turns clipping off."""
    caption_dropout: Fraction = 0.1
    """Probability of training a sample with its own empty prompt."""
    timestep_sampling: Literal["uniform", "logit_normal", "mode"] = "logit_normal"
    """Distribution of u, before the resolution's shift."""
    logit_mean: float = 0.0
    """Mean of logit_normal."""
    logit_std: float = 1.0
    """Standard deviation of logit_normal."""
    mode_scale: Annotated[float, Field(ge=-1, le=1.75)] = 1.29
    """Scale of mode; outside these bounds its density leaves (0, 1)."""
    timestep_shift: Annotated[float, Field(gt=0)] | None = None
    """A fixed shift of the noise levels, for every resolution: above 1 towards more noise. By default the model's own,
    which grows with the resolution."""
    min_timestep: Annotated[float, Field(ge=0, lt=1000)] = 0.0
    """The lowest timestep that is trained, of 1000; sampled again below it, so the distribution keeps its shape."""
    max_timestep: Annotated[float, Field(gt=0, le=1000)] = 1000.0
    """The highest timestep that is trained; 1000 is pure noise."""
    weighting: Literal["none", "sigma_sqrt", "cosmap", "min_snr", "debiased"] = "none"
    """Loss weight by noise level: a factor, not normalised. sigma_sqrt, cosmap: as in diffusers. min_snr (arXiv
    2303.09556), debiased (arXiv 2310.08442): by the signal-to-noise ratio, for the velocity of flow matching."""
    snr_gamma: Annotated[float, Field(gt=0)] = 5.0
    """The largest ratio that min_snr counts."""
    loss_type: Literal["mse", "l1", "huber"] = "mse"
    """The error of each predicted value. huber: pseudo-Huber, squared below huber_c and linear above it, so that
    outliers weigh less. The validation loss is always mse, to compare runs."""
    huber_c: Annotated[float, Field(gt=0)] = 0.1
    """Where huber turns from squared to linear."""
    huber_schedule: Literal["exponential", "constant"] = "exponential"
    """exponential (arXiv 2403.16728): from 1 for clean images to huber_c for pure noise. constant: always huber_c."""
    loss_reduction: Literal["per_sample", "per_token"] = "per_sample"
    """per_sample: every sample has equal weight in an optimizer step. per_token: every target token has."""
    edit_mask_weight: Annotated[float, Field(gt=0)] = 1.0
    """Loss weight of tokens inside the edit mask, relative to 1 outside; normalised by the sum of weights."""
    checkpointing_steps: Positive = 500
    """Save a checkpoint every this many steps, and after the last."""
    on_nan: Literal["stop", "skip"] = "stop"
    """How to handle a non-finite loss: stop the run, or skip the batch."""
    checkpoints_total_limit: NotNegative = 3
    """Number of newest checkpoints to keep; 0 keeps all."""
    lora: LoraConfig = LoraConfig()


class MaskHeadConfig(Section):
    """`qwen-train mask-head`. Experimental: never trained on the real encoder's attention."""

    steps: Positive = 3000
    """Optimizer steps."""
    batch_size: Positive = 8
    """Masks in one step."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    """For a few hundred masks, 1e-3 learns faster."""
    base_channels: Positive = 64
    """Width of the first stage: 64 makes 7.6 M parameters on the 784 heads of the 7B encoder."""
    mask_size: Positive = 64
    """The longer side of the predicted masks, in cells."""
    validation_split: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Fraction of the targets that is held out, by their hash."""
    device: str = "auto"
    """The device for training; `auto` is the first accelerator, or the CPU."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the initial weights and the order of the masks."""


class OptimizerConfig(Section):
    name: str = "adamw"
    """adamw, adamw8bit (bitsandbytes), adafactor, prodigy (prodigyopt), or the import path of a class, such as
    schedulefree.AdamWScheduleFree."""
    arguments: dict[str, Any] = {}
    """Further arguments of this class, such as {momentum: 0.9}."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    """prodigy finds its own learning rate and multiplies it by this: set 1."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay of the running means of the gradient and its square."""
    weight_decay: Annotated[float, Field(ge=0)] = 1e-2
    """The coefficient of weight decay."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator of the update."""


class LrSchedulerConfig(Section):
    name: Literal["constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial"] = (
        "constant"
    )
    """Names as in diffusers."""
    warmup_steps: NotNegative = 0
    """Steps over which the learning rate rises from 0."""
    num_cycles: Positive = 1
    """For cosine_with_restarts."""
    power: float = 1.0
    """For polynomial."""


class LoggingConfig(Section):
    report_to: Literal[
        "tensorboard", "wandb", "trackio", "aim", "comet_ml", "mlflow", "clearml", "dvclive", "swanlab", "none"
    ] = "tensorboard"
    """The tracker for metrics, through accelerate. tensorboard writes to train.output_dir/logs; the others need their
    own package."""
    project: str = "qwen-train"
    """The project in the tracker; tensorboard has none."""
    run_name: str | None = None
    """The run in the tracker, by default the name of train.output_dir; for tensorboard a folder in logs."""
    logging_steps: Positive = 1
    """Write metrics to metrics.jsonl and the tracker every this many steps."""


NO_CACHE = "none"
"""The value of validation.cache for a run without a validation cache."""


class ValidationPrompt(Section):
    @model_validator(mode="before")
    @classmethod
    def _of_text(cls, value: Any) -> Any:
        """A prompt alone may be written as text."""
        return {"prompt": value} if isinstance(value, str) else value

    prompt: str
    """The instruction."""
    control: Names = []
    """The control image, or several in their order: paths from the working directory, or URLs."""
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    """The seed of the noise."""
    width: Positive | None = None
    """The width of the image in pixels; when not given, of the shape of the last control, else 1024²."""
    height: Positive | None = None
    """The height, given if the width is."""


class ValidationConfig(Section):
    validation_steps: Positive | None = None
    """Measure the loss of held-out samples every this many steps; by default never."""
    num_samples: Positive = 16
    """Held-out samples whose loss is measured."""
    source: str | None = None
    """What `build` encodes into the validation cache: a folder of controls with prompts, a table, tars, or a .txt with
    a prompt per line. A table may have columns `seed`, `width` and `height`. Targets are not needed."""
    prompts: list[ValidationPrompt] = []
    """More rows for it: [a cat, {prompt: night, control: street.png, seed: 7, width: 1024, height: 768}]. The trigger
    word replaces [trigger]; nothing is put before or after."""
    cache: str | None = None
    """A cache of which every sample is generated, with target or without: its folder or a URL. By default the folder
    validation/ in cache.path, if it holds a cache; none: no cache."""
    num_images: NotNegative = 0
    """Held-out samples that are generated too."""
    images_every_steps: Positive = 500
    """Generate images before training, every this many steps, and after the last; with the average of train.ema_decay,
    if there is one. They are stored as latents for `qwen-train decode`."""
    num_inference_steps: Annotated[int, Field(ge=2)] = 20
    """Denoising steps of an image."""
    true_cfg_scale: Scales = [1.0]
    """Classifier-free guidance against the sample's own empty prompt; 1 turns it off and halves the time. Several, such
    as [1, 4], give an image each, from the same noise."""
    assistant_lora: bool = False
    """Generate these images with train.assistant_lora, as for Lightning, or without it, as the result alone does. The
    losses are measured with it."""
    vae_device: str | None = None
    """Decode the images in the run itself, with the VAE on this device, such as cuda:1 or cpu; by default never."""
