"""Templates print values as text, and a missing value is an error."""

from __future__ import annotations

import json

import pytest
from jinja2 import UndefinedError

from qwen_cache.html.page import BARS, FOLDER, bars, environment, render


def test_a_value_is_text_and_json_is_json() -> None:
    hostile = "</script><!-- & \"' \u2028 ü"
    template = environment().from_string("<i title='{{ value }}'>{{ value }}</i><script>{{ [value]|tojson }}</script>")
    shown, _, script = template.render(value=hostile).partition("<script>")
    assert shown.count("<") == 2
    assert shown.count("'") == 2
    assert json.loads(script.removesuffix("</script>")) == [hostile]
    assert script.count("<") == 1
    assert "ü" in script


def test_a_missing_value_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="'samples' is undefined"):
        render("cache.html.jinja", title="a")


def test_no_own_file_ends_its_element() -> None:
    """Pages include them unescaped."""
    files = [*FOLDER.glob("*.js"), *FOLDER.glob("*.css")]
    assert len(files) >= 3
    assert not [path.name for path in files if "</" in path.read_text(encoding="utf-8")]


def test_bars_beyond_the_limit_are_one() -> None:
    counts = {f"{i}": i + 1 for i in range(BARS + 3)}
    *shown, others = bars(counts)
    assert {bar.label: bar.count for bar in shown} == dict(list(counts.items())[:BARS])
    assert (others.label, others.count, others.fraction) == ("3 others", 13 + 14 + 15, 1.0)
    assert shown[0].fraction == 1 / 42
    assert bars({}) == []
