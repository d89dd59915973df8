"""qwen.yaml: one file for both programs.

Names are diffusers' own where it has one. An unknown key is an error that names the nearest known one; `--set
a.b=value` and options of the commands are laid over the file; the result is saved beside every output.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, ValidationError

from qwen_cache.format.errors import ConfigError
from qwen_cache.format.remote import LOCAL_COPIES_SIZE

CONFIG_NAME = "qwen.yaml"

Fraction = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
Areas = Annotated[list[Positive], Field(min_length=1), BeforeValidator(lambda v: v if isinstance(v, list) else [v])]
Side = Annotated[int, Field(ge=16)]
Sigmas = Annotated[
    list[Annotated[float, Field(gt=0, le=1)]],
    Field(min_length=1),
    BeforeValidator(lambda v: v.split(",") if isinstance(v, str) else v),
]
Resolutions = Annotated[
    list[tuple[Positive, Positive]],
    Field(min_length=1),
    BeforeValidator(lambda v: [v] if isinstance(v, list) and all(isinstance(side, int) for side in v) else v),
]


class Section(BaseModel):
    """Part of qwen.yaml: frozen, and strict about names."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    def flat(self, prefix: str = "") -> dict[str, Any]:
        """Every setting by its dotted name, as JSON has it."""
        found: dict[str, Any] = {}
        for name, value in self.model_dump(mode="json").items():
            section = getattr(self, name)
            found |= section.flat(f"{prefix}{name}.") if isinstance(section, Section) else {prefix + name: value}
        return found


class ModelConfig(Section):
    path: str | None = None
    """A diffusers folder, or a repository on the Hugging Face hub."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    quantization: Literal["none", "int8", "fp8", "nf4"] = "none"
    """The transformer, frozen, in 8 bits (torchao) or 4 (bitsandbytes, needs a GPU); a quantised folder: none."""


class DataConfig(Section):
    source: str = "data"
    """What `build` reads when no SOURCE is given: a folder, a table, tars, or a URL of them."""
    on_error: Literal["stop", "skip"] = "stop"
    """What a sample that cannot be used does to a build."""
    part: str | None = None
    """Which rows of the source to build: 3/16 is the third of sixteen runs of equal length."""
    edit_mask: Literal["none", "file", "diff", "head", "auto"] = "file"
    """Where the source has none: diff of target and control, head, auto: diff, else head. none: no masks at all."""
    mask_head: str | None = None
    """What `qwen-train mask-head` made, for head and auto."""
    allow_empty_prompt: bool = False
    """Whether a sample may have no instruction."""
    vae_image_size: Areas | None = None
    """Pixels of a picture for the VAE, or several such budgets; the model's own (1024²) when not given."""
    resolution: Resolutions | None = None
    """In place of that, a fixed [width, height], or several, of which a picture gets the one of the nearest shape."""
    resolutions_per_sample: Literal["nearest", "all"] = "nearest"
    """Of several: the largest that a target fills, else the smallest; or a sample for each."""
    resize_mode: Literal["crop", "stretch"] | None = None
    """How a picture gets a fixed resolution of another shape; when not given it is refused. crop: cut to the middle."""
    upscale: bool = True
    """Whether a picture may be enlarged, as the pipelines do; else its own size is used, rounded down to 32 pixels."""
    condition_image_size: Positive | None = None
    """Pixels of a picture for the text encoder; the model's own (1024² for Edit, 384² for Edit-Plus) when not given."""


