"""Folders as people bring them from other trainers: `init` and `build` read the same pairs, or ask with the options."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from qwen_cache.cli import init
from qwen_cache.cli.doctor import Torch
from qwen_cache.errors import SourceError
from qwen_cache.settings.load import load_config
from qwen_cache.settings.sections import ColumnsConfig
from qwen_cache.sources.detect import read_content

from .support.commands import run
from .support.fake_lanes import FakeLanes

NAMES = ("Dune", "Garden", "Silk")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(init, "probe_torch", lambda: Torch("2.11"))
    return tmp_path


def fill(folder: str, *images: str, prompts: bool = False, names: tuple[str, ...] = NAMES) -> None:
    """Images of each name below `folder`, by patterns such as `{}_0`; the first one with a prompt."""
    for number, pattern in enumerate(images or ("{}",)):
        for colour, name in enumerate(names):
            path = Path("mine", folder, pattern.format(name) + ".png")
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (64, 48), (40 * colour, 90 * number, len(folder))).save(path)
            if prompts and not number:
                path.with_suffix(".txt").write_text(f"change {name}", encoding="utf-8")


def own_names() -> None:
    fill("nachher", prompts=True)
    fill("vorher")


def ai_toolkit() -> None:
    fill("my", prompts=True)
    fill("my_control")


def ai_toolkit_two() -> None:
    fill("my", prompts=True)
    fill("my_control")
    fill("my_control_2")


def ai_toolkit_target() -> None:
    fill("target", prompts=True)
    fill("control")


def musubi() -> None:
    fill("images", prompts=True)
    fill("control", "{}_0", "{}_1")


def musubi_from_one() -> None:
    fill("images", prompts=True)
    fill("control", "{}_1", "{}_2")


def white_mask(folder: str) -> None:
    fill(folder, names=NAMES[2:])
    Image.new("L", (64, 48), 255).save(Path("mine", folder, f"{NAMES[2]}.png"))


def with_masks() -> None:
    fill("target", prompts=True)
    fill("control")
    white_mask("masks")


def targets_beside_masks() -> None:
    beside_targets()
    white_mask("mask")


def simple_tuner() -> None:
    fill("edited-images", prompts=True)
    fill("reference-images")


def simple_tuner_two() -> None:
    fill("edited", prompts=True)
    fill("reference-a")
    fill("reference-b")


def fizgig() -> None:
    fill("edited folder", prompts=True)
    fill("originals folder")


def kohya() -> None:
    fill("10_cat", prompts=True)


def one_trainer() -> None:
    fill(".", "{}", "{}-condlabel", "{}-masklabel", prompts=True)


def beside_targets() -> None:
    fill(".", prompts=True)
    fill("control")


def diffsynth() -> None:
    fill("after")
    fill("before")
    rows = "".join(f"after/{name}.png,before/{name}.png,change it\n" for name in NAMES)
    Path("mine/metadata.csv").write_text(f"image,edit_image,prompt\n{rows}", encoding="utf-8")


LAYOUTS: dict[str, tuple[Callable[[], None], int, str]] = {
    "own names": (own_names, 1, "nachher has prompts, vorher none"),
    "ai-toolkit, NAME_control": (ai_toolkit, 1, "the names of the folders"),
    "ai-toolkit, two controls": (ai_toolkit_two, 2, "those of my_control and my_control_2 their controls"),
    "ai-toolkit, target and control": (ai_toolkit_target, 1, ""),
    "musubi-tuner": (musubi, 2, "images has prompts, control none"),
    "OneTrainer": (one_trainer, 1, ""),
    "targets beside a folder of controls": (beside_targets, 1, ""),
    "DiffSynth-Studio": (diffsynth, 1, ""),
    "musubi-tuner, numbers from 1": (musubi_from_one, 2, "images has prompts, control none"),
    "masks beside known folders": (with_masks, 1, "images of masks are the edit masks of their targets"),
    "masks beside the targets": (targets_beside_masks, 1, "images of mask are the edit masks of their targets"),
    "SimpleTuner": (simple_tuner, 1, "edited-images has prompts, reference-images none"),
    "SimpleTuner, two controls": (simple_tuner_two, 2, ""),
    "Fizgig": (fizgig, 1, "edited folder has prompts, originals folder none"),
    "kohya": (kohya, 0, ""),
}
"""The function that writes each, its controls per sample, and the reason that is given."""
OPTIONS = {
    "SimpleTuner, two controls": ["--targets", "edited", "--controls", "reference-a", "--controls", "reference-b"],
    "kohya": ["--targets", "10_cat"],
}
"""Options of `init` that say what the files do not."""
BUILT = ("own names", "SimpleTuner, two controls", "DiffSynth-Studio")
"""Layouts that are built too, of one control, of two, and with names in a folder: a build goes by its plan."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_init_and_build_read_the_same_pairs(
    layout: str, tiny_model: Callable[[str], Path], fast: list[FakeLanes]
) -> None:
    write, controls, why = LAYOUTS[layout]
    write()
    result = json.loads(run("qwen-cache", "init", "mine", "--json", *OPTIONS.get(layout, ())).stdout)
    assert (result["samples"], result["controls"]) == (3, [controls, controls])
    assert result["models"][0] == ("Qwen/Qwen-Image-Edit-2509" if controls else "Qwen/Qwen-Image")
    assert why in " ".join(result["notices"])
    assert bool(why) == bool(result["notices"])
    model = str(tiny_model("edit-plus" if controls else "t2i"))
    plan = json.loads(run("qwen-cache", "build", "--model", model, "--dry-run", "--json").stdout)
    assert plan["problems"] == []
    assert plan["to_encode"] == 3
    assert plan["controls"] == [{"controls": controls, "samples": 3}]
    assert [each["name"] for each in plan["samples"]] == [
        f"after/{name}" if layout == "DiffSynth-Studio" else name for name in NAMES
    ]
    assert [each["what"] for each in plan["notices"] if why not in each["what"]] == []
    assert len(plan["notices"]) == bool(why)
    if layout in BUILT:
        assert run("qwen-cache", "build", "--model", model).code == 0
        again = json.loads(run("qwen-cache", "build", "--model", model, "--dry-run", "--json").stdout)
        assert (again["cached"], again["to_encode"]) == (3, 0)


