"""SimpleTuner's config.json and the multidatabackend.json that it names; the latter alone, too.

Read in bghira/SimpleTuner bc8e6ab77: documentation/OPTIONS.md, documentation/DATALOADER.md,
documentation/quickstart/QWEN_EDIT.md, helpers/models/qwen_image/model.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from qwen_cache.errors import ConfigError
from qwen_cache.trainers.settings.names import (
    ALWAYS_CACHED,
    OPTIMIZERS,
    PUSH,
    SCHEDULERS,
    TRACKERS,
    Dataset,
    NoCounterpartError,
    Reading,
    Table,
    To,
    epochs,
    file_here,
    if_on,
    is_on,
    number,
    one_of,
    only,
    optimizer,
    optimizer_arguments,
    pairs,
    sides,
    take_prompts,
    whole,
)

TITLE = "SimpleTuner"
FILES = "config.json, or its multidatabackend.json"
MODELS = {
    "v1.0": "Qwen/Qwen-Image",
    "v2.0": "Qwen/Qwen-Image-2512",
    "edit-v1": "Qwen/Qwen-Image-Edit",
    "edit-v2": "Qwen/Qwen-Image-Edit-2509",
    "edit-v2+": "Qwen/Qwen-Image-Edit-2509",
    "edit-v3": "Qwen/Qwen-Image-Edit-2511",
}
KEPT = ("data_backend_config", "model_family", "model_flavour")
"""Keys of a config.json that no other trainer's has."""
ONE_IMAGE = "an image is encoded once, whole, at its own ratio of width and height"
FILTERED = "no image is left out for its size: `qwen-cache build --dry-run` shows the sizes"
DATASET: Table = {
    "type": only("local", "huggingface", why="a local folder is read from this file; a URL can be data.source"),
    "dataset_name": lambda _: {},
    "split": To("data.split", str),
    "image_column": To("data.columns.target", str),
    "caption_column": To("data.columns.prompt", str),
    "caption_strategy": only(
        *("textfile", "huggingface"), why="prompts are read from .txt beside the images, or from a table"
    ),
    "disable_multiline_split": only(True, why="a text file is one prompt; one per caption is a table's `prompts`"),
    "repeats": lambda value: {"train.caches.weight": whole(value) + 1},
    "is_regularisation_data": if_on({"train.caches.teacher": True}),
    "is_regularization_data": if_on({"train.caches.teacher": True}),
    "train_batch_size": To("train.batch_size", whole),
    "prepend_instance_prompt": only(False, why="data.prompt_prefix is a text before every prompt"),
    "instance_prompt": "data.prompt_prefix is a text before every prompt",
    "only_instance_prompt": only(False, why="every sample has its own prompt"),
    **dict.fromkeys(("minimum_image_size", "maximum_image_size", "target_downsample_size"), only(0, why=FILTERED)),
    **dict.fromkeys(("minimum_aspect_ratio", "maximum_aspect_ratio", "max_upscale_threshold"), FILTERED),
    "crop_style": only("center", "centre", why=ONE_IMAGE),
    "crop_aspect_buckets": ONE_IMAGE,
    "metadata_backend": only("discovery", "huggingface", why="sizes are read from the images"),
    **dict.fromkeys(
        ("cache_dir_vae", "cache_dir", "text_embeds", "image_embeds", "conditioning_image_embeds"), lambda _: {}
    ),
    **dict.fromkeys(("vae_cache_clear_each_epoch", "vae_cache_ondemand", "vae_cache_disable"), ALWAYS_CACHED),
    **dict.fromkeys(
        ("skip_file_discovery", "preserve_data_backend_cache", "hash_filenames", "default", "write_batch_size"),
        lambda _: {},
    ),
    "probability": "a weight is how often a sample comes in an epoch",
    "max_num_samples": "data.slice reads a part of the source",
    **dict.fromkeys(("start_step", "start_epoch", "end_step", "end_epoch"), "a data set counts from start to end"),
    "caption_shuffle": "data.shuffle_tags and data.keep_tags shuffle the tags of a caption",
    "timestep_sampling_offset": "train.logit_mean moves the noise levels of all",
    "source_dataset_id": lambda _: {},
}
"""Keys of a data set, beside those that name folders, controls and the resolution."""


