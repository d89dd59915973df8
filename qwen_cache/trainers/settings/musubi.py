"""musubi-tuner's dataset.toml, which Fizgig has too, and the .toml for `--config_file`, which names one.

Read in kohya-ss/musubi-tuner 30c658c: docs/dataset_config.md, docs/advanced_config.md, dataset/config_utils.py,
training/parser_common.py, networks/lora_qwen_image.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from qwen_cache.errors import ConfigError
from qwen_cache.settings.load import MAX_BYTES
from qwen_cache.storage.files import read_file
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
    prompt_of,
    sides,
    take_prompts,
    warmup,
    whole,
)

TITLE = "musubi-tuner"
FILES = "dataset.toml (general, datasets), or the .toml for --config_file"
MODELS = {
    "original": "Qwen/Qwen-Image",
    "edit": "Qwen/Qwen-Image-Edit",
    "edit-2509": "Qwen/Qwen-Image-Edit-2509",
    "edit-2511": "Qwen/Qwen-Image-Edit-2511",
}
ADAPTERS = {"networks.lora_qwen_image": "lora", "networks.loha": "loha", "networks.lokr": "lokr"}
TARGETS = [
    *("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
    *("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2"),
]
"""The layers that its adapters are in: all of a block but the modulation."""

CONTROL_SIZE = "control images have the size that the stock pipeline gives them, about data.vae_image_size"
FRAMEPACK = "of FramePack, another model"
VIDEOS = ("video_directory", "video_jsonl_file")
IMAGES = ("image_directory", "image_jsonl_file")

DATASET: Table = {
    "batch_size": To("train.batch_size", whole),
    "num_repeats": To("train.caches.weight", number),
    "bucket_no_upscale": if_on({"data.upscale": False}),
    "caption_extension": only(".txt", "txt", why="prompts are read from .txt files: rename them"),
    "cache_directory": f"{ALWAYS_CACHED}; `qwen-cache import musubi` takes a cache that is in it",
    "multiple_target": only(False, why="a sample has one target"),
    "no_resize_control": only(False, why=CONTROL_SIZE),
    "control_resolution": CONTROL_SIZE,
    "qwen_image_edit_no_resize_control": only(False, why=CONTROL_SIZE),
    "qwen_image_edit_control_resolution": CONTROL_SIZE,
    "flux_kontext_no_resize_control": only(False, why=CONTROL_SIZE),
    "debug_dataset": "`qwen-cache inspect --html` shows the samples",
    **dict.fromkeys(
        ("fp_latent_window_size", "fp_1f_clean_indices", "fp_1f_target_index", "fp_1f_no_post"),
        FRAMEPACK,
    ),
}
"""Keys of `general` and `datasets`, beside those that name folders and the resolution."""


def _dit(path: Any) -> dict[str, Any]:
    if re.search(r"-\d+-of-\d+", str(path)):
        raise NoCounterpartError("a transformer in several files is read from model.path")
    if not Path(path).is_file():
        raise NoCounterpartError(
            "this file is not there; model.transformer takes a single file, else it is model.path's"
        )
    return {"model.transformer": str(path)}


def _sampling(name: Any) -> dict[str, Any]:
    """How u is sampled; the shift is that of `discrete_flow_shift`, or the model's own."""
    known: Mapping[Any, dict[str, Any]] = {
        "qwen_shift": {"train.timestep_sampling": "logit_normal"},
        "shift": {"train.timestep_sampling": "logit_normal"},
        "sigmoid": {"train.timestep_sampling": "logit_normal", "train.timestep_shift": 1.0},
        "uniform": {"train.timestep_sampling": "uniform", "train.timestep_shift": 1.0},
    }
    if name not in known:
        raise NoCounterpartError("train.timestep_sampling has no such distribution")
    return known[name]


