"""`init --from`: the settings file of another trainer as ours, and a list of what it does not take."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from qwen_cache.cli import init
from qwen_cache.cli.doctor import Torch
from qwen_cache.settings.load import Config, known_keys, load_config
from qwen_cache.sources.detect import read_content
from qwen_cache.trainers.settings import ai_toolkit, musubi, simpletuner
from qwen_cache.trainers.settings.names import To

from .support.commands import Result, run
from .support.fake_lanes import FakeLanes
from .support.paths import ROOT

NAMES = ("Dune", "Garden", "Silk")
MODEL = "Qwen/Qwen-Image-Edit-2509"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(init, "probe_torch", lambda: Torch("2.11"))
    return tmp_path


def fill(folder: str, *patterns: str, prompts: bool = False) -> None:
    for number, pattern in enumerate(patterns or ("{}",)):
        for colour, name in enumerate(NAMES):
            path = Path(folder, pattern.format(name) + ".png")
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (64, 48), (40 * colour, 90 * number, len(folder))).save(path)
            if prompts:
                path.with_suffix(".txt").write_text(f"change {name}", encoding="utf-8")


def write(name: str, text: str) -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def from_(file: Path, *options: str) -> tuple[Config, dict[str, Any]]:
    """The settings written, and what `--json` says of the file."""
    result = run("qwen-cache", "init", "--from", file, "--force", "--json", *options)
    assert result.code == 0, result.stderr
    return load_config(Path("qwen.yaml")), json.loads(result.stdout)


def not_taken(facts: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each["why"] for each in facts["from"]["not_taken"]}


def refused(file: Path) -> Result:
    result = run("qwen-cache", "init", "--from", file)
    assert (result.code, Path("qwen.yaml").exists()) == (2, False)
    return result


# ---- musubi-tuner ----------------------------------------------------------------------------------------------------

DATASET = """\
[general]
resolution = [960, 544]
caption_extension = ".txt"
batch_size = 2
enable_bucket = true
bucket_no_upscale = true

[[datasets]]
image_directory = "set/img"
control_directory = "set/ctl"
cache_directory = "set/cache"
num_repeats = 2
no_resize_control = true
"""
SECOND = """
[[datasets]]
image_directory = "other"
num_repeats = 5
resolution = 512
batch_size = 1
"""
TRAINING = """\
dit = "dit.safetensors"
vae = "vae.safetensors"
dataset_config = "dataset.toml"
network_module = "networks.lora_qwen_image"
network_dim = 32
network_args = ["loraplus_lr_ratio=4"]
model_version = "edit-2509"
sample_prompts = "prompts.txt"

[optimizer]
optimizer_type = "AdamW8bit"
learning_rate = 5e-5
optimizer_args = ["weight_decay=0.1", "betas=0.9,0.99", "foreach=False"]
lr_scheduler = "cosine"
lr_warmup_steps = 0.25