def _precision(names: Mapping[str, str], key: str) -> Callable[[Any], Mapping[str, Any]]:
    def settings(value: Any) -> Mapping[str, Any]:
        if str(value).lower() in ("no_change", "bf16", "none"):
            return {}
        if str(value).lower() not in names:
            raise NoCounterpartError(f"{key} has no such choice")
        return {key: names[str(value).lower()]}

    return settings


EIGHT_BITS = {
    **dict.fromkeys(("int8-quanto", "int8-torchao", "int8dq-torchao", "int8-sdnq"), "int8"),
    **dict.fromkeys(("fp8-quanto", "fp8uz-quanto", "fp8-torchao", "fp8wo-torchao"), "fp8"),
    "nf4-bnb": "nf4",
}
LOCAL_OPTIMIZERS = {
    **OPTIMIZERS,
    **dict.fromkeys(("adamw_bf16", "optimi-adamw", "bnb-adamw"), "adamw"),
    **dict.fromkeys(("bnb-adamw8bit", "bnb-adamw8bit-paged", "ao-adamw8bit"), "adamw8bit"),
}
NO_TABLE = "SimpleTuner's own; here it has no part"
TRAINING: Table = {
    "model_family": lambda _: {},
    "model_flavour": To("model.path", one_of(MODELS, "no pipeline here trains this model")),
    "pretrained_model_name_or_path": To("model.path", str),
    "pretrained_transformer_model_name_or_path": "model.transformer takes a single file",
    "model_type": To("train.method", one_of({"lora": "lora", "full": "full"}, "train.method is lora or full")),
    "lora_type": only("standard", why="train.lora.type and its settings make a LoKr, a LoHa or an OFT"),
    "lycoris_config": "train.lora.type and its settings make a LoKr, a LoHa or an OFT",
    "lora_rank": To("train.lora.rank", whole),
    "lora_alpha": To("train.lora.lora_alpha", number),
    "lora_dropout": To("train.lora.lora_dropout", number),
    "lora_format": "`qwen-train export` converts the file",
    "init_lora": To("train.lora.weights", file_here),
    "use_dora": To("train.lora.use_dora", is_on),
    "peft_lora_target_modules": To("train.lora.target_modules"),
    "max_train_steps": lambda value: {"train.max_steps": whole(value)} if whole(value) else {},
    "num_train_epochs": lambda value: {"train.max_steps": epochs(value)} if number(value) else {},
    "strict_epoch_limit": "train.max_steps counts steps",
    "train_batch_size": To("train.batch_size", whole),
    "gradient_accumulation_steps": To("train.gradient_accumulation_steps", whole),
    "gradient_checkpointing": To("train.gradient_checkpointing", is_on),
    "gradient_checkpointing_interval": To("train.gradient_checkpointing", whole),
    "learning_rate": To("optimizer.learning_rate", number),
    "optimizer": To("optimizer.name", optimizer(LOCAL_OPTIMIZERS)),
    "optimizer_config": lambda given: optimizer_arguments(pairs(given)),
    "adam_weight_decay": To("optimizer.weight_decay", number),
    "adam_epsilon": To("optimizer.eps", number),
    "lr_scheduler": To("lr_scheduler.name", SCHEDULERS),
    "lr_warmup_steps": To("lr_scheduler.warmup_steps", whole),
    "lr_num_cycles": To("lr_scheduler.num_cycles", whole),
    "lr_power": To("lr_scheduler.power", number),
    "max_grad_norm": To("train.max_grad_norm", number),
    "seed": To("train.seed", whole),
    "mixed_precision": To("train.mixed_precision", one_of({"bf16": "bf16", "no": "no"}, "bf16 or float32 here")),
    "base_model_precision": _precision(EIGHT_BITS, "model.quantization"),
    "text_encoder_1_precision": _precision(EIGHT_BITS, "cache.text_quantization"),
    **dict.fromkeys(("quantize_via", "quantize_activations"), "model.quantization says how"),
    "musubi_blocks_to_swap": To("train.offload_blocks", whole),
    "flow_schedule_shift": lambda value: {"train.timestep_shift": number(value)} if number(value) else {},
    "flow_schedule_auto_shift": lambda _: {},
    "flow_sigmoid_scale": To("train.logit_std", number),
    "flow_use_uniform_schedule": if_on({"train.timestep_sampling": "uniform"}),
    "caption_dropout_probability": To("train.caption_dropout", number),
    "loss_type": To("train.loss_type", one_of({"l2": "mse", "huber": "huber"}, "train.loss_type is mse, l1 or huber")),
    "huber_c": To("train.huber_c", number),
    "snr_gamma": lambda value: {"train.weighting": "min_snr", "train.snr_gamma": number(value)},
    "output_dir": To("train.output_dir"),
    "checkpoint_step_interval": To("train.checkpointing_steps", whole),
    "checkpointing_steps": To("train.checkpointing_steps", whole),
    "checkpoint_epoch_interval": To("train.checkpointing_steps", epochs),
    "checkpoints_total_limit": To("train.checkpoints_total_limit", whole),
    "resume_from_checkpoint": "`qwen-train run --resume` continues a run",
    "validation_step_interval": To("validation.images_every_steps", whole),
    "validation_steps": To("validation.images_every_steps", whole),
    "validation_guidance": To("validation.true_cfg_scale", lambda value: max(1.0, float(number(value)))),
    "validation_guidance_real": To("validation.true_cfg_scale", lambda value: max(1.0, float(number(value)))),
    "validation_num_inference_steps": To("validation.num_inference_steps", whole),
    "validation_negative_prompt": "images are guided against the sample's own empty prompt",
    **dict.fromkeys(
        ("validation_guidance_rescale", "validation_lycoris_strength", "validation_torch_compile"), NO_TABLE
    ),
    **dict.fromkeys(("num_eval_images", "eval_dataset_id"), "validation.num_images generates held-out samples"),
    "report_to": To("logging.report_to", TRACKERS),
    "tracker_project_name": To("logging.project"),
    "tracker_run_name": To("logging.run_name"),
    "logging_dir": "tensorboard writes to train.output_dir/logs",
    **dict.fromkeys(("push_to_hub", "push_checkpoints_to_hub", "hub_model_id"), PUSH),
    **dict.fromkeys(("vae_batch_size", "write_batch_size", "text_encoder_batch_size"), "`build` chooses its batches"),
    **dict.fromkeys(("aspect_bucket_rounding", "disable_bucket_pruning", "aspect_bucket_alignment"), ONE_IMAGE),
    **dict.fromkeys(("minimum_image_size", "maximum_image_size"), only(0, why=FILTERED)),
    **dict.fromkeys(("disable_benchmark", "compress_disk_cache", "skip_file_discovery"), NO_TABLE),
    "attention_mechanism": "train.attention chooses the kernel of attention by itself",
}
"""Options, without their dashes, beside those that name other files or go together."""


