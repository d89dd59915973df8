"""The documentation: its commands and Python run, its settings, options, links and error messages exist, the README is
short, and the generated pages match the code.

Every block of commands or Python in docs/ runs in order, page by page, in a folder with a few photographs, with the
tiny model, which SUBSTITUTIONS puts in place of the real one. Blocks after `<!-- not run: … -->` are only parsed.
"""

from __future__ import annotations

import ast
import functools
import gc
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from accelerate.state import AcceleratorState
from PIL import ImageDraw

import qwen_cache
import qwen_cache.torch
import qwen_cache.webdataset
import qwen_train
from qwen_cache.models.family import QWEN_IMAGE, QWEN_IMAGE_21
from qwen_cache.settings.load import Config, known_keys, load_config
from qwen_cache.settings.sections import TrainConfig
from qwen_cache.storage.files import cache_home
from qwen_cache.storage.measured import FOLDER as MEASURED
from qwen_train.memory.prediction import host_bytes, predict_memory
from qwen_train.memory.sizes import SampleSize, tokens_of
from qwen_train.training import prepare

from .support.browser import chromium, new_page
from .support.commands import run
from .support.imports import make, write_diffusion_pipe, write_musubi, write_qflux
from .support.marks import slow
from .support.paths import ROOT, load_tool
from .support.photographs import photograph
from .support.preferences import write_directions, write_preferences
from .support.sources import write_pairs