WEIGHTINGS = {each: each for each in ("none", "sigma_sqrt", "cosmap")}
PARTS = "the VAE and the text encoder are those of model.path"
KERNEL = "train.attention chooses the kernel of attention by itself"
SAVED = "a checkpoint has the whole state, and `run --resume` continues from it"
NOT_FOR_QWEN = "it says nothing for Qwen-Image"
COMPILED = "train.compile decides"
SCHEDULE = "lr_scheduler has name, warmup_steps, num_cycles and power"
DISTRIBUTED = "accelerate's own; `qwen-train run` starts under torchrun"
TRAINING: Table = {
    "dit": _dit,
    **dict.fromkeys(("vae", "text_encoder", "vae_dtype", "fp8_vl", "vae_tiling", "vae_chunk_size"), PARTS),
    "model_version": To("model.path", one_of(MODELS, "no pipeline here trains this model")),
    "edit": if_on({"model.path": MODELS["edit"]}),
    "edit_plus": if_on({"model.path": MODELS["edit-2509"]}),
    "num_layers": "the transformer has its own number of blocks",
    "remove_first_image_from_target": "a sample has one target",
    **dict.fromkeys(("sdpa", "flash_attn", "sage_attn", "xformers", "flash3", "split_attn"), KERNEL),
    "compile": To("train.compile", is_on),
    **dict.fromkeys(
        ("compile_backend", "compile_mode", "compile_dynamic", "compile_fullgraph", "compile_cache_size_limit"),
        COMPILED,
    ),
    **dict.fromkeys(("dynamo_backend", "dynamo_mode", "dynamo_fullgraph", "dynamo_dynamic"), COMPILED),
    "max_train_steps": To("train.max_steps", whole),
    "max_train_epochs": To("train.max_steps", epochs),
    **dict.fromkeys(
        ("max_data_loader_n_workers", "persistent_data_loader_workers"), "a thread reads, not worker processes"
    ),
    "seed": To("train.seed", whole),
    "gradient_checkpointing": To("train.gradient_checkpointing", is_on),
    "gradient_checkpointing_cpu_offload": To("train.offload_activations", is_on),
    "gradient_accumulation_steps": To("train.gradient_accumulation_steps", whole),
    "mixed_precision": To("train.mixed_precision", one_of({"bf16": "bf16", "no": "no"}, "bf16 or float32 here")),
    "save_precision": "the LoRA is saved as it is trained; `qwen-train export --dtype` makes another",
    "logging_dir": "tensorboard writes to train.output_dir/logs",
    "log_with": To("logging.report_to", TRACKERS),
    "log_tracker_name": To("logging.project"),
    "wandb_run_name": To("logging.run_name"),
    "sample_every_n_steps": To("validation.images_every_steps", whole),
    "sample_every_n_epochs": To("validation.images_every_steps", epochs),
    "sample_at_first": only(True, why="images are generated before training, too"),
    "optimizer_type": To("optimizer.name", optimizer(OPTIMIZERS)),
    "optimizer_args": lambda given: optimizer_arguments(pairs(given)),
    "learning_rate": To("optimizer.learning_rate", number),
    "max_grad_norm": To("train.max_grad_norm", number),
    "lr_scheduler": To("lr_scheduler.name", SCHEDULERS),
    "lr_warmup_steps": To("lr_scheduler.warmup_steps", warmup),
    "lr_scheduler_num_cycles": To("lr_scheduler.num_cycles", whole),
    "lr_scheduler_power": To("lr_scheduler.power", number),
    "fp8_base": if_on({"model.quantization": "fp8"}),
    "fp8_scaled": if_on({"model.quantization": "fp8"}),
    "blocks_to_swap": To("train.offload_blocks", whole),
    **dict.fromkeys(
        ("use_pinned_memory_for_block_swap", "block_swap_h2d_only", "block_swap_ring_size", "img_in_txt_in_offloading"),
        "train.offload_blocks has no such choice",
    ),
    "disable_numpy_memmap": "weights are mapped, not read",
    "guidance_scale": NOT_FOR_QWEN,
    "timestep_sampling": _sampling,
    "sigmoid_scale": To("train.logit_std", number),
    "weighting_scheme": To("train.weighting", one_of(WEIGHTINGS, "train.weighting has no such weight")),
    "logit_mean": To("train.logit_mean", number),
    "logit_std": To("train.logit_std", number),
    "mode_scale": To("train.mode_scale", number),
    "min_timestep": To("train.min_timestep", number),
    "max_timestep": To("train.max_timestep", number),
    "preserve_distribution_shape": only(True, why="train.min_timestep and max_timestep always keep the shape"),
    "num_timestep_buckets": "timesteps are sampled one by one",
    "network_weights": To("train.lora.weights", file_here),
    "network_dim": To("train.lora.rank", whole),
    "network_alpha": To("train.lora.lora_alpha", number),
    "network_dropout": To("train.lora.lora_dropout", number),
    "dim_from_weights": "train.lora.rank says it",
    "scale_weight_norms": "weights are not scaled",
    "output_dir": To("train.output_dir"),
    "output_name": "the LoRA is pytorch_lora_weights.safetensors; `qwen-train export --out` gives a name",
    "resume": "`qwen-train run --resume` continues a run of its own only",
    "save_every_n_steps": To("train.checkpointing_steps", whole),
    "save_every_n_epochs": To("train.checkpointing_steps", epochs),
    **dict.fromkeys(
        ("save_last_n_epochs", "save_last_n_epochs_state", "save_last_n_steps", "save_last_n_steps_state"),
        "train.checkpoints_total_limit counts checkpoints",
    ),
    **dict.fromkeys(("save_state", "save_state_on_train_end", "save_state_to_huggingface"), SAVED),
    **dict.fromkeys(
        ("no_metadata", "training_comment", *(f"metadata_{name}" for name in ("title", "author", "description"))),
        "the file says how it was trained",
    ),
    **dict.fromkeys(
        tuple(f"huggingface_{name}" for name in ("repo_id", "repo_type", "path_in_repo", "token", "repo_visibility")),
        PUSH,
    ),
    **dict.fromkeys(
        tuple(f"metadata_{name}" for name in ("license", "tags", "reso", "arch")), "a card says it: " + PUSH
    ),
    **dict.fromkeys(("async_upload", "resume_from_huggingface"), PUSH),
    **dict.fromkeys(("lr_decay_steps", "lr_scheduler_timescale", "lr_scheduler_min_lr_ratio"), SCHEDULE),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler_args"), SCHEDULE),
    **dict.fromkeys(("log_prefix", "log_tracker_config", "log_config", "wandb_api_key"), "the tracker's own settings"),
    **dict.fromkeys(("cuda_allow_tf32", "cuda_cudnn_benchmark"), "the switches of torch stay as they are"),
    "show_timesteps": "`qwen-cache inspect` shows a cache, not timesteps",
    **dict.fromkeys(("ddp_timeout", "ddp_gradient_as_bucket_view", "ddp_static_graph"), DISTRIBUTED),
}
"""Options of qwen_image_train_network.py, beside those that name other files or go together."""
NETWORK_ARGS: Table = {
    "factor": To("train.lora.decompose_factor", whole),
    "rank_dropout": To("train.lora.rank_dropout", number),
    "module_dropout": To("train.lora.module_dropout", number),
    "verbose": "`qwen-train run` prints the layers' number",
    "include_patterns": "train.lora.target_modules names the layers",
    "exclude_patterns": "train.lora.target_modules names the layers",
    "loraplus_lr_ratio": "both matrices have one learning rate",
}