def recognises(value: Any) -> bool:
    if isinstance(value, list):
        keys = ("instance_data_dir", "dataset_type", "type", "cache_dir_vae")
        return (
            bool(value)
            and all(isinstance(each, dict) and "id" in each for each in value)
            and any(not each.keys().isdisjoint(keys) for each in value)
        )
    return isinstance(value, dict) and not _options(value).keys().isdisjoint(KEPT) and "job" not in value


def _options(value: Mapping[str, Any]) -> dict[str, Any]:
    return {str(name).removeprefix("--"): each for name, each in value.items()}


def take(reading: Reading, value: Any, read: Callable[[Path], Any]) -> None:
    if isinstance(value, list):
        _take_backends(reading, value, {})
        return
    options = _options(value)
    if options.get("model_family", "qwen_image") != "qwen_image":
        found = options["model_family"]
        raise ConfigError("this file trains another model", where=reading.file, expected="qwen_image", found=found)
    sizes: dict[str, Any] = {name: options.pop(name) for name in ("resolution", "resolution_type") if name in options}
    if named := options.pop("data_backend_config", None):
        file = Path(named) if Path(named).exists() else reading.file.parent / Path(named).name
        backends = read(file)
        if not isinstance(backends, list) or not recognises(backends):
            raise ConfigError(f"this is no multidatabackend.json of {TITLE}", where=file)
        reading.within = file
        _take_backends(reading, backends, sizes)
        reading.within = None
    betas = [options.pop(f"optimizer_beta{each}", options.pop(f"adam_beta{each}", None)) for each in (1, 2)]
    if None not in betas:
        reading.set("optimizer.betas", [number(each) for each in betas], "optimizer_beta1 and optimizer_beta2", betas)
    decay = options.pop("ema_decay", None)
    if is_on(options.pop("use_ema", False)):
        reading.set("train.ema_decay", number(0.995 if decay is None else decay), "use_ema, ema_decay", decay or 0.995)
    if not number(options.get("num_train_epochs", 1)) or number(options.get("max_train_steps", 0)):
        options.pop("num_train_epochs", None)
    is_automatic = is_on(options.get("flow_schedule_auto_shift", False))
    if is_automatic and "flow_schedule_shift" in options:
        reading.leave("flow_schedule_shift", options.pop("flow_schedule_shift"), "flow_schedule_auto_shift counts")
    _take_prompts(reading, options, read)
    reading.take(TRAINING, options)
    if "flow_schedule_shift" not in options and not is_automatic:
        reading.default("train.timestep_shift", 3.0, "flow_schedule_shift")


