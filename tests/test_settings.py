"""qwen.yaml and options: old names are refused with today's, but for files that an earlier version saved.

No text of settings takes longer or more memory than it looks.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from qwen_cache.errors import ConfigError
from qwen_cache.settings.load import MAX_BYTES, RENAMED, RENAMED_VALUES, Config, known_keys, load_config, load_saved

from .support.commands import command, run

VALUES = {
    "cache.attention": True,
    "data.part": "1/2",
    "logging.every_steps": 7,
    "logging.tracker": "none",
    "mask_head.base": 7,
    "mask_head.size": 7,
    "train.balanced_over": 7,
    "train.loss_mean": "tokens",
    "train.shuffle_window": 7,
    "validation.every_steps": 7,
    "validation.picture_steps": 7,
    "validation.pictures": 7,
    "validation.samples": 7,
}


def test_old_names_of_settings_are_read_in_saved_files_alone(tmp_path: Path) -> None:
    sections: dict[str, dict[str, object]] = {}
    for old, value in VALUES.items():
        section, name = old.split(".")
        sections.setdefault(section, {})[name] = value
    file = tmp_path / "qwen.yaml"
    file.write_text(yaml.safe_dump(sections), encoding="utf-8")
    settings = load_saved(file).flat()
    assert RENAMED.keys() == VALUES.keys()
    for old, new in RENAMED.items():
        assert settings[new] == RENAMED_VALUES.get(old, {}).get(str(VALUES[old]), VALUES[old])
        with pytest.raises(ConfigError) as refusal:
            load_config(None, [f"{old}={VALUES[old]}"])
        assert str(refusal.value) == f"--set: {old} is called {new} now"
    assert not RENAMED.keys() & set(known_keys(Config))
    with pytest.raises(ConfigError, match=re.escape(f"{file}: cache.attention is called cache.store_attention now")):
        load_config(file)
    with pytest.raises(ConfigError, match=r"train\.shuffle_window is called train\.bucketing_window now"):
        load_saved(file, ["train.shuffle_window=7"])


def test_settings_are_saved_as_they_were_typed() -> None:
    text = 'an emoji 😀, 提示 and "quotes": # no comment'
    saved = load_config(None, [f"data.trigger_word={json.dumps(text, ensure_ascii=False)}"]).to_yaml()
    assert "an emoji 😀, 提示 and" in saved
    assert yaml.safe_load(saved)["data"]["trigger_word"] == text


def test_a_folder_whose_name_is_no_utf_8_is_saved_and_read(tmp_path: Path) -> None:
    saved = load_config(None, train__output_dir="a\udcffb").to_yaml()
    (tmp_path / "qwen.yaml").write_text(saved, encoding="utf-8")
    assert load_saved(tmp_path / "qwen.yaml").train.output_dir == "a\udcffb"


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)
)
MERGED_LAUGHS = "a0: &a0 {x: 1}\n" + "".join(
    f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 10)
)
BEYOND = {
    "aliases of aliases": (LAUGHS, "the settings have more than 10000 values, with aliases expanded"),
    "merged aliases": (MERGED_LAUGHS, "the settings have more than 10000 values, with aliases expanded"),
    "an alias in its own value": ("data: &a [*a]", "the settings contain an alias inside its own value: *a"),
    "brackets": ("[" * 50_000, "the settings are nested more than 32 deep"),
    "indents": ("- " * 50_000, "the settings are nested more than 32 deep"),
    "a long integer": ("data: " + "9" * 5000, "the settings contain an integer of 5000 digits; at most 100 are read"),
    "a long one to base 60": ("data: " + "1:" * 3000 + "1", "the settings contain an integer of 6001 digits"),
    "megabytes": ("ü" * (MAX_BYTES + 1), f"the settings are too long (expected at most {MAX_BYTES} bytes)"),
    "an object": ("data: !!python/object/apply:os.mkdir [run]", "this is not YAML: could not determine a constructor"),
    "a month 13": ("data: 2020-13-45", "a value does not fit its YAML type: month must be in 1..12"),
    "a section twice": (
        "train:\n  seed: 7\nlogging: {}\ntrain:\n  max_steps: 9\n",
        "train is there twice (found lines 1 and 4)\n  → write all that belongs to it under one of them",
    ),
    "a setting twice": (
        "train: &a {lora: [{r: 8, r: 4}]}\n<<: *a\n<<: *a",
        "train.lora[0].r is there twice (found line 1)",
    ),
    "an empty integer": ("data: !!int ''", "a value does not fit its YAML type: string index out of range"),
}


@pytest.mark.parametrize("case", BEYOND)
def test_what_no_settings_need_is_refused_at_once(
    tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a file, in --set, and in the qwen.yaml of a cache of somebody else."""
    monkeypatch.chdir(tmp_path)
    text, expected = BEYOND[case]
    cache = tmp_path / "shards"
    cache.mkdir()
    file = cache / "qwen.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert str(caught.value).startswith(f"{file}: {expected}")
    with pytest.raises(ConfigError) as caught:
        load_config(None, [f"data={text}"])
    assert str(caught.value).startswith(f"--set data: {expected}")
    result = run("qwen-cache", "inspect", cache, "--source", tmp_path)
    assert result.code == 2
    assert f"{file}: {expected}" in result.stderr
    assert not Path("run").exists()


