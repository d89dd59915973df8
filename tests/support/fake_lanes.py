"""In place of the encoders of a build: noise, so that a build takes milliseconds."""

from __future__ import annotations

import pytest
import torch

from qwen_cache.encode import preflight
from qwen_cache.encode.builder import BuildJob, RunningEncoders
from qwen_cache.encode.plan import PlannedSample
from qwen_cache.format.identity import content_hash, recipe_id
from qwen_cache.format.sample import SLIDER_EMBEDS, SampleMeta, TensorSpec, token_count

PROMPT_ROWS = 20


def fake_lanes(monkeypatch: pytest.MonkeyPatch) -> list[FakeLanes]:
    """Build without encoders from now on; every set of lanes that is loaded."""
    loaded: list[FakeLanes] = []

    def load(job: BuildJob) -> FakeLanes:
        loaded.append(FakeLanes(job))
        return loaded[-1]

    monkeypatch.setattr(preflight, "load_lanes", load)
    return loaded


class FakeLanes(RunningEncoders):
    """Noise that depends on the key alone; `encoded` has the names of the samples."""

    def __init__(self, job: BuildJob) -> None:
        self.job, self.encoded = job, []  # type: ignore[var-annotated]

    def close(self) -> None:
        pass

    def submit(self, sample: PlannedSample, known: object = None) -> PlannedSample:
        return sample

    def result(self, sample: PlannedSample) -> tuple[SampleMeta, dict[str, memoryview]]:
        shapes = sample.img_shapes
        wanted = {"image_latents": (token_count(shapes[:1]), 64)}
        if sample.rejected_shape:
            wanted["rejected_latents"] = token_count([sample.rejected_shape]), 64
        wanted |= {"control_latents": (token_count(shapes[1:]), 64)}
        wanted |= {"prompt_embeds": (PROMPT_ROWS, 64), "empty_prompt_embeds": (5, 64)}
        wanted |= dict.fromkeys(SLIDER_EMBEDS, (6, 64)) if sample.row.slider else {}
        absent = ["image_latents"] * (sample.row.target is None) + ["control_latents"] * (len(shapes) == 1)
        wanted = {name: shape for name, shape in wanted.items() if name not in absent}
        data = {name: memoryview(self._noise(sample.key + name, shape)) for name, shape in wanted.items()}
        tensors = {name: TensorSpec("F32", shape, content_hash(data[name])) for name, shape in wanted.items()}
        described = recipe_id(self.job.recipe), sample.inputs, sample.row.prompt, shapes, 15, tensors
        meta = SampleMeta(*described, rejected_shape=sample.rejected_shape, slider=sample.row.slider)
        self.encoded.append(sample.row.name)
        return meta, data

    @staticmethod
    def _noise(seed: str, shape: tuple[int, ...]) -> bytes:
        generator = torch.Generator().manual_seed(int(content_hash(seed.encode())[:15], 16))
        return bytes(torch.randn(shape, generator=generator).view(-1).view(torch.uint8).numpy().data)
