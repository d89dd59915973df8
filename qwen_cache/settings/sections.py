"""The sections of qwen.yaml: each setting with its type, default and description."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    PrivateAttr,
    model_validator,
)
from pydantic_core import PydanticCustomError

from qwen_cache.errors import ConfigError

# ---- section ---------------------------------------------------------------------------------------------------------
# The base class of the sections of qwen.yaml, and the types of their values.


def _local(value: str) -> str:
    if re.match("[a-z][a-z0-9+.-]+:/", value):
        what = (
            "a run is written and read in a folder of this machine, not behind an address: download what is elsewhere"
        )
        raise PydanticCustomError("address", what)
    return value


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
Names = Annotated[list[str], BeforeValidator(lambda v: [v] if isinstance(v, str) else v)]
OneName = Annotated[list[str], Field(max_length=1), BeforeValidator(lambda v: [v] if isinstance(v, str) else v)]
Strengths = Annotated[
    list[Annotated[float, Field(ge=-10, le=10)]],
    Field(min_length=1),
    BeforeValidator(lambda v: v if isinstance(v, list) else [v]),
]
Scales = Annotated[
    list[Annotated[float, Field(ge=1)]],
    Field(min_length=1),
    BeforeValidator(lambda v: v if isinstance(v, list) else [v]),
]
LocalFolder = Annotated[str, AfterValidator(_local)]
UrlPrefix = Annotated[str, Field(pattern="^[a-z][a-z0-9+.-]*://")]
Resolutions = Annotated[
    list[tuple[Positive, Positive]],
    Field(min_length=1),
    BeforeValidator(lambda v: [v] if isinstance(v, list) and all(isinstance(side, int) for side in v) else v),
]


class Section(BaseModel):
    """A section of qwen.yaml: frozen; unknown names are errors, and so are numbers that are not finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    def flat(self, prefix: str = "") -> dict[str, Any]:
        """Every setting by its dotted name, with JSON values."""
        settings: dict[str, Any] = {}
        for name, value in self.model_dump(mode="json").items():
            section = getattr(self, name)
            settings |= section.flat(f"{prefix}{name}.") if isinstance(section, Section) else {prefix + name: value}
        return settings


# ---- model -----------------------------------------------------------------------------------------------------------
# `model` in qwen.yaml.


class ModelConfig(Section):
    path: str | None = None
    """A diffusers folder, or a repository on the Hugging Face hub."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    transformer: str | None = None
    """A single file in place of the transformer's weights: .safetensors as ComfyUI has it (bf16, fp8, scaled fp8), or
    .gguf. Its config.json and all other components are those of model.path."""
    text_encoder: str | None = None
    """A single file in place of the text encoder's weights: .safetensors as ComfyUI has it (bf16, scaled fp8,
    int8_convrot). Its config.json and all other components are those of model.path."""
    vae: str | None = None
    """A VAE whose decoder makes the images, in place of the model's: a folder, or a repository on the hub. The model's
    own VAE still encodes."""
    quantization: Literal["none", "int8", "fp8", "nf4", "int8_convrot", "fp8_w8a8"] = "none"
    """Quantise the frozen transformer. int8, fp8, nf4 (by bitsandbytes): 8 or 4 bits in memory, unpacked for each
    product. int8_convrot, fp8_w8a8: multiplied in 8 bits, too, which is faster on GPUs that can (fp8: from Ada and
    Hopper on). none: as the folder or file is."""
    _only_here: bool = PrivateAttr(default=False)

    @property
    def only_here(self) -> bool:
        """True if somebody else's file named the model: nothing of it is downloaded."""
        return self._only_here

    def found_here(self, path: str) -> Self:
        """A copy with this path, of which nothing is downloaded."""
        copy = self.model_copy(update={"path": path})
        copy._only_here = True
        return copy


# ---- data ------------------------------------------------------------------------------------------------------------
# `data` in qwen.yaml.


