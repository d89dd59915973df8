"""`inspect --html`, flags and single samples: the contents of the cache, and no markup from a prompt."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
from base64 import b64decode
from collections import Counter
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image, ImageChops

from qwen_cache import open_cache
from qwen_cache.encode.vae import decode_latents, load_vae
from qwen_cache.format.identity import content_hash
from qwen_cache.html.page import FOLDER
from qwen_cache.inspect import page as document
from qwen_cache.inspect import page as page_files
from qwen_cache.inspect.flags import FLAGS, THUMBNAIL
from qwen_cache.inspect.page import FILES_SCRIPTS, SCRIPTS, evenly
from qwen_cache.inspect.summary import histogram, survey
from qwen_cache.models.folder import open_model
from qwen_cache.storage.files import locked, write_durably

from .support.caches import build
from .support.commands import command, run
from .support.large_caches import write_large
from .support.pages import HOSTILE, RECIPE, CacheSample, Page, page_of, write
from .support.scenes import Scene, write_scenes
from .support.server import Server, serving

V1 = ("--format", "v1", "--edit-mask", "none")

Built = Callable[..., Path]


@pytest.fixture
def cache(request: pytest.FixtureRequest, built: Built, tiny_model: Built, pairs: Path, tmp_path: Path) -> Path:
    """A cache of edit pairs, built with these options; with `t2i`, of targets and prompts only."""
    if request.param != "t2i":
        return built("edit-plus", request.param)
    assert build(pairs / "target_images", tmp_path / "shards", tiny_model("t2i")).code == 0
    return tmp_path / "shards"


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("cache", [(), ("--edit-mask", "diff"), V1, "t2i"], indirect=True)
def test_the_page_says_what_the_index_holds(cache: Path, tmp_path: Path) -> None:
    page = page_of(cache, tmp_path / "report.html")
    index = pq.read_table(cache / "index.parquet").to_pylist()
    assert [sample["key"] for sample in page.samples] == [row["key"] for row in index]
    for sample, row in zip(page.samples, index, strict=True):
        assert {name: sample[name] for name in ("name", "prompt")} == {name: row[name] for name in ("name", "prompt")}
        assert (sample["text_tokens"], sample["edit_mask_from"]) == (row["text_length"], row.get("edit_mask_from"))
        stored = [row[name]["shape"][0] for name in ("image_latents", "control_latents") if row[name]]
        assert sample["image_tokens"] == sum(stored)
        assert sum(w * h for w, h in sample["sizes"][1:]) == 256 * sum(stored[1:])
        sizes = [shape[:0:-1] for shape in row["img_shapes"]] if "img_shapes" in row else None
        assert sizes is None or sample["sizes"] == [[16 * w, 16 * h] for w, h in sizes]
        kept = row.get("thumbnails") is not None
        assert [title for title, _ in sample["images"] if title == "target"] == ["target"] * kept
    sizes = Counter("×".join(map(str, sample["sizes"][0])) for sample in page.samples)
    assert page.chart("target sizes") == sizes
    assert page.chart("controls per sample") == Counter(str(len(row["controls"])) for row in index)
    masks = Counter(row["edit_mask_from"] for row in index if row.get("edit_mask_from"))
    assert page.chart("edit masks by origin") == masks
    for title in ("width over height", "text tokens", "all tokens: text, target and controls"):
        assert sum(page.chart(title).values()) == len(index)


def test_the_page_and_json_say_the_same(built: Built, tmp_path: Path) -> None:
    cache = built("edit-plus", ("--edit-mask", "diff"))
    for options in ((), ("--scan",)):
        report = json.loads(run("qwen-cache", "inspect", cache, "--json", *options).stdout)
        assert page_of(cache, tmp_path / "new" / "report.html", *options).overview == report
        scanned = FLAGS.keys() - {"doubtful_mask"}  # needs a mask head
        assert (report["recipes"]["default"]["flags"].keys() == scanned) == (options == ("--scan",))


def test_a_remote_cache_has_a_page(built: Built, tmp_path: Path) -> None:
    local = page_of(built("edit-plus"), tmp_path / "local.html", "--thumbnails", "0")
    with serving(Server(built("edit-plus"))) as server:
        page = page_of(server.url, tmp_path / "report.html")
        shown = page_of(server.url, tmp_path / "images.html", "--thumbnails", "4")
    assert all(sample["images"] for sample in shown.samples)
    assert page.samples == local.samples
    assert page.overview["cache"] == server.url


def test_text_of_the_source_stays_text(tmp_path: Path) -> None:
    samples = [CacheSample(HOSTILE, HOSTILE), CacheSample("b", "plain"), CacheSample("c", "also plain", target="b")]
    page = page_of(write(tmp_path / "<b>shards&", samples), tmp_path / "report.html")
    plain = page_of(write(tmp_path / "shards", [CacheSample("a"), *samples[1:]]), tmp_path / "plain.html")
    assert page.tags == plain.tags
    assert (page.samples[0]["prompt"], page.samples[0]["name"]) == (HOSTILE, HOSTILE)
    assert page.tags["script"] == 3
    assert "unsafe" not in page.policy["script-src"]
    assert "<" not in page.texts["samples"] + page.texts["overview"]  # a comment would change where a script ends
    written = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert not re.search(
        r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u202e]", written
    )  # a terminal obeys them, as `less` shows


def test_nothing_is_loaded_from_anywhere(built: Built, tmp_path: Path) -> None:
    page = page_of(
        write(tmp_path / "shards", [CacheSample("a", target="x"), CacheSample("b", HOSTILE, target="x")]),
        tmp_path / "r",
    )
    keys = {sample["key"] for sample in page.samples}
    assert {reference.removeprefix("#") for reference in page.references} == {*keys, "flags", "details"}
    assert not re.search(r"url\(|@import|https?:", page.texts["style"])
    assert not re.search(r"https?:|fetch\(|XMLHttp|import|innerHTML|eval", page.texts["script"])


def test_the_script_finds_what_it_looks_for(tmp_path: Path) -> None:
    page = page_of(write(tmp_path / "shards", [CacheSample("a")]), tmp_path / "report.html")
    scripts = "".join((FOLDER / name).read_text(encoding="utf-8") for name in {*SCRIPTS, *FILES_SCRIPTS})
    assert set(re.findall(r'(?:byId|choices)\("([\w-]+)"', scripts)) <= page.ids
    assert set(re.findall(r"sample\.(\w+)", scripts)) == page.samples[0].keys()


def test_a_build_that_is_not_done_has_a_page(tmp_path: Path) -> None:
    staging = tmp_path / "shards" / ".staging" / "x"
    staging.mkdir(parents=True)
    (staging / "a.tar").write_bytes(bytes(1000))
    page = page_of(tmp_path / "shards", tmp_path / "report.html")
    assert page.overview["state"] == "partial"
    assert page.samples == []


def test_flags(tmp_path: Path) -> None:
    usual = [CacheSample(f"usual {i}", f"do {i}", mask=0.92) for i in range(26)]  # of all but one of 24 tokens
    odd = {
        "repeated_target": [CacheSample("t1", "one", target="same"), CacheSample("t2", "two", target="same")],
        "identity_pair": [CacheSample("same before", "nothing", target="x", controls=("y", "x"))],
        "frequent_prompt": [CacheSample(f"often {i}", "again") for i in range(10)],
        "long_prompt": [CacheSample("long", "把" * 700)],
        "empty_mask": [CacheSample("none masked", "e", mask=0.0)],
        "full_mask": [CacheSample("all masked", "f", mask=0.95)],
        "extreme_numbers": [CacheSample("loud", "l", scale=50.0), CacheSample("mute", "m", scale=0.01)],
    }
    again = [
        CacheSample("same row", "three", target="other"),
        CacheSample("same row", "three", target="other", controls=("z",)),
    ]
    cache = write(tmp_path / "shards", [*usual, *again, *(each for flagged in odd.values() for each in flagged)])
    page = page_of(cache, tmp_path / "report.html", "--scan")
    names = {sample["key"]: sample["name"] for sample in page.samples}
    found = page.overview["recipes"]["default"]["flags"]
    assert {flag: [names[key] for key in keys] for flag, keys in found.items()} == {
        flag: [each.name for each in flagged] for flag, flagged in odd.items()
    }
    links = {f"#{key}" for keys in found.values() for key in keys}
    assert links | {"#flags", "#details"} == set(page.references)
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert all(f'<a href="#{key}">{names[key]}</a>' in html for keys in found.values() for key in keys)
    report = " ".join(run("qwen-cache", "inspect", cache).stdout.split())
    shown = "often 0, often 1, often 2, often 3, often 4, often 5, …"
    assert (
        f"repeated target 2 t1, t2 identity pair 1 same before frequent prompt 10 {shown} long prompt 1 long" in report
    )
    assert "4 more are in --html FILE and --json" in report


def test_one_prompt_for_all_is_no_flag(tmp_path: Path) -> None:
    cache = write(tmp_path / "shards", [CacheSample(f"{i}") for i in range(12)])
    (recipe,) = json.loads(run("qwen-cache", "inspect", cache, "--json").stdout)["recipes"].values()
    assert not any(recipe["flags"].values())


def thumbnail(image: Image.Image) -> Image.Image:
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    return image


@pytest.mark.parametrize("within", [2, 1])
def test_images_of_a_few(
    built: Built, tiny_model: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, within: int
) -> None:
    """Images are in the page, or in files beside it when there are many; they equal the VAE's decoded latents."""
    monkeypatch.setattr(document, "ONE_FILE_IMAGES", within)
    path, model = built("edit-plus", ("--edit-mask", "file")), tiny_model("edit-plus")
    options = ("--decode", "--thumbnails", "2", "--model", model, "--vae-device", "cpu")
    page = page_of(path, tmp_path / "report.html", *options)
    assert [bool(sample["images"]) for sample in page.samples] == [True, False, False, True]
    shown = []
    for title, source in page.samples[0]["images"] + page.samples[3]["images"]:
        shown.append((title, Image.open(BytesIO(b64decode(source.removeprefix("data:image/jpeg;base64,"))))))
    assert (page.folder is not None) == (within == 1)
    cache = open_cache(path)
    controls = [["control 1", "control 2"] if len(cache[i].img_shapes) > 2 else ["control"] for i in (0, 3)]
    masks = [["edit mask"] if "edit_mask" in cache[i].row.meta.tensors else [] for i in (0, 3)]
    assert [title for title, _ in shown] == [*controls[0], "target", *masks[0], *controls[1], "target", *masks[1]]
    vae = load_vae(open_model(str(model), ("vae",), None), torch.device("cpu"), torch.float32)
    targets = [image for title, image in shown if title == "target"]
    for image, sample in zip(targets, (cache[0], cache[3]), strict=True):
        _, h, w = sample.img_shapes[0]
        expected = thumbnail(decode_latents(vae, sample["image_latents"][None], (16 * w, 16 * h)))
        assert image.size == expected.size
        assert np.asarray(ImageChops.difference(image.convert("RGB"), expected)).mean() < 8  # of JPEG and bfloat16


