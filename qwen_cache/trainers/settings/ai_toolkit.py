"""ai-toolkit's YAML of a job: `config.process[0]`.

Read in ostris/ai-toolkit 27a03a91: config/examples, toolkit/config_modules.py, toolkit/lora_special.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from qwen_cache.errors import ConfigError
from qwen_cache.trainers.settings.names import (
    ALWAYS_CACHED,
    OPTIMIZERS,
    PUSH,
    SCHEDULERS,
    Dataset,
    NoCounterpartError,
    Reading,
    Table,
    To,
    file_here,
    flat,
    if_on,
    is_on,
    number,
    one_of,
    only,
    optimizer,
    optimizer_arguments,
    prompt_of,
    sides,
    take_prompts,
    whole,
)

TITLE = "ai-toolkit"
FILES = "YAML of a job (job, config.process)"
ARCHITECTURES = ("qwen_image", "qwen_image_edit", "qwen_image_edit_plus", "qwen_image2", "qwen_image_2", "qwen_image21")
PROCESSES = ("sd_trainer", "diffusion_trainer", "ui_trainer")
TARGETS = [
    *("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
    *("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2", "img_mod.1", "txt_mod.1"),
]
"""The layers that its adapters are in: all of a block."""
QUANTIZATIONS = {
    **dict.fromkeys(("qfloat8", "float8"), "fp8"),
    **dict.fromkeys(("int8", "qint8"), "int8"),
    "convrot8": "int8_convrot",
}
SIDE = "the area of an image, data.vae_image_size, is what its resolution means"
AUGMENTED = "an image is encoded once, as it is"
ENCODED = "train.caption_dropout is one for all"
PART_OF_MODEL = "it is read from model.path"
TEACHER = "prior preservation is `teacher: true` in train.caches"
LOGGED = "metrics.jsonl has every step"
DATASET: Table = {
    "caption_ext": only("txt", ".txt", why="prompts are read from .txt files: rename them"),
    "caption_type": only("txt", ".txt", why="prompts are read from .txt files: rename them"),
    "default_caption": "every sample has a prompt of its own; data.allow_empty_prompt accepts none",
    "caption_dropout_rate": To("train.caption_dropout", number),
    "trigger_word": To("data.trigger_word", str),
    "batch_size": To("train.batch_size", whole),
    "num_repeats": To("train.caches.weight", number),
    "loss_multiplier": To("train.caches.loss_weight", number),
    "network_weight": only(1, 1.0, why="the LoRA has one weight"),
    "prior_reg": if_on({"train.caches.teacher": True}),
    "is_reg": only(False, why=f"its samples are trained like others; {TEACHER}"),
    "buckets": only(True, why="data.resolution and data.resize_mode give one size"),
    "bucket_tolerance": "sizes are multiples of 32 pixels",
    "shuffle_tokens": only(False, why="data.shuffle_tags takes how many orders of the tags are encoded"),
    "keep_tokens": only(0, why="data.keep_tags counts with data.shuffle_tags"),
    "token_dropout_rate": only(0, 0.0, why="captions are encoded whole"),
    **dict.fromkeys(("random_scale", "random_crop", "flip_x", "flip_y", "square_crop"), only(False, why=AUGMENTED)),
    **dict.fromkeys(("augments", "augmentations", "shuffle_augmentations", "scale", "replay_transforms"), AUGMENTED),
    **dict.fromkeys(("cache_latents", "cache_latents_to_disk", "cache_text_embeddings"), lambda _: {}),
    "load_image_when_caching_latents": ALWAYS_CACHED,
    "mask_min_value": "train.edit_mask_weight says how much more the inside of a mask counts",
    "invert_mask": only(False, why="white is what was edited: invert the images"),
    "alpha_mask": only(False, why="a mask is an image of its own"),
    "full_size_control_images": only(True, why="control images keep their shape"),
    "control_from_same_folder": only(False, why="a control belongs to its target by its name"),
    "control_transparent_color": "transparent pixels are white, as in the stock pipeline",
    "num_frames": only(1, why="videos are not trained"),
    "shrink_video_to_frames": lambda _: {},
    "fps": lambda _: {},
    **dict.fromkeys(("num_workers", "prefetch_factor", "cache_latents_num_workers"), "a thread reads"),
    **dict.fromkeys(("do_i2v", "do_audio"), only(False, why="images alone are trained")),
}
"""Keys of a data set, beside those that name folders and the resolution."""


def _quantize_text(value: Any) -> dict[str, Any]:
    return {"cache.text_quantization": "fp8"} if is_on(value) else {}


def _path(value: Any) -> dict[str, Any]:
    return {"model.path": str(value)}


def _loss(value: Any) -> dict[str, Any]:
    known = {"mse": "mse", "mae": "l1", "pseudo_huber": "huber"}
    if value not in known:
        raise NoCounterpartError("train.loss_type is mse, l1 or huber")
    return {"train.loss_type": known[value]}


def _timesteps(value: Any) -> dict[str, Any]:
    known: Mapping[Any, dict[str, Any]] = {
        "sigmoid": {"train.timestep_sampling": "logit_normal", "train.timestep_shift": 1.0},
        "linear": {"train.timestep_sampling": "uniform", "train.timestep_shift": 1.0},
        "shift": {"train.timestep_sampling": "uniform"},
    }
    if value not in known:
        raise NoCounterpartError("train.timestep_sampling has no such distribution; by default logit_normal, shifted")
    return known[value]


TRAINING: Table = {
    "device": "accelerate chooses the device",
    "performance_log_every": LOGGED,
    "trigger_word": To("data.trigger_word", str),
    "sqlite_db_path": LOGGED,
    "network.type": To("train.lora.type", one_of({"lora": "lora", "lokr": "lokr"}, "train.lora.type has no such type")),
    "network.linear": To("train.lora.rank", whole),
    "network.rank": To("train.lora.rank", whole),
    "network.linear_alpha": To("train.lora.lora_alpha", number),
    "network.alpha": To("train.lora.lora_alpha", number),
    "network.dropout": To("train.lora.lora_dropout", number),
    "network.lokr_factor": To("train.lora.decompose_factor", whole),
    "network.pretrained_lora_path": To("train.lora.weights", file_here),
    **dict.fromkeys(("network.conv", "network.conv_alpha"), "the transformer has no convolutions"),
    "network.network_kwargs": "train.lora.target_modules names the layers",
    "network.transformer_only": only(True, why="the text encoder is not trained"),
    "network.split_multistage_loras": lambda _: {},
    "network.old_lokr_format": only(False, why="`qwen-train export` converts the file"),
    "save.save_every": To("train.checkpointing_steps", whole),
    "save.max_step_saves_to_keep": To("train.checkpoints_total_limit", whole),
    "save.dtype": "the LoRA is saved as it is trained; `qwen-train export --dtype` makes another",
    "save.save_format": "`qwen-train export` converts the file",
    **dict.fromkeys(("save.push_to_hub", "save.hf_repo_id", "save.hf_private"), PUSH),
    "logging.log_every": To("logging.logging_steps", whole),
    "logging.use_wandb": if_on({"logging.report_to": "wandb"}),
    "logging.project_name": To("logging.project"),
    "logging.run_name": To("logging.run_name"),
    **dict.fromkeys(("logging.verbose", "logging.use_ui_logger"), LOGGED),
    "train.batch_size": To("train.batch_size", whole),
    "train.steps": To("train.max_steps", whole),
    "train.lr": To("optimizer.learning_rate", number),
    "train.unet_lr": To("optimizer.learning_rate", number),
    "train.gradient_accumulation": To("train.gradient_accumulation_steps", whole),
    "train.gradient_accumulation_steps": To("train.gradient_accumulation_steps", whole),
    "train.gradient_checkpointing": To("train.gradient_checkpointing", is_on),
    "train.optimizer": To("optimizer.name", optimizer({**OPTIMIZERS, "adam8": "adamw8bit", "adamw8": "adamw8bit"})),
    "train.optimizer_params": optimizer_arguments,
    "train.lr_scheduler": To("lr_scheduler.name", SCHEDULERS),
    "train.lr_scheduler_params": lambda given: _scheduler(given),
    "train.max_grad_norm": To("train.max_grad_norm", number),
    "train.dtype": To(
        "train.mixed_precision",
        one_of({**dict.fromkeys(("bf16", "bfloat16"), "bf16"), **dict.fromkeys(("fp32", "float32"), "no")}, "bf16"),
    ),
    "train.loss_type": _loss,
    "train.timestep_type": _timesteps,
    "train.content_or_style": only("balanced", why="train.logit_mean moves the noise levels"),
    "train.min_snr_gamma": lambda value: {"train.weighting": "min_snr", "train.snr_gamma": number(value)},
    "train.snr_gamma": lambda value: {"train.weighting": "min_snr", "train.snr_gamma": number(value)},
    "train.ema_config.ema_decay": To("train.ema_decay", number),
    "train.noise_scheduler": only("flowmatch", why="the scheduler is the model's own"),
    "train.train_unet": only(True, why="the transformer is trained"),
    "train.train_text_encoder": only(False, why="the text encoder is not trained"),
    "train.caption_dropout_rate": To("train.caption_dropout", number),
    **dict.fromkeys(("train.cache_text_embeddings", "train.unload_text_encoder"), lambda _: {}),
    "train.diff_output_preservation": only(False, why=TEACHER),
    **dict.fromkeys(
        ("train.diff_output_preservation_multiplier", "train.diff_output_preservation_class"),
        TEACHER,
    ),
    "train.blank_prompt_preservation": only(False, why=TEACHER),
    "train.skip_first_sample": only(False, why="images are generated before training, too"),
    "train.linear_timesteps": if_on({"train.timestep_sampling": "uniform", "train.timestep_shift": 1.0}),
    **dict.fromkeys(
        ("train.bypass_guidance_embedding", "train.do_cfg", "train.noise_offset", "train.reg_weight"),
        "the loss has no such part",
    ),
    "model.name_or_path": _path,
    "model.arch": only(*ARCHITECTURES, why="another model"),
    "model.quantize_te": _quantize_text,
    "model.qtype_te": only("qfloat8", "float8", why="cache.text_quantization is int8, fp8 or nf4"),
    "model.low_vram": only(False, why="train.offload_blocks; `qwen-train plan` says what fits"),
    "model.layer_offloading": only(False, why="train.offload_blocks; `qwen-train plan` says what fits"),
    **dict.fromkeys(
        ("model.layer_offloading_transformer_percent", "model.layer_offloading_text_encoder_percent"),
        "train.offload_blocks counts blocks",
    ),
    "model.assistant_lora_path": To("train.assistant_lora"),
    "model.accuracy_recovery_adapter": "the base is quantised without an adapter for its errors",
    "model.compile": To("train.compile", is_on),
    "model.vae_path": "model.vae gives another decoder; the model's own VAE encodes",
    **dict.fromkeys(("model.dtype", "model.te_name_or_path", "model.extras_name_or_path"), PART_OF_MODEL),
    "sample.sample_every": To("validation.images_every_steps", whole),
    "sample.guidance_scale": To("validation.true_cfg_scale", lambda value: max(1.0, float(number(value)))),
    "sample.sample_steps": To("validation.num_inference_steps", whole),
    "sample.sampler": only("flowmatch", why="the scheduler is the model's own"),
    "sample.sample_start_step": only(0, why="images are generated from the start"),
    "sample.neg": only("", False, why="images are guided against the sample's own empty prompt"),
    "sample.network_multiplier": only(1, 1.0, why="the LoRA has one weight"),
    **dict.fromkeys(("sample.fps", "sample.num_frames", "sample.format", "sample.ext"), lambda _: {}),
}
"""Keys of a process, beside those that go together."""


def _scheduler(given: Mapping[str, Any]) -> dict[str, Any]:
    known = {"num_warmup_steps": "lr_scheduler.warmup_steps", "num_cycles": "lr_scheduler.num_cycles"}
    if unknown := given.keys() - known.keys():
        raise NoCounterpartError(f"lr_scheduler has no {', '.join(sorted(unknown))}")
    return {known[name]: whole(value) for name, value in given.items()}


def recognises(value: Any) -> bool:
    inner = value.get("config") if isinstance(value, dict) and "job" in value else None
    return isinstance(inner, dict) and isinstance(inner.get("process"), list)


def take(reading: Reading, value: Any, read: Callable[[Path], Any]) -> None:
    reading.take({}, {key: each for key, each in value.items() if key not in ("job", "config", "meta")})
    if value.get("meta"):
        reading.leave("meta", value["meta"], "the LoRA's file says how it was trained")
    reading.take({}, {key: each for key, each in value["config"].items() if key not in ("name", "process")}, "config.")
    name, (process, *more) = str(value["config"].get("name", "")), value["config"]["process"] or [{}]
    if (kind := process.get("type")) not in PROCESSES:
        what = "this job trains no LoRA from images"
        raise ConfigError(what, where=reading.file, expected=", ".join(PROCESSES), found=kind)
    model = process.get("model") or {}
    architecture, path = str(model.get("arch", "")).partition(":")[0], str(model.get("name_or_path", ""))
    if architecture not in ARCHITECTURES and "qwen-image" not in path.lower():
        found, expected = architecture or path or "no model", ", ".join(ARCHITECTURES[:3])
        raise ConfigError("this file trains another model", where=reading.file, expected=expected, found=found)
    for number_, _ in enumerate(more, 1):
        reading.leave(f"process[{number_}]", "", "the first process is read")
    stop = ("network.network_kwargs", "train.optimizer_params", "train.lr_scheduler_params")
    options = flat({key: each for key, each in process.items() if key not in ("type", "datasets")}, stop=stop)
    options = {key: each.replace("[name]", name) if isinstance(each, str) else each for key, each in options.items()}
    options |= {"model.arch": architecture} if "model.arch" in options else {}
    for number_, given in enumerate(process.get("datasets") or []):
        _take_dataset(reading, given, f"datasets[{number_}]")
    if folder := options.pop("training_folder", None):
        reading.set("train.output_dir", f"{folder}/{name}".rstrip("/"), "training_folder and name", f"{folder}/{name}")
    _take_quantization(reading, options)
    _take_adapter(reading, options)
    if not is_on(options.pop("train.ema_config.use_ema", False)):
        options.pop("train.ema_config.ema_decay", None)
    _take_samples(reading, options)
    reading.take(TRAINING, options)
    reading.default("train.lora.target_modules", TARGETS, "network.type")
    reading.default("train.lora.lora_alpha", 1, "network.linear_alpha")
    reading.default("train.caption_dropout", 0.0, "caption_dropout_rate")


def _take_dataset(reading: Reading, given: Mapping[str, Any], name: str) -> None:
    given = dict(given)
    folder = given.pop("folder_path", None) or given.pop("dataset_path", None)
    if not folder:
        raise ConfigError(f"{name} has no folder_path", where=reading.file)
    listed = given.pop("control_path", None) or []
    numbered = [given.pop(f"control_path_{number_}", None) for number_ in (1, 2, 3)]
    controls = [each for each in numbered if each] or ([listed] if isinstance(listed, str) else list(listed))
    dataset = Dataset(name, str(folder), [str(each) for each in controls if each], given.pop("mask_path", None))
    reading.datasets.append(dataset)
    size = given.pop("resolution", 512)
    lengths = [whole(each) for each in (size if isinstance(size, list) else [size])]
    origin = f"{name}.resolution"
    if is_on(given.get("buckets", True)):
        reading.set("data.vae_image_size", [side * side for side in lengths], origin, size, dataset)
    else:
        given.pop("buckets")
        reading.set(
            "data.resolution", [sides(side, side) for side in lengths], f"{origin} without buckets:", size, dataset
        )
        reading.set("data.resize_mode", "crop", f"{origin} without buckets:", size, dataset)
    if len(lengths) > 1:
        reading.set("data.resolutions_per_sample", "all", origin, size, dataset)
    if dataset.mask:
        weight = number(given.pop("mask_min_value", 0))
        if weight > 0:
            reading.set("train.edit_mask_weight", 1 / weight, f"{name}.mask_min_value", weight, dataset)
        else:
            reading.leave(f"{name}.mask_min_value", weight, DATASET["mask_min_value"])  # type: ignore[arg-type]
    reading.take(DATASET, given, f"{name}.", dataset)


def _take_quantization(reading: Reading, options: dict[str, Any]) -> None:
    kind = str(options.pop("model.qtype", "qfloat8"))
    if not is_on(options.pop("model.quantize", False)):
        return
    plain_kind, _, adapter = kind.partition("|")
    if plain_kind in QUANTIZATIONS:
        reading.set("model.quantization", QUANTIZATIONS[plain_kind], "model.quantize with qtype", plain_kind)
    else:
        reading.leave("model.qtype", plain_kind, "model.quantization is int8, fp8, nf4, int8_convrot or fp8_w8a8")
    if adapter:
        reading.take(TRAINING, {"model.accuracy_recovery_adapter": adapter})


def _take_adapter(reading: Reading, options: dict[str, Any]) -> None:
    """The layers; and a LoKr, which there begins as LyCORIS does and keeps its second factor whole by default."""
    words = (options.get("network.network_kwargs") or {}).get("ignore_if_contains") or []
    if words and all(any(word in each for each in TARGETS) for word in words):
        kept = [each for each in TARGETS if not any(word in each for word in words)]
        reading.set("train.lora.target_modules", kept, "network.network_kwargs.ignore_if_contains", words)
        others = {key: each for key, each in options.pop("network.network_kwargs").items() if each != words}
        options |= {"network.network_kwargs": others} if others else {}
    is_whole = is_on(options.pop("network.lokr_full_rank", True))
    if options.get("network.type") != "lokr":
        options.pop("network.lokr_factor", None)
        return
    reading.set("train.lora.type", "lokr", "network.type", "lokr")
    reading.set("train.lora.init_weights", "lycoris", "network.type", "lokr")
    if is_whole:
        for name in ("network.linear", "network.rank", "network.linear_alpha", "network.alpha"):
            if (value := options.pop(name, None)) is not None:
                reading.leave(name, value, "a LoKr with lokr_full_rank has no rank")
        reading.set("train.lora.rank", 100_000, "network.lokr_full_rank", True)
        reading.set("train.lora.lora_alpha", 100_000, "network.lokr_full_rank", True)


def _take_samples(reading: Reading, options: dict[str, Any]) -> None:
    """The prompts of `sample`, each with a size and a seed; none with disable_sampling."""
    written, prompts = options.pop("sample.samples", None), options.pop("sample.prompts", None)
    common = {name: options.pop(f"sample.{name}", None) for name in ("width", "height", "seed")}
    is_walking = is_on(options.pop("sample.walk_seed", False))
    samples = written if written is not None else [{"prompt": each} for each in prompts or []]
    if is_on(options.pop("train.disable_sampling", False)):
        reading.leave("sample", f"{len(samples)} prompts", "train.disable_sampling is on")
        for name in [each for each in options if each.startswith("sample.")]:
            del options[name]
        return
    entries = []
    for number_, each in enumerate(samples):
        entry, others = prompt_of(str(each.get("prompt", "")))
        images = [each.get(name) for name in ("ctrl_img_1", "ctrl_img", "ctrl_img_2", "ctrl_img_3")]
        controls = list(dict.fromkeys(str(image) for image in images if image))
        entry |= {"control": controls} if controls else {}
        for side in ("width", "height"):
            if (value := each.get(side, common[side])) is not None:
                entry.setdefault(side, value)
        seed = each.get("seed", None if common["seed"] is None else common["seed"] + number_ * is_walking)
        entry |= {} if seed is None or "seed" in entry else {"seed": seed}
        known = ("prompt", "width", "height", "seed", "ctrl_img", "ctrl_img_1", "ctrl_img_2", "ctrl_img_3")
        renamed = {"neg": "n", "sample_steps": "s", "guidance_scale": "l"}
        others |= {renamed.get(name, name): str(value) for name, value in each.items() if name not in known}
        entries.append((entry, others))
    take_prompts(reading, "sample.samples" if written is not None else "sample.prompts", entries)