def recognises(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    datasets = value.get("datasets")
    if isinstance(datasets, list):
        return any(isinstance(each, dict) and not each.keys().isdisjoint((*IMAGES, *VIDEOS)) for each in datasets)
    options = _options(value)
    return "pretrained_model_name_or_path" not in options and ("dataset_config" in options or "dit" in options)


def _options(value: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a training file, whose sections say nothing."""
    found = dict[str, Any]()
    for name, inner in value.items():
        found |= inner if isinstance(inner, dict) else {name: inner}
    return found


def take(reading: Reading, value: Any, read: Callable[[Path], Any]) -> None:
    if isinstance(value.get("datasets"), list):
        _take_datasets(reading, value)
    else:
        _take_training(reading, _options(value), read)


# ---- dataset.toml ----------------------------------------------------------------------------------------------------


def _take_datasets(reading: Reading, value: Mapping[str, Any]) -> None:
    general = value.get("general") or {}
    others = {name: each for name, each in value.items() if name not in ("general", "datasets")}
    reading.take({}, others)
    for number_, given in enumerate(value["datasets"]):
        name = f"datasets[{number_}]"
        if not given.keys().isdisjoint(VIDEOS):
            reading.skip(name, given.get("video_directory") or given.get("video_jsonl_file"), "videos are not trained")
            continue
        table = given.get("image_jsonl_file")
        controls = [] if table or not given.get("control_directory") else [given["control_directory"]]
        dataset = Dataset(name, str(table or given.get("image_directory") or ""), controls)
        if not dataset.targets:
            raise ConfigError(f"{name} has no image_directory", where=reading.file, expected=" or ".join(IMAGES))
        reading.datasets.append(dataset)
        _take_size(reading, general, given, name, dataset)
        sized = ("resolution", "enable_bucket", "image_directory", "image_jsonl_file", "control_directory")
        inherited = {key: each for key, each in general.items() if key not in given and key not in sized}
        reading.take(DATASET, inherited, "general.", dataset)
        reading.take(DATASET, {key: each for key, each in given.items() if key not in sized}, f"{name}.", dataset)
        if table and given.get("control_directory"):
            reading.leave(f"{name}.control_directory", given["control_directory"], "the table names the controls")
    reading.left = list({(each.name, str(each)): each for each in reading.left}.values())  # of `general` once
    reading.same = list(dict.fromkeys(reading.same))


def _take_size(
    reading: Reading, general: Mapping[str, Any], given: Mapping[str, Any], name: str, dataset: Dataset
) -> None:
    """The area with buckets, one size without; both are what that trainer does if the file does not say."""
    start = f"{name}." if "resolution" in given else "general."
    merged = {**general, **given}
    size = merged.get("resolution", [960, 544])
    width, height = (size, size) if isinstance(size, int) else size
    origin = f"{start}resolution" if "resolution" in merged else "resolution, by default,"
    if is_on(merged.get("enable_bucket", False)):
        reading.set("data.vae_image_size", width * height, origin, size, dataset)
        reading.same.append(f"{name}.enable_bucket" if "enable_bucket" in given else "general.enable_bucket")
        return
    reading.set("data.resolution", sides(width, height), f"{origin} without enable_bucket:", size, dataset)
    reading.set("data.resize_mode", "crop", f"{origin} without enable_bucket:", size, dataset)


# ---- the file for --config_file --------------------------------------------------------------------------------------


def _take_training(reading: Reading, options: dict[str, Any], read: Callable[[Path], Any]) -> None:
    if named := options.pop("dataset_config", None):
        file = Path(named) if Path(named).exists() else reading.file.parent / named
        value = read(file)
        if not recognises(value) or "datasets" not in value:
            raise ConfigError(f"this is no dataset.toml of {TITLE}", where=file)
        reading.within = file
        _take_datasets(reading, value)
        reading.within = None
    module = str(options.pop("network_module", "networks.lora_qwen_image"))
    if module not in ADAPTERS:
        what = "this file trains another model, or an adapter that is not trained here"
        raise ConfigError(what, where=reading.file, expected=", ".join(ADAPTERS), found=module)
    reading.set("train.lora.type", ADAPTERS[module], "network_module", module)
    prompts, arguments = options.pop("sample_prompts", None), options.pop("network_args", None)
    shift, base = options.pop("discrete_flow_shift", None), options.pop("base_weights", None)
    scales = options.pop("base_weights_multiplier", None)
    if "max_train_epochs" in options and "max_train_steps" in options:
        reading.leave("max_train_steps", options.pop("max_train_steps"), "max_train_epochs counts")
    reading.take(TRAINING, options)
    if arguments:
        reading.take(NETWORK_ARGS, pairs(arguments), "network_args.")
    if shift is not None:
        if options.get("timestep_sampling") == "shift":
            reading.set("train.timestep_shift", number(shift), "discrete_flow_shift", shift)
        else:
            reading.leave("discrete_flow_shift", shift, "it counts for timestep_sampling shift alone")
    if base:
        bases = [base] if isinstance(base, str) else base
        factors = scales if isinstance(scales, list) else [scales or 1]
        reading.set("train.assistant_lora", f"{bases[0]}:{factors[0]}", "base_weights", bases[0])
        for more in bases[1:]:
            reading.leave("base_weights", more, "train.assistant_lora is one")
    if prompts:
        _take_prompts(reading, str(prompts))
    reading.default("train.lora.target_modules", TARGETS, "network_module")
    reading.default("train.lora.lora_alpha", 1, "network_alpha")
    reading.default("train.caption_dropout", 0.0, "training, which drops no captions")


def _take_prompts(reading: Reading, named: str) -> None:
    file = Path(named) if Path(named).exists() else reading.file.parent / named
    if file.suffix.lower() != ".txt" or not file.is_file():
        reading.leave("sample_prompts", named, "a .txt that exists is read, with a prompt per line")
        return
    data = read_file(file, MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        reading.leave("sample_prompts", named, f"a file of at most {MAX_BYTES} bytes is read")
        return
    lines = data.decode("utf-8").splitlines()
    take_prompts(reading, "sample_prompts", [prompt_of(line) for line in lines if line.strip() and line[0] != "#"])