class CacheConfig(Section):
    path: str = "shards"
    """The folder of the cache; for all that only reads it, also a URL such as s3://bucket/shards."""
    recipe: str | None = None
    """The name of the recipe, where a cache holds more than one; `default` when building."""
    format: Literal["v1", "v2"] = "v2"
    """The format that `build` writes."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """What the encoders compute in, and what is stored."""
    vae_device: str = "auto"
    """The device of the VAE, or several with commas; `auto` is the first accelerator, or the CPU."""
    text_device: str = "auto"
    """The device of the text encoder, or several; `auto` is the second accelerator, else the first, or the CPU."""
    vae_batch_pixels: Positive | None = None
    """Pixels that the VAE gets at once, of one shape and 8 samples at most; 2 megapixels on CUDA, else one picture."""
    text_batch_tokens: Positive | None = None
    """Tokens that the text encoder gets at once, of 8 samples at most; 2048 on CUDA, else, or with 1, one sample's."""
    thumbnails: bool = True
    """Keep small pictures of what is encoded from now on, for `inspect --html`: 4 to 12 kB each; v2 only."""
    attention: bool = False
    """Store where each prompt looks in its first picture, for `qwen-train mask-head`: about a fifth more. v2 only."""
    compression: Literal["none", "zstd"] = "none"
    """zstd: 0.7 of the bytes; worth it when what is read from is slower than 0.8 GB/s. v2 only."""
    shard_size: ByteSize = ByteSize(1_000_000_000)
    """A shard is closed when it has reached this many bytes."""
    local_copies: str | None = None
    """The folder for what is read of a cache behind a URL; qwen-cache/shards in the user's cache folder by default."""
    local_copies_size: ByteSize = ByteSize(LOCAL_COPIES_SIZE)
    """How much of the disk that may take; what was not used for longest goes first."""


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


class TrainConfig(Section):
    output_dir: str = "out"
    """Where checkpoints and the LoRA go."""
    method: Literal["lora", "full"] = "lora"
    """lora: an adapter. full: every weight, kept in float32; the result goes to output_dir/transformer."""
    caches: list[WeightedCache] = []
    """Several caches in place of cache.path: [{path: a, weight: 2}, {path: b, weight: 0.5}]."""
    validation_split: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Which part of the samples is never trained; the hash of its target picture decides, so it stays that part."""
    max_steps: Positive = 1000
    """Optimizer steps."""
    batch_size: Positive | None = None
    """Samples in one forward pass on one device; 1 where neither this nor max_tokens is given."""
    max_tokens: Positive | None = None
    """Tokens in one forward pass on one device: of text, target and controls, padding included. Both limits bind."""
    shuffle_window: Positive = 4096
    """Of so many samples of a shuffled epoch, half of it at most, those alike in size are batched; 1: by chance."""
    balanced_over: Positive = 8
    """Batches that cost alike come in runs of so many: as many processes, or a divisor, hardly wait; 1: no runs."""
    drop_last: bool = False
    """Leave out the samples that do not fill the last batch of an epoch; else that batch is smaller."""
    layout: Literal["padded", "packed"] = "padded"
    """padded: rows of equal length. packed: one row of valid tokens, no padding computed. Equal results."""
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
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Order, noise, timesteps and dropout follow from it."""
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


class PredictConfig(Section):
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """What all parts compute in."""
    num_inference_steps: Positive = 50
    sigmas: Sigmas | None = None
    """Noise levels in place of num_inference_steps, falling from 1, before the shift; also as text with commas."""
    true_cfg_scale: Annotated[float, Field(allow_inf_nan=False)] = 4.0
    """Classifier-free guidance, where a negative prompt is given."""
    negative_prompt: str | None = None
    guidance_scale: float | None = None
    """For guidance-distilled models only."""
    num_images_per_prompt: Positive = 1
    max_sequence_length: Annotated[int, Field(gt=0, le=1024)] = 512
    """Tokens that are kept of a prompt without pictures."""
    height: Side | None = None
    """Rounded down to 16 pixels, as the width; about 1024² in the shape of the last picture when not given."""
    width: Side | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    tabulated_modulation: bool = False
    """Read the modulation from a table in place of loading its weights, a third of all; bfloat16 only."""
    offload: Literal["none", "model", "sequential"] = "none"
    """What waits in the host's memory for its turn to compute: nothing, each part as a whole, or layer by layer."""