def _take_prompts(reading: Reading, options: dict[str, Any], read: Callable[[Path], Any]) -> None:
    """The validation prompt, and those of the library, each with the first resolution and the seed."""
    prompts = [options.pop("validation_prompt", None)]
    library = options.pop("validation_prompt_library", None) or options.pop("user_prompt_library", None)
    if isinstance(library, str) and library.lower().endswith(".json"):
        listed = read(Path(library) if Path(library).exists() else reading.file.parent / Path(library).name)
        prompts += [each if isinstance(each, str) else each.get("prompt") for each in dict(listed).values()]
    elif is_on(library or False):
        reading.leave("validation_prompt_library", library, "SimpleTuner's own list of prompts")
    size, seed = str(options.pop("validation_resolution", "")), options.pop("validation_seed", None)
    first, *others = size.split(",")
    both = [int(side) for side in first.lower().split("x") if side.strip().isdecimal()]
    common: dict[str, Any] = {"width": both[0], "height": both[-1]} if both else {}
    common |= {} if seed is None else {"seed": whole(seed)}
    take_prompts(reading, "validation_prompt", [({"prompt": str(each), **common}, {}) for each in prompts if each])
    for other in others:
        reading.leave("validation_resolution", other, "a prompt has one size")


# ---- multidatabackend.json -------------------------------------------------------------------------------------------

OF_CACHES = ("text_embeds", "image_embeds", "conditioning_image_embeds")


def _take_backends(reading: Reading, backends: Sequence[Mapping[str, Any]], sizes: Mapping[str, Any]) -> None:
    """A data set for each of images, with those of its controls and masks."""
    used = [each for each in backends if not is_on(each.get("disabled", each.get("disable", False)))]
    for each in [each for each in backends if each not in used]:
        reading.leave(str(each["id"]), "disabled", "it is switched off")
    by_id = {str(each["id"]): each for each in used}
    paired = set[str]()
    for each in used:
        kind, name = each.get("dataset_type", "image"), str(each["id"])
        if kind == "image":
            paired |= _take_images(reading, each, by_id, sizes)
        elif kind in OF_CACHES:
            reading.same.append(name)
        elif kind != "conditioning":
            reading.skip(name, kind, "images alone are trained")
    for name, each in by_id.items():
        if each.get("dataset_type") == "conditioning" and name not in paired:
            reading.leave(name, each.get("instance_data_dir"), "no data set names it in conditioning_data")


