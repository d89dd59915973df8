"""`qwen-cache push`: the hub gets the cache, a card made from it and nothing of this machine, in one commit that
follows the one that was seen; a second push sends what is new and removes what is no longer named; all of it is read
again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from hashlib import md5
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import yaml
from huggingface_hub import DatasetCard
from PIL import Image

from qwen_cache import __version__, open_cache
from qwen_cache.encode.recipe import public_settings, settings_of_build
from qwen_cache.format.manifest import with_checksum
from qwen_cache.settings.load import Config, load_config
from qwen_cache.storage.remote import Url

from .support.caches import build
from .support.commands import Result, refused, run
from .support.hub import Hub, UploadHub
from .support.runs import SMALL
from .support.server import Server, serving
from .support.sources import change_prompt
from .support.waiting import HANG

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # huggingface_hub's way of sending
REPO = "me/cats"
SHARDS = ("--set", "cache.shard_size=1")
"""A shard for each of the four samples."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[UploadHub]:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)  # a protocol of its own, not LFS
    monkeypatch.setenv("HF_TOKEN", "hf_a_token")
    with serving(UploadHub(REPO, "dataset")) as server:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
        yield server


@pytest.fixture
def cache(built: Callable[..., Path], tmp_path: Path) -> Path:
    """A cache that may be changed."""
    return Path(shutil.copytree(built("edit-plus", SHARDS), tmp_path / "shards"))


def push(cache: Path, *options: str | Path) -> Result:
    return run("qwen-cache", "push", cache, f"hf://datasets/{REPO}", *options)


def test_the_hub_gets_the_cache_and_a_card_and_nothing_of_this_machine(
    cache: Path, hub: UploadHub, tmp_path: Path
) -> None:
    result = push(cache, "--json", "--license", "cc-by-4.0", "--source-license", "CC BY 4.0, by J | D")
    assert result.code == 0, result.stderr
    assert "the names and prompts of 4 samples, thumbnails of its images, and latents, which anybody" in result.stderr
    assert "is not stated" not in result.stderr
    files, names = hub.branches["main"], {path.name for path in cache.glob("*.tar")}
    assert files.keys() == {"README.md", "gallery.jpg", "qwen.yaml", "cache.json", "index.parquet", *names}
    for name in ("cache.json", "index.parquet", *names):
        assert files[name] == (cache / name).read_bytes()
    found = json.loads(result.stdout)
    assert found["files"] == {name: len(data) for name, data in files.items()}
    assert sorted(found["sent"]) == sorted(files)
    assert found["commit"] == f"{hub.url}/{REPO}/commit/{hub.head}"
    assert hub.commits == 1
    text = files["README.md"].decode()
    settings = load_config(cache / "qwen.yaml")
    for private in (str(settings.model.path), settings.data.source, str(tmp_path)):
        assert not [name for name, data in files.items() if private.encode() in data]
    card = DatasetCard(text).data.to_dict()
    assert card["license"] == "cc-by-4.0"
    assert (card["pretty_name"], card["viewer"]) == ("cats", False)
    assert (card["task_categories"], card["size_categories"]) == (["image-to-image"], "n<1K")
    identity = open_cache(cache).identity
    for line in (
        "| images and prompts | CC BY 4.0, by J \\| D |",
        "| model | apache-2.0 |",
        "| control images | 1: 3 samples, 2: 1 sample |",
        "| `dtype` | `float32` |",
        "| with an edit mask | 1 |",
        f"| identity | `{identity}` |",
        f'cache = open_cache("hf://datasets/{REPO}")',
        f"qwen-train run hf://datasets/{REPO} --model MODEL",
    ):
        assert line in text
    (tmp_path / "gallery.jpg").write_bytes(files["gallery.jpg"])
    with Image.open(tmp_path / "gallery.jpg") as image:
        assert image.format == "JPEG"
        assert image.height > 4 * 96


