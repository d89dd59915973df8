"""report.html holds what a run's own files say and needs nothing else; its charts show the numbers in their places."""

from __future__ import annotations

import base64
import itertools
import json
import os
import re
import shutil
import struct
import zlib
from contextlib import closing
from html import unescape
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save, save_file

from qwen_cache import open_cache
from qwen_cache.errors import TrainError
from qwen_cache.html.page import GRID, POINTS
from qwen_cache.storage.remembered import sealed
from qwen_cache.terminal import human_bytes, human_time
from qwen_train.run import METRICS_NAME, TIMES
from qwen_train.training import report
from qwen_train.training.report import smoothed, write_report

from .support.commands import refused, run
from .support.runs import IMAGES, LORA, Trainer, metrics


class Page(HTMLParser):
    """The text, the tags that are open where they should not be, and everything that a page refers to."""

    VOID = ("meta", "img")

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self.html = path.read_text(encoding="utf-8")
        self.feed(self.html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.references += [value or "" for name, value in attrs if name in ("src", "srcset", "action")]
        self.links += [value or "" for name, value in attrs if name == "href"]
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
    """The labels of the largest and the smallest value, the first and the last step."""
    return [value(text.text) for axis in ("values", "steps") for text in chart.findall(f".//div[@class='{axis}']/span")]


@pytest.fixture
def train(train: Trainer) -> Trainer:
    train.page = True
    return train


def test_a_run_ends_with_a_page_that_needs_nothing_else(train: Trainer) -> None:
    out = train(settings=IMAGES, validation__validation_steps=1, train__max_steps=2)
    page = Page(out / "report.html")
    assert page.references == page.links == []
    assert not re.search(r"https?:|@import|url\(|fetch|XMLHttp|import\(|innerHTML|eval|<script ", page.html)
    cache = open_cache(train.cache)
    for text in (cache.identity, str(train.cache), f"{len(cache)}", "QwenImageEditPlusPipeline", str(train.model)):
        assert text in page.words, text
    assert (out / "qwen.yaml").read_text(encoding="utf-8") in page.text
    for name, last in metrics(out)[-1].items():
        texts = [
            value(each.text) for each in page.charts().get(name.replace("_", " "), ElementTree.Element("a")).iter("b")
        ]
        is_other = name in ("step", "data_wait", *TIMES) or "validation" in name
        assert is_other or texts[:1] == [pytest.approx(last, rel=1e-3)]


def test_the_overview_says_how_the_run_went(train: Trainer) -> None:
    """Against the settings, the metrics and the files themselves."""
    settings = {**IMAGES, "train.validation_split": 0.5, "train.batch_size": 2, "train.checkpointing_steps": 3}
    steps = {"validation__validation_steps": 2, "validation__images_every_steps": 5, "train__max_steps": 5}
    out = train(settings=settings, **steps)
    facts, lines = Page(out / "report.html").facts(), metrics(out)
    losses = {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line}
    low = min(losses, key=lambda step: losses[step])
    assert list(losses) == [0, 2, 4, 5]
    lines = lines[1:]  # without the one before training
    with closing(train.batches(settings=settings).starting_at(0)) as stream:
        keys = [key for batch in itertools.islice(stream, 5) for key in batch.keys]
    assert facts["steps"] == f"5 of 5, {len(keys) / 5:g} samples in each"
    assert facts["epochs"] == f"{len(keys) / len(set(keys)):.1f}, {len(set(keys))} samples in each"
    average = np.average([line["loss"] for line in lines], weights=0.95 ** np.arange(5)[::-1])
    assert facts["loss"] == f"{average:.4g} smoothed after step 5, {lines[-1]['loss']:.4g} in that step alone"
    assert facts["validation loss"] == (
        f"{losses[5]:.4g} after step 5; {losses[0]:.4g} after step 0, lowest {losses[low]:.4g} after step {low}"
    )
    speed = sorted(line["samples_per_second"] for line in lines)[2]
    found = re.match(r"([\d.]+) (m?s) for a step: ([\d.,]+) steps/s, ([\d.,]+) samples/s$", facts["speed"])
    taken, unit, rate, samples = found.groups()  # type: ignore[union-attr]
    assert float(taken) * (0.001 if unit == "ms" else 1) == pytest.approx(len(keys) / 5 / speed, rel=0.1, abs=0.0006)
    assert [value(rate), value(samples)] == pytest.approx([speed * 5 / len(keys), speed], rel=1e-3)
    assert re.match(rf"{human_time(lines[-1]['elapsed_seconds'])} of training, from 20\d\d-", facts["time"])
    sizes = dict(part.rsplit(", ", 1) for part in facts["output files"].split("; "))
    assert sizes.keys() == {LORA, "checkpoint-3", "checkpoint-5"}
    assert sizes[LORA] == human_bytes((out / LORA).stat().st_size)
    trained = sum(tensor.numel() for tensor in load_file(out / LORA).values())
    assert (facts["trained"], facts["trainable parameters"]) == ("a LoRA of rank 16", f"{trained:,}")


@pytest.mark.slow
def test_the_curves_are_those_of_the_metrics(train: Trainer) -> None:
    """The smallest and largest values and steps are written at the axes; between them points are in proportion."""
    out = train(settings=IMAGES, validation__validation_steps=1, train__max_steps=5, optimizer__learning_rate=0.01)
    charts, lines = Page(out / "report.html").charts(), metrics(out)[1:]  # without the one before training
    names = ("loss", "grad_norm", "samples_per_second", "tokens_per_second")
    assert {name.replace("_", " ") for name in (*names, "learning_rate")} < charts.keys()
    for name in names:
        chart, values = charts[name.replace("_", " ")], np.array([line[name] for line in lines])
        assert labels(chart) == pytest.approx([values.max(), values.min(), 1, 5], rel=1e-3)
        (curve, *_), (carried, *_) = curves(chart), numbers(chart)
        assert carried == [pytest.approx((line["step"], line[name]), rel=1e-3) for line in lines]
        assert np.corrcoef(curve[:, 0], [1, 2, 3, 4, 5])[0, 1] > 0.99999
        assert np.corrcoef(curve[:, 1], values)[0, 1] < -0.99999, "down is more in an SVG"
        assert (curve.min(axis=0).tolist(), curve.max(axis=0).tolist()) == ([0, 0], [GRID, GRID])
    (chart,) = (chart for title, chart in charts.items() if title.startswith("validation loss"))
    measures = ("validation_loss", *(f"validation_loss_q{i}" for i in (1, 2, 3, 4)))
    plotted = np.array([[line[name] for name in measures] for line in metrics(out)])  # with the one before training
    assert labels(chart)[:2] == pytest.approx([plotted.max(), plotted.min()], rel=1e-3)
    heights = np.array([curve[:, 1] for curve in curves(chart)]).T
    assert np.corrcoef(heights.ravel(), plotted.ravel())[0, 1] < -0.9999


def test_long_runs_are_thinned_and_smoothed(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=5000)
    lines = [json.dumps({"step": i + 1, "loss": value}) for i, value in enumerate(values)]
    (tmp_path / METRICS_NAME).write_text("\n".join(lines), encoding="utf-8")
    page = Page(write_report(tmp_path))
    plain, smooth = curves(page.charts()["loss"])
    assert POINTS / 2 < len(plain) <= POINTS + 1
    assert smooth[-1, 0] == plain[-1, 0] == curves(page.charts()["loss"])[0][:, 0].max()
    assert smooth[100:, 1].std() < 0.2 * plain[:, 1].std()
    assert "smoothed, 0.996" in page.text  # 1/20 of the steps
    assert len(page.html) < 100_000


def test_the_smoothed_curve_is_a_mean_with_weights_that_fall_exponentially() -> None:
    """Which is what the correction for the beginning at 0 comes to: the weights of the values so far sum to 1."""
    values = np.random.default_rng(0).normal(size=40)
    for weight in (0.0, 0.6, 0.95):
        expected = [np.average(values[: i + 1], weights=weight ** np.arange(i + 1)[::-1]) for i in range(40)]
        assert smoothed(values.tolist(), weight) == pytest.approx(expected)
    assert smoothed(values.tolist(), 0.0) == values.tolist()


@pytest.mark.parametrize(
    ("times", "says"),
    [
        ([{}, {}], None),
        ([{"time": 1e9}, {"time": 2e9}], None),
        (
            [{"time": 1e9 + 90, "elapsed_seconds": 90.0}, {"time": 1e9 + 86_400, "elapsed_seconds": 7400.0}],
            "2 h 03 min of training, from 2001-09-09 01:46 to 2001-09-10 01:46 UTC",
        ),
        (
            [{"time": 1e99, "elapsed_seconds": 1.0}],
            "1.0 s of training, from 1e+99 to 1e+99 UTC",
        ),
    ],
)
def test_the_time_of_training_is_without_pauses(times: list[dict[str, float]], says: str, tmp_path: Path) -> None:
    lines = [json.dumps({"step": i, "loss": 1.0, **each}) for i, each in enumerate(times, 1)]
    (tmp_path / METRICS_NAME).write_text("\n".join(lines), encoding="utf-8")
    page = Page(write_report(tmp_path))
    assert page.facts().get("time") == says
    assert page.charts().keys() == {"loss"}


def test_noise_levels_and_shares_of_time_are_in_words(tmp_path: Path) -> None:
    levels = {f"validation_loss_q{i}": float(i) for i in (1, 2, 3, 4)}
    line = {"step": 1, "loss": 1.0, "data_wait": 0.000155, "validation_loss": 2.5, **levels}
    (tmp_path / METRICS_NAME).write_text(json.dumps(line), encoding="utf-8")
    charts = Page(write_report(tmp_path)).charts()
    keys = ["".join(each.itertext()).strip() for each in charts["validation loss by noise level"].findall(".//span")]
    assert keys[:5] == [
        *("all levels 2.5", "0–25 % noise, almost clean 1", "25–50 % noise 2", "50–75 % noise 3"),
        "75–100 % noise, almost pure noise 4",
    ]
    assert numbers(charts["data wait, %"]) == [[(1, 0.0155)]]


def test_values_that_are_no_numbers_and_names_that_are_html_do_no_harm(tmp_path: Path) -> None:
    folder = tmp_path / "<b>&run"
    folder.mkdir()
    (folder / METRICS_NAME).write_text('{"step": 1, "loss": NaN}\n{"step": 2, "loss": 3.5}\n', encoding="utf-8")
    (folder / "qwen.yaml").write_text("a: </pre><script>\n", encoding="utf-8")
    page = Page(write_report(folder))
    assert "Training run <b>&run" in page.words
    assert "</pre><script>" in page.text
    assert labels(page.charts()["loss"])[0] == 3.5
    (folder / METRICS_NAME).write_text("", encoding="utf-8")
    assert Page(write_report(folder)).charts() == {}


def test_text_of_a_run_stays_text(tmp_path: Path) -> None:
    """Names of metrics and images, prompts, and what the run wrote of itself."""
    hostile, control = "</script></pre><script>alert(1)</script><!-- <img src=x> & \"'", "\x1b]0;pwned\x07\u202e"
    folder = validation(tmp_path, {"step-5/<b>&'\".png": png(), "step-5/a.png": png()})
    (folder / METRICS_NAME).write_text(json.dumps({"step": 1, "loss": 2.0, hostile: 1.0}), encoding="utf-8")
    (folder / "about.json").write_text(json.dumps({"cache": hostile + control, hostile: hostile}), encoding="utf-8")
    words = {"name": hostile, "prompt": f"{hostile}, please"}
    save_file({"latents": torch.zeros(1)}, folder / "validation" / "step-5" / "a.safetensors", words)
    page = Page(write_report(folder))
    assert hostile in page.charts()
    assert page.facts()["cache"] == rf"{hostile}\x1b]0;pwned\x07\u202e"
    assert page.facts()[hostile] == hostile
    assert {*words.values(), "<b>&'\""} < set(page.words)
    assert [source[:5] for source in page.references] == ["data:"] * 2
    assert set(page.links) == {"./validation/step-5/%3Cb%3E%26%27%22.png", "./validation/step-5/a.png"}
    assert page.html.count("<script>") == 1


def test_the_prompt_of_changed_latents_is_not_shown(tmp_path: Path) -> None:
    folder = validation(tmp_path, {"step-5/a.png": png()})
    file = folder / "validation" / "step-5" / "a.safetensors"
    data = b"".join(sealed(save({"latents": torch.zeros(1)}, {"name": "cat", "prompt": "a cat"})))
    for content, shown in ((data, True), (data.replace(b"a cat", b"a bat"), False)):
        file.write_bytes(content)
        words = Page(write_report(folder)).words
        assert ("cat" in words, "a cat" in words, "a bat" in words) == (shown, shown, False)


GOOD = [f'{{"step": {i}, "loss": {i / 8}}}'.encode() for i in range(1, 9)]


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(b'{"step": 60, "lo{"step": 61, "loss": 1.0}', id="two in one"),
        pytest.param(b'{"step": 60, "loss": {}', id="half, with a brace at its end"),
        pytest.param(b'{"step": 60, "lo', id="half"),
        pytest.param(b"\0" * 100, id="zeros"),
        pytest.param(b'\xff\xfe{"step": 60}', id="not UTF-8"),
        pytest.param(b'{"loss": 1.0}', id="no step"),
        pytest.param(b"[60, 1.0]", id="a list"),
        pytest.param(b'{"a": ' + b"[" * 100_000, id="a tower"),
        pytest.param(b'{"step": 60, "loss": null}', id="null"),
        pytest.param(b'{"step": 60, "loss": "nan"}', id="text"),
        pytest.param(b'{"step": 60, "loss": true}', id="a truth"),
        pytest.param(b'{"step": 1e400, "loss": 1.0}', id="an infinite step"),
        pytest.param(b'{"step": NaN, "loss": 1.0}', id="a step that is no number"),
        pytest.param(b'{"step": 1' + b"0" * 400 + b', "loss": 1.0}', id="a step beyond floats"),
        pytest.param(b'{"step": 60, "loss": 1e308}', id="a loss that cannot be summed"),
        pytest.param(b'{"step": 60, "loss": -1e308}', id="nor one below zero"),
    ],
)
def test_lines_that_no_run_writes_are_left_out_and_counted(line: bytes, tmp_path: Path) -> None:
    (tmp_path / METRICS_NAME).write_bytes(b"\n".join([*GOOD[:4], line, line, b"", *GOOD[4:]]))
    page = Page(write_report(tmp_path))
    assert "2 lines of metrics.jsonl could not be read" in page.words
    assert numbers(page.charts()["loss"])[0] == [(i, i / 8) for i in range(1, 9)]
    (tmp_path / METRICS_NAME).write_bytes(b"\n".join([*GOOD, line]))
    assert "1 line of metrics.jsonl could not be read" in Page(write_report(tmp_path)).words