class ColumnsConfig(Section):
    """Which columns of a table, parts of a tar or folders of images hold what; others are recognised by name."""

    target: str | None = None
    """The column, part or folder of the targets."""
    control: Names | None = None
    """The name of the controls, or a list of names in their order. An empty list ignores all controls."""
    mask: str | None = None
    """The column, part or folder of the edit masks."""
    rejected: OneName | None = None
    """The column, part or folder of the rejected images, which are worse than their targets. An empty list ignores
    them."""
    prompt: str | None = None
    """The column, part or folder of the prompts, or of lists of captions; in a tar also a key of KEY.json."""
    phrase: str | None = None
    """The column of the words that say where the edit is. Experimental."""
    positive_prompt: OneName | None = None
    """The column of the positive prompts of a slider's direction, or the part of a tar. An empty list ignores them."""
    negative_prompt: OneName | None = None
    """The column of the negative prompts of a slider's direction, or the part of a tar. An empty list ignores them."""


class DataConfig(Section):
    source: str = "data"
    """The source that `build` reads by default: a folder, a table or tars, local or by URL."""
    columns: ColumnsConfig = ColumnsConfig()
    """The names that the source gives to its columns, parts or folders, where they are not recognised."""
    split: str | None = None
    """The split to read where a source has several, such as train."""
    config_name: str | None = None
    """The configuration of a dataset on the Hugging Face hub; by default the dataset's own default."""
    on_error: Literal["stop", "skip"] = "stop"
    """How `build` handles an unusable sample: stop, or skip it."""
    slice: str | None = None
    """The rows of the source to build: 3/16 is the third of sixteen slices of equal length."""
    edit_mask: Literal["none", "file", "diff", "head", "auto"] = "file"
    """Edit masks for rows without one. diff: the difference of target and control. head (experimental): a mask head.
    auto (experimental): diff, else head. none: no masks at all."""
    mask_head: str | None = None
    """The file that `qwen-train mask-head` wrote, for head and auto. Experimental."""
    marked_phrases: bool | None = None
    """true: [[ ]] in a prompt mark the words that say where the edit is, and are not encoded. false: every character is
    part of the prompt. When not given the same, and `build` says how many prompts have them. Experimental."""
    allow_urls: list[UrlPrefix] = []
    """URLs that a remote table may name besides files of its own server: their first parts, such as
    https://images.example.com/ or https://. A local table may name anything."""
    allow_empty_prompt: bool = False
    """Accept samples without an instruction."""
    allow_no_control: bool = False
    """Accept targets without a control image in a folder or a tar that may have some, and, for an editing model, a
    source without any: they are trained as text to image. In a table an empty cell is enough."""
    trigger_word: str | None = None
    """The word that stands for the subject or style. It replaces [trigger] in prompts, and is put before a prompt that
    has neither."""
    prompt_prefix: str = ""
    """A text before every prompt, trigger word included, with a space between."""
    prompt_suffix: str = ""
    """A text after every prompt, with a space between unless it begins with a punctuation mark."""
    positive_prompt: str | None = None
    """The positive prompt of a slider's direction, for rows without one: with more of the attribute. {prompt} in it
    stands for the prompt of the row, trigger word, prefix and suffix included."""
    negative_prompt: str | None = None
    """The negative prompt of a slider's direction, for rows without one: with less of the attribute."""
    shuffle_tags: NotNegative = 0
    """How many orders of a caption's tags, which commas separate, become samples; 0: only its own order."""
    keep_tags: NotNegative = 0
    """How many of the first tags stay first when tags are shuffled."""
    shuffle_seed: int = 0
    """Another number gives other orders of tags."""
    vae_image_size: Areas | None = None
    """Pixels of an image for the VAE, or several such areas; the model's own (1024²) when not given."""
    resolution: Resolutions | None = None
    """A fixed [width, height] in place of an area, or several: an image gets the one nearest in shape."""
    resolutions_per_sample: Literal["nearest", "all"] = "nearest"
    """With several areas or resolutions. nearest: the largest that the target fills, else the smallest. all: one sample
    for each."""
    resize_mode: Literal["crop", "stretch"] | None = None
    """How an image gets a fixed resolution of another shape; refused when not given. crop: keep the centre."""
    upscale: bool = True
    """Enlarge small images, as the pipelines do. false: keep their own size, rounded down to 32 pixels."""
    condition_image_size: Positive | None = None
    """Pixels of an image for the text encoder; the model's own (1024² for Edit, 384² for Edit-Plus) when not given.
    Qwen-Image-2.1 has none: its text encoder gets the image of the VAE."""

    @model_validator(mode="after")
    def _has_both_prompts(self) -> Self:
        """ConfigError for one prompt of a slider's direction without the other one."""
        prompts = {name: (getattr(self, name) or "").strip() for name in ("positive_prompt", "negative_prompt")}
        given = [name for name, text in prompts.items() if text]
        if len(given) == 1 or (given and prompts["positive_prompt"] == prompts["negative_prompt"]):
            raise ConfigError(
                "the direction of a slider has two prompts, which differ",
                where="data.positive_prompt and data.negative_prompt",
                found=", ".join(f"data.{name}={prompts[name]}" for name in given),
                do="set both, or neither",
            )
        return self