def test_a_second_push_sends_what_is_new_and_removes_what_is_no_longer_named(
    cache: Path, hub: UploadHub, pairs: Path, tiny_model: Any
) -> None:
    assert push(cache).code == 0
    old, sent = set(hub.branches["main"]), len(hub.sent())
    again = push(cache, "--json")
    assert json.loads(again.stdout)["sent"] == ["README.md", "gallery.jpg", "qwen.yaml", "cache.json", "index.parquet"]
    assert len(hub.sent()) == sent
    hub.branches["main"] |= {"notes.txt": b"mine", "README.md": b"my own words"}
    change_prompt(pairs)
    assert build(pairs, cache, tiny_model("edit-plus"), *SHARDS).code == 0
    result = push(cache, "--json", "--no-images", "--keep-card")
    files = hub.branches["main"]
    now = {path.name for path in cache.glob("*.tar")}
    assert files.keys() == {"README.md", "notes.txt", "qwen.yaml", "cache.json", "index.parquet", *now}
    assert files["README.md"] == b"my own words"
    found = json.loads(result.stdout)
    assert set(found["removed"]) == {"gallery.jpg", *{name for name in old if name.endswith(".tar")} - now}
    (new,) = (name for name in found["sent"] if name.endswith(".tar"))
    assert new not in old
    assert files[new] == (cache / new).read_bytes()


def test_an_interrupted_push_leaves_the_repository_as_it_was_and_sends_nothing_twice(
    cache: Path, hub: UploadHub
) -> None:
    hub.status = 500
    refused(push(cache), "the hub refused the upload", "run the same command again")
    assert hub.branches["main"] == {}
    sent = len(hub.sent())
    assert sent == 4 + 2  # shards, index and gallery
    hub.status = 200
    assert push(cache).code == 0
    assert len(hub.sent()) == sent
    assert len(hub.branches["main"]) == 9


def test_a_push_of_somebody_else_in_between_is_not_overwritten(cache: Path, hub: UploadHub) -> None:
    def other() -> None:
        hub.commits += 1
        hub.branches["main"]["cache.json"] = b"theirs"

    hub.before_commit = other
    refused(push(cache), f"{REPO}: somebody else has changed this repository since this command began", "status 412")
    assert hub.branches["main"] == {"cache.json": b"theirs"}


def test_a_preview_needs_no_network(cache: Path, hub: UploadHub, tmp_path: Path, monkeypatch: Any) -> None:
    shown = push(cache, "--dry-run")
    assert shown.code == 0
    assert DatasetCard(shown.stdout).data.to_dict()["pretty_name"] == "cats"
    assert "cache.json, " in shown.stderr
    assert "the licence of the images and prompts is not stated: --source-license TEXT" in shown.stderr
    assert "| images and prompts | not stated: ask the owner" in shown.stdout
    monkeypatch.chdir(cache.parent)  # CACHE is `shards` if it is left out
    result = run("qwen-cache", "push", REPO, "--preview", tmp_path / "preview", "--base-model", "Qwen/Base")
    assert result.code == 0
    assert {path.name for path in (tmp_path / "preview").iterdir()} == {"README.md", "gallery.jpg"}
    assert "--model Qwen/Base\n" in (tmp_path / "preview/README.md").read_text(encoding="utf-8")
    assert not hub.requests


def test_options_decide_branch_and_privacy(cache: Path, hub: UploadHub) -> None:
    assert push(cache, "--private", "--revision", "v2").code == 0
    assert hub.private
    assert hub.branches["main"] == {}
    assert "cache.json" in hub.branches["v2"]
    hub.private = False
    refused(push(cache, "--private"), f"{REPO}: this repository is public", "leave out --private")