def test_names_of_metrics_may_be_of_any_letters(tmp_path: Path) -> None:
    """Characters that end a line in Python, and halves of surrogate pairs, which are escaped, among them."""
    line = '{"step": 1, "a\u2028b\x85c": 2.0, "\\ud800": 3.0}'
    (tmp_path / METRICS_NAME).write_text(line, encoding="utf-8")
    page = Page(write_report(tmp_path))
    assert page.charts().keys() == {r"a\u2028b\x85c", r"\ud800"}
    assert "could not be read" not in page.text


ABOUT = '{"samples_in_an_epoch": 16, "device": "1 × cpu"}'
STATE = '{"step": 4, "samples": 8}'


@pytest.mark.parametrize(
    ("about", "state", "left_out"),
    [
        (ABOUT, STATE, ""),
        ('{"cache": "x', STATE, "about.json"),
        ("[1]", STATE, "about.json"),
        ("", STATE, "about.json"),
        ("\ud800", STATE, "about.json"),
        ("{}", STATE, ""),
        ('{"samples_in_an_epoch": 0}', STATE, ""),
        ('{"samples_in_an_epoch": "16"}', STATE, ""),
        (f'{{"samples_in_an_epoch": 1{"0" * 400}}}', STATE, ""),
        (ABOUT, "{", "the state.json of the newest checkpoint"),
        (ABOUT, "[8]", "the state.json of the newest checkpoint"),
        (ABOUT, '{"step": 4}', "the state.json of the newest checkpoint"),
        (ABOUT, '{"samples": NaN}', "the state.json of the newest checkpoint"),
        (ABOUT, '{"samples": "8"}', "the state.json of the newest checkpoint"),
        (ABOUT, None, "the state.json of the newest checkpoint"),
        (None, "{", "the state.json of the newest checkpoint"),
        ("{", "{", "about.json, the state.json of the newest checkpoint"),
        (None, STATE, ""),
    ],
)
def test_what_a_run_wrote_of_itself_may_be_damaged(
    about: str | None, state: str | None, left_out: str, tmp_path: Path
) -> None:
    """A figure that follows from others is there only if all of them are."""
    (tmp_path / METRICS_NAME).write_bytes(b"\n".join(GOOD))
    (tmp_path / "checkpoint-4").mkdir()
    for path, text in ((tmp_path / "about.json", about), (tmp_path / "checkpoint-4" / "state.json", state)):
        if text is not None:
            path.write_bytes(text.encode("utf-8", "surrogatepass"))
    page = Page(write_report(tmp_path))
    facts = page.facts()
    assert [words for words in page.words if "could not be read" in words] == (
        [f"{left_out} could not be read"] if left_out else []
    )
    assert facts["steps"] == ("8, 2 samples in each" if state == STATE else "8")
    assert facts.get("epochs") == ("1.0, 16 samples in each" if (about, state) == (ABOUT, STATE) else None)
    assert facts.get("device") == ("1 × cpu" if about == ABOUT else None)