SIZES = (
    "vae_image_size",
    "resolution",
    "resolutions_per_sample",
    "resize_mode",
    "upscale",
    "condition_image_size",
    "edit_mask",
)
"""The settings that decide what is stored: a server of encoders has them, and its clients take them from it."""

# ---- cache -----------------------------------------------------------------------------------------------------------
# `cache` in qwen.yaml.

LOCAL_COPIES_SIZE = 100_000_000_000
"""Disk space for local copies of remote shards, in bytes."""


class CacheConfig(Section):
    path: str = "shards"
    """The folder of the cache, or a URL such as s3://bucket/shards; caches are written to s3, gs and hf://datasets/…."""
    recipe: str | None = None
    """The name of the recipe, if the cache holds several; `default` when building."""
    format: Literal["v1", "v2"] = "v2"
    """The format that `build` writes."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """The dtype in which the encoders compute, and in which the cache stores their outputs."""
    vae_device: str = "auto"
    """The device of the VAE, or several with commas; `auto` is the first accelerator, or the CPU."""
    text_device: str = "auto"
    """The device of the text encoder, or several; `auto` is the second accelerator, else the first, or the CPU."""
    text_quantization: Literal["none", "int8", "fp8", "nf4"] = "none"
    """Quantise the language model inside the text encoder to 8 bits or 4 (bitsandbytes). This changes the embeddings,
    so it is part of the recipe."""
    text_offload: bool = False
    """Keep the text encoder's layers in host memory, two at a time on the accelerator. The embeddings are the same."""
    vae_batch_pixels: Positive | None = None
    """Pixels per VAE batch, of images of one shape, 8 samples at most; 2 megapixels on CUDA, else one image."""
    text_batch_tokens: Positive | None = None
    """Tokens per text encoder batch, 8 samples at most; 2048 on CUDA. Elsewhere, or with 1: one sample."""
    thumbnails: bool = True
    """Store small images of each sample for `inspect --html`: 4 to 12 kB each. v2 only."""
    store_attention: bool = False
    """Store the attention of each prompt to its first image, for `qwen-train mask-head`: a fifth more bytes. v2 only.
    Experimental."""
    compression: Literal["none", "zstd"] = "none"
    """zstd: 0.7 of the bytes; worth it when reading is slower than 0.8 GB/s. v2 only."""
    shard_size: ByteSize = ByteSize(1_000_000_000)
    """Start a new shard when one reaches this many bytes."""
    commit_every: Positive | None = None
    """Commit whenever this many new samples are there, for runs that follow the build; by default once, at the end.
    Shards end at commits. Samples that replace others wait for the last one."""
    reuse: Names = []
    """Caches to copy samples from in place of encoding them: those with the same content and recipe. They need the same
    format version."""
    local_copies: str | None = None
    """The folder for local copies of remote caches; qwen-cache/shards in the user's cache folder by default."""
    local_copies_size: ByteSize = ByteSize(LOCAL_COPIES_SIZE)
    """Disk space for local copies; the least recently used are removed first."""


