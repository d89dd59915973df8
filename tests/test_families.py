"""Each model family is known everywhere it has to be, and other models are refused by name."""

from __future__ import annotations

import hashlib
import inspect
import json
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift

from qwen_cache.encode.vae import LATENT_SPACES
from qwen_cache.errors import ModelError
from qwen_cache.format.sample import LATENT_CHANNELS
from qwen_cache.models.encoders import MODELS, PROCESSORS
from qwen_cache.models.family import FAMILIES, PIPELINES, Family, family_of, family_of_recipe
from qwen_cache.models.folder import open_model
from qwen_cache.models.loading import from_config
from qwen_cache.settings.sections import PredictConfig
from qwen_train.flow import NoiseSchedule
from qwen_train.inference.pipeline import PIPELINES as PLACED
from qwen_train.inference.pipeline import Sampling
from qwen_train.model.loading import TRAINED_CLASSES, trained_class
from qwen_train.training.prepare import distilled_warning

from .support.published import PUBLISHED, TURBO, TURBO_SHA256, TURBO_SIGMAS

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_is_complete(family: Family) -> None:
    """The demands of CONTRIBUTING.md on a new family."""
    vae = getattr(diffusers, family.vae)
    assert LATENT_SPACES[vae].mode == family.image_mode
    channels = inspect.signature(vae.__init__).parameters["z_dim"].default
    assert family.latent_channels == channels == LATENT_CHANNELS // LATENT_SPACES[vae].patch ** 2
    assert family.text_encoder in MODELS
    assert family.text_encoder in PROCESSORS
    assert [each for each in TRAINED_CLASSES if each._stock_class.__name__ == family.transformer]
    for pipeline in family.pipelines:
        assert issubclass(PLACED[pipeline.name], getattr(diffusers, pipeline.name))
        assert family_of(pipeline.name) is family
        assert family_of_recipe({"pipeline": pipeline.name}) is family


@pytest.mark.parametrize(
    ("pipeline", "what"),
    [
        ("QwenImageLayeredPipeline", "Qwen-Image-Layered is not supported yet"),
        ("FluxPipeline", "this pipeline is not supported"),
    ],
)
def test_another_model_is_refused_with_the_supported_ones(pipeline: str, what: str, tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": pipeline}), encoding="utf-8")
    with pytest.raises(ModelError) as error:
        open_model(str(tmp_path), ())
    message = str(error.value)
    assert what in message
    assert f"found {pipeline}" in message
    models = [repository.partition("/")[2] for each in PIPELINES.values() for repository in each.models]
    assert {"FireRed-Image-Edit-1.1", "Qwen-Image-2512", "Qwen-Image-2.1-Turbo"} <= set(models)
    assert f"use one of {', '.join(models)}" in message


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_model_is_listed_with_its_pipeline_and_licence(family: Family) -> None:
    rows = [line for line in DOCS.joinpath("index.md").read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    for pipeline in family.pipelines:
        for model in pipeline.models:
            [row] = [row for row in rows if f"`{model}`" in row]
            assert f"| `{pipeline.name}` |" in row
            assert family.licence in row
            assert ("to generate with" in row) is (model in pipeline.distilled)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_is_known_and_taken_as_it_is(name: str, tmp_path: Path) -> None:
    """Its pipeline, the parameters of its transformer, its noise levels; weights are not needed for that."""
    published = PUBLISHED[name]
    folder = published.write(tmp_path)
    model = open_model(str(folder), ("transformer", "scheduler") if published.scheduler else ("transformer",))
    assert name in model.facts.models

    assert model.transformer_config["num_layers"] == published.transformer["num_layers"]
    few = {"num_layers": 2}
    with torch.device("meta"):
        ours = from_config(trained_class(model.transformer_config), {**model.transformer_config, **few})
        stock = getattr(diffusers, model.family.transformer).from_config({**published.transformer, **few})
    shapes = [{key: value.shape for key, value in each.named_parameters()} for each in (ours, stock)]
    assert shapes[0] == shapes[1]
    assert ours.config.get("zero_cond_t", False) is (name == "Qwen/Qwen-Image-Edit-2511")

    if published.scheduler:
        scheduler = FlowMatchEulerDiscreteScheduler.from_config(published.scheduler)
        schedule, steps = NoiseSchedule.of_config(model.scheduler_config), 5000
        levels = np.linspace(1.0, 1 / steps, steps)
        scheduler.set_timesteps(sigmas=levels, mu=calculate_shift(4096, 256, 8192, 0.5, 0.9))
        errors = [schedule.sigma(u, 4096) for u in levels] - scheduler.sigmas[:-1].double().numpy()
        assert np.abs(errors).max() < 1e-3, "of the last level, which the scheduler puts on the terminal"

    assert (distilled_warning(model) is not None) is (name in model.facts.distilled) is (name == TURBO)
    sampling = Sampling.of(model, PredictConfig())
    assert sampling.sigmas == (tuple(TURBO_SIGMAS) if name == TURBO else None)
    assert sampling.num_inference_steps == (8 if name == TURBO else 50)


def test_the_configurations_of_turbo_are_those_of_the_hub(tmp_path: Path) -> None:
    folder = PUBLISHED[TURBO].write(tmp_path)
    found = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in TURBO_SHA256}
    assert found == TURBO_SHA256