def read(**settings: object) -> list[tuple[str, list[str], str | None]]:
    """Each row of the source: its target, controls and mask, for either kind of model."""
    needs: dict[str, object] = {"needs_control": False, "takes_control": True}
    content = read_content(Path("mine"), **needs | settings)  # type: ignore[arg-type]
    assert content.problems == []
    return [
        (str(row.target)[5:], [str(each)[5:] for each in row.controls], row.mask and str(row.mask)[5:])
        for row in content.rows
    ]


def test_labels_are_controls_and_masks_of_their_image() -> None:
    one_trainer()
    assert read()[0] == ("Dune.png", ["Dune-condlabel.png"], "Dune-masklabel.png")
    Path("mine/Dune-condlabel.txt").write_text("an image of its own", encoding="utf-8")
    content = read_content(Path("mine"), needs_control=True)
    assert [row.name for row in content.rows] == ["Garden", "Silk"]
    assert {problem.what for problem in content.problems} == {
        "the control Dune-condlabel.png (or .jpg, …) is missing, found none",
        "the control Dune-condlabel-condlabel.png (or .jpg, …) is missing, found none",
    }


def test_numbered_controls_begin_at_0_and_take_the_place_of_the_plain_name() -> None:
    musubi()
    assert read()[2] == ("images/Silk.png", ["control/Silk_0.png", "control/Silk_1.png"], None)
    fill("control", "{}", names=("Silk",))  # then the numbered ones belong to no target
    content = read_content(Path("mine"), needs_control=True)
    assert [row.name for row in content.rows] == ["Dune", "Garden", "Silk"]
    assert {Path(problem.where).name for problem in content.problems} == {"Silk_0.png", "Silk_1.png"}


def test_controls_are_numbered_from_1_if_no_target_has_another_control() -> None:
    musubi_from_one()
    assert read()[2] == ("images/Silk.png", ["control/Silk_1.png", "control/Silk_2.png"], None)
    Path("mine/control/Silk_1.png").unlink()
    content = read_content(Path("mine"), needs_control=True)
    assert [row.name for row in content.rows] == ["Dune", "Garden"]
    assert content.problems[0].what == "the control control/Silk_1.png (or .jpg, …) is missing, found none"
    fill("control", "{}", names=("Dune",))  # then Garden_1 is no control of Garden
    content = read_content(Path("mine"), needs_control=True)
    assert [row.name for row in content.rows] == ["Dune"]