@pytest.mark.parametrize(
    ("options", "report"),
    [
        (("--decode",), "--decode and --thumbnails go with --html\n  → give --html FILE too"),
        (
            ("--thumbnails", "3"),
            "--decode and --thumbnails go with --html\n  → give --html FILE too",
        ),
        (("--sample", "ab", "--html", "new.html"), "--sample shows one sample (found --html)"),
        (("--sample", "ab", "--scan"), "--sample shows one sample (found --scan)"),
        (("--model", "tiny"), "--model goes with --decode or --save-images"),
    ],
)
def test_options_that_do_not_go_together(built: Built, options: tuple[str, ...], report: str) -> None:
    result = run("qwen-cache", "inspect", built("edit-plus"), *options)
    assert result.code == 2
    assert report in result.stderr
    assert not Path("new.html").exists()


@pytest.mark.parametrize(("count", "most"), [(5, 9), (9, 9), (1000, 7), (7, 2), (7, 1), (0, 3)])
def test_samples_are_chosen_evenly(count: int, most: int) -> None:
    chosen = evenly(count, most)
    assert len(chosen) == min(count, most)
    assert most < 2 or not len(chosen) or (chosen[0], chosen[-1]) == (0, count - 1)
    assert len(set(np.diff(chosen))) <= 2
    assert max(np.diff(chosen), default=0) - min(np.diff(chosen), default=0) <= 1