def check_compression(format_version: str, compression: str) -> None:
    """ConfigError if the format version does not support this compression."""
    if format_version == "v1" and compression != "none":
        raise ConfigError("format v1 has no compression", found=f"cache.compression={compression}")


# ---- batching --------------------------------------------------------------------------------------------------------
# The settings of `train` in qwen.yaml that determine the batches and their order.


class BatchConfig(Section):
    """The part of `train` in qwen.yaml that planning batches needs."""

    batch_size: Positive | None = None
    """Samples in one forward pass on one device; 1 if neither this nor max_tokens is given."""
    max_tokens: Positive | None = None
    """Tokens in one forward pass on one device: text, target and controls, padding included. With batch_size, both
    limits apply."""
    bucketing_window: Positive = 4096
    """Samples are shuffled, then batched by length within windows of this many samples (at most half an epoch). 1 turns
    length bucketing off."""
    balance_window: Positive = 8
    """Order batches of similar cost in runs of this length, so that this many ranks (or a divisor) finish together. 1
    turns it off."""
    drop_last: bool = False
    """Drop the samples that do not fill the last batch of an epoch; otherwise this batch is smaller."""
    layout: Literal["auto", "padded", "packed"] = "auto"
    """padded: rows of equal length with a mask. packed: one row of valid tokens, no padding computed and no mask, which
    lets flash attention run. Equal results. auto: packed on an accelerator, padded on the CPU."""
    noise_draws: Positive = 1
    """Timesteps and noises of a sample in one pass: text and control images are computed once, and each draw attends to
    them and to itself. Qwen-Image-2.1 only."""
    captions: Literal["all", "one"] = "all"
    """all: an epoch has every caption of an image. one: it has each image once, with the next of its captions; each of
    them comes as often as the source lists it."""
    validation_split: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of the samples that is held out. The hash of the target decides, so a sample never changes sides."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of sample order, noise, timesteps and dropout."""


# ---- train -----------------------------------------------------------------------------------------------------------
# The sections of qwen.yaml that `qwen-train run` reads, and `mask_head`.


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