class Config(Section):
    """The whole of qwen.yaml."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    cache: CacheConfig = CacheConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lr_scheduler: LrSchedulerConfig = LrSchedulerConfig()
    logging: LoggingConfig = LoggingConfig()
    validation: ValidationConfig = ValidationConfig()
    predict: PredictConfig = PredictConfig()
    mask_head: MaskHeadConfig = MaskHeadConfig()

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def load_config(path: Path | None, assignments: Sequence[str] = (), **options: Any) -> Config:
    """The file (qwen.yaml of this folder when none is named and it exists), then `a.b=value`, then command options.

    `options` are keyed by dotted name with `__` for the dot; None means not given.
    """
    if path is None and Path(CONFIG_NAME).is_file():
        path = Path(CONFIG_NAME)
    value = _read(path) if path else {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals:
            raise ConfigError("--set takes section.key=value", found=assignment)
        _assign(value, name.strip(), yaml.safe_load(text))
    for name, option in options.items():
        if option is not None:
            _assign(value, name.replace("__", "."), option)
    return _validate(value, str(path) if path else "the options given")


def parse_config(text: str) -> Config:
    """The settings as `qwen-train run --encode-on-the-fly` hands them on: JSON."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"this is not JSON: {error}") from None
    return _validate(value if isinstance(value, dict) else {"": value}, "the settings given")


def check_compression(format_version: str, compression: str) -> None:
    """ConfigError where the format has no place for it."""
    if format_version == "v1" and compression != "none":
        raise ConfigError("format v1 knows no compression", found=f"cache.compression={compression}")


def _read(path: Path) -> dict[str, Any]:
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError("no such file", where=path) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"this is not YAML: {error}", where=path) from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError("a mapping of sections is expected", where=path, found=type(value).__name__)
    return value


def _assign(value: dict[str, Any], name: str, new: Any) -> None:
    *parents, last = name.split(".")
    for part in parents:
        value = value.setdefault(part, {})
        if not isinstance(value, dict):
            raise ConfigError(f"{part} is not a section", found=name)
    value[last] = new


def _validate(value: Mapping[str, Any], where: str) -> Config:
    try:
        return Config.model_validate({key: {} if section is None else section for key, section in value.items()})
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise ConfigError(
                f"unknown key {name}", where=where, do=_nearest([str(part) for part in first["loc"]])
            ) from None
        what = "is a section, with settings of its own" if first["type"] == "model_type" else first["msg"]
        raise ConfigError(f"{name}: {what}", where=where, found=repr(first["input"])) from None


OTHER_NAMES = {
    "optimizer.learning_rate": ("lr", "learningrate"),
    "train.max_steps": ("epochs", "num_epochs", "num_train_epochs", "max_train_epochs", "steps", "max_train_steps"),
    "train.lora.rank": ("rank", "dim", "network_dim", "lora_rank"),
    "train.lora.lora_alpha": ("alpha", "network_alpha"),
    "train.checkpointing_steps": ("save_every", "save_every_n_steps", "save_steps"),
    "train.output_dir": ("out", "output", "output_name"),
    "train.batch_size": ("train_batch_size",),
    "model.quantization": ("fp8", "fp8_base", "quantize"),
    "train.offload_blocks": ("blocks_to_swap",),
}
"""What other trainers call a setting."""


def _nearest(location: list[str]) -> str:
    """The key that was probably meant: what others call so, a like name in the same section, or in another."""
    *section, last = (part for part in location if not part.isdigit())
    if meant := next((key for key, names in OTHER_NAMES.items() if last in names and key != ".".join(location)), None):
        return f"did you mean {meant}?"
    known = [key.split(".") for key in known_keys()]
    here = {key[-1]: key for key in known if key[:-1] == section}
    anywhere = {key[-1]: key for key in reversed(known) if key[0] != "mask_head"}
    for candidates, likeness in ((here, 0.6), (anywhere, 0.8)):
        if found := difflib.get_close_matches(last, candidates, n=1, cutoff=likeness):
            return f"did you mean {'.'.join(candidates[found[0]])}?"
    return "known here: " + ", ".join(sorted(here))


def known_keys(section: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Every dotted name that qwen.yaml may contain, sections included."""
    names: list[str] = []
    for name, field in section.model_fields.items():
        names.append(prefix + name)
        for kind in (field.annotation, *get_args(field.annotation)):  # a section, or a list of them
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                names += known_keys(kind, f"{prefix}{name}.")
    return names