@pytest.mark.parametrize(("unit", "values"), [(1, [7]), (1, [3, 4, 4, 15]), (1, [1, 9000, 14]), (0.01, [0.5, 2.35, 1])])
def test_bins_count_as_numpy_does(unit: float, values: list[float]) -> None:
    found = histogram(Counter(values), unit)
    assert 1 <= len(found) <= 12
    edges = [low for low, _, _ in found] + [found[-1][1]]
    assert [high for _, high, _ in found] == edges[1:]
    assert np.histogram(values, [edge - unit / 1000 for edge in edges])[0].tolist() == [count for _, _, count in found]
    assert sum(count for _, _, count in found) == len(values)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("options", [(), ("--dtype", "bfloat16"), V1])
def test_one_sample_whole(built: Built, options: tuple[str, ...]) -> None:
    path = built("edit-plus", options)
    for sample in open_cache(path):
        report = json.loads(run("qwen-cache", "inspect", path, "--sample", sample.key[:12], "--json").stdout)
        facts = {"key": sample.key, "name": sample.name, "prompt": sample.prompt, "recipe": "default"}
        assert {name: report[name] for name in facts} == facts
        assert report["tensors"].keys() == sample.row.meta.tensors.keys()
        shard = (path / f"{report['shard']}").read_bytes()
        for name, tensor in report["tensors"].items():
            stored = sample.stored(name).float()
            assert tensor["shape"] == list(stored.shape)
            assert content_hash(shard[tensor["offset"] :][: tensor["bytes"]]) == tensor["xxh3_128"]
            has_numbers = stored.numel() and name != "thumbnails"
            numbers = [stored.min(), stored.max(), stored.double().mean()] if has_numbers else []
            named = [tensor[which] for which in ("min", "max", "mean") if which in tensor]
            assert named == pytest.approx([float(number) for number in numbers])
        text = run("qwen-cache", "inspect", path, "--sample", sample.key).stdout
        assert run("qwen-cache", "inspect", path, "--sample", sample.name).stdout == text
        words = (sample.key, sample.name, sample.prompt[:20], report["shard"], *report["tensors"])
        assert all(word in text for word in words)