def _take_images(
    reading: Reading, given: Mapping[str, Any], by_id: Mapping[str, Mapping[str, Any]], sizes: Mapping[str, Any]
) -> set[str]:
    """The data set; the ids of its controls and masks."""
    name, listed = str(given["id"]), given.get("conditioning_data") or []
    ids = [listed] if isinstance(listed, str) else [str(each) for each in listed]
    if missing := [each for each in ids if each not in by_id]:
        what = f"{name} names conditioning data that this file does not have"
        raise ConfigError(what, where=reading.file, found=missing[0], expected=", ".join(by_id))
    is_dataset = given.get("type") == "huggingface" and given.get("dataset_name")
    folder = f"hf://datasets/{given['dataset_name']}" if is_dataset else given.get("instance_data_dir")
    if not folder or given.get("type", "local") not in ("local", "huggingface"):
        reading.skip(name, given.get("type"), "its images are in no local folder")
        return set(ids)
    of_masks = [each for each in ids if by_id[each].get("conditioning_type") == "mask"]
    controls = [str(by_id[each].get("instance_data_dir", "")) for each in ids if each not in of_masks]
    mask = str(by_id[of_masks[0]].get("instance_data_dir", "")) if of_masks else None
    dataset = Dataset(name, str(folder), controls, mask)
    reading.datasets.append(dataset)
    for each in of_masks[1:]:
        reading.leave(each, by_id[each].get("instance_data_dir"), "a sample has one mask")
    known = ("id", "dataset_type", "instance_data_dir", "conditioning_data", "disabled", "disable")
    rest = {key: value for key, value in given.items() if key not in known}
    _take_size(reading, rest, sizes, name, dataset)
    _take_prefix(reading, rest, name, dataset)
    if rest.get("caption_strategy") == "textfile" and not is_on(rest.get("disable_multiline_split", False)):
        rest.pop("disable_multiline_split", None)
        if several := _captions_by_line(Path(dataset.targets)):
            why = "a text file is one prompt; several captions of an image are `prompts` in a table"
            reading.leave(f"{name}.caption_strategy", f"a caption per line, as in {several}", why)
    reading.take(DATASET, rest, f"{name}.", dataset)
    for each in ids:
        inner = {key: value for key, value in by_id[each].items() if key not in known}
        sized = ("resolution", "resolution_type", "crop", "crop_aspect", "crop_style", "conditioning_type")
        loose = inner.get("conditioning_type") == "controlnet"
        if loose:
            reading.leave(f"{each}.conditioning_type", "controlnet", "its images are controls of an editing model here")
        reading.take(DATASET, {key: value for key, value in inner.items() if key not in sized}, f"{each}.", dataset)
    return set(ids)


def _take_size(reading: Reading, given: dict[str, Any], sizes: Mapping[str, Any], name: str, dataset: Dataset) -> None:
    merged = {"resolution": 1024, "resolution_type": "pixel_area", **sizes, **given}
    size, kind = number(merged["resolution"]), merged["resolution_type"]
    start = f"{name}." if "resolution" in given else "" if sizes else "the default of "
    is_cropped, aspect = is_on(given.pop("crop", False)), given.pop("crop_aspect", "square")
    for key in ("resolution", "resolution_type"):
        given.pop(key, None)
    side = round((size * 1e6) ** 0.5) if kind == "area" else int(size)
    if is_cropped and aspect == "square":
        reading.set("data.resolution", sides(side, side), f"{start}resolution with crop:", size, dataset)
        reading.set("data.resize_mode", "crop", f"{start}resolution with crop:", size, dataset)
        return
    if kind == "pixel":
        reading.leave(f"{name}.resolution_type", kind, "the area decides here: data.vae_image_size")
    if is_cropped:
        reading.leave(f"{name}.crop_aspect", aspect, ONE_IMAGE)
    reading.set(
        "data.vae_image_size", round(size * 1e6) if kind == "area" else side * side, f"{start}resolution", size, dataset
    )


LOOKED_AT = 8  # captions of a data set


def _captions_by_line(folder: Path) -> str | None:
    """The first of some captions that has several lines."""
    files = islice((each for each in folder.glob("*.txt") if each.is_file()), LOOKED_AT)
    return next((each.name for each in files if "\n" in each.read_text("utf-8", "replace").strip()), None)


def _take_prefix(reading: Reading, given: dict[str, Any], name: str, dataset: Dataset) -> None:
    if is_on(given.get("prepend_instance_prompt", False)) and given.get("instance_prompt"):
        given.pop("prepend_instance_prompt")
        text = given.pop("instance_prompt")
        reading.set("data.prompt_prefix", text, f"{name}.instance_prompt", text, dataset)
    elif "instance_prompt" in given and given.get("caption_strategy") == "textfile":
        given.pop("instance_prompt")
        reading.same.append(f"{name}.instance_prompt")
