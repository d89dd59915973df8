"""The mark for slow cases of a test."""

from __future__ import annotations

import pytest
from _pytest.mark.structures import ParameterSet


def slow(*values: object, id: str | None = None) -> ParameterSet:
    """A case of a parametrised test that `make test-slow` runs."""
    return pytest.param(*values, marks=pytest.mark.slow, id=id)