def test_a_checkpoint_before_the_first_step_says_nothing_of_steps(tmp_path: Path) -> None:
    (tmp_path / METRICS_NAME).write_bytes(GOOD[0])
    (tmp_path / "checkpoint-0").mkdir()
    (tmp_path / "checkpoint-0" / "state.json").write_text('{"samples": 0}', encoding="utf-8")
    page = Page(write_report(tmp_path))
    assert page.facts()["steps"] == "1"
    assert "could not be read" not in page.text


def test_speeds_that_are_no_speeds_give_no_time(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-4").mkdir()
    (tmp_path / "checkpoint-4" / "state.json").write_text(STATE, encoding="utf-8")
    for speed in ("0", "-1", "1e-320"):
        line = f'{{"step": 1, "samples_per_second": {speed}}}'
        (tmp_path / METRICS_NAME).write_text(line, encoding="utf-8")
        assert "speed" not in Page(write_report(tmp_path)).facts()


@pytest.mark.parametrize("settings", [b"\xff\xfe", b"a: 2024-13-45\n", b"a: " + b"[" * 5000, b"1: 2\n", b"a: [\n"])
def test_settings_that_are_none_are_shown_where_they_are_text(settings: bytes, tmp_path: Path) -> None:
    (tmp_path / METRICS_NAME).write_bytes(b"\n".join(GOOD))
    (tmp_path / "qwen.yaml").write_bytes(settings)
    page = Page(write_report(tmp_path))
    assert ("qwen.yaml could not be read" in page.words) == (settings == b"\xff\xfe")
    assert (settings.decode("utf-8", "replace") in page.words) == (settings != b"\xff\xfe")
    assert "model" not in page.facts()


def test_names_of_files_need_not_be_unicode(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"run \xff")
    folder.mkdir()
    (folder / METRICS_NAME).write_bytes(GOOD[0])
    (folder / os.fsdecode(b"\xfe.safetensors")).write_bytes(b"12")
    page = Page(write_report(folder))
    assert r"Training run run \udcff" in page.words
    assert page.facts()["output files"] == r"\udcfe.safetensors, 2 B"


def png(colour: str = "red", size: tuple[int, int] = (8, 8)) -> bytes:
    data = BytesIO()
    Image.new("RGB", size, colour).save(data, "PNG")
    return data.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def validation(folder: Path, images: dict[str, bytes]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / METRICS_NAME).write_bytes(GOOD[0])
    for name, data in images.items():
        path = folder / "validation" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def captions(page: Page) -> list[str]:
    return [unescape(text) for text in re.findall("<figcaption>([^<]*)</figcaption>", page.html)]


SIGNATURE, PIXELS = png()[:8], zlib.compress(b"\0" + bytes(100))


def header(side: int, colours: int = 2) -> bytes:
    return SIGNATURE + chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, colours, 0, 0, 0))