class DpoConfig(Section):
    beta: Annotated[float, Field(gt=0)] | None = None
    """Learn from preferences (Diffusion-DPO, arXiv 2311.12908): how strongly the LoRA is held to the model without it;
    1000 to 2500 are usual. Half of diffusers' beta_dpo. By default off."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """The probability that a preference is the wrong way round."""
    rpo_alpha: Annotated[float, Field(ge=0)] = 0.0
    """The weight of a supervised term beside it: the usual loss of the target."""

    @model_validator(mode="after")
    def _used(self) -> Self:
        """ConfigError for a setting without effect."""
        if self.beta is None and (given := [name for name in ("label_smoothing", "rpo_alpha") if getattr(self, name)]):
            raise ConfigError(
                f"train.dpo.{given[0]} is for learning from preferences, which train.dpo.beta turns on",
                found=f"train.dpo.{given[0]}={getattr(self, given[0])} without train.dpo.beta",
                do=f"set train.dpo.beta, such as 2000, or leave train.dpo.{given[0]} out",
            )
        return self


class SliderConfig(Section):
    direction: Literal["prompts", "images"] | None = None
    """Train a slider (Concept Sliders, arXiv 2311.12092), a LoRA whose strength moves one attribute, in both
    directions. prompts: from the positive and the negative prompt of each sample; images: strength 1 learns the target,
    -1 the rejected image. By default off."""
    guidance_strength: Annotated[float, Field(gt=0)] = 3.0
    """For prompts: how many times the difference between the two prompts the LoRA learns to add."""
    num_inference_steps: Annotated[int, Field(ge=2)] = 20
    """For samples without target: the steps in which the model generates the images that the slider is trained on."""

    @model_validator(mode="after")
    def _used(self) -> Self:
        """ConfigError for a setting without effect."""
        names = [] if self.direction == "prompts" else ["guidance_strength", "num_inference_steps"]
        for name in names:
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                raise ConfigError(
                    f"train.slider.{name} is for sliders from prompts",
                    found=f"train.slider.{name}={value} with train.slider.direction={self.direction or 'null'}",
                    do=f"set train.slider.direction=prompts, or leave train.slider.{name} out",
                )
        return self


class TrainConfig(BatchConfig):
    output_dir: LocalFolder = "out"
    """The folder for checkpoints and the LoRA."""
    method: Literal["lora", "full"] = "lora"
    """lora: an adapter. full: every weight, kept in float32; the result goes to output_dir/transformer."""
    stochastic_rounding: bool = False
    """For full: keep weights, gradients and moments in bfloat16, in half the memory; updates are rounded at random, up
    or down, so that small ones count on average. By torchao; with optimizer.name adamw or adamw8bit."""
    caches: list[WeightedCache] = []
    """Several caches in place of cache.path: [{path: a, weight: 2}, {path: b, weight: 0.5}]. An entry may also have
    recipe, loss_weight (a factor of the loss of its samples), and teacher: true, which keeps what the model does."""
    follow: bool = False
    """Train while the cache is built: wait for its first commit, and take in new ones at the ends of epochs. max_steps
    and the learning rate's schedule count steps, whatever the commits."""
    assistant_lora: str | None = None
    """A second, frozen LoRA that is active in training and left out of the result: a file, the output folder of a run,
    or owner/repository[@revision][/file] on the hub, each with an optional :weight. auto: the verified training adapter
    of the model, if there is one."""
    max_steps: Positive = 1000
    """Optimizer steps."""
    gradient_accumulation_steps: Positive = 1
    """Forward passes before each optimizer step."""
    memory: Literal["manual", "auto"] = "manual"
    """auto: the fastest of offloaded blocks and activations, gradient checkpointing, compile and FSDP2 that fits the
    GPUs, in place of these settings. manual: what they say."""
    memory_quantization: list[Literal["int8", "fp8", "nf4", "int8_convrot", "fp8_w8a8"]] = []
    """Values of model.quantization that memory=auto may choose as well, if the model is to be trained on rounded
    weights; by default none, so that it changes no result."""
    gradient_checkpointing: Literal["auto"] | bool | Positive = True
    """Recompute activations in the backward pass: a third more time, much less memory. n: every nth block. auto: as
    many blocks as the GPU's memory asks for."""
    offload_blocks: NotNegative = 0
    """Blocks that stay in host memory until they compute; for LoRA. Two of them fit on the device at once, so memory is
    saved from 3 on."""
    offload_activations: bool = False
    """Keep what gradient checkpointing saves, the inputs of the recomputed blocks, in host memory until the backward
    pass: for long edits and large batches."""
    tabulated_modulation: bool = False
    """Read the modulation from a table, computed once, instead of loading its weights (a third of a 20B model). LoRA in
    bfloat16 only; not for Qwen-Image-2.1."""
    compile: Literal["auto"] | bool = "auto"
    """torch.compile of the blocks: minutes at the start, then faster steps. auto: on CUDA with Triton, if at least 200
    steps are left."""
    quantized_backward: bool = True
    """With model.quantization int8_convrot or fp8_w8a8, or a single file in int8: the backward pass multiplies in 8
    bits, too. false: in bfloat16."""
    attention: Literal["auto", "flash", "cudnn", "fa3"] = "auto"
    """The kernel of attention on CUDA. flash: torch's flash attention. cudnn: cuDNN's, for long sequences. fa3:
    FlashAttention-3, where its package is installed. auto: cudnn on compute capability 9 and 10 (H100, B200) if the
    samples have few lengths, else flash."""
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
    """The error at which huber turns from squared to linear."""
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
    """Number of newest checkpoints to keep, beside the one that `qwen-train best` proposes; 0 keeps all."""
    lora: LoraConfig = LoraConfig()
    dpo: DpoConfig = DpoConfig()
    slider: SliderConfig = SliderConfig()

    @property
    def trains_rejected(self) -> bool:
        """True if rejected images are trained."""
        return self.dpo.beta is not None or self.slider.direction == "images"

    @property
    def passes_without_gradients(self) -> int:
        """The forward passes of a batch beside the one that is trained, from targets."""
        return 1 if self.dpo.beta is not None else 3 if self.slider.direction == "prompts" else 0

    @property
    def rows_per_sample(self) -> int:
        """The rows of a sample in a batch: with train.dpo its target and its rejected image."""
        return 1 if self.dpo.beta is None else 2

    @model_validator(mode="after")
    def _chosen(self) -> Self:
        """ConfigError for a setting that train.memory=auto would ignore, or that needs it."""
        if self.memory == "manual" and self.memory_quantization:
            do = "set train.memory=auto, or model.quantization"
            raise ConfigError("train.memory_quantization is for train.memory=auto", found="train.memory=manual", do=do)
        chosen = {
            "offload_blocks": not self.offload_blocks,
            "offload_activations": not self.offload_activations,
            "gradient_checkpointing": self.gradient_checkpointing in ("auto", True),
        }
        for name, by_default in chosen.items():
            if self.memory == "auto" and not by_default:
                raise ConfigError(
                    f"train.memory=auto chooses train.{name} itself",
                    found=f"train.{name}={str(getattr(self, name)).lower()}",
                    do=f"leave train.{name} out, or set train.memory=manual",
                )
        return self


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
    """Measure the loss of held-out samples before training, every this many steps, and after the last; by default
    never."""
    num_samples: Positive = 16
    """Held-out samples whose loss is measured."""
    source: str | None = None
    """The source that `build` encodes into the validation cache: a folder of controls with prompts, a table,
    tars, or a .txt with a prompt per line. A table may have columns `seed`, `width` and `height`. Targets are not
    needed."""
    prompts: list[ValidationPrompt] = []
    """More rows for it: [a cat, {prompt: night, control: street.png, seed: 7, width: 1024, height: 768}]. The trigger
    word replaces [trigger]; nothing is put before or after."""
    cache: str | None = None
    """A cache of which every sample is generated, with target or without: its folder or a URL. By default the folder
    validation/ in cache.path, if it holds a cache; none: no cache."""
    num_images: NotNegative = 0
    """Held-out samples that are generated too; without train.validation_split, samples that are trained."""
    images_every_steps: Positive = 500
    """Generate images before training, every this many steps, and after the last; with the average of train.ema_decay,
    if there is one. They are stored as latents for `qwen-train decode`."""
    num_inference_steps: Annotated[int, Field(ge=2)] = 20
    """Denoising steps of an image."""
    true_cfg_scale: Scales = [1.0]
    """Classifier-free guidance against the sample's own empty prompt; 1 turns it off and halves the time. Several, such
    as [1, 4], give an image each, from the same noise."""
    lora_weight: Strengths | None = None
    """The strengths of the LoRA, as several scales, with a single scale. By default 1; for a slider -2, -1, 0, 1, 2."""
    assistant_lora: bool = False
    """Generate these images with train.assistant_lora, as for Lightning, or without it, as the result alone does. The
    losses are measured with it."""
    vae_device: str | None = None
    """Decode the images in the run itself, with the VAE on this device, such as cuda:0 or cpu; by default never."""