[training]
max_train_epochs = 4
save_every_n_epochs = 1
timestep_sampling = "shift"
discrete_flow_shift = 2.2
blocks_to_swap = 16
fp8_base = true
sdpa = true
frobnicate = 3
huggingface_token = "hf_secret"
"""


def test_a_dataset_of_musubi_tuner(tiny_model: Callable[[str], Path], fast: list[FakeLanes]) -> None:
    fill("set/img", prompts=True)
    fill("set/ctl", "{}_0", "{}_1")
    config, facts = from_(write("dataset.toml", DATASET))
    data = config.data
    assert (data.source, data.columns.target, data.columns.control) == ("set", "img", ["ctl"])
    assert (data.vae_image_size, data.upscale, config.train.batch_size) == ([960 * 544], False, 2)
    assert (facts["samples"], facts["controls"], facts["models"][0]) == (3, [2, 2], MODEL)
    assert facts["next"] == ["qwen-cache build --dry-run", "qwen-cache build"]
    assert facts["from"]["taken"] == {"train.batch_size": "dataset.toml: general.batch_size = 2"}
    assert facts["from"]["same"] == ["general.enable_bucket", "general.caption_extension"]
    assert not_taken(facts) == {
        "datasets[0].cache_directory": musubi.DATASET["cache_directory"],
        "datasets[0].no_resize_control": musubi.CONTROL_SIZE,
        "datasets[0].num_repeats": "of one data set, it only makes an epoch longer; steps count here",
    }
    plan = run("qwen-cache", "build", "--model", str(tiny_model("edit-plus")), "--dry-run", "--json")
    assert json.loads(plan.stdout)["controls"] == [{"controls": 2, "samples": 3}]
    told = run("qwen-cache", "init", "--from", "dataset.toml", "--out", "again.yaml").stderr
    assert "dataset.toml is of musubi-tuner: 3 settings taken, each with its name there as a comment\n" in told
    assert f"  datasets[0].no_resize_control = true: {musubi.CONTROL_SIZE}\n" in told


def test_several_data_sets_are_caches_with_weights(tiny_model: Callable[[str], Path], fast: list[FakeLanes]) -> None:
    fill("set/img", prompts=True)
    fill("set/ctl", "{}_0", "{}_1")
    fill("other", prompts=True)
    config, facts = from_(write("dataset.toml", DATASET + SECOND), "--model", str(tiny_model("edit-plus")))
    assert [(each.path, each.weight) for each in config.train.caches] == [("shards-img", 2), ("shards-other", 5)]
    assert (facts["samples"], facts["controls"]) == (6, [0, 2])
    assert not_taken(facts)["datasets[1].batch_size"] == (
        "train.batch_size is one for all data sets: dataset.toml: general.batch_size = 2"
    )
    assert facts["next"][0] == "qwen-cache build set --out shards-img"
    words = [shlex.split(each)[1:] for each in facts["next"]]
    plans = [json.loads(run("qwen-cache", *each, "--dry-run", "--json").stdout) for each in words]
    assert [plan["controls"] for plan in plans] == [[{"controls": 2, "samples": 3}], [{"controls": 0, "samples": 3}]]
    assert "--set 'data.vae_image_size=[262144]'" in facts["next"][1]


def test_the_training_of_musubi_tuner() -> None:
    """Epochs become steps, and sample prompts validation prompts; what differs by default is written out."""
    fill("set/img", prompts=True)
    fill("set/ctl", "{}_0", "{}_1")
    write("dataset.toml", DATASET)
    write("prompts.txt", "# a comment\nmake it night --w 640 --h 480 --d 7 --s 20 --ci set/ctl/Dune_0.png\na cat\n")
    write("dit.safetensors", "")
    config, facts = from_(write("train.toml", TRAINING))
    train, optimizer, lora = config.train, config.optimizer, config.train.lora
    assert (config.model.path, config.model.transformer, config.model.quantization) == (MODEL, "dit.safetensors", "fp8")
    assert (train.max_steps, train.checkpointing_steps, config.lr_scheduler.warmup_steps) == (12, 3, 3)
    assert (config.lr_scheduler.name, train.offload_blocks, train.caption_dropout) == ("cosine", 16, 0.0)
    assert (train.timestep_sampling, train.timestep_shift) == ("logit_normal", 2.2)
    assert (lora.rank, lora.lora_alpha, lora.target_modules) == (32, 1, musubi.TARGETS)
    assert (optimizer.name, optimizer.learning_rate, optimizer.weight_decay) == ("adamw8bit", 5e-5, 0.1)
    assert (optimizer.betas, optimizer.arguments) == ((0.9, 0.99), {"foreach": False})
    assert [each.model_dump(exclude_defaults=True) for each in config.validation.prompts] == [
        {"prompt": "make it night", "control": ["set/ctl/Dune_0.png"], "seed": 7, "width": 640, "height": 480},
        {"prompt": "a cat"},
    ]
    assert "hf_secret" not in json.dumps(facts)
    left = not_taken(facts)
    assert left["frobnicate"] == "no table here knows this name"
    assert left["sample_prompts --s"] == "validation.num_inference_steps is one for all prompts"
    assert left["network_args.loraplus_lr_ratio"] == "both matrices have one learning rate"
    assert {"vae", "sdpa", "datasets[0].cache_directory"} <= left.keys()
    text = Path("qwen.yaml").read_text(encoding="utf-8")
    assert "  # train.toml: max_train_epochs = 4; an epoch has 3 steps.\n  max_steps: 12\n" in text
    assert "    # The default of musubi-tuner's network_alpha.\n    lora_alpha: 1\n" in text
    Path("dit.safetensors").unlink()
    config, _ = from_(Path("train.toml"), "--set", "train.batch_size=1", "--set", "train.checkpointing_steps=7")
    assert (config.train.max_steps, config.train.checkpointing_steps) == (24, 7)
    config, facts = from_(Path("train.toml"), "--set", "train.max_steps=100")
    assert (config.train.max_steps, config.lr_scheduler.warmup_steps) == (100, 25)
    assert (config.model.transformer, "dit" in not_taken(facts)) == (None, True)


# ---- ai-toolkit ------------------------------------------------------------------------------------------------------

JOB = """\
job: extension
config:
  name: my_first
  process:
    - type: diffusion_trainer
      training_folder: output
      device: cuda:0
      trigger_word: p3r5on
      network: {type: lora, linear: 8, network_kwargs: {ignore_if_contains: [img_mod, txt_mod]}}
      save: {dtype: float16, save_every: 250, max_step_saves_to_keep: 4}
      datasets:
        - folder_path: data/after
          control_path: [data/a, data/b]
          mask_path: data/masks
          mask_min_value: 0.25
          caption_ext: txt
          caption_dropout_rate: 0.05
          resolution: [512, 768]
          flip_x: true
      train:
        steps: 3000
        timestep_type: weighted
        optimizer: adamw8bit
        lr: 1e-4
        optimizer_params: {weight_decay: 1e-4}
        dtype: bf16
        train_text_encoder: false
      model:
        name_or_path: Qwen/Qwen-Image-Edit-2509
        arch: qwen_image_edit_plus:plus
        quantize: true
        qtype: uint3|ostris/adapter.safetensors
        quantize_te: true
        low_vram: true
      sample:
        sample_every: 250
        width: 1024
        height: 1024
        samples:
          - {prompt: one, ctrl_img_1: data/a/Dune.png}
          - {prompt: two, ctrl_img_1: /no/such.png}
          - {prompt: "three --d 3", sample_steps: 4}
        seed: 42
        walk_seed: true
        guidance_scale: 3