@pytest.mark.parametrize(
    "damaged",
    [
        pytest.param(b"", id="empty"),
        pytest.param(png()[:40], id="cut off"),
        pytest.param(png()[:-13] + bytes([png()[-13] ^ 1]) + png()[-12:], id="a changed bit that decoding ignores"),
        pytest.param(SIGNATURE + chunk(b"IHDR", b"12345"), id="half a header"),
        pytest.param(header(60_000) + chunk(b"IDAT", PIXELS), id="a bomb"),
        pytest.param(header(8) + chunk(b"IDAT", PIXELS[:6]) + chunk(b"I\xb7AT", PIXELS[6:]), id="a broken chunk"),
        pytest.param(header(8) + chunk(b"acTL", b"1234") + png()[33:], id="half of an animation"),
        pytest.param(header(8, 3) + chunk(b"tRNS", b"\xff\xff\0") + chunk(b"IDAT", PIXELS), id="without its palette"),
    ],
)
def test_images_that_are_damaged_are_named(damaged: bytes, tmp_path: Path) -> None:
    page = Page(write_report(validation(tmp_path, {"step-5/a.png": damaged, "step-5/b.png": png()})))
    assert captions(page) == ["after step 5 a.png cannot be read", "after step 5"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes")
def test_no_pipe_in_a_run_is_waited_for(tmp_path: Path) -> None:
    folder = validation(tmp_path, {"step-5/b.png": png()})
    for name in ("validation/step-5/a.png", "validation/step-5/a.safetensors", "qwen.yaml", "run.json"):
        os.mkfifo(folder / name)
    assert captions(Page(write_report(folder))) == ["after step 5 a.png cannot be read", "after step 5"]


def test_what_pillow_warns_of_is_no_matter(tmp_path: Path) -> None:
    """Warnings are errors here: an animation without images is an image all the same."""
    image = header(8) + chunk(b"acTL", bytes(8)) + png()[33:]
    assert captions(Page(write_report(validation(tmp_path, {"step-5/a.png": image})))) == ["after step 5"]


def test_steps_are_side_by_side(tmp_path: Path) -> None:
    """Without the folders that a file manager makes when it copies one, and samples that are no longer generated."""
    folders = ("step-0", "step-3", "step-5", "step-12", "step-foo", "step-12 copy", "step-99.bak", "step-")
    images = {f"{folder}/a.png": png() for folder in folders} | {"step-0/b.png": png()}
    page = Page(write_report(validation(tmp_path, images)))
    assert captions(page) == ["before training", *(f"after step {step}" for step in (3, 5, 12))]
    many = validation(tmp_path / "many", {f"step-{10 * i}/a.png": png() for i in range(100)})
    shown = captions(Page(write_report(many)))
    assert [shown[0], *shown[-1:], len(shown)] == ["before training", "after step 990", report.SHOWN_STEPS]
    gaps = np.diff([0, *(int(text.split()[-1]) for text in shown[1:])])
    assert gaps.max() - gaps.min() <= 10


def test_names_of_images_are_taken_as_they_are(tmp_path: Path) -> None:
    """Neither as patterns nor as beginnings of others, and controls in their order."""
    controls = ["cat.png", *(f"cat-{i}.png" for i in range(2, 12)), "catalog.png", "cat-dog.png"]
    colours = [f"#{20 * i:02x}0000" for i in range(11)]
    images = {
        f"controls/{name}": png(colour) for name, colour in zip(controls, [*colours, "blue", "blue"], strict=True)
    }
    names = {f"{place}/[c]*.png": png() for place in ("step-5", "target", "controls")}
    page = Page(write_report(validation(tmp_path, {"step-5/cat.png": png(), **images, **names})))
    assert captions(page) == [
        *("control", "target", "after step 5"),
        *(f"control {i}" for i in range(1, 12)),
        "after step 5",
    ]
    data = [base64.b64decode(source.removeprefix("data:image/jpeg;base64,")) for source in page.references]
    reds = [Image.open(BytesIO(jpeg)).getpixel((0, 0))[0] for jpeg in data[3:14]]  # type: ignore[index]
    assert reds == pytest.approx([20 * i for i in range(11)], abs=6)


def test_transparent_images_are_over_white(tmp_path: Path) -> None:
    data = BytesIO()
    Image.new("RGBA", (8, 8), (200, 0, 0, 0)).save(data, "PNG")
    page = Page(write_report(validation(tmp_path, {"step-5/a.png": data.getvalue()})))
    (source,) = page.references
    shown = Image.open(BytesIO(base64.b64decode(source.removeprefix("data:image/jpeg;base64,"))))
    assert min(low for low, _ in shown.getextrema()) > 250


@pytest.mark.slow
def test_decoded_images_are_in_it(train: Trainer) -> None:
    """Images of the steps, small, beside targets and controls."""
    out = train(settings=IMAGES)
    assert Page(out / "report.html").references == []
    assert run("qwen-train", "decode", out).code == 0
    page = Page(out / "report.html")
    assert {out / link for link in page.links} == set((out / "validation").rglob("*.png"))
    data = [base64.b64decode(source.removeprefix("data:image/jpeg;base64,")) for source in page.references]
    shown = [Image.open(BytesIO(jpeg)) for jpeg in data]
    newest = sorted((out / "validation" / "step-2").glob("*.png"))
    assert len(shown) == 2 * (1 + 3) + 3
    steps = ("before training", "after step 1", "after step 2")
    assert [captions(page).count(step) for step in steps] == [2, 2, 2]
    cache = open_cache(train.cache)
    for image in newest:
        assert {cache[image.stem].name, cache[image.stem].prompt} < set(page.words)
    last, expected = (
        np.asarray(image.convert("RGB"), float) for image in (shown[-1], Image.open(out / page.links[-1]))
    )
    assert last.shape == expected.shape
    assert np.abs(last - expected).mean() < 20, "a JPEG of noise"


def test_the_command_makes_the_same_page_again_wherever_the_folder_is(train: Trainer) -> None:
    out = train(settings=IMAGES)
    expected = (out / "report.html").read_text(encoding="utf-8")
    (out / "report.html").unlink()
    moved = train.folder / "moved" / "out"
    shutil.move(out, moved)
    result = run("qwen-train", "report", "--set", f"train.output_dir={moved}", "--json")
    assert result.code == 0, result.stderr
    assert json.loads(result.stdout) == {"report": str(moved / "report.html")}
    assert (moved / "report.html").read_text(encoding="utf-8") == expected


def test_every_checkpoint_renews_it(train: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    from qwen_train import train as training

    seen: list[int] = []
    renew = training.renew_report
    monkeypatch.setattr(training, "renew_report", lambda folder: (renew(folder), seen.append(len(metrics(folder))))[0])
    train(train__max_steps=3, train__checkpointing_steps=2)
    assert seen == [2, 3, 3]


def test_a_run_continues_when_its_page_cannot_be_made(train: Trainer) -> None:
    """A folder has its name: once at the checkpoint after each step, and once at the end, a line says so."""
    place = train.folder / "out" / "report.html"
    place.mkdir(parents=True)
    result = train.try_(train__max_steps=2, train__checkpointing_steps=1)
    assert result.code == 0, result.stderr
    assert (place.parent / LORA).is_file()
    assert len(metrics(place.parent)) == 2
    warnings = [line for line in result.stderr.splitlines() if "report.html was not renewed" in line]
    assert len(warnings) == 3
    assert all(f"{place}: this page cannot be written: Is a directory" in line for line in warnings)
    told = f"{place}: this page cannot be written: Is a directory\n  → make report.html writable, or copy"
    refused(run("qwen-train", "report", place.parent), told)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (TrainError("odd", where="here", do="do that"), "here: odd → do that"),
        (ZeroDivisionError("division\nby zero"), "ZeroDivisionError: division by zero"),
        (MemoryError(), "MemoryError:"),
        (PermissionError(13, "Permission denied", "a.json"), "PermissionError: [Errno 13] Permission denied: 'a.json'"),
    ],
)
def test_whatever_is_wrong_with_the_page_is_one_line(
    error: Exception, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def page(folder: Path) -> str:
        raise error

    (tmp_path / METRICS_NAME).touch()
    monkeypatch.setattr(report, "page", page)
    report.renew_report(tmp_path)
    assert capsys.readouterr().err.strip() == f"warning: report.html was not renewed: {said}"
    with pytest.raises(type(error)):
        write_report(tmp_path)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    refused(run("qwen-train", "report", tmp_path), f"{tmp_path}: no run here", "metrics.jsonl")