def refusal(cache: Path, key: str) -> str:
    result = run("qwen-cache", "inspect", cache, "--sample", key)
    assert result.code == 2
    assert result.stdout == ""
    return result.stderr


def test_a_key_names_one_sample(built: Built) -> None:
    cache = built("edit-plus")
    middle = open_cache(cache)[0].key[4:]
    assert f"no sample has this name, key or start of a key (found {middle})" in refusal(cache, middle)
    assert "no sample has this name, key or start of a key" in refusal(cache, "")


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("", "this names no file"),
        (".", "this names no file"),
        ("/", "this names no file"),
        ("-", "this names no file"),
        ("..", "this names no file"),
        ("x" * 251, "its name is too long"),
        ("x" * 300 + "/page.html", "File name too long"),
        ("/dev/null", "this is a device or a pipe"),
        ("folder", "this is a folder"),
        ("link.html", "this is a symbolic link"),
        ("file/page.html", "it would be inside a file"),
        ("shards/cache.json", "it would be inside the cache"),
        ("shards/new/page.html", "it would be inside the cache"),
        ("way/page.html", "it would be inside the cache"),
        ("cache.json", "a cache has a file of this name"),
        ("index.parquet", "a cache has a file of this name"),
    ],
)
def test_no_page_takes_the_place_of_something_else(
    path: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "shards", [CacheSample("a")])
    Path("folder").mkdir()
    Path("file").write_text("mine")
    Path("link.html").symlink_to("file")
    Path("way").symlink_to("shards")
    before = {each: each.is_file() and each.read_bytes() for each in tmp_path.rglob("*")}
    result = run("qwen-cache", "inspect", "shards", "--html", path)
    assert result.code == 2
    assert f"a page cannot be written here: {fault}\n  → give --html another file" in result.stderr
    assert result.stdout == ""
    assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")} == before


