"""A dataset on the hub by its name: the rows of one split, from one commit, without its code and without downloads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, Features, Image, Value
from PIL import Image as PillowImage

from .support.commands import command
from .support.hub import COMMIT, Hub
from .support.server import serving
from .support.waiting import HANG

NAME = "me/edits"
READ = """
import json, sys
from qwen_cache.errors import QwenCacheError
from qwen_cache.sources.detect import read_source
from qwen_cache.storage.remote import location
for source, options in json.loads(sys.argv[1]):
    try:
        rows, problems = read_source(location(source), needs_control=True, **options)
        images = [[image.read().hex() for image in (row.target, *row.controls)] for row in rows]
        found = [[row.name, row.where, row.prompt, *read] for row, read in zip(rows, images)]
        print(json.dumps([found, [problem.what for problem in problems]]))
    except QwenCacheError as error:
        print(json.dumps([type(error).__name__, str(error)]))
"""
"""In a process of its own: `huggingface_hub` reads the hub's address when it is imported."""


def png(path: Path, shade: int) -> bytes:
    PillowImage.new("RGB", (64, 64), (shade, 0, 0)).save(path, "PNG")
    return path.read_bytes()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Parquet as `push_to_hub` writes it: two splits, two configurations, of which the second is imagefolder's."""
    folder = tmp_path / "repository"
    (folder / "data").mkdir(parents=True)
    (folder / "files").mkdir()
    features = Features({"source_image": Image(), "edited_image": Image(), "edit_prompt": Value("string")})
    for split, shades in {"train": [1, 2], "test": [3]}.items():
        images = [[png(tmp_path / "x.png", shade + extra) for shade in shades] for extra in (0, 100)]
        prompts = [f"{split} {shade}" for shade in shades]
        columns = dict(zip(features, [*images, prompts], strict=True))
        Dataset.from_dict(columns, features=features).to_parquet(folder / f"data/{split}-00000-of-00001.parquet")
    for name in ("a", "b"):
        png(folder / f"files/{name}.png", ord(name))
    (folder / "files/metadata.csv").write_text("edited_file_name,original_file_name,text\na.png,b.png,red\n")
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: tables\n  data_files:\n  - {split: train, path: data/train-*}\n"
        "  - {split: test, path: data/test-*}\n- config_name: folder\n  data_files: files/**\n---\nEdits.\n"
    )
    return folder


def environment(hub: Hub, tmp_path: Path) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf")}


def read(repository: Path, tmp_path: Path, *questions: tuple[str, dict[str, Any]]) -> tuple[list[Any], Hub]:
    """The answer of `read_source`, and the hub with the requests that came."""
    with serving(Hub(NAME, repository)) as hub:
        process = subprocess.run(
            [sys.executable, "-c", READ, json.dumps(questions)],
            env={**os.environ, **environment(hub, tmp_path)},
            capture_output=True,
            text=True,
            timeout=HANG,
            cwd=tmp_path,
        )
    assert process.returncode == 0, process.stderr
    return [json.loads(line) for line in process.stdout.splitlines()], hub


def test_a_dataset_is_read_by_name_configuration_and_split(repository: Path, tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir(parents=True)  # a local folder of this name is not meant
    url = f"hf://datasets/{NAME}"
    tables, folder = {"config_name": "tables"}, {"config_name": "folder"}
    questions = [
        (url, tables | {"split": "train"}),
        (f"{url}@main/", tables | {"split": "test"}),
        (url, folder),
        (url, tables),
        (url, tables | {"split": "val"}),
        (url, {}),
        ("hf://datasets/me/nothing", {}),
    ]
    (train, test, images, *refusals), hub = read(repository, tmp_path, *questions)
    assert (train[1], test[1], images[1]) == ([], [], [])
    at = f"hf://datasets/{NAME}@{COMMIT}"
    assert [row[:3] for row in train[0]] == [
        [f"train-00000-of-00001/{row}", f"{at}/data/train-00000-of-00001.parquet[{row}]", f"train {row + 1}"]
        for row in (0, 1)
    ]
    shades = [[png(tmp_path / "x.png", shade).hex() for shade in (101 + row, 1 + row)] for row in (0, 1)]
    assert [row[3:] for row in train[0]] == shades
    assert [row[2] for row in test[0]] == ["test 3"]
    expected = [(repository / f"files/{name}.png").read_bytes().hex() for name in ("a", "b")]
    assert images[0] == [["a", f"{at}/files/metadata.csv:2", "red", *expected]]
    messages = [
        "the source holds several splits (expected one, found test, train)\n  → choose one: --set data.split=test or",
        "there is no split 'val' (expected one, found test, train)",
        "the dataset cannot be read (found Config name is missing. Please pick one among the available configs: "
        "['tables', 'folder']",
        "the dataset cannot be read (found Dataset 'me/nothing' doesn't exist on the Hub or cannot be accessed.)\n"
        "  → check the name; another configuration: --set data.config_name=NAME",
    ]
    for (kind, message), part in zip(refusals, messages, strict=True):
        assert kind == "SourceError"
        assert part in message
    whole = {path for method, path, ranges in hub.requests if method == "GET" and "/resolve/" in path and not ranges}
    assert whole == {f"/datasets/{NAME}/resolve/main/README.md"}
    assert not list((tmp_path / "hf").rglob("*.parquet"))


HOSTILE = {
    "a script": ("", {"edits.py": "open('run', 'w')"}, "Dataset scripts are no longer supported, but found edits.py"),
    "a file of this machine": ("{}/secret.parquet", {}, "Data files don't belong to me/edits"),
    "another dataset": ("hf://datasets/me/other/*.parquet", {}, "No (supported) data files found in me/edits"),
    "a way out": ("../../other/*.parquet", {}, "No (supported) data files found in me/edits"),
    "an object": ("!!python/object/apply:os.mkdir [run]", {}, "could not determine a constructor for the tag"),
    "no images": ("files/*.txt", {"files/a.txt": "a"}, "this dataset has no known layout (expected a table"),
}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("case", HOSTILE)
def test_a_dataset_runs_nothing_and_names_nothing_else(case: str, repository: Path, tmp_path: Path) -> None:
    pattern, files, expected = HOSTILE[case]
    (tmp_path / "secret.parquet").write_bytes((repository / "data/test-00000-of-00001.parquet").read_bytes())
    for name, text in files.items():
        (repository / name).write_text(text)
    paths = pattern.format(tmp_path) or "data/train-*"
    (repository / "README.md").write_text(f"---\nconfigs:\n- config_name: a\n  data_files: {paths}\n---\n")
    [(kind, message)], _ = read(repository, tmp_path, (f"hf://datasets/{NAME}", {}))
    assert kind == "SourceError"
    assert expected in message
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_cache_of_a_dataset(
    repository: Path, tmp_path: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings travel into its qwen.yaml, and the keys are those of the files."""
    source, out = f"hf://datasets/{NAME}", tmp_path / "out"
    options = ("--out", out, "--model", tiny_model("edit-plus"), "--set", "data.split=train")
    with serving(Hub(NAME, repository)) as hub:
        for name, value in environment(hub, tmp_path).items():
            monkeypatch.setenv(name, value)
        result = command("qwen-cache", "build", source, *options, "--set", "data.config_name=tables")
        assert result.code == 0, result.stderr
        again = command("qwen-cache", "inspect", out, "--source", source)
        assert again.code == 0, again.stderr
    local = command("qwen-cache", "build", repository / "data", *options, "--dry-run", "--json")
    assert json.loads(local.stdout)["cached"] == 2
    assert "config_name: tables" in (out / "qwen.yaml").read_text(encoding="utf-8")
