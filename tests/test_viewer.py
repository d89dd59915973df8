"""schemas/viewer.html in a real Chromium, beside a dataset on a server; and the JavaScript of FORMAT.md.

hyparquet and fzstd, which it fetches from a CDN, are those of npm here.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from qwen_cache import open_cache

from .support.browser import chromium, new_page
from .support.large_caches import write_large
from .support.paths import ROOT
from .support.server import Server, serving
from .support.waiting import HANG

VIEWER = ROOT / "schemas" / "viewer.html"
CDN = "https://cdn.jsdelivr.net/npm/"


def import_map() -> dict[str, dict[str, str]]:
    (text,) = re.findall(r'<script type="importmap">(.*?)</script>', VIEWER.read_text(encoding="utf-8"), re.DOTALL)
    found: dict[str, dict[str, str]] = json.loads(text)
    return found


def test_every_file_from_the_network_has_an_exact_version_and_a_hash() -> None:
    """The page fetches only the files of the import map from elsewhere."""
    libraries, hashes = import_map()["imports"], import_map()["integrity"]
    assert set(libraries.values()) <= hashes.keys()
    for address, hash_ in hashes.items():
        assert re.fullmatch(rf"{re.escape(CDN)}[\w-]+@\d+\.\d+\.\d+/(?!\+esm)[\w/-]+\.m?js", address)
        assert re.fullmatch(r"sha384-[\w+/]{64}", hash_)
    page = VIEWER.read_text(encoding="utf-8")
    examples = {"https://bucket.example/shards"}
    assert set(re.findall(r"https?://[^\s\"'`<)]+", page)) - examples == hashes.keys()


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages of the import map, each in a folder named as on the CDN; skips without npm and its registry."""
    folder = tmp_path_factory.mktemp("npm")
    names = sorted(set(re.findall(rf"{re.escape(CDN)}([\w-]+@[\d.]+)/", VIEWER.read_text(encoding="utf-8"))))
    assert len(names) == 2
    if shutil.which("npm") is None:
        pytest.skip("the viewer is not tested: no npm in PATH")
    for name in names:
        done = subprocess.run(["npm", "pack", name], cwd=folder, capture_output=True, text=True, timeout=HANG)
        if done.returncode:
            pytest.skip(f"the viewer is not tested: npm pack {name}: {done.stderr[-200:]}")
        with tarfile.open(folder / done.stdout.split()[-1]) as archive:
            archive.extractall(folder / name, filter="data")
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@contextmanager
def viewed(
    browser: Any, packages: Path, folder: Path, width: int = 1200, changed: str = ""
) -> Iterator[tuple[Any, Server]]:
    """The viewer beside a dataset, and the server; it writes nothing to the console.

    The CDN has other bytes for the file `changed`, which works as well as the right one.
    """
    shutil.copy(VIEWER, folder)
    page, console = new_page(browser, viewport={"width": width, "height": 900}), list[str]()
    page.on("console", lambda message: console.append(message.text))
    page.on("pageerror", lambda error: console.append(str(error)))

    def answer(route: Any) -> None:
        name, _, path = route.request.url.removeprefix(CDN).partition("/")
        assert route.request.url in import_map()["integrity"], "this file is loaded unchecked"
        body = (packages / name / "package" / path).read_bytes() + b"\n" * (path == changed)
        route.fulfill(body=body, content_type="text/javascript", headers={"Access-Control-Allow-Origin": "*"})

    page.route(f"{CDN}**", answer)
    with serving(Server(folder)) as server:
        page.goto(f"{server.url}/viewer.html")
        yield page, server
    page.context.close()
    if changed:
        assert len(console) == 1
        assert changed in console[0]
        assert "integrity" in console[0]
    else:
        assert console == []