meta: {name: "[name]"}
"""


def test_a_job_of_ai_toolkit(tiny_model: Callable[[str], Path], fast: list[FakeLanes]) -> None:
    fill("data/after", prompts=True)
    fill("data/a")
    fill("data/b")
    fill("data/masks")
    config, facts = from_(write("job.yaml", JOB))
    data, train, lora = config.data, config.train, config.train.lora
    assert (data.source, data.columns.target, data.columns.control) == ("data", "after", ["a", "b"])
    assert (data.columns.mask, train.edit_mask_weight) == ("masks", 4)
    assert (data.vae_image_size, data.resolutions_per_sample) == ([512 * 512, 768 * 768], "all")
    assert (data.trigger_word, train.caption_dropout, train.output_dir) == ("p3r5on", 0.05, "output/my_first")
    assert (train.max_steps, train.checkpointing_steps, train.checkpoints_total_limit) == (3000, 250, 4)
    assert (lora.rank, lora.lora_alpha, lora.target_modules) == (8, 1, musubi.TARGETS)
    assert (config.optimizer.learning_rate, config.optimizer.weight_decay) == (1e-4, 1e-4)
    assert (config.model.path, config.model.quantization, config.cache.text_quantization) == (MODEL, "none", "fp8")
    assert (config.validation.images_every_steps, config.validation.true_cfg_scale) == (250, [3.0])
    size = {"width": 1024, "height": 1024}
    assert [each.model_dump(exclude_defaults=True) for each in config.validation.prompts] == [
        {"prompt": "one", "control": ["data/a/Dune.png"], "seed": 42, **size},
        {"prompt": "three", "seed": 3, **size},
    ]
    assert facts["from"]["same"] == ["datasets[0].caption_ext", "train.train_text_encoder", "model.arch"]
    left = not_taken(facts)
    assert left["datasets[0].flip_x"] == ai_toolkit.AUGMENTED
    assert left["sample.samples"] == "its control image does not exist: /no/such.png"
    expected = {"device", "save.dtype", "train.timestep_type", "model.low_vram", "model.qtype", "sample.samples --s"}
    assert left.keys() == expected | {"meta", "datasets[0].flip_x", "sample.samples", "model.accuracy_recovery_adapter"}
    needs = {"needs_control": True, "columns": config.data.columns}
    content = read_content(Path(data.source), **needs)  # type: ignore[arg-type]
    assert [(len(row.controls), row.mask is not None) for row in content.rows] == [(2, True)] * 3


def test_a_lokr_of_ai_toolkit_is_whole_and_begins_as_there() -> None:
    fill("data/after", prompts=True)
    job = JOB[: JOB.index("          control_path")] + JOB[JOB.index("          caption_ext") :]
    job = job.replace(
        "{type: lora, linear: 8, network_kwargs: {ignore_if_contains: [img_mod, txt_mod]}}",
        "{type: lokr, linear: 8, lokr_factor: 4}",
    )
    lora = from_(write("job.yaml", job), "--model", "Qwen/Qwen-Image")[0].train.lora
    assert (lora.type, lora.rank, lora.lora_alpha, lora.decompose_factor) == ("lokr", 100_000, 100_000, 4)
    assert (lora.init_weights, lora.target_modules) == ("lycoris", ai_toolkit.TARGETS)


# ---- SimpleTuner -----------------------------------------------------------------------------------------------------

CONFIG = {
    "--data_backend_config": "config/multidatabackend.json",
    "--model_family": "qwen_image",
    "--model_flavour": "edit-v2",
    "--model_type": "lora",
    "--lora_type": "standard",
    "--lora_rank": 8,
    "--max_train_steps": 100,
    "--num_train_epochs": 0,
    "--gradient_checkpointing": "true",
    "--learning_rate": "1e-4",
    "--optimizer": "optimi-lion",
    "--base_model_precision": "int8-quanto",
    "--flow_schedule_shift": 1.73,
    "--use_ema": "true",
    "--ema_decay": 0.99,
    "--validation_prompt": "a cat",
    "--validation_resolution": "1024x768,512x512",
    "--validation_seed": 42,
    "--push_to_hub": "true",
}
BACKENDS: list[dict[str, Any]] = [
    {
        "id": "edited",
        "type": "local",
        "instance_data_dir": "data/edited",
        "caption_strategy": "textfile",
        "resolution": 1024,
        "conditioning_data": ["ref-a", "ref-b"],
        "cache_dir_vae": "cache",
        "repeats": 9,
    },
    {"id": "ref-a", "type": "local", "dataset_type": "conditioning", "instance_data_dir": "data/a"},
    {"id": "ref-b", "type": "local", "dataset_type": "conditioning", "instance_data_dir": "data/b"},
    {
        "id": "keep",
        "type": "local",
        "instance_data_dir": "keep",
        "caption_strategy": "textfile",
        "is_regularisation_data": True,
        "crop": True,
        "crop_aspect": "square",
        "resolution": 0.25,
        "resolution_type": "area",
        "minimum_image_size": 0.1,
    },
    {"id": "text", "dataset_type": "text_embeds", "type": "local", "cache_dir": "cache/text", "default": True},
    {"id": "off", "type": "local", "instance_data_dir": "nowhere", "disabled": True},
]


def test_simpletuner_pairs_edits_with_conditioning_data(
    tiny_model: Callable[[str], Path], fast: list[FakeLanes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qwen_cache.encode.build.plan_devices", lambda *_: None)  # memory is not what this is about
    fill("data/edited", prompts=True)
    fill("data/a")
    fill("data/b")
    fill("keep", prompts=True)
    Path("data/edited/Dune.txt").write_text("one\ntwo\n", encoding="utf-8")
    write("config/multidatabackend.json", json.dumps(BACKENDS))
    config, facts = from_(write("config/config.json", json.dumps(CONFIG)))
    data, train = config.data, config.train
    assert (data.source, data.columns.target, data.columns.control) == ("data", "edited", ["a", "b"])
    assert (data.vae_image_size, config.model.path, config.model.quantization) == ([1024 * 1024], MODEL, "int8")
    assert (train.max_steps, train.lora.rank, train.ema_decay, train.timestep_shift) == (100, 8, 0.99, 1.73)
    assert [(each.path, each.weight, each.teacher) for each in train.caches] == [
        ("shards-edited", 10, False),
        ("shards-keep", 1, True),
    ]
    assert [each.model_dump(exclude_defaults=True) for each in config.validation.prompts] == [
        {"prompt": "a cat", "seed": 42, "width": 1024, "height": 768}
    ]
    left = not_taken(facts)
    assert left["optimizer"] == "optimizer.name takes adamw, adamw8bit, adafactor, prodigy or an import path"
    expected = {"edited.caption_strategy", "keep.minimum_image_size", "off", "validation_resolution", "push_to_hub"}
    assert left.keys() == expected | {"optimizer"}
    model = ["--model", str(tiny_model("edit-plus"))]
    words = [[*shlex.split(each)[1:], *model, "--dry-run"] for each in facts["next"]]
    plans = [run("qwen-cache", *each).stderr for each in words]
    assert "plan     3 samples" in plans[0]
    assert "3 of 3 samples without a control image" in plans[1]
    assert "estimate 3,072 image tokens" in plans[1]  # of 512²
    automatic = {name: value for name, value in CONFIG.items() if name != "--flow_schedule_shift"}
    write("config/config.json", json.dumps(automatic))
    assert from_(Path("config/config.json"))[0].train.timestep_shift == 3
    write("config/config.json", json.dumps({**CONFIG, "--flow_schedule_auto_shift": True}))
    assert from_(Path("config/config.json"))[0].train.timestep_shift is None
    alone, _ = from_(Path("config/multidatabackend.json"))
    assert (alone.data, alone.model.path) == (data, MODEL)


# ---- any of them -----------------------------------------------------------------------------------------------------


def test_the_command_line_overrides_the_file() -> None:
    fill("set/img", prompts=True)
    fill("set/ctl")
    fill("mine", prompts=True)
    file = write("dataset.toml", DATASET)
    config, _ = from_(file, "--set", "train.batch_size=1", "--set", "data.vae_image_size=[65536]")
    assert (config.train.batch_size, config.data.vae_image_size) == (1, [65536])
    assert "# Given on the command line.\n  batch_size: 1\n" in Path("qwen.yaml").read_text(encoding="utf-8")
    result = run("qwen-cache", "init", "mine", "--from", file, "--force")
    assert "datasets[0] = set/img: the source is given on the command line" in result.stderr
    data = load_config(Path("qwen.yaml")).data
    assert (data.source, data.columns.target, data.vae_image_size) == ("mine", None, [960 * 544])


def test_a_path_that_is_not_here_is_refused_with_the_folder_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths count from the working directory, as in these trainers."""
    file = write("musubi/config/dataset.toml", DATASET).absolute()
    message = refused(file).stderr
    assert f"{file}: datasets[0] names a path that does not exist from here (found set/img)" in message
    assert (
        "→ run this command where musubi-tuner runs, or name the data: `qwen-cache init SOURCE --from FILE`" in message
    )
    fill("musubi/set/img", prompts=True)
    fill("musubi/set/ctl")
    assert f"→ run this command where musubi-tuner runs: `cd {file.parents[1]}`\n" in refused(file).stderr
    monkeypatch.chdir("musubi")
    assert from_(file)[0].data.source == "set"


