"""A distilled model is named, and training on it warns: its model_index.json has the sigmas that it samples with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState

from qwen_cache.errors import ModelError
from qwen_cache.models.folder import ModelFolder
from qwen_cache.settings.load import load_config
from qwen_train import train as training
from qwen_train.run import Launch
from qwen_train.training.prepare import distilled_warning
from qwen_train.training.start import starting

from .support.published import PUBLISHED, TURBO, TURBO_SIGMAS
from .support.runs import run_training

Built = Callable[[str, Sequence[str]], Path]


def with_sigmas(folder: Path, sigmas: object) -> ModelFolder:
    index = folder / "model_index.json"
    before = json.loads(index.read_text()) if index.is_file() else {}
    index.write_text(json.dumps(before | {"sample_sigmas": sigmas}))
    return ModelFolder("Qwen/Turbo", folder, "QwenImageEditPlusPipeline")


def test_the_sigmas_of_a_distilled_model(tmp_path: Path) -> None:
    assert with_sigmas(tmp_path, [1, 0.75, 0.25]).sample_sigmas == (1.0, 0.75, 0.25)
    assert with_sigmas(tmp_path, None).sample_sigmas is None
    (tmp_path / "model_index.json").write_text("{}")
    assert ModelFolder("m", tmp_path, "QwenImagePipeline").sample_sigmas is None


@pytest.mark.parametrize(
    "sigmas", [[], "0.5", 0.5, [0], [1.01], [-0.5], [True], ["1"], [None], {"1": 1}, [float("nan")]]
)
def test_sigmas_that_are_no_noise_levels_are_refused(sigmas: object, tmp_path: Path) -> None:
    model = with_sigmas(tmp_path, sigmas)
    with pytest.raises(ModelError, match=r"model_index\.json: sample_sigmas are no noise levels"):
        _ = model.sample_sigmas


def test_the_warning_is_one_line_and_says_what_to_do(tmp_path: Path) -> None:
    warning = distilled_warning(with_sigmas(tmp_path, [1, 0.5]))
    assert warning == (
        "warning: Qwen/Turbo is distilled (a schedule of 2 sigmas), and plain flow-matching training undoes the "
        "distillation: train a LoRA on the undistilled model, and use it with this one; or with a LoRA that undoes the "
        "distillation as train.assistant_lora"
    )
    assert distilled_warning(with_sigmas(tmp_path, None)) is None


def test_a_model_with_the_schedule_of_turbo_is_trained_and_shown(
    built: Built, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Its scheduler has no shift that depends on the size, which both the noise levels and the images take."""
    model = shutil.copytree(tiny_model("qwen-image-21"), tmp_path / "Turbo")
    with_sigmas(model, TURBO_SIGMAS)
    scheduler = PUBLISHED[TURBO].scheduler
    (model / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler), encoding="utf-8")
    settings = {
        "train.output_dir": str(tmp_path / "out"),
        "train.mixed_precision": "no",
        "train.max_steps": 1,
        "validation.num_images": 1,
        "validation.num_inference_steps": 2,
        "logging.report_to": "none",
    }
    assignments = [word for name, value in settings.items() for word in ("--set", f"{name}={json.dumps(value)}")]
    result = run_training(built("qwen-image-21", ()), "--model", model, *assignments)
    assert result.code == 0, result.stderr
    assert "is distilled (a schedule of 8 sigmas)" in result.stderr
    assert list((tmp_path / "out" / "validation" / "step-1").glob("*.safetensors"))


def test_training_warns(
    built: Built, tiny_model: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "Turbo"
    shutil.copytree(tiny_model("edit-plus"), model)
    for number, sigmas in enumerate((None, [1.0, 0.5])):
        with_sigmas(model, sigmas)
        AcceleratorState._reset_state(reset_partial_state=True)
        options = ["train.mixed_precision='no'", "logging.report_to=none"]
        out = f"train.output_dir={json.dumps(str(tmp_path / str(number)))}"
        cache = built("edit-plus", ())
        config = load_config(None, [*options, out], cache__path=str(cache), model__path=str(model))
        with starting(config, Launch()) as start:
            training.prepare(start)
        printed = capsys.readouterr().err.splitlines()
        assert [f"warning: {model} is distilled (a schedule of 2 sigmas)" in line for line in printed].count(
            True
        ) == number
    AcceleratorState._reset_state(reset_partial_state=True)