# ---- inference -------------------------------------------------------------------------------------------------------
# `predict` in qwen.yaml.


class PredictConfig(Section):
    """A default that the model family decides is None here; `models/family.py` has the values."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """The dtype in which all components compute."""
    num_inference_steps: Positive | None = None
    """Denoising steps; by default 50, for Qwen-Image-2.1 40, or as many as the noise levels saved with the model."""
    sigmas: Sigmas | None = None
    """Noise levels in place of num_inference_steps, descending from 1, before the shift; also as text with commas."""
    true_cfg_scale: float | None = None
    """Classifier-free guidance, where a negative prompt is given; by default 4, for Qwen-Image-2.1 1 (none)."""
    negative_prompt: str | None = None
    """The prompt to guide away from; may be empty."""
    guidance_scale: float | None = None
    """For guidance-distilled models only."""
    num_images_per_prompt: Positive = 1
    """Images of one prompt, each from its own noise."""
    max_sequence_length: Annotated[int, Field(gt=0, le=1024)] | None = None
    """Tokens kept of a prompt without images, by default 512; not for Qwen-Image-2.1."""
    height: Side | None = None
    """A multiple of 16 pixels (Qwen-Image-2.1: 32), as the width; when not given, about 1024² (Qwen-Image-2.1:
    output_resolution²) in the shape of the last image."""
    width: Side | None = None
    """Width of the image, with the same limits and default as the height."""
    output_resolution: Annotated[int, Field(gt=0, multiple_of=32)] | None = None
    """Qwen-Image-2.1: about the square of it are the pixels of control images, and of the result; by default 1024."""
    use_kv_cache: bool | None = None
    """Qwen-Image-2.1: keep keys and values of text and control images after the first step; by default true."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the noise."""
    tabulated_modulation: bool = False
    """Read the modulation from a table instead of loading its weights (a third of the model); bfloat16 only."""
    offload: Literal["none", "model", "sequential"] = "none"
    """Weights that stay in host memory until they compute: none, whole components (model), or layers (sequential)."""