def test_what_cannot_be_published_is_refused(cache: Path, hub: UploadHub, tmp_path: Path) -> None:
    for address in ("hf://datasets/cats", "s3://bucket/cats", f"hf://datasets/{REPO}@main", "me/a/b"):
        result = run("qwen-cache", "push", cache, address)
        refused(result, "not the name of a dataset on the hub", "expected hf://datasets/OWNER/NAME", address)
    refused(run("qwen-cache", "push", cache, "me/a--b"), "not the name of a repository")
    refused(
        run("qwen-cache", "push"), "push needs the dataset to publish to\n  → name it: qwen-cache push shards hf://"
    )
    refused(push(cache, "--license", "by me"), "--license is no identifier of a licence", "cc-by-4.0")
    refused(push(cache, "--base-model", "mine"), "the base model is no repository on the hub", "--base-model Qwen/")
    refused(push(tmp_path), "not a cache")
    refused(run("qwen-cache", "push", "s3://bucket/shards", REPO), "s3://bucket/shards: only a cache in a local folder")
    assert not hub.requests
    shard = min(cache.glob("*.tar"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    refused(push(cache), f"{shard.name}: the bytes do not match the name of the shard")
    shard.write_bytes(data[:-1])
    refused(push(cache), f"{shard.name}: the bytes do not match the name of the shard", f"found {len(data) - 1} bytes")
    shard.unlink()
    refused(push(cache), "a shard of the manifest is missing")
    assert hub.commits == 0


def test_a_repository_that_holds_something_else_is_left_alone(cache: Path, hub: UploadHub) -> None:
    hub.branches["main"] = {"README.md": b"Mine.", "train.parquet": b"rows"}
    refused(push(cache), f"{REPO}: this repository holds something else", "found train.parquet", "name another")
    hub.branches["main"] = {"README.md": b"Soon.", ".gitattributes": b""}
    assert push(cache).code == 0


@pytest.mark.parametrize(("status", "what"), [(401, "the hub does not know you"), (403, "you may not write")])
def test_an_answer_of_the_hub_becomes_a_sentence(status: int, what: str, cache: Path, hub: UploadHub) -> None:
    hub.status = status
    refused(push(cache), f"{REPO}: {what}", f"found status {status}")


# ---- licences, recipes, settings -------------------------------------------------------------------------------------


def test_the_licence_of_a_model_that_restricts_its_use_is_that_of_the_dataset(built: Callable[..., Path]) -> None:
    shown = push(built("qwen-image-21"), "--dry-run", "--license", "cc0-1.0")
    card = DatasetCard(shown.stdout).data.to_dict()
    link = "https://huggingface.co/Qwen/Qwen-Image-2.1/blob/main/LICENSE"
    assert (card["license"], card["license_name"], card["license_link"]) == ("other", "qwen-research", link)
    assert (
        f"| model | [qwen-research]({link}): it holds for this dataset and for what is trained on it |" in shown.stdout
    )
    assert card["task_categories"] == ["image-to-image", "text-to-image"]


def test_a_cache_of_several_recipes_without_thumbnails(pairs: Path, tiny_model: Any, tmp_path: Path, fast: Any) -> None:
    out, model = tmp_path / "out", tiny_model("edit-plus")
    assert build(pairs, out, model).code == 0
    assert build(pairs, out, model, "--set", "cache.recipe=small", "--set", "data.vae_image_size=9216").code == 0
    shown = push(out, "--dry-run", "--json")
    found = json.loads(shown.stdout)
    assert "thumbnails" not in shown.stderr
    assert "gallery.jpg" not in found["files"]
    assert "gallery.jpg" not in found["card"]
    assert "## Samples of recipe default" in found["card"]
    assert "| `vae_image_size` | `9216` |" in found["card"]


def test_words_on_the_card_stay_words(cache: Path) -> None:
    shown = push(cache, "--dry-run", "--source-license", "`a`\n\n# b <script>|").stdout
    assert "| images and prompts | 'a'\\n\\n# b ‹script›\\| |\n" in shown


def test_only_settings_of_the_source_are_published(tmp_path: Path) -> None:
    (tmp_path / "qwen.yaml").write_text(
        "model: {path: Qwen/Qwen-Image-Edit-2509, revision: abc}\n"
        "data: {source: 'hf://datasets/me/images', trigger_word: sks, mask_head: /home/me/head, slice: 1/2,"
        " allow_urls: ['https://a.example/']}\ntrain: {output_dir: /home/me/out}\n"
    )
    public = public_settings(load_config(tmp_path / "qwen.yaml"))
    assert public == {
        "data": {"trigger_word": "sks", "source": "hf://datasets/me/images"},
        "model": {"path": "Qwen/Qwen-Image-Edit-2509", "revision": "abc"},
    }
    with serving(Server(tmp_path)) as server:  # a stranger's settings
        read = settings_of_build(Url(server.url))
    assert read == Config.model_validate(public)
    assert public_settings(load_config(None, ["data.columns.target=/home/me/images"])) == {}
    assert public_settings(load_config(None, ["data.columns.target=after"]))["data"]["columns"]["target"] == "after"
    for own in ("/home/me/model", str(tmp_path), "one-word"):
        assert "model" not in public_settings(load_config(None, [f"model.path={own}", "data.source=/home/me"]))


def test_the_settings_of_a_cache_that_were_public_are_pushed(cache: Path) -> None:
    value = yaml.safe_load((cache / "qwen.yaml").read_text())
    value["data"] |= {"source": "hf://datasets/me/images", "trigger_word": "sks"}
    value["model"]["path"] = "Qwen/Qwen-Image-Edit-2509"
    (cache / "qwen.yaml").write_text(yaml.safe_dump(value))
    found = json.loads(push(cache, "--dry-run", "--json").stdout)
    assert "qwen.yaml" in found["files"]
    assert "| model | [Qwen/Qwen-Image-Edit-2509](https://huggingface.co/Qwen/Qwen-Image-Edit-2509) |" in found["card"]


# ---- reading ---------------------------------------------------------------------------------------------------------

READ = """
import sys
from hashlib import md5
from qwen_cache import open_cache
cache = open_cache("hf://datasets/me/cats", local_copies=sys.argv[1])
for sample in cache:
    print(sample.name, {name: md5(sample.buffer(name)).hexdigest() for name in sample.row.meta.tensors})
"""
"""In a process of its own: `huggingface_hub` reads the hub's address when it is imported."""


@pytest.fixture
def pushed(cache: Path, hub: UploadHub, tmp_path: Path) -> Iterator[Hub]:
    """The pushed files, on a hub that is read."""
    assert push(cache).code == 0
    folder = tmp_path / "repository"
    folder.mkdir()
    for name, data in hub.branches["main"].items():
        (folder / name).write_bytes(data)
    with serving(Hub(REPO, folder)) as reading:
        yield reading


def on(hub: Hub, tmp_path: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf")}
    return subprocess.run(
        list(map(str, words)),
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=HANG,
        cwd=tmp_path,
        check=False,
    )


def test_what_was_pushed_is_read_by_ranges(cache: Path, pushed: Hub, tmp_path: Path) -> None:
    result = on(pushed, tmp_path, sys.executable, "-c", READ, tmp_path / "copies")
    assert result.returncode == 0, result.stderr
    expected = [
        f"{sample.name} { {name: md5(sample.buffer(name)).hexdigest() for name in sample.row.meta.tensors} }"
        for sample in open_cache(cache)
    ]
    assert result.stdout.splitlines() == expected
    shards = [ranges for method, path, ranges in pushed.requests if method == "GET" and path.endswith(".tar")]
    assert len(shards) >= 4
    assert all(shards)


@pytest.mark.slow
def test_what_was_pushed_is_verified_encoded_again_and_trained(
    cache: Path, pushed: Hub, tmp_path: Path, tiny_model: Any
) -> None:
    address, model, programs = f"hf://datasets/{REPO}", tiny_model("edit-plus"), Path(sys.executable).parent
    copies = ("--set", f"cache.local_copies={tmp_path / 'copies'}")
    source = load_config(cache / "qwen.yaml").data.source
    small = [word for name, value in SMALL.items() for word in ("--set", f"{name}={value}")]
    for words in (
        ("qwen-cache", "verify", address),
        ("qwen-cache", "verify", address, "--re-encode", "3", "--source", source, "--model", model, *copies),
        ("qwen-train", "run", address, "--model", model, *copies, *small),
    ):
        result = on(pushed, tmp_path, programs / words[0], *words[1:])
        assert result.returncode == 0, result.stderr
    assert (tmp_path / "out" / "pytorch_lora_weights.safetensors").is_file()


def test_a_manifest_with_notes_of_other_programs_keeps_its_meaning(cache: Path, hub: UploadHub) -> None:
    value = json.loads((cache / "cache.json").read_text())
    value["x-note"] = {"must_understand": False, "text": "hello"}
    (cache / "cache.json").write_bytes(with_checksum(value))
    assert push(cache).code == 0
    pushed = json.loads(hub.branches["main"]["cache.json"])
    assert pushed["x-note"]["text"] == "hello"
    assert pushed["written_by"]["qwen-cache"] == __version__