WRONG = {
    "settings.ini": ("", "this kind of file is not read (expected musubi-tuner's dataset.toml"),
    "kohya.toml": ("[[datasets]]\n[[datasets.subsets]]\nimage_dir = 'a'\n", "found datasets)"),
    "broken.toml": ("[general\n", "this is not TOML: "),
    "broken.json": ("{", "this is not JSON: "),
    "twice.json": ('{"model_family": "a", "model_family": "b"}', 'the key "model_family" is there twice'),
    "onetrainer.json": ('{"model_type": "QWEN", "concepts": []}', "this is no configuration of a trainer"),
    "flux.json": ('{"model_family": "flux"}', "trains another model (expected qwen_image, found flux)"),
    "flux.yaml": (
        "job: a\nconfig: {name: a, process: [{type: sd_trainer, model: {arch: flux, name_or_path: b}}]}",
        "trains another model (expected qwen_image, qwen_image_edit, qwen_image_edit_plus, found flux)",
    ),
    "object.yaml": ("job: !!python/object:os.system {}\nconfig: {process: []}", "this is not YAML: "),
    "list.toml": ('datasets = [{image_directory = "a"}, 3]', "this is not what musubi-tuner reads: "),
    "number.toml": (
        '[[datasets]]\nimage_directory = "a"\ncontrol_directory = 3.5\n',
        "this is not what musubi-tuner reads: datasets[0]: a path is text, not 3.5",
    ),
    "nothing.toml": ("", "this is no configuration of a trainer that is read here"),
    "videos.toml": (
        '[[datasets]]\nvideo_directory = "a"\n',
        "no data set of this file can be read here (found datasets[0] = a:",
    ),
    "cloud.json": (
        '[{"id": "a", "type": "aws", "instance_data_dir": "x"}]',
        "no data set of this file can be read here (found a = aws: its images are in no local folder)",
    ),
    "flux_without_arch.yaml": (
        "job: a\nconfig: {name: a, process: [{type: sd_trainer, model: {is_flux: true, name_or_path: FLUX}}]}",
        "trains another model (expected qwen_image, qwen_image_edit, qwen_image_edit_plus, found FLUX)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_files_are_refused_by_name(name: str) -> None:
    text, told = WRONG[name]
    message = refused(write(name, text)).stderr
    assert message.startswith(f"error: {name}: ")
    assert told in message


def test_a_pipe_is_not_waited_for() -> None:
    for name in ("file.yaml", "file.toml", "file.json"):
        os.mkfifo(name)
        assert "the file cannot be read (found not a regular file)" in refused(Path(name)).stderr


def test_a_value_that_our_settings_refuse_is_not_taken() -> None:
    fill("set/img", prompts=True)
    fill("set/ctl")
    write("dataset.toml", DATASET)
    training = 'dataset_config = "dataset.toml"\nnetwork_module = "networks.lokr"\nnetwork_dropout = 0.1\nseed = -1\n'
    numbers = "save_every_n_epochs = inf\nmax_train_epochs = nan\nblocks_to_swap = -inf\nnetwork_dim = 1" + "0" * 400
    config, facts = from_(write("train.toml", training + 'learning_rate = "fast"\n' + numbers))
    assert (config.train.seed, config.train.lora.lora_dropout) == (0, 0.0)
    left = not_taken(facts)
    assert left["seed"].startswith("train.seed does not take it: ")
    assert "is not a setting of this type of adapter" in left["network_dropout"]
    for name in ("learning_rate", "save_every_n_epochs", "max_train_epochs", "blocks_to_swap", "network_dim"):
        assert left[name] == "this is not a number"


def test_tables_name_settings_that_exist() -> None:
    """A renamed setting must not leave a table behind; functions are run by the tests above."""
    keys = {*known_keys(), *(f"train.caches.{name}" for name in ("weight", "teacher", "loss_weight"))}
    tables = [
        *(musubi.DATASET, musubi.TRAINING, musubi.NETWORK_ARGS),
        *(ai_toolkit.DATASET, ai_toolkit.TRAINING, simpletuner.DATASET, simpletuner.TRAINING),
    ]
    for table in tables:
        assert {entry.key for entry in table.values() if isinstance(entry, To)} <= keys
        assert all(entry for entry in table.values() if isinstance(entry, str))


def test_the_page_has_the_names_of_the_tables() -> None:
    """A cell of the page's table that names a key of theirs is in the row of the setting that the code gives it."""
    page = (ROOT / "docs" / "howto" / "come-from-another-trainer.md").read_text(encoding="utf-8")
    head, _, *lines = page.partition("\n| here |")[2].partition("\n\n")[0].splitlines()
    titles, rows = head.strip(" |").split(" | "), [line.strip("| ").split(" | ") for line in lines]
    tables = {
        "musubi-tuner": {**musubi.DATASET, **musubi.TRAINING},
        "ai-toolkit": {**ai_toolkit.DATASET, **ai_toolkit.TRAINING},
        "SimpleTuner": {**simpletuner.DATASET, **simpletuner.TRAINING},
    }
    for title, table in tables.items():
        known = {name.rpartition(".")[2]: entry for name, entry in table.items() if isinstance(entry, To)}
        named = [
            (known[name], ours)
            for ours, *theirs in rows
            for name in re.findall(r"`(\w+)", theirs[titles.index(title)])
            if name in known
        ]
        assert len(named) >= 8, title
        for entry, ours in named:
            section, _, last = entry.key.rpartition(".")
            assert entry.key in ours or (section == "train.caches" and section in ours and last in ours), entry.key