# ---- caption ---------------------------------------------------------------------------------------------------------
# `caption` in qwen.yaml.


class CaptionConfig(Section):
    model: str | None = None
    """The Qwen2.5-VL or Qwen3-VL that writes the captions, a folder or a repository on the hub; by default the model's
    own text encoder."""
    instruction: str = (
        "Describe this image for somebody who has to paint it: subject, surroundings, style and light. Write one short "
        "paragraph, without an introduction."
    )
    """The question to the language model about an image without controls."""
    edit_instruction: str = (
        "The last image was made from what comes before it. Write the instruction that makes this edit, as a short "
        "command such as: make the sky orange. Write the instruction alone."
    )
    """The question about control images, in their order, and their target, which comes last."""
    image_size: Positive = 589824
    """The most pixels of an image that it sees; larger images are made smaller."""
    max_new_tokens: Positive = 256
    """The most tokens of a caption."""


# ---- serve -----------------------------------------------------------------------------------------------------------
# `serve` in qwen.yaml.

Seconds = Annotated[float, Field(gt=0)]


class ServeConfig(Section):
    listen: str = "127.0.0.1:8077"
    """The address of the server: HOST:PORT. Any other host than this machine's own needs a token."""
    token_file: str | None = None
    """A file with the token that every request must have, as `Authorization: Bearer TOKEN`."""
    source: str | None = None
    """A source that the server reads when it starts; clients name its rows in place of sending them."""
    allow_urls: list[UrlPrefix] = []
    """Addresses that a client may name in place of sending an image: their first parts, such as s3://team/pairs/. The
    server reads them with its own rights; without any, it reads none."""
    store: bool = True
    """Store what is encoded in the cache. false: keep the newest samples in memory, up to serve.memory."""
    commit_samples: Positive = 256
    """Commit when this many samples are not stored yet."""
    commit_seconds: Seconds = 10.0
    """Commit when a sample has waited this long."""
    memory: ByteSize = ByteSize(1_000_000_000)
    """Bytes of encoded samples in memory, with serve.store=false."""
    queue_samples: Positive = 512
    """Samples that may wait for the encoders; more are refused with 429, and the client tries again."""
    queue_bytes: ByteSize = ByteSize(2_000_000_000)
    """Bytes of uploaded images that may wait for the encoders."""
    max_body: ByteSize = ByteSize(256_000_000)
    """The largest body of a request, in bytes."""
    max_pixels: Positive = 100_000_000
    """The most pixels of an image."""
    body_seconds: Seconds = 60.0
    """How long a client may take to send the body of a request. Its head has 10 seconds, or this if it is less."""
    connections: Positive = 1024
    """Connections at a time, and at most half of the file descriptors of the process. The one that has waited longest
    for its next request gives way to a new one; if all have a request, a new one is refused with 503."""
    stop_seconds: Seconds = 600.0
    """After SIGTERM or Ctrl-C: how long the accepted samples may take to be encoded and stored."""