@pytest.mark.slow
def test_samples_their_thumbnails_and_a_search(
    browser: Any, packages: Path, built: Callable[..., Path], tmp_path: Path
) -> None:
    cache = Path(shutil.copytree(built("edit-plus"), tmp_path / "shards"))
    samples = list(open_cache(cache))
    with viewed(browser, packages, cache, width=390) as (page, server):
        page.wait_for_function(
            "document.querySelectorAll('li img').length && [...document.images].every(i => i.naturalWidth)"
        )
        assert page.locator("li b").all_text_contents() == [sample.name for sample in samples]
        assert page.locator("li p").all_text_contents() == [sample.prompt for sample in samples]
        shown = page.evaluate("[...document.images].map(i => [i.naturalWidth, i.naturalHeight])")
        expected = [Image.open(BytesIO(bytes(sample.buffer("thumbnails")))).size for sample in samples]
        assert [tuple(size) for size in shown] == expected
        stored = {sample.row.meta.tensors["thumbnails"].nbytes for sample in samples}
        assert {end - begin for _, begin, end in server.requests} == stored, "only thumbnails are fetched from shards"
        page.fill("#words", samples[0].prompt.split()[0].upper())
        found = [
            sample
            for sample in samples
            if samples[0].prompt.split()[0].lower() in (sample.name + sample.prompt).lower()
        ]
        page.wait_for_function(f"document.querySelectorAll('li').length === {len(found)}")
        assert page.locator("#count").text_content() == f"{len(found)} sample{'s' * (len(found) > 1)}"
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing is cut off on a phone"


@pytest.mark.slow
def test_a_hundred_thousand_rows_scroll(browser: Any, packages: Path, tmp_path: Path) -> None:
    folder = write_large(tmp_path / "shards", 100_001)
    with viewed(browser, packages, folder) as (page, _):
        page.wait_for_selector("li")
        assert page.locator("#count").text_content() == "1 to 100,000 of 100,001 samples"
        page.evaluate("scrollTo(0, document.body.scrollHeight)")
        page.wait_for_function("document.querySelector('li:last-child b').textContent === 'photo-99999'")
        assert page.locator("li").count() < 30
        page.click("#next")
        page.wait_for_function("document.querySelector('li:last-child b').textContent === 'photo-100000'")
        page.fill("#words", "number 77777.")
        page.wait_for_function("document.querySelector('li b').textContent === 'photo-77777'")
        assert page.locator("#count").text_content() == "1 sample"


@pytest.mark.slow
def test_what_is_no_dataset_is_said(browser: Any, packages: Path, tmp_path: Path) -> None:
    (tmp_path / "cache.json").write_text(json.dumps({"format_version": 9}), encoding="utf-8")
    with viewed(browser, packages, tmp_path) as (page, _):
        page.wait_for_function("document.getElementById('message').textContent.includes('version 9 is not known')")


@pytest.mark.slow
@pytest.mark.parametrize("changed", ["src/index.js", "src/thrift.js", "esm/index.mjs"])
def test_a_library_with_other_bytes_is_not_run(browser: Any, packages: Path, tmp_path: Path, changed: str) -> None:
    folder = write_large(tmp_path / "shards", 3)
    with viewed(browser, packages, folder, changed=changed) as (page, _):
        page.wait_for_function(
            "document.getElementById('message').textContent === 'A library could not be loaded, or is not the one that "
            "this page was written for: see the console of the browser.'"
        )
        assert page.locator("li").count() == 0


@pytest.mark.slow
def test_names_and_prompts_are_text(browser: Any, packages: Path, tmp_path: Path) -> None:
    folder = write_large(tmp_path / "shards", 3, prompts=("<img src=x onerror=alert({})>",))
    with viewed(browser, packages, folder) as (page, _):
        page.wait_for_selector("li")
        assert page.locator("li p").all_text_contents() == [f"<img src=x onerror=alert({i})>" for i in range(3)]
        assert page.locator("img").count() == 0


@pytest.mark.slow
def test_the_lines_of_the_specification_fetch_a_thumbnail(
    packages: Path, built: Callable[..., Path], tmp_path: Path
) -> None:
    if shutil.which("node") is None:
        pytest.skip("no node in PATH")
    cache = built("edit-plus")
    (code,) = re.findall(r"```js\n(.*?)```", (ROOT / "schemas" / "FORMAT.md").read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "node_modules").mkdir()
    for folder in packages.glob("*@*"):
        (tmp_path / "node_modules" / folder.name.partition("@")[0]).symlink_to(folder / "package")
    code += 'process.stdout.write(Buffer.from(await image.arrayBuffer()).toString("hex"))'
    with serving(Server(cache)) as server:
        (tmp_path / "read.mjs").write_text(code.replace("https://bucket.example/shards", server.url), encoding="utf-8")
        done = subprocess.run(["node", "read.mjs"], cwd=tmp_path, capture_output=True, text=True, timeout=HANG)
    assert bytes.fromhex(done.stdout) == bytes(open_cache(cache)[0].buffer("thumbnails")), done.stderr
