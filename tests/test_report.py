"""report.html holds what a run's own files say and needs nothing else; its charts show the numbers in their places."""

from __future__ import annotations

import base64
import itertools
import json
import re
import shutil
from collections.abc import Callable
from contextlib import closing
from html import unescape
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file

from qwen_cache import open_cache
from qwen_cache.console import human_bytes
from qwen_cache.page.charts import GRID, POINTS
from qwen_train.metrics import METRICS_NAME
from qwen_train.report import moving_mean, write_report

from .conftest import run
from .test_decode import PICTURES
from .test_train import LORA, Trainer, metrics, refused


@pytest.fixture
def train(built: Callable[..., Path], tiny_model: Callable[[str], Path], tmp_path: Path) -> Trainer:
    return Trainer(built("edit-plus"), tiny_model("edit-plus"), tmp_path)


class Page(HTMLParser):
    """The text, the tags that are open where they should not be, and everything that a page refers to."""

    VOID = ("meta", "img")

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.words: list[str] = []
        self.html = path.read_text(encoding="utf-8")
        self.feed(self.html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return "\n".join(self.words)

    def charts(self) -> dict[str, ElementTree.Element]:
        """By their titles; a figure is XML as well."""
        found = map(ElementTree.fromstring, re.findall(r'<figure class="curves">.*?</figure>', self.html, re.DOTALL))
        return {chart.find(".//svg").attrib["aria-label"]: chart for chart in found}  # type: ignore[union-attr]

    def facts(self) -> dict[str, str]:
        rows = re.findall(r"<tr><th>(.*?)</th><td>(.*?)</td></tr>", self.html)
        return {unescape(name): unescape(value) for name, value in rows}


def value(text: str | None) -> float:
    return float((text or "").replace(",", ""))


def curves(chart: ElementTree.Element) -> list[np.ndarray]:  # type: ignore[type-arg]
    lines = [line.attrib["points"].split() for line in chart.iter("polyline")]
    return [np.array([[float(number) for number in point.split(",")] for point in line]) for line in lines]


def numbers(chart: ElementTree.Element) -> list[list[tuple[float, float]]]:
    """Steps and values that the curves carry for the readout."""
    lines = [(line.attrib["data-steps"].split(), line.attrib["data-values"].split()) for line in chart.iter("polyline")]
    return [[(float(step), value(text)) for step, text in zip(*line, strict=True)] for line in lines]


def labels(chart: ElementTree.Element) -> list[float]:
    """Of the largest and the smallest value, the first and the last step."""
    return [value(text.text) for axis in ("values", "steps") for text in chart.findall(f".//div[@class='{axis}']/span")]


def test_a_run_ends_with_a_page_that_needs_nothing_else(train: Trainer) -> None:
    out = train(settings=PICTURES, validation__every_steps=1, train__max_steps=4)
    page = Page(out / "report.html")
    assert page.references == []
    assert not re.search(r"https?:|@import|url\(|fetch|XMLHttp|import\(|innerHTML|eval|<script ", page.html)
    cache = open_cache(train.cache)
    for text in (cache.identity, str(train.cache), f"{len(cache)}", "QwenImageEditPlusPipeline", str(train.model)):
        assert text in page.words, text
    assert (out / "qwen.yaml").read_text(encoding="utf-8") in page.text
    for name, last in metrics(out)[-1].items():
        texts = [
            value(each.text) for each in page.charts().get(name.replace("_", " "), ElementTree.Element("a")).iter("b")
        ]
        assert name == "step" or "validation" in name or texts == [pytest.approx(last, rel=1e-3)]


def test_the_overview_says_how_the_run_went(train: Trainer) -> None:
    """Against the settings, the metrics and the files themselves."""
    settings = {**PICTURES, "train.validation_split": 0.5, "train.batch_size": 2, "train.checkpointing_steps": 3}
    out = train(settings=settings, validation__every_steps=2, train__max_steps=5)
    facts, lines = Page(out / "report.html").facts(), metrics(out)
    losses = {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line}
    low = min(losses, key=lambda step: losses[step])
    assert losses.keys() == {2, 4}
    with closing(train.batches(settings=settings).starting_at(0)) as stream:
        keys = [key for batch in itertools.islice(stream, 5) for key in batch.keys]
    assert facts["steps"] == f"5 of 5, {len(keys) / 5:g} samples in each"
    assert facts["epochs"] == f"{len(keys) / len(set(keys)):.4g}, {len(set(keys))} samples in each"
    assert facts["loss"] == f"{lines[-1]['loss']:.4g}"
    assert facts["validation loss"] == (
        f"{losses[4]:.4g} after step 4; {losses[2]:.4g} after step 2, lowest {losses[low]:.4g} after step {low}"
    )
    speed = sorted(line["samples_per_second"] for line in lines)[2]
    taken, unit = re.match(r"([\d.]+) (m?s) for a step, at ", facts["time"]).groups()  # type: ignore[union-attr]
    assert float(taken) * (0.001 if unit == "ms" else 1) == pytest.approx(len(keys) / 5 / speed, rel=0.1, abs=0.0006)
    sizes = dict(part.rsplit(", ", 1) for part in facts["came out"].split("; "))
    assert sizes.keys() == {LORA, "checkpoint-3", "checkpoint-5"}
    assert sizes[LORA] == human_bytes((out / LORA).stat().st_size)
    trained = sum(tensor.numel() for tensor in load_file(out / LORA).values())
    assert (facts["trained"], facts["trainable parameters"]) == ("a LoRA of rank 16", f"{trained:,}")


def test_the_curves_are_those_of_the_metrics(train: Trainer) -> None:
    """The smallest and largest values and steps are written at the axes; between them a point lies in proportion."""
    out = train(settings=PICTURES, validation__every_steps=1, train__max_steps=5, optimizer__learning_rate=0.01)
    charts, lines = Page(out / "report.html").charts(), metrics(out)
    names = ("loss", "grad_norm", "samples_per_second", "tokens_per_second")
    assert {name.replace("_", " ") for name in (*names, "learning_rate")} < charts.keys()
    for name in names:
        chart, values = charts[name.replace("_", " ")], np.array([line[name] for line in lines])
        assert labels(chart) == pytest.approx([values.max(), values.min(), 1, 5], rel=1e-3)
        (curve,), (carried,) = curves(chart), numbers(chart)
        assert carried == [pytest.approx((line["step"], line[name]), rel=1e-3) for line in lines]
        assert np.corrcoef(curve[:, 0], [1, 2, 3, 4, 5])[0, 1] > 0.99999
        assert np.corrcoef(curve[:, 1], values)[0, 1] < -0.99999, "down is more in an SVG"
        assert (curve.min(axis=0).tolist(), curve.max(axis=0).tolist()) == ([0, 0], [GRID, GRID])
    (chart,) = (chart for title, chart in charts.items() if title.startswith("validation loss"))
    measures = ("validation_loss", *(f"validation_loss_q{i}" for i in (1, 2, 3, 4)))
    drawn = np.array([[line[name] for name in measures] for line in lines])
    assert labels(chart)[:2] == pytest.approx([drawn.max(), drawn.min()], rel=1e-3)
    heights = np.array([curve[:, 1] for curve in curves(chart)]).T
    assert np.corrcoef(heights.ravel(), drawn.ravel())[0, 1] < -0.9999


def test_long_runs_are_thinned_and_smoothed(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=5000)
    lines = [json.dumps({"step": i + 1, "loss": value}) for i, value in enumerate(values)]
    (tmp_path / METRICS_NAME).write_text("\n".join(lines), encoding="utf-8")
    page = Page(write_report(tmp_path))
    plain, smooth = curves(page.charts()["loss"])
    assert POINTS / 2 < len(plain) <= POINTS + 1
    assert smooth[-1, 0] == plain[-1, 0] == curves(page.charts()["loss"])[0][:, 0].max()
    assert smooth[100:, 1].std() < 0.2 * plain[:, 1].std()
    assert "mean of 100 logged steps" in page.text
    assert len(page.html) < 100_000


def test_the_moving_mean_is_over_the_last_values() -> None:
    points = [(float(i), float(value)) for i, value in enumerate(np.random.default_rng(0).normal(size=40))]
    expected = [np.mean([value for _, value in points[max(0, i - 6) : i + 1]]) for i in range(40)]
    assert [value for _, value in moving_mean(points, 7)] == pytest.approx(expected)


def test_values_that_are_no_numbers_and_names_that_are_html_do_no_harm(tmp_path: Path) -> None:
    folder = tmp_path / "<b>&run"
    folder.mkdir()
    (folder / METRICS_NAME).write_text('{"step": 1, "loss": NaN}\n{"step": 2, "loss": 3.5}\n', encoding="utf-8")
    (folder / "qwen.yaml").write_text("a: </pre><script>\n", encoding="utf-8")
    page = Page(write_report(folder))
    assert "<b>&run" in page.words
    assert "</pre><script>" in page.text
    assert labels(page.charts()["loss"])[0] == 3.5
    (folder / METRICS_NAME).write_text("", encoding="utf-8")
    assert Page(write_report(folder)).charts() == {}


def test_decoded_pictures_are_in_it(train: Trainer) -> None:
    """Of the newest step alone, small, beside targets and controls."""
    out = train(settings=PICTURES)
    assert Page(out / "report.html").references == []
    assert run("qwen-train", "decode", out).code == 0
    page = Page(out / "report.html")
    data = [base64.b64decode(source.removeprefix("data:image/jpeg;base64,")) for source in page.references]
    shown = [Image.open(BytesIO(jpeg)) for jpeg in data]
    newest = sorted((out / "validation" / "step-2").glob("*.png"))
    assert len(shown) == 2 * 2 + 3
    assert page.text.count("drawn after step 2") == len(newest)
    assert "step 1" not in page.text
    cache = open_cache(train.cache)
    for picture in newest:
        assert {cache[picture.stem].name, cache[picture.stem].prompt} < set(page.words)
    last, expected = np.asarray(shown[-1], float), np.asarray(Image.open(newest[-1]).convert("RGB"), float)
    assert last.shape == expected.shape
    assert np.abs(last - expected).mean() < 20, "a JPEG of noise"


def test_the_command_makes_the_same_page_again_wherever_the_folder_lies(train: Trainer) -> None:
    out = train(settings=PICTURES)
    expected = (out / "report.html").read_text(encoding="utf-8")
    (out / "report.html").unlink()
    moved = train.folder / "moved" / "out"
    shutil.move(out, moved)
    result = run("qwen-train", "report", moved)
    assert result.code == 0, result.stderr
    assert str(moved / "report.html") in result.stderr
    assert (moved / "report.html").read_text(encoding="utf-8") == expected


def test_every_checkpoint_renews_it(train: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    from qwen_train import train as training

    seen: list[int] = []
    write = training.write_report
    monkeypatch.setattr(training, "write_report", lambda folder: (write(folder), seen.append(len(metrics(folder))))[0])
    train(train__max_steps=3, train__checkpointing_steps=2)
    assert seen == [2, 3, 3]


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    refused(run("qwen-train", "report", tmp_path), f"{tmp_path}: no run here", "metrics.jsonl")