def test_masks_beside_known_folders_are_edit_masks() -> None:
    with_masks()
    assert read()[1:] == [
        ("target/Garden.png", ["control/Garden.png"], None),
        ("target/Silk.png", ["control/Silk.png"], "masks/Silk.png"),
    ]
    [notice] = read_content(Path("mine"), needs_control=True).notices
    assert notice.do == "if they are none: --set data.edit_mask=none"
    fill("masks", names=("other",))  # not of these targets, so not recognised
    assert [row[2] for row in read()] == [None, None, None]
    assert read(columns=ColumnsConfig(mask="control", control=[]))[0] == ("target/Dune.png", [], "control/Dune.png")


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_paths_of_images_in_a_table_are_used_or_refused(kind: str) -> None:
    """The same as in CSV, with the setting that uses them."""
    fill("after")
    fill("before")
    fill("depth")
    columns = {name: [f"{name}/{each}.png" for each in NAMES] for name in ("after", "vorher", "depth")}
    columns["vorher"] = [f"before/{each}.png" for each in NAMES]
    columns |= {"prompt": ["change it"] * 3, "place": ["depth", "before", ""]}
    source = Path("mine") / ("my.parquet" if kind == "parquet" else "set")
    if kind == "parquet":
        pq.write_table(pa.table(columns), source)
    else:
        columns |= {name: [f"../{path}" for path in columns[name]] for name in ("after", "vorher", "depth")}
        source.mkdir()
        table = pa.table(columns)
        with pa.OSFile(str(source / "data.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
        (source / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}', encoding="utf-8")
    refused = run("qwen-cache", "init", str(source))
    assert (refused.code, Path("qwen.yaml").exists()) == (2, False)
    assert "columns hold images and are not used (expected every column with images" in refused.stderr
    assert "found 'vorher', 'depth')" in refused.stderr
    assert """--set 'data.columns.control=["vorher", "depth"]'""" in refused.stderr
    assert run("qwen-cache", "init", str(source), "--controls", "vorher").code == 0
    content = read_content(source, needs_control=True, columns=ColumnsConfig(control=["vorher", "depth"]))
    assert [len(row.controls) for row in content.rows] == [2, 2, 2]


def test_two_folders_with_prompts_are_two_sets() -> None:
    fill("a", prompts=True)
    fill("b", prompts=True)
    assert [row[0] for row in read()] == [f"{folder}/{name}.png" for folder in "ab" for name in NAMES]


def masks() -> None:
    fill("img", prompts=True)
    fill("masks")


def sizes() -> None:
    fill("1024", prompts=True)
    fill("512")


def three() -> None:
    fill("img", prompts=True)
    fill("raw")
    fill("depth")


def few() -> None:
    fill("nachher", prompts=True)
    fill("vorher", names=NAMES[:2])


def known_target() -> None:
    fill("targets", prompts=True)
    fill("vorher")


def no_prompts() -> None:
    fill("nachher")
    fill("vorher")


QUESTIONS: dict[str, tuple[Callable[[], None], list[str]]] = {
    "masks": (
        masks,
        [
            "--targets img --controls masks",
            "--targets img --set data.columns.mask=masks",
            "without controls --targets img",
        ],
    ),
    "sizes": (sizes, ["--targets 1024 --controls 512", "without controls --targets 1024"]),
    "three folders": (
        three,
        [
            "--targets img --controls depth",
            "--targets img --controls raw",
            "--targets img --controls depth --controls raw",
            "without controls --targets img",
        ],
    ),
    "two of three names": (few, ["--targets nachher --controls vorher", "without controls --targets nachher"]),
    "one known name": (known_target, ["--targets targets --controls vorher", "without controls --targets targets"]),
    "no prompts": (
        no_prompts,
        [
            "--targets nachher --controls vorher",
            "--targets vorher --controls nachher",
            "without controls --targets nachher",
            "without controls --targets vorher",
        ],
    ),
}


@pytest.mark.parametrize("case", QUESTIONS)
def test_what_may_mean_something_else_is_asked_with_the_options_that_decide(case: str) -> None:
    write, options = QUESTIONS[case]
    write()
    for needs_control in (True, False):
        with pytest.raises(SourceError) as caught:
            read_content(Path("mine"), needs_control=needs_control, takes_control=True)
        assert caught.value.what == "it is not clear which folder has the targets and which the controls"
        assert (
            caught.value.do
            == f"choose one: {', or '.join(options)} (in qwen.yaml: data.columns.target, data.columns.control)"
        )
    if case == "no prompts":
        return
    result = run("qwen-cache", "init", "mine", *shlex.split(options[0]))
    if case == "two of three names":
        assert "the control vorher/Silk.png (or .jpg, …) is missing" in result.stderr
        return
    assert (result.code, load_config(Path("qwen.yaml")).data.columns) == (
        0,
        ColumnsConfig(target=options[0].split()[1], control=[options[0].split()[3]]),
    )
    assert "3 samples with 1 control image each" in result.stderr


def test_a_known_folder_of_targets_is_read_alone_where_no_control_is_stated() -> None:
    known_target()
    content = read_content(Path("mine"), needs_control=False, takes_control=True, no_control="allowed")
    assert [len(row.controls) for row in content.rows] == [0, 0, 0]


def test_folders_of_masks_and_prompts_that_are_named_are_no_controls() -> None:
    fill("img", prompts=True)
    fill("raw")
    fill("masks")
    assert read(columns=ColumnsConfig(mask="masks"))[0] == ("img/Dune.png", ["raw/Dune.png"], "masks/Dune.png")
    for name in NAMES:
        for folder in ("img", "raw"):
            path = Path("mine/texts", folder, f"{name}.txt")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("a set of its own", encoding="utf-8")
            Path("mine/img", f"{name}.txt").unlink(missing_ok=True)
    shutil.rmtree("mine/masks")
    columns = ColumnsConfig(prompt="texts")
    assert [row[0] for row in read(columns=columns)] == [
        f"{folder}/{name}.png" for folder in ("img", "raw") for name in NAMES
    ]


def test_the_message_says_what_is_in_each_folder() -> None:
    three()
    with pytest.raises(SourceError) as caught:
        read_content(Path("mine"), needs_control=True)
    assert (
        caught.value.found == "depth (3 images, no prompts), img (3 images, with prompts), raw (3 images, no prompts)"
    )


def test_init_says_which_folder_has_the_targets_and_how_to_decide_otherwise() -> None:
    own_names()
    result = run("qwen-cache", "init", "mine")
    images = "images of nachher are the targets, and those of vorher their controls: nachher has prompts, vorher none"
    assert f"3 {images}: Dune, Garden, Silk\n" in result.stderr
    assert "  → if it is the other way round: --targets vorher --controls nachher\n" in result.stderr
    Path("mine/vorher/other.png").write_bytes(Path("mine/vorher/Dune.png").read_bytes())
    result = run("qwen-cache", "init", "mine", "--force")
    assert result.code == 2
    assert f"3 {images}: Dune, Garden, Silk\n" in result.stderr
    result = run("qwen-cache", "init", "mine", "--force", "--targets", "vorher", "--controls", "nachher")
    assert "none of the 4 targets has a prompt (expected Dune.txt for Dune.png, found no .txt)" in result.stderr


def test_a_text_to_image_model_is_told_about_the_controls() -> None:
    own_names()
    with pytest.raises(SourceError, match=r"a text-to-image model takes no controls .*, found vorher"):
        read_content(Path("mine"), needs_control=False)
    masks()
    assert len(read_content(Path("mine"), needs_control=False).problems) > 1


def test_controls_beside_the_folder_of_targets_are_pointed_out() -> None:
    ai_toolkit()
    told = "my_control is beside it: name the folder above, mine, with --targets my --controls my_control"
    with pytest.raises(SourceError) as caught:
        read_content(Path("mine/my"), needs_control=True)
    assert caught.value.do == told
    [notice] = read_content(Path("mine/my"), needs_control=False, takes_control=True).notices
    assert str(notice) == f"1 folder of targets is read without its controls: mine/my\n  → {told}"


def test_controls_with_known_names_beside_the_folder_of_targets_are_pointed_out() -> None:
    ai_toolkit_target()
    [notice] = read_content(Path("mine/target"), needs_control=False, takes_control=True).notices
    assert notice.do == "control is beside it: name the folder above, mine, with --targets target --controls control"


def test_a_name_that_nearly_agrees_is_a_problem_of_its_pair() -> None:
    own_names()
    Path("mine/vorher/Dune.png").rename("mine/vorher/DUNE.png")
    content = read_content(Path("mine"), needs_control=True)
    assert [row.name for row in content.rows] == ["Garden", "Silk"]
    [problem] = content.problems
    assert problem.what == "the control vorher/Dune.png (or .jpg, …) is missing; did you mean vorher/DUNE.png?"


def test_repeats_of_kohyas_trainers_become_weights_of_caches() -> None:
    fill("10_my cat", prompts=True)
    fill("3_style", prompts=True, names=NAMES[:2])
    result = run("qwen-cache", "init", "mine")
    assert result.code == 0
    assert "2 folders have numbers that kohya's trainers read as repeats" in result.stderr
    assert "train.caches has a cache for each folder, with its number as the weight\n" in result.stderr
    assert result.stderr.endswith(
        "next:\n  qwen-cache build 'mine/10_my cat' --out shards-10_my_cat\n"
        "  qwen-cache build mine/3_style --out shards-3_style\n"
    )
    config = load_config(Path("qwen.yaml"))
    assert [(each.path, each.weight) for each in config.train.caches] == [
        ("shards-10_my_cat", 10),
        ("shards-3_style", 3),
    ]
    assert "cache:" not in re.findall(r"^\w+:", Path("qwen.yaml").read_text(encoding="utf-8"), re.MULTILINE)
    [notice] = read_content(Path("mine"), needs_control=False).notices
    assert notice.do == "`qwen-cache init` writes a cache and a weight for each folder"
    assert read_content(Path("mine/3_style"), needs_control=False).notices == ()


def test_most_of_a_source_is_never_proposed_to_be_skipped() -> None:
    fill("a", prompts=True, names=NAMES[:1])
    fill("b", names=("Rain", "Snow"))
    result = run("qwen-cache", "init", "mine")
    assert result.code == 2
    assert "skip" not in result.stderr
    assert "if folders or columns are read in another way than you mean, name them: --targets, --controls" in (
        result.stderr
    )
