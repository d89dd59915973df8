"""`init` writes a settings file for the data that it sees, and `config` prints all settings, or those of a search."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from qwen_cache.cli import init
from qwen_cache.cli.doctor import Device, Torch
from qwen_cache.models import assistants
from qwen_cache.models.family import FAMILIES
from qwen_cache.settings.describe import all_settings
from qwen_cache.settings.load import OTHER_NAMES, Config, known_keys, load_config

from .support.commands import refused, run
from .support.paths import ROOT


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(init, "probe_torch", lambda: Torch("2.11"))
    return tmp_path


def write_data(controls: dict[str, int], size: tuple[int, int] = (1600, 1200), prompts: int = 99) -> None:
    """A table of targets with these numbers of controls, the first `prompts` with a prompt."""
    Path("data").mkdir()
    rows = []
    for number, (name, count) in enumerate(controls.items()):
        images = [f"{name}.png", *(f"{name}-{control}.png" for control in range(count))]
        for image in images:
            Image.new("RGB", size).save(f"data/{image}")
        prompt = "mirror it" if number < prompts else ""
        rows.append({"file_name": images[0], "control_images": images[1:], "prompt": prompt})
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    Path("data/metadata.jsonl").write_text(lines, encoding="utf-8")


def written() -> tuple[Config, str]:
    return load_config(Path("qwen.yaml")), Path("qwen.yaml").read_text(encoding="utf-8")


def test_a_settings_file_for_the_data() -> None:
    write_data({"a": 1, "b": 1, "c": 1}, size=(704, 480), prompts=2)
    result = run("qwen-cache", "init")
    about = "data is a JSON Lines table: 3 samples with 1 control image each, targets 704×480"
    assert (result.code, result.stdout) == (0, "")
    commands = "next:\n  qwen-cache build --dry-run\n  qwen-cache build\n"
    smaller = "3 of 3 samples looked at: targets are scaled up to the size that is trained, by up to 1.75×: a, b, c\n"
    do = "  → use larger images, a smaller data.vae_image_size, or data.upscale=false: a model learns their blur\n"
    assert result.stderr == f"wrote qwen.yaml: {about}\n{smaller}{do}{commands}"
    config, text = written()
    prompts = [{"prompt": "mirror it", "control": [f"data/{name}-0.png"]} for name in "ab"]
    assert config == load_config(
        None,
        ["train.batch_size=1", "model.path=Qwen/Qwen-Image-Edit-2509", f"validation.prompts={json.dumps(prompts)}"],
    )
    comments = " ".join(line.strip().removeprefix("# ") for line in text.splitlines() if "#" in line)
    assert about in comments
    without = "1 of 3 samples without a prompt: `build` refuses this unless the setting is true. `qwen-cache caption`"
    assert without in comments
    assert "Images to generate while it trains, from the first rows" in comments
    assert "333.3 epochs at a batch size of 1." in comments
    assert (
        "Also possible: Qwen/Qwen-Image-Edit-2511 (apache-2.0); FireRedTeam/FireRed-Image-Edit-1.0 (apache-" in comments
    )
    assert "Qwen/Qwen-Image-2.1-Turbo (qwen-research, distilled: to generate with)" in comments
    assert "No GPU was found on this machine" in comments
    assert max(map(len, text.splitlines())) <= 80


def test_the_training_adapter_of_a_model_is_in_a_comment_until_it_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    write_data({"a": 1})
    name = "SimpleTuner/Qwen-Image-2.1-training-assistant-v3"
    for model, line in (("2.1", f"  # assistant_lora: {name}\n"), ("2.1-Turbo", None), ("Edit-2511", None)):
        assert run("qwen-cache", "init", "--force", "--model", f"Qwen/Qwen-Image-{model}").code == 0
        config, text = written()
        assert config.train.assistant_lora is None
        assert ("assistant_lora" in text) is (line is not None)
        assert line is None or line in text
    first = assistants.published_for("Qwen/Qwen-Image-2.1")[0]
    monkeypatch.setattr(assistants, "VERIFIED", (assistants.Verified(first, "0" * 40, "0" * 64),))
    assert run("qwen-cache", "init", "--force", "--model", "Qwen/Qwen-Image-2.1").code == 0
    config, text = written()
    assert config.train.assistant_lora == "auto"
    assert name in text
    own = ("--set", "train.assistant_lora=mine.safetensors")
    assert run("qwen-cache", "init", "--force", "--model", "Qwen/Qwen-Image-2.1", *own).code == 0
    assert written()[0].train.assistant_lora == "mine.safetensors"


def test_prompts_for_images_are_those_that_are_trained() -> None:
    """`build` puts no trigger word before a prompt of the settings."""
    write_data({"a": 1})
    words = ("data.trigger_word=sks", "data.prompt_prefix=a photo of", "data.shuffle_tags=2")
    assert run("qwen-cache", "init", *(each for word in words for each in ("--set", word))).code == 0
    assert [each.prompt for each in written()[0].validation.prompts] == ["a photo of sks mirror it"]


def test_an_existing_file_is_kept_without_force() -> None:
    write_data({"a": 1})
    Path("qwen.yaml").write_text("mine: [", encoding="utf-8")
    result = run("qwen-cache", "init", "data")
    assert result.code == 2
    assert result.stderr == (
        "error: qwen.yaml: this settings file already exists\n  → give --force to replace it, or --out\n"
    )
    assert Path("qwen.yaml").read_text(encoding="utf-8") == "mine: ["
    assert run("qwen-cache", "init", "data", "--out", "my/run.yaml").stderr.endswith("build --config my/run.yaml\n")
    assert run("qwen-cache", "init", "data", "--force", "--set", "train.max_steps=50").code == 0
    assert written()[0].train.max_steps == 50


@pytest.mark.parametrize(
    ("controls", "model"),
    [
        ({"a": 0, "b": 0}, "Qwen/Qwen-Image"),
        ({"a": 1, "b": 2}, "Qwen/Qwen-Image-Edit-2509"),
        ({"a": 0, "b": 1}, "Qwen/Qwen-Image-Edit-2509"),
    ],
)
def test_the_model_takes_as_many_images_as_the_samples_have(controls: dict[str, int], model: str) -> None:
    write_data(controls)
    result = json.loads(run("qwen-cache", "init", "--json").stdout)
    assert result["models"][0] == written()[0].model.path == model
    assert result["controls"] == [min(controls.values()), max(controls.values())]
    published = {name for family in FAMILIES for pipeline in family.pipelines for name in pipeline.models}
    assert set(result["models"]) <= published
    assert written()[0].data.vae_image_size is None


@pytest.mark.parametrize(
    ("controls", "size", "side"),
    [(0, (704, 480), 576), (1, (704, 480), None), (1, (640, 400), 480), (0, (1100, 800), None)],
)
def test_edits_are_trained_at_a_megapixel_unless_they_are_far_smaller(
    controls: int, size: tuple[int, int], side: int | None
) -> None:
    write_data({"a": controls}, size=size)
    result = run("qwen-cache", "init")
    config, text = written()
    assert config.data.vae_image_size == ([side * side] if side else None)
    comment = " ".join(line.strip().removeprefix("# ") for line in text.splitlines())
    assert (f"{side}²: the median target has {size[0]}×{size[1]} pixels." in comment) == bool(side)
    told = "warning: data.vae_image_size is 480²: the median target has 640×400 pixels. By default all are resized to "
    told += "about 1024². The stock Edit pipelines condition on about a megapixel: train on larger images if you have "
    told += "them."
    assert (told in " ".join(result.stderr.split())) == bool(side and controls)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("/no/such/folder", "error: /no/such/folder: no such folder"),
        ("tiny", "error: tiny: no such folder"),
        ("data", "error: data: not a diffusers model folder: it has no model_index.json"),
    ],
)
def test_a_model_that_does_not_exist_is_refused_at_once(model: str, told: str) -> None:
    write_data({"a": 1})
    result = run("qwen-cache", "init", "--model", model)
    assert result.code == 2
    assert result.stderr.startswith(told)
    assert not Path("qwen.yaml").exists()


def test_columns_of_ones_own_names() -> None:
    write_data({"a": 2, "b": 2})
    rows = "".join(f"{name},{name}.png,{name}-0.png,{name}-1.png,red\n" for name in "ab")
    Path("my.csv").write_text(f"nr,neu,alt,depth,wunsch\n{rows}", encoding="utf-8")
    Path("my.csv").rename("data/my.csv")
    asked = run("qwen-cache", "init", "data/my.csv").stderr
    assert "no column holds the target or the prompt" in asked
    assert "(columns with images: 'neu', 'alt', 'depth')" in asked
    assert "--set data.columns.target=NAME; add it, or name the right column: --set data.columns.prompt=NAME" in asked
    named = ["--targets", "neu", "--set", "data.columns.prompt=wunsch"]
    assert run("qwen-cache", "init", "data/my.csv", *named).stderr == (
        "error: data/my.csv: columns hold images and are not used (expected every column with images as target, "
        "control or mask, found 'alt', 'depth')\n"
        '  → use them as controls, in the order that the model sees: --set \'data.columns.control=["alt", "depth"]\'; '
        "or name the controls without them: --set 'data.columns.control=[]'\n"
    )
    wrong = run("qwen-cache", "init", "data/my.csv", *named, "--set", "data.columns.control=alt,depth").stderr
    assert '  → several columns are a list: --set \'data.columns.control=["alt", "depth"]\'\n' in wrong
    assert run("qwen-cache", "init", "data/my.csv", *named, "--controls", "alt", "--controls", "depth").code == 0
    assert written()[0].data.columns.control == ["alt", "depth"]
    Path("qwen.yaml").unlink()
    result = run("qwen-cache", "init", "data/my.csv", *named, "--set", "data.columns.control=[]")
    assert "2 samples without control images" in result.stderr


@pytest.mark.parametrize(
    ("memory", "settings"),
    [
        (80e9, {}),
        (48e9, {}),
        (40e9, {"tabulated_modulation": True}),
        (24e9, {"offload_blocks": 40}),
        (12e9, {"offload_blocks": 60}),
    ],
)
def test_training_fits_the_gpu(memory: float, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device("cuda:0", "NVIDIA X", int(memory), int(memory), True)
    monkeypatch.setattr(init, "probe_torch", lambda: Torch("2.11", "CUDA 13", (device,)))
    write_data({"a": 1})
    assert run("qwen-cache", "init").code == 0
    config, text = written()
    assert (
        config.train == load_config(None, train__batch_size=1, **{f"train__{k}": v for k, v in settings.items()}).train
    )
    assert f"# NVIDIA X has {memory / 1e9:.1f} GB; a sample of 1024² with one control needs" in text
    assert ("int8_convrot" in text) == (memory == 24e9)


def test_the_memory_that_is_needed_is_that_of_the_documentation() -> None:
    page = (ROOT / "docs" / "howto" / "fit-your-gpu.md").read_text(encoding="utf-8")
    in_8_bits = {"train.tabulated_modulation": True, "model.quantization": "int8_convrot"}
    for size, settings in (*init.FITTING, (init.IN_8_BITS, in_8_bits)):
        words = " ".join(f"{key}={json.dumps(value)}".replace('"', "") for key, value in settings.items())
        row = f"`{words}`" if words else "defaults"
        assert re.search(rf"^\| {re.escape(row)} \| {size / 1e9:.1f} GB \|", page, re.MULTILINE), row


def test_a_source_that_cannot_be_used_writes_nothing() -> None:
    result = run("qwen-cache", "init", "nothing")
    assert result.code == 2
    assert result.stderr.startswith("error: nothing: there is no such source")
    write_data({"a": 1, "c": 1})
    with Path("data/metadata.jsonl").open("a") as table:
        table.write('{"file_name": "b.png", "control_images": ["a.png"], "prompt": "x"}\n')
    result = run("qwen-cache", "init")
    assert "the target data/b.png does not exist" in result.stderr
    assert result.stderr.endswith(
        "error: data: some rows of this source cannot be used\n"
        "  → fix it, or skip its row with --set data.on_error=skip\n"
    )
    assert not Path("qwen.yaml").exists()
    assert run("qwen-cache", "init", "--set", "data.on_error=skip").code == 0
    assert written()[0].data.on_error == "skip"
    Path("qwen.yaml").unlink()
    for name in "ac":
        Path(f"data/{name}.png").write_bytes(b"no image")
    result = run("qwen-cache", "init", "--set", "data.on_error=skip")
    assert "error: data: no image of this source can be read (found data/a.png)" in result.stderr
    assert not Path("qwen.yaml").exists()


# ---- config ----------------------------------------------------------------------------------------------------------


def test_config_prints_every_setting_as_a_settings_file() -> None:
    text = run("qwen-train", "config").stdout
    Path("qwen.yaml").write_text(text, encoding="utf-8")
    assert load_config(None) == Config()
    assert run("qwen-cache", "config").stdout == text
    assert max(map(len, text.splitlines())) <= 80
    listed = json.loads(run("qwen-train", "config", "--json").stdout)
    lists = {"train.caches", "validation.prompts"}
    parts = {key for key in known_keys() if key.rpartition(".")[0] in lists}
    sections = {key.rpartition(".")[0] for key in known_keys()} - lists | set(Config.model_fields)
    assert {each["key"] for each in listed} == set(known_keys()) - parts - sections
    assert [each["key"] for each in listed if not each["description"]] == []
    assert all(each["value"] == each["default"] for each in listed)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("lr", "optimizer.learning_rate"),
        ("network_dim", "train.lora.rank"),
        ("teacher", "train.caches"),
        ("shuffle window", "train.bucketing_window"),
        ("Learning_Rate", "optimizer.learning_rate"),
        ("bitsandbytes", "model.quantization"),
    ],
)
def test_config_finds_settings_by_their_words(words: str, found: str) -> None:
    listed = [each["key"] for each in json.loads(run("qwen-train", "config", "--search", words, "--json").stdout)]
    assert found in listed
    assert len(listed) < 12


def test_config_shows_the_values_that_are_set() -> None:
    Path("qwen.yaml").write_text("train: {lora: {rank: 4}}\n", encoding="utf-8")
    shown = run("qwen-train", "config", "--search", "update matrices").stdout
    assert shown == "train:\n  lora:\n    # The rank of the update matrices; OFT has none. Default: 16.\n    rank: 4\n"
    result = run("qwen-train", "config", "--search", "nothing like it")
    assert result.code == 2
    assert result.stderr == (
        "error: --search: no setting matches these words (found nothing like it)\n  → try a single word\n"
    )


def test_other_names_are_those_of_settings() -> None:
    keys = {each.key for each in all_settings()}
    assert OTHER_NAMES.keys() <= keys


def test_a_model_that_takes_fewer_images_than_the_samples_have_is_refused(tiny_model: Callable[[str], Path]) -> None:
    """Here, not by the build."""
    write_data({"a": 2})
    for model in ("Qwen/Qwen-Image", "Qwen/Qwen-Image-Edit", str(tiny_model("edit"))):
        result = run("qwen-cache", "init", "--model", model)
        refused(result, "--model: ", "(found 2 control images per sample)", "Qwen/Qwen-Image-Edit-2509, or leave them")
        assert not Path("qwen.yaml").exists()
    assert run("qwen-cache", "init", "--model", "Qwen/Qwen-Image", "--set", "data.columns.control=[]").code == 0
