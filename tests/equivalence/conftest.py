"""What every comparison with the stock pipelines runs under."""

from __future__ import annotations

import pytest
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus

from .judge import SMALL_AREA


@pytest.fixture
def small_areas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the pipelines work at the sizes of `small_options`, by their own formula."""
    for module in (pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus):
        stock = module.calculate_dimensions
        monkeypatch.setattr(module, "calculate_dimensions", lambda area, ratio, f=stock: f(SMALL_AREA[area], ratio))
