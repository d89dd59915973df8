"""qwen.yaml and options: names that changed are still read, and reported; nothing is read under two names."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from qwen_cache.errors import ConfigError
from qwen_cache.settings.load import RENAMED, RENAMED_VALUES, Config, known_keys, load_config

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


def test_settings_by_their_old_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sections: dict[str, dict[str, object]] = {}
    for old, value in VALUES.items():
        section, name = old.split(".")
        sections.setdefault(section, {})[name] = value
    file = tmp_path / "qwen.yaml"
    file.write_text(yaml.safe_dump(sections), encoding="utf-8")
    settings = load_config(file).flat()
    reported = " ".join(capsys.readouterr().err.split())
    assert RENAMED.keys() == VALUES.keys()
    for old, new in RENAMED.items():
        assert settings[new] == RENAMED_VALUES.get(old, {}).get(str(VALUES[old]), VALUES[old])
        assert f"{file}: {old} is called {new} now" in reported
    assert not RENAMED.keys() & set(known_keys(Config))
    assert load_config(None, ["train.shuffle_window=7"]).train.bucketing_window == 7


def test_a_misspelt_old_name_leads_to_the_new_one() -> None:
    with pytest.raises(ConfigError, match=r"unknown key train.shufle_window\n.*did you mean train.bucketing_window\?"):
        load_config(None, ["train.shufle_window=7"])


def test_a_setting_under_both_names_is_refused() -> None:
    both = ["train.shuffle_window=7", "train.bucketing_window=8"]
    with pytest.raises(ConfigError, match=r"train.shuffle_window is the old name of train.bucketing_window"):
        load_config(None, both)


def test_options_by_their_old_names(tmp_path: Path) -> None:
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
        assert new in result.stderr
    shown = command("qwen-train", "predict", "--help").stdout
    assert "--num-inference-steps" in shown
    assert " --steps" not in shown