reference: Any = load_tool("make_reference")
DOCS = ROOT / "docs"
GENERATED = ("reference", "gpu")
PAGES = sorted(
    str(path) for path in (each.relative_to(DOCS) for each in DOCS.rglob("*.md")) if path.parts[0] not in GENERATED
)
ROOT_PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
MOST_WORDS = 1200
"""The limit of the README, which takes five minutes to read. Everything else is in docs/."""
REAL_MODELS = {"Qwen/Qwen-Image-Edit-2509": ("tiny", "edit-plus"), "Qwen/Qwen-Image-2.1": ("tiny-21", "qwen-image-21")}
"""The folder and the variant of the tiny model that takes the place of each model in the commands."""
SUBSTITUTIONS = {
    **{re.escape(name): folder for name, (folder, _) in REAL_MODELS.items()},
    r"(--base-model )tiny": r"\g<1>OWNER/TINY",
    r"(--prompt 'a paper boat')": r"\g<1> --height 64 --width 64",
    r"(--output-resolution )\d+": r"\g<1>96",
    r"\bcuda:\d": "cpu",
    r" --offload \w+": "",  # no offloading on a CPU
    r"--(height|width) 1024": r"--\g<1> 64",
    r"(predict .*--(?:image|source) \S+)": r"\g<1> --height 64 --width 64",
    r"(offload_blocks[=:] ?)\d+": r"\g<1>1",  # the tiny model has two
    r"([_-]steps[=: ] ?)(\d)000\b": r"\g<1>\g<2>",
    r"(_steps[=:] ?)\d{3}\b": r"\g<1>1",
    r"(vae_image_size=)\d+": r"\g<1>9216",
    r"(validation_split: )[\d.]+": r"\g<1>0.5",
    r"^(init data/ .*)": r"\g<1> --force --set data.vae_image_size=16384 --set data.condition_image_size=12544",
}
"""Replacements in commands, and in blocks of qwen.yaml."""
SMALL = {
    "data": {"vae_image_size": 16384, "condition_image_size": 12544},
    "train": {"max_steps": 2},
    "mask_head": {"steps": 3, "base_channels": 8, "validation_split": 0.5},
    "predict": {"num_inference_steps": 2},
    "validation": {"num_inference_steps": 2},
}
"""The settings of qwen.yaml where a page has none."""
FAMILY_PAGES = {"howto/train-qwen-image-2.1.md"}
"""Pages about a model that has no data.condition_image_size."""
BEFORE: dict[str, tuple[str, ...]] = {
    "data.md": (),
    "howto/fit-your-gpu.md": ("qwen-cache build",),
    "howto/improve-a-lora.md": (
        "qwen-cache build",
        "qwen-train run --set train.validation_split=0.5 --set validation.validation_steps=1",
    ),
    "howto/look-after-a-cache.md": ("qwen-cache build",),
    "howto/watch-and-resume.md": ("qwen-cache build",),
}
"""The pages that read the qwen.yaml of the tutorial, and the commands that have run before theirs."""
PAIR = {"image_path": "target", "control_path": "control"}
"""Columns of a table of another trainer, and the folders of the images."""
SLIDERS = """\
prompt,positive_prompt,negative_prompt,width,height
a portrait of a man,a portrait of a very old man,a portrait of a very young man,768,1024
a dog in a park,a very old dog in a park,a very young dog in a park,,
"""
"""The table of directions of a slider on the page about sources."""
MIXED = """\
target,control,prompt
data/target_images/cat.png,data/control_images/cat.png,mirror it
photo.jpg,,a red flower in front of green leaves
"""
"""The table with and without controls on the page about sources."""
MARK = r"<!-- not run: [^\n]+ -->\n"
BLOCK = re.compile(rf"^(?P<mark>{MARK})?```(?P<kind>\w+)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block; `commands` are those of our programs, as lists of words."""

    kind: str
    body: str
    is_run: bool

    @property
    def commands(self) -> list[list[str]]:
        lines = self.body.replace("\\\n", " ").splitlines()
        return list(filter(None, map(words_of, lines))) if self.kind in ("sh", "console") else []


def words_of(line: str) -> list[str]:
    """The words of one of our commands, also after torchrun; empty for other commands."""
    words = shlex.split(line, comments=True)
    if "qwen_train" in words:
        return ["qwen-train", *words[words.index("qwen_train") + 1 :]]
    return words if words[:1] in (["qwen-cache"], ["qwen-train"]) else []


def blocks(page: str) -> list[Block]:
    matches = BLOCK.finditer((DOCS / page).read_text(encoding="utf-8"))
    return [Block(match["kind"], match["body"], match["mark"] is None) for match in matches]


def tiny(text: str) -> str:
    for real, small in SUBSTITUTIONS.items():
        text = re.sub(real, small, text)
    return text


# ---- the commands ----------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(
    tmp_path: Path, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], Path]]:
    """The current folder for the commands of a page: `folder(page)`."""
    AcceleratorState._reset_state(reset_partial_state=True)  # other tests train in another precision

    def make_folder(page: str) -> Path:
        write_pairs(tmp_path / "data")
        write_local_edits(tmp_path / "data", 4)
        write_local_edits(tmp_path / "test", 1)
        (tmp_path / "data" / "validation").mkdir()
        photograph("china.jpg").resize((160, 107)).save(tmp_path / "data" / "validation" / "street.png")
        (tmp_path / "data" / "validation" / "street.txt").write_text("make it autumn", encoding="utf-8")
        photograph("flower.jpg").resize((107, 160)).save(tmp_path / "photo.jpg")
        (tmp_path / "photos").mkdir()
        photograph("flower.jpg").resize((107, 160)).save(tmp_path / "photos" / "flower.jpg")
        cat = [f'"{column}": "data/{kind}_images/cat.png"' for column, kind in PAIR.items()]
        (tmp_path / "pairs.jsonl").write_text(f'{{{", ".join(cat)}, "caption": "mirror it"}}\n', encoding="utf-8")
        (tmp_path / "names.txt").write_text("cat\ncup\n", encoding="utf-8")
        (tmp_path / "mixed.csv").write_text(MIXED, encoding="utf-8")
        (tmp_path / "sliders.csv").write_text(SLIDERS, encoding="utf-8")
        for name, variant in REAL_MODELS.values():
            (tmp_path / name).symlink_to(tiny_model(variant))
        if page == "howto/store-and-share.md":
            write_other_caches(tmp_path)
        if page == "howto/come-from-another-trainer.md":
            write_data_of_others(tmp_path)
        if page == "howto/train-from-preferences.md":
            write_preferences(tmp_path / "preferences", 8)
            write_directions(tmp_path / "directions", 3, target=True)
        (tmp_path / "qwen.yaml").write_text(yaml.safe_dump(small(page)), encoding="utf-8")
        return tmp_path

    measured = cache_home() / MEASURED  # of all tests; the page's commands remember nothing else
    measured.mkdir(parents=True, exist_ok=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    cache_home().mkdir(parents=True)
    (cache_home() / MEASURED).symlink_to(measured)
    monkeypatch.setattr(prepare, "print_memory", Mock())  # predicting it takes longer than the steps
    monkeypatch.chdir(tmp_path)
    yield make_folder
    AcceleratorState._reset_state(reset_partial_state=True)


def small(page: str) -> dict[str, Any]:
    """The settings of a page that has none; commands need not name the model of the 20B family."""
    if page not in FAMILY_PAGES:
        return {"model": {"path": REAL_MODELS["Qwen/Qwen-Image-Edit-2509"][0]}, **SMALL}
    return {**SMALL, "data": {"vae_image_size": SMALL["data"]["vae_image_size"]}}


def write_local_edits(data: Path, count: int) -> None:
    """Pairs whose target and control differ in one region."""
    for kind in ("control_images", "target_images"):
        (data / kind).mkdir(parents=True, exist_ok=True)
    for number in range(count):
        control = photograph("chelsea.png").resize((128, 128))
        target = control.copy()
        ImageDraw.Draw(target).ellipse([20 + 12 * number, 30, 60 + 12 * number, 70], fill=(220, 30, 30))
        control.save(data / "control_images" / f"dot{number}.png")
        target.save(data / "target_images" / f"dot{number}.png")
        (data / "target_images" / f"dot{number}.txt").write_text("add a red dot", encoding="utf-8")


def write_other_caches(folder: Path) -> None:
    samples = [make("a_cat", "make it blue", [(4, 6), (4, 6)], 9, 1), make("c", "mirror it", [(6, 4), (6, 4)], 7, 2)]
    write_musubi(folder / "musubi_cache", samples)
    write_qflux(folder / "qflux_cache", samples)
    write_diffusion_pipe(folder / "pipe_cache", samples)


OTHERS = {
    "sets": ("my_dataset/*", "my_dataset_control/+"),
    "cats": ("10_cat/*", "3_style/*"),
    "concept": ("*", "+-condlabel", "+-masklabel"),
    "set": ("after/+", "before/+"),
    "photos-for-fizgig": ("edited/*", "originals/+"),
}
"""The layouts of the page about other trainers, by folder: `*` is an image with a prompt, `+` one without."""
DATASETS = """\
[general]
resolution = [1024, 1024]
enable_bucket = true
[[datasets]]
image_directory = "sets/my_dataset"
control_directory = "sets/my_dataset_control"
"""
JOB = """\
job: extension
config:
  name: mirror
  process:
    - type: diffusion_trainer
      datasets: [{folder_path: sets/my_dataset, control_path: sets/my_dataset_control, resolution: 1024}]
      model: {name_or_path: Qwen/Qwen-Image-Edit-2509, arch: qwen_image_edit_plus}
"""
BACKENDS = [
    {"id": "a", "type": "local", "instance_data_dir": "sets/my_dataset", "conditioning_data": "b"},
    {"id": "b", "type": "local", "instance_data_dir": "sets/my_dataset_control", "dataset_type": "conditioning"},
]


def write_data_of_others(folder: Path) -> None:
    for name, patterns in OTHERS.items():
        for number, pattern in enumerate(patterns):
            path = folder / name / (re.sub(r"[*+]", "cat", pattern) + ".png")
            path.parent.mkdir(parents=True, exist_ok=True)
            photograph("chelsea.png").resize((128, 96)).rotate(number).save(path)
            if "*" in pattern:
                path.with_suffix(".txt").write_text("turn it", encoding="utf-8")
    table = "image,edit_image,prompt\nafter/cat.png,before/cat.png,turn it\n"
    (folder / "set" / "metadata.csv").write_text(table, encoding="utf-8")
    (folder / "dataset.toml").write_text(DATASETS, encoding="utf-8")
    (folder / "job.yaml").write_text(JOB, encoding="utf-8")
    (folder / "multidatabackend.json").write_text(json.dumps(BACKENDS), encoding="utf-8")
    config = {"model_family": "qwen_image", "data_backend_config": "multidatabackend.json"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def over(lower: dict[str, Any], upper: dict[str, Any]) -> dict[str, Any]:
    """Nested settings `lower` with those of `upper` on top."""
    inner = {key: over(lower[key], upper[key]) for key in lower.keys() & upper.keys() if isinstance(upper[key], dict)}
    return {**lower, **upper, **inner}


RUN = [
    page for page in PAGES if any(block.is_run and (block.commands or block.kind == "python") for block in blocks(page))
]


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.usefixtures("small_areas")
@pytest.mark.parametrize("page", [page if page == "tutorial.md" else slow(page) for page in RUN])
def test_the_commands_of_a_page_run(page: str, folder: Callable[[str], Path]) -> None:
    settings = folder(page) / "qwen.yaml"
    names: dict[str, Any] = {}
    for line in BEFORE.get(page, ()):
        assert run(*shlex.split(line)).code == 0, line
    for block in filter(lambda block: block.is_run, blocks(page)):
        if block.kind == "yaml":
            settings.write_text(yaml.safe_dump(over(small(page), yaml.safe_load(tiny(block.body)))), encoding="utf-8")
        for program, *arguments in block.commands:
            result = run(program, *shlex.split(tiny(shlex.join(arguments))))
            assert result.code == 0, f"{program} {shlex.join(arguments)}\n{result.stderr}"
        if block.kind == "python":
            exec(compile(tiny(block.body), page, "exec"), names)
            gc.collect()  # webdataset leaves its files to the garbage collector, which warns: here, where it is ignored


def test_the_table_of_a_page_is_the_one_that_is_built() -> None:
    texts = [block.body for block in blocks("data.md") if block.kind == "text"]
    assert {f"mixed.csv\n{MIXED}", f"sliders.csv\n{SLIDERS}"} <= {*texts}


def test_a_block_is_run_whole_or_marked() -> None:
    """Otherwise commands of other programs, and new kinds of fences, would be skipped silently."""
    for page in PAGES:
        assert len(blocks(page)) == (DOCS / page).read_text(encoding="utf-8").count("\n```") / 2
        for block in blocks(page):
            assert block.kind in ("sh", "console", "yaml", "text", "python"), f"{page}: {block.kind}"
            lines = [line for line in block.body.replace("\\\n", " ").splitlines() if line.strip()]
            if block.is_run and block.commands:
                assert len(block.commands) == len(lines), f"{page}:\n{block.body}"


# ---- parsed, not run -------------------------------------------------------------------------------------------------


commands = functools.cache(reference.commands)


def check_command(program: str, name: str, *arguments: str) -> None:
    """Check that the command, its options and its settings exist."""
    context = commands(program)[name].make_context(name, list(arguments))
    load_config(None, context.params.get("set_") or ())


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_settings_are_known(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for block in blocks(page):
        for words in block.commands:
            check_command(*words)
        if block.kind == "yaml":
            assert block.body.startswith("# qwen.yaml\n")
            Config.model_validate(yaml.safe_load(block.body))


SECTIONS = "|".join(Config.model_fields)
SETTING = re.compile(rf"\b(?:{SECTIONS})\.(?!json|py\b)[a-z_]+(?:\.[a-z_]+)*")


@pytest.mark.parametrize("page", PAGES)
def test_names_in_the_text_exist(page: str) -> None:
    text = re.sub(r"^```.*?^```$", "", (DOCS / page).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    known = [command for program in reference.APPS for command in commands(program).values()]
    options = {option for command in known for parameter in command.params for option in parameter.opts}
    options |= {"--help", "--version", "--install-completion"}
    for code in re.findall(r"`([^`\n]+)`", text):
        assert set(SETTING.findall(code)) <= set(known_keys()), f"{page}: {code}"
        if code.startswith(("--", "qwen-")):
            assert set(re.findall(r"--[a-z][a-z-]*", code)) <= options, f"{page}: {code}"
        if match := re.match(r"(qwen-cache|qwen-train) ([a-z][a-z-]*)", code):
            assert match[2] in commands(match[1]), f"{page}: {code}"


@pytest.mark.slow
def test_the_memory_of_a_24_gb_gpu_is_what_plan_computes() -> None:
    tool: Any = load_tool("fit_table")
    name = "Qwen-Image-Edit-2509"
    model, edit = tool.TRANSFORMERS[name], [tool.edit(name)]
    assert tokens_of(edit, TrainConfig(), QWEN_IMAGE) == 8464
    page = (DOCS / "howto/fit-your-gpu.md").read_text(encoding="utf-8")

    def check(settings: Sequence[str], stated: str, batch: list[SampleSize], processes: int = 1) -> None:
        config = load_config(None, ["train.layout=packed", *settings])
        computed = predict_memory(model, config, batch, "accelerator", None, processes).total
        assert computed / 1e9 == pytest.approx(float(stated), abs=0.051), settings

    amount = r" \| (–|[\d.]+)(?: GB)?"
    rows = re.findall(r"^\| (defaults|`[^|`]+`)[^|]*" + amount * 4 + r" \|$", page, re.MULTILINE)
    assert len(rows) == 14
    for named, one, four, on_host, of_two in rows:
        settings = [] if named == "defaults" else named.strip("`").split()
        check(settings, one, edit)
        check(settings, four, edit * 4)
        if of_two != "–":
            check([*settings, "train.fsdp=true"], of_two, edit, 2)
        host = host_bytes(model, load_config(None, ["train.layout=packed", *settings]), edit)
        assert host / 1e9 == pytest.approx(0 if on_host == "–" else float(on_host), abs=0.051), settings
    [whole] = re.findall(r"Without it the sample takes ([\d.]+) GB", page)
    check(["train.gradient_checkpointing=false"], whole, edit)
    [each, pinned] = re.findall(r"each block frees ([\d.]+) GB and pins ([\d.]+) GB", page)[0]
    of_40, of_60 = (load_config(None, ["train.layout=packed", f"train.offload_blocks={n}"]) for n in (40, 60))
    freed = [predict_memory(model, config, edit, "accelerator").total for config in (of_40, of_60)]
    assert (freed[0] - freed[1]) / 20e9 == pytest.approx(float(each), abs=0.006)
    assert host_bytes(model, of_60, edit) / 60e9 == pytest.approx(float(pinned), abs=0.006)
    tutorial = (DOCS / "tutorial.md").read_text(encoding="utf-8")
    [total] = re.findall(r"^ total +([\d.]+) GB$", tutorial, re.MULTILINE)
    check(["train.offload_blocks=40"], total, edit)
    [on_host] = re.findall(r"^host memory +([\d.]+) GB", tutorial, re.MULTILINE)
    assert host_bytes(model, of_40, edit) / 1e9 == pytest.approx(float(on_host), abs=0.051)
    readme = re.findall(r"takes ([\d.]+) GB and\s+([\d.]+) GB of RAM", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert readme == [(total, on_host)]
    [whole] = re.findall(r"Without `offload_blocks` it would be ([\d.]+) GB", tutorial)
    check([], whole, edit)


def test_the_figure_of_memory_is_what_plan_computes() -> None:
    tool: Any = load_tool("make_figures")
    figure = (DOCS / "memory.svg").read_text(encoding="utf-8")
    rows = re.split(r"<text[^>]*>(\S+)</text>(?=\n<text[^>]*font-weight)", figure)[1:]
    shown = dict(zip(rows[::2], rows[1::2], strict=True))
    assert list(shown) == [settings or "defaults" for settings in tool.SETTINGS]
    one_gb = (tool.WIDTH - 2 * tool.EDGE) / tool.MOST
    for settings, row in shown.items():
        config = load_config(None, ["train.layout=packed", *([] if settings == "defaults" else [settings])])
        name = "Qwen-Image-Edit-2509"
        memory = predict_memory(tool.TRANSFORMERS[name], config, [tool.edit(name)], "accelerator")
        trained = memory.trained + memory.gradients + memory.optimizer
        computed = [size / 1e9 for size in (memory.weights, trained, memory.activations, memory.reserved)]
        bars = [float(width) / one_gb for width in re.findall(r'<rect .* width="([\d.]+)" height="24.0"', row)]
        assert bars == pytest.approx(computed, abs=0.02), settings
        [total] = re.findall(r">([\d.]+) GB<", row)[:1]
        assert float(total) == pytest.approx(memory.total / 1e9, abs=0.051), settings


@pytest.mark.slow
def test_the_memory_of_qwen_image_21_is_what_plan_computes() -> None:
    bench: Any = load_tool("bench_memory")
    model = bench.transformer_config(layers=32, heads=32, head_dim=128, width=4096, family=QWEN_IMAGE_21)
    edit = [SampleSize(((1, 64, 64), (1, 64, 64)), 134, (7,))]
    page = (DOCS / "howto/train-qwen-image-2.1.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (none|`.+`).* \| ([\d.]+) GB \| ([\d.]+) GB \| ([\d.]+) GB \|$", page, re.MULTILINE)
    assert len(rows) == 5
    for settings, *stated in rows:
        for draws, total in zip((1, 2, 4), stated, strict=True):
            assignments = [] if settings == "none" else settings.split("`")[1].split()
            config = load_config(None, [*assignments, f"train.noise_draws={draws}"])
            computed = predict_memory(model, config, edit, "accelerator").total
            assert round(computed / 1e9, 1) == pytest.approx(float(total), abs=0.11), (settings, draws)


# ---- the README, links, error messages -------------------------------------------------------------------------------


def test_the_pages_are_few_and_short() -> None:
    """By hand; a word has a letter or a digit, so that the bars of tables are none."""
    words = [word for page in PAGES for word in (DOCS / page).read_text(encoding="utf-8").split()]
    assert sum(any(map(str.isalnum, word)) for word in words) <= 30_000
    assert sum(page.startswith("howto/") for page in PAGES) <= 20


def test_the_index_links_every_page() -> None:
    """The README calls it all pages; on GitHub there is no navigation."""
    linked = re.findall(r"\]\(([\w./-]+\.md)", (DOCS / "index.md").read_text(encoding="utf-8"))
    assert sorted({*PAGES} - {*linked}) == ["index.md"]


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= MOST_WORDS
    first_screen = text.partition("\n## ")[0]
    by_hand = re.sub(r"<!--gpu-->\n.*?<!--/gpu-->\n", "", first_screen, flags=re.DOTALL)
    assert len(by_hand.splitlines()) <= 37, "and a warning of three lines, or a table of reports"
    for command in ("pip install", "qwen-cache build", "qwen-train run", "qwen-train predict"):
        assert command in first_screen


def test_the_commands_of_the_readme_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    matches = BLOCK.finditer((ROOT / "README.md").read_text(encoding="utf-8"))
    commands = [words for match in matches for words in Block(match["kind"], match["body"], True).commands]
    assert len(commands) >= 4
    for words in commands:
        check_command(*words)


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as MkDocs and GitHub make them."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


ON_GITHUB = "https://github.com/qwen-cache/qwen-cache/blob/main/"


def linked_text(path: Path) -> str | None:
    """The text of a link's target; None where it does not exist, or only on the site."""
    if path.parent == DOCS / "reference":
        return None
    if path.is_dir():
        return ""
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None


@pytest.mark.parametrize("page", [*ROOT_PAGES, *(f"docs/{page}" for page in PAGES)])
def test_links_lead_somewhere(page: str) -> None:
    """On GitHub, where the pages of the reference are not, and on the site, which has no files outside docs/."""
    path = ROOT / page
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://")) and not link.startswith(ON_GITHUB):
            continue
        name, _, anchor = link.partition("#")
        of_file = ROOT / name.removeprefix(ON_GITHUB) if name.startswith(ON_GITHUB) else (path.parent / name).resolve()
        target = linked_text(of_file if name else path)
        assert target is not None, f"{page}: {link}"
        assert not anchor or anchor in anchors(target), f"{page}: {link}"


@functools.cache
def modules() -> dict[Path, ast.Module]:
    """Every module of both packages."""
    paths = [path for package in ("qwen_cache", "qwen_train") for path in (ROOT / package).rglob("*.py")]
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def texts_of_the_code() -> str:
    """Every string constant of both packages, and the literal parts of f-strings, each on its own line."""
    nodes = (node for module in modules().values() for node in ast.walk(module) if isinstance(node, ast.Constant))
    return "\n".join(node.value for node in nodes if isinstance(node.value, str))


def test_the_messages_of_troubleshooting_are_those_of_the_code() -> None:
    """The first cell of a row is a message in backquotes, with … for names and numbers; a section only lists some."""
    page = (DOCS / "howto/troubleshooting.md").read_text(encoding="utf-8")
    messages = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    listed = page.partition("## The line after → is enough")[2].partition("\n## ")[0]
    messages += [" ".join(message.split()) for message in re.findall(r"`([^`]+)`", listed)]
    assert len(messages) > 30
    texts = texts_of_the_code()
    pieces = [(message, piece.strip()) for message in messages for piece in re.split(r"(?<!, )…", message)]
    assert [message for message, piece in pieces if piece not in texts] == []


# ---- the site and the reference --------------------------------------------------------------------------------------


def nav_pages(entries: Sequence[Any]) -> Iterator[str]:
    for entry in entries:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            yield from nav_pages(value) if isinstance(value, list) else [value]


def test_every_page_is_in_the_navigation_once_and_old_addresses_lead_to_one() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    generated = [f"reference/{name}" for name in reference.PAGES]
    assert sorted(nav_pages(config["nav"])) == sorted([*PAGES, *generated])
    [moved] = [each["redirects"]["redirect_maps"] for each in config["plugins"] if "redirects" in each]
    assert set(moved.values()) <= set(PAGES)
    assert set(moved).isdisjoint(PAGES), "a page that exists would be replaced"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The reference pages."""
    folder = tmp_path_factory.mktemp("reference")
    reference.write_reference(folder)
    return {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}


@pytest.mark.parametrize("program", list(reference.APPS))
def test_the_reference_has_the_options_that_help_shows(
    program: str, written: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    sections = re.split(r"^## ", written[f"{program}.md"], flags=re.MULTILINE)[1:]
    names = [section.partition("\n")[0] for section in sections]
    assert names == re.findall(r"^│ ([a-z][a-z-]*) ", run(program, "--help").stdout, re.MULTILINE)
    for name, section in zip(names, sections, strict=True):
        shown = re.findall(r"^│ \*?\s*(--[a-z-]+)", run(program, name, "--help").stdout, re.MULTILINE)
        assert re.findall(r"^\| `(--[a-z-]+)[,`]", section, re.MULTILINE) == [s for s in shown if s != "--help"]


def test_the_reference_has_every_setting(written: dict[str, str]) -> None:
    keys = []
    for section in re.split(r"^## ", written["qwen-yaml.md"], flags=re.MULTILINE)[1:]:
        name = section.partition("\n")[0].removesuffix("[]")
        keys += [name, *(f"{name}.{key}" for key in re.findall(r"^\| `(\w+)`", section, re.MULTILINE))]
    assert set(keys) == set(known_keys())


def test_the_reference_has_every_module(written: dict[str, str]) -> None:
    """Each with a docstring, by its name and the first line."""
    lines = [line.strip().split(maxsplit=1) for line in written["tree.md"].splitlines()]
    for path, module in modules().items():
        docstring = ast.get_docstring(module)
        name = f"{path.parent.name}/" if path.name == "__init__.py" else path.name
        if docstring and name != "__main__.py":
            assert [name, docstring.partition("\n")[0]] in lines, path


def test_the_reference_has_every_error_and_rule(written: dict[str, str]) -> None:
    source = (ROOT / "qwen_cache" / "errors.py").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| (?:F\d+ \| )?`(\w+)`", written["errors.md"], re.MULTILINE)) == {
        name for name in re.findall(r"^class (\w+)\(", source, re.MULTILINE) if name != "QwenCacheError"
    }
    rules = re.findall(r"^\*\*(F\d+)\*\*", (ROOT / "schemas" / "FORMAT.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert re.findall(r"^\| (F\d+) ", written["errors.md"], re.MULTILINE) == sorted(rules, key=lambda r: int(r[1:]))


PUBLIC = (qwen_cache, qwen_train, qwen_cache.torch, qwen_cache.webdataset)


def test_the_python_reference_is_the_public_api(written: dict[str, str]) -> None:
    names = re.findall(r"^::: (\S+)$", written["python.md"], re.MULTILINE)
    public = {f"{package.__name__}.{name}" for package in PUBLIC for name in package.__all__}
    assert sorted(names) == sorted(public - {"qwen_cache.__version__"})
    assert all(resolve_name(name).__doc__ for name in names)


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("material", "mkdocs_redirects", "mkdocstrings"))),
    reason="needs the extra `docs`",
)
def test_the_site_builds_without_warnings_and_is_searched_from_the_disk(tmp_path: Path) -> None:
    """Links and anchors too: `strict` is set in mkdocs.yml. Searched where there is a browser."""
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    shutil.copytree(DOCS, tmp_path / "docs")
    reference.write_reference(tmp_path / "docs" / "reference")
    for package in ("qwen_cache", "qwen_train"):
        (tmp_path / package).symlink_to(ROOT / package)
    process = subprocess.run([sys.executable, "-m", "mkdocs", "build"], cwd=tmp_path, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert 'id="qwen_cache.Cache.__getitem__"' in (tmp_path / "site/reference/python.html").read_text(encoding="utf-8")
    with chromium() as browser:
        page, asked = new_page(browser), list[str]()
        page.on("request", lambda request: asked.append(request.url))
        page.goto((tmp_path / "site" / "howto" / "watch-and-resume.html").as_uri())
        page.click(".md-search__input")
        page.keyboard.type("caption dropout")
        page.wait_for_selector(".md-search-result__link[href*='how-it-works.html']")
        assert [url for url in asked if not url.startswith("file:")] == []