@pytest.mark.parametrize("key", ["train.logit_mean", "train.lora.lora_alpha", "predict.guidance_scale"])
@pytest.mark.parametrize("value", [".nan", "-.inf", '"NaN"'])
def test_a_number_is_finite(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}.*finite|finite.*{key}"):
        load_config(None, [f"{key}={value}"])


def test_anchors_aliases_and_merge_keys_work(tmp_path: Path) -> None:
    file = tmp_path / "qwen.yaml"
    file.write_text(
        "train: &shared {max_steps: &steps 7, batch_size: 2}\n"
        "validation: {validation_steps: *steps}\n"
        "lr_scheduler: {<<: {name: constant}, warmup_steps: *steps}\n"
    )
    config = load_config(file)
    assert (config.train.max_steps, config.train.batch_size, config.validation.validation_steps) == (7, 2, 7)
    assert (config.lr_scheduler.name, config.lr_scheduler.warmup_steps) == ("constant", 7)


@pytest.mark.parametrize("prefix", ["images.example.com", "/srv/images", ""])
def test_data_allow_urls_are_urls(prefix: str) -> None:
    with pytest.raises(ConfigError, match=r"data.allow_urls.0: String should match pattern"):
        load_config(None, [f"data.allow_urls=['{prefix}']"])


def error_of(tmp_path: Path, *arguments: str) -> str:
    result = run("qwen-cache", "build", tmp_path, "--model", tmp_path, *arguments)
    assert result.code == 2
    return result.stderr


def test_an_error_about_a_setting_names_where_it_was_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is innocent is not named."""
    monkeypatch.chdir(tmp_path)
    Path("qwen.yaml").write_text("data: {edit_mask: none}\n", encoding="utf-8")
    option = "error: --edit-mask: not a valid value (expected none, file, diff, head or auto, found dif)\n"
    assert error_of(tmp_path, "--edit-mask", "dif") == option + "  → did you mean diff?\n"
    typed = "error: --set: data.edit_mask: not a valid value (expected none, file, diff, head or auto, found dif)\n"
    assert error_of(tmp_path, "--set", "data.edit_mask=dif").startswith(typed)
    misspelt = "error: --set: unknown key data.vae_imge_size\n  → did you mean data.vae_image_size?\n"
    assert error_of(tmp_path, "--set", "data.vae_imge_size=9") == misspelt
    assert error_of(tmp_path, "--set", "data={slise: 1/2}").startswith("error: --set: unknown key data.slise\n")
    without_path = error_of(tmp_path, "--set", "train.caches=[{pth: a}]")
    assert without_path == "error: --set: unknown key train.caches.0.pth\n  → did you mean train.caches.path?\n"
    several = error_of(tmp_path, "--set", "train={learning_rate: 1, batchsize: 2}", "--set", "traim.x=1")
    assert several == (
        "error: --set: 3 unknown keys: train.learning_rate (did you mean optimizer.learning_rate?), train.batchsize "
        "(did you mean train.batch_size?), traim (did you mean train?)\n"
    )
    number = "error: --set: train.max_steps: not a valid value (expected an integer, found 1k)\n"
    assert error_of(tmp_path, "--set", "train.max_steps=1k") == number
    assert error_of(tmp_path, "--set", "data.edit_mask.x=1").startswith("error: --set: edit_mask is not a section")
    Path("qwen.yaml").write_text("data: {edit_mask: dif}\n", encoding="utf-8")
    assert error_of(tmp_path, "--dtype", "float32").startswith("error: qwen.yaml: data.edit_mask: not a valid value")
    result = run("qwen-train", "run", "--max-steps", "0", "--config", tmp_path / "none.yaml")
    assert result.stderr == f"error: {tmp_path / 'none.yaml'}: no such file\n"
    Path("qwen.yaml").unlink()
    result = run("qwen-train", "run", "--max-steps", "0")
    assert result.stderr == "error: --max-steps: not a valid value (expected greater than 0, found 0)\n"


def test_options_by_their_old_names_are_refused(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    for arguments, new in (
        (("qwen-cache", "build", missing, "--part=1/2", "--model", missing), "--part is called --slice now"),
        (("qwen-cache", "inspect", missing, "--worst", "3"), "--worst is called --top now"),
        (("qwen-cache", "inspect", missing, "--pictures", "x.png"), "--pictures is called --save-images now"),
        (("qwen-train", "predict", "--steps", "3"), "--steps is called --num-inference-steps now"),
    ):
        program, *rest = arguments
        result = run(str(program), *rest)
        assert result.code == 2
        assert result.stderr == f"error: {new}\n"
    shown = command("qwen-train", "predict", "--help").stdout
    assert "--num-inference-steps" in shown
    assert " --steps" not in shown
