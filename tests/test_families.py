"""Each model family is known everywhere it has to be, and other models are refused by name."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import diffusers
import pytest

from qwen_cache.encode.vae import LATENT_SPACES
from qwen_cache.errors import ModelError
from qwen_cache.format.sample import LATENT_CHANNELS
from qwen_cache.models.encoders import MODELS, PROCESSORS
from qwen_cache.models.family import FAMILIES, PIPELINES, Family, family_of, family_of_recipe
from qwen_cache.models.folder import open_model
from qwen_train.inference.pipeline import PIPELINES as PLACED
from qwen_train.model.loading import TRAINED_CLASSES


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_is_complete(family: Family) -> None:
    """What CONTRIBUTING.md asks of a new family."""
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
    assert models[-1] == "Qwen-Image-2.1"
    assert f"use one of {', '.join(models)}" in message