def test_a_page_replaces_a_page(tmp_path: Path) -> None:
    cache = write(tmp_path / "shards", [CacheSample("a")])
    for _ in range(2):
        assert len(page_of(cache, tmp_path / f"{'x' * 235}.html").samples) == 1


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    """A full disk, imitated: the size of files is limited."""
    page = tmp_path / "page.html"
    page.write_text("an older page")
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        with pytest.raises(OSError, match="File too large") as error:
            write_durably(page, bytes(5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert error.value.filename == str(page)
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert page.read_text() == "an older page"


def in_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages have their samples in files, with a few in each."""
    monkeypatch.setattr(document, "ONE_FILE", 0)
    for name, samples in (("CHUNK", 8), ("PACK", 2), ("SECTION", 16), ("BUCKET", 1)):
        monkeypatch.setattr(page_files, name, samples)


def test_files_have_what_a_page_of_one_file_has(built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And small files say for the filters what the rows say."""
    samples = [CacheSample(f"{i}", HOSTILE if i == 5 else f"do {i % 9}", target=f"{i % 17}") for i in range(45)]
    scenes = [Scene(f"edit {i}", None, None) for i in range(21)]
    recipes = {"default": RECIPE, "other": RECIPE | {"dtype": "bfloat16"}}
    both = write_scenes(tmp_path / "both", {"default": scenes[:9], "other": scenes[9:]}, recipes)
    one = write(tmp_path / "one", samples)
    for cache, options in ((one, ()), (both, ()), (built("edit-plus"), ("--scan",))):
        whole = page_of(cache, tmp_path / "whole.html", *options)
        with monkeypatch.context() as patch:
            in_files(patch)
            split = page_of(cache, tmp_path / "split.html", *options)
        assert split.samples == whole.samples
        assert split.overview["recipes"].keys() == whole.overview["recipes"].keys()
        same = ("columns", "count", "sizes", "flags", "recipes", "groups")
        assert {name: split.facts[name] for name in same} == {name: whole.facts[name] for name in same}
        check_filters(split)


def check_filters(page: Page) -> None:
    """`kinds` and `keys` say what the rows say."""
    facts, position = page.facts, 0
    for section in range(-(-facts["count"] // facts["section"])):
        kinds = page.files[f"kinds-{section}"]
        for code in np.frombuffer(b64decode(kinds["codes"]), "<u2").tolist():
            size, recipe, bits, has_images = kinds["kinds"][code]
            sample = page.samples[position]
            assert facts["sizes"][size][0] == "×".join(map(str, sample["sizes"][0]))
            assert facts["recipes"][recipe][0] == sample["recipe"]
            assert [flag for i, flag in enumerate(facts["flag_names"]) if bits >> i & 1] == sample["flags"]
            assert has_images == bool(sample["images"])
            position += 1
    assert position == facts["count"] == len(page.samples)
    buckets = {name.removeprefix("keys-"): value for name, value in page.files.items() if name.startswith("keys-")}
    assert len(buckets) == 16 ** facts["key_digits"]
    files = ((begin, zip(*each, strict=True)) for begin, each in buckets.items())
    found = {page.samples[i]["key"]: begin + rest for begin, each in files for rest, i in each}
    assert len(found) == facts["count"]
    assert all(key.startswith(begin) and len(begin) >= 13 for key, begin in found.items())


def test_files_of_an_older_page_are_removed(built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing else, whatever the name of the page; at every moment the page that is there has its own."""
    path, beside = tmp_path / "a#b?c%20 d:e.html", tmp_path / "a#b?c%20 d:e_files"
    (beside / "0123456789abcdef0123456789abcdef").mkdir(parents=True)
    (beside / "0123456789abcdef0123456789abcdef" / "mine.txt").touch()
    (beside / "mine.jpg").touch()
    kept = {each.name for each in beside.iterdir()}
    with monkeypatch.context() as patch:
        in_files(patch)
        for count in (4, 2, 2):
            page = page_of(built("edit-plus"), path, "--thumbnails", f"{count}")
            assert page.folder is not None
            assert sum(bool(sample["images"]) for sample in page.samples) == count
            assert not re.search(r"[#?: ]", page.facts["folder"])
            assert {each.name for each in beside.iterdir()} == kept | {page.folder.name}
        next(iter(page.folder.glob("rows-*"))).write_text("damaged")
        page_of(built("edit-plus"), path, "--thumbnails", "2")
        monkeypatch.setattr(document, "write_durably", refuse)
        before = path.read_bytes()
        assert run("qwen-cache", "inspect", built("edit-plus"), "--html", path, "--thumbnails", "3").code == 2
        assert path.read_bytes() == before
        assert Page(path).samples == page.samples
        monkeypatch.undo()
    assert page_of(built("edit-plus"), path).folder is None
    assert {each.name for each in beside.iterdir()} == kept


def refuse(path: Path, *_: object) -> None:
    raise OSError(28, "No space left on device", str(path))


def test_what_is_in_the_way_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = write(tmp_path / "shards", [CacheSample("a")])
    monkeypatch.chdir(tmp_path)
    in_files(monkeypatch)
    Path("page_files").write_text("mine")
    result = run("qwen-cache", "inspect", cache, "--html", "page.html")
    what = "page_files: the files of a page of this size cannot be written here: not a folder"
    assert (result.code, result.stderr.count(f"{what}\n  → give --html another file")) == (2, 1)
    Path("page_files").unlink()
    Path("page_files").mkdir()
    with locked(Path("page_files/.lock")):
        result = run("qwen-cache", "inspect", cache, "--html", "page.html")
    assert result.code == 2
    assert f"page.html: another process is writing this page (found process {os.getpid()}" in result.stderr
    assert "→ wait for it, or give --html another file" in result.stderr
    assert not Path("page.html").exists()


@pytest.mark.slow
def test_a_page_of_many_is_counted_and_listed(tmp_path: Path) -> None:
    """Against the index as pyarrow reads it."""
    cache = write_large(tmp_path / "shards", 100_000)
    page, index = page_of(cache, tmp_path / "page.html"), pq.read_table(cache / "index.parquet")
    assert (tmp_path / "page.html").stat().st_size < 50_000
    assert [sample["key"] for sample in page.samples] == index["key"].to_pylist()
    assert [sample["prompt"] for sample in page.samples] == index["prompt"].to_pylist()
    targets = Counter(index["target"].to_pylist())
    repeated = [targets[target] > 1 for target in index["target"].to_pylist()]
    assert [sample["flags"] == ["repeated_target"] for sample in page.samples] == repeated
    assert sum(repeated) == 2000
    check_filters(page)


def test_the_page_shows_what_was_counted(tmp_path: Path) -> None:
    """Even if the cache is replaced in between."""
    surveyed = survey(write(tmp_path / "shards", [CacheSample("a"), CacheSample("b")]))
    (tmp_path / "shards").rename(tmp_path / "elsewhere")
    write(tmp_path / "shards", [CacheSample("c")])
    document.write_page(tmp_path / "page.html", surveyed)
    page = Page(tmp_path / "page.html")
    assert [sample["name"] for sample in page.samples] == ["a", "b"]


def test_names_that_are_not_utf_8(pairs: Path, tmp_path: Path) -> None:
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe"))
    odd.mkdir()
    cache = write(odd / "shards", [CacheSample("a")])
    assert json.loads(run("qwen-cache", "inspect", cache, "--json").stdout)["cache"] == f"{tmp_path}/��/shards"
    assert "��/shards" in "".join(run("qwen-cache", "inspect", cache).stdout.split())
    page = page_of(cache, odd / os.fsdecode(b"\xff.html"))
    assert page.overview["cache"] == f"{tmp_path}/��/shards"
    staging = odd / "new" / ".staging"
    staging.mkdir(parents=True)
    (staging / "a.tar").touch()
    report = json.loads(run("qwen-cache", "inspect", odd / "new", "--source", odd, "--json").stdout)
    assert report["source"] == {"path": f"{tmp_path}/��"}


@pytest.mark.parametrize("name", ["[/]", "[red]x", "[/bold]"])
def test_no_name_is_markup(name: str, tmp_path: Path) -> None:
    recipe = RECIPE | {"pipeline": f"{name}P", "imported_from": f"{name}tool", "claimed": {"model": f"{name}m"}}
    cache = write(tmp_path / "[bold]shards[", [CacheSample("a")], recipe, name)
    result = run("qwen-cache", "inspect", cache)
    assert result.code == 0, result.stderr
    shown = " ".join(result.stdout.split())
    assert f"{name} {name}P, float32" in shown
    assert f"from {name}tool; claimed model: {name}m" in shown
    assert "[bold]shards[" in shown.replace(" ", "")


@pytest.mark.parametrize("claimed", [3, None, [], {}, {"model": None}])
def test_an_import_that_claims_nothing(claimed: Any, tmp_path: Path) -> None:
    cache = write(tmp_path / "shards", [CacheSample("a")], RECIPE | {"imported_from": "tool", "claimed": claimed})
    assert "from tool; claimed model: none" in " ".join(run("qwen-cache", "inspect", cache).stdout.split())
    page_of(cache, tmp_path / "page.html")


def test_a_page_without_images_needs_no_model(built: Built, tmp_path: Path) -> None:
    alone = command("qwen-cache", "inspect", built("edit-plus"), "--html", tmp_path / "report.html")
    assert alone.code == 0, alone.stderr
    assert Page(tmp_path / "report.html").tags["article"] == 0
