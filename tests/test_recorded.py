"""A cache's or a run's record is not asked for again, and nothing that it says is trusted."""

from __future__ import annotations

import json
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import HfApi, constants, file_download
from huggingface_hub.errors import OfflineModeIsEnabled
from safetensors.torch import load_file, save_file

from qwen_cache.models.folder import find_here
from qwen_cache.settings.load import MAX_BYTES, load_config
from qwen_cache.storage import remembered
from qwen_train.inference.images import COMPONENTS

from .support.caches import build
from .support.commands import Result, refused, run
from .support.runs import IMAGES, Trainer, run_training

ONE_STEP = {**IMAGES, "train.max_steps": 1}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder without qwen.yaml, and no network."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")

    def connect(*_: Any) -> None:
        raise AssertionError("something was asked for")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", connect)


def without_model(train: Trainer, **changes: Any) -> Result:
    arguments = train.arguments(**changes)
    at = arguments.index("--model")
    return run_training(*arguments[1:at], *arguments[at + 2 :])


def said(path: Path) -> str:
    return f"model.path is {yaml.safe_load(path.read_text(encoding='utf-8'))['model']['path']}, as in {path}\n"


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    change(settings)
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")


def copied(folder: Path, out: Path) -> Path:
    return Path(shutil.copytree(folder, out))


def test_the_model_of_a_cache_and_of_a_run_is_not_asked_for_again(train: Trainer, tmp_path: Path) -> None:
    trained = without_model(train, settings=ONE_STEP)
    assert trained.code == 0, trained.stderr
    out, of_cache = train.folder / "out", said(train.cache / "qwen.yaml")
    of_run = said(out / "qwen.yaml")
    assert of_cache in trained.stderr
    assert load_config(out / "qwen.yaml").model.path == load_config(train.cache / "qwen.yaml").model.path
    assert of_cache in run("qwen-train", "plan", train.cache).stderr
    assert of_run in run("qwen-train", "decode", out).stderr
    merged = ("export", out, "--to", "merged", "--out", tmp_path / "merged")
    assert of_run in run("qwen-train", *merged).stderr
    sample = ("--from-cache", train.cache, "--key", "cat", "--set", "predict.num_inference_steps=2")
    for options, expected in (((), of_cache), (("--lora", out), of_run)):
        made = run("qwen-train", "predict", *sample, *options, "--out", tmp_path / f"{len(options)}.png")
        assert made.code == 0, made.stderr
        assert expected in made.stderr
    cache_of_run = f"the cache is {train.cache}, as in {out / 'qwen.yaml'}\n"
    for of_run in (("plan", out), ("predict", "--lora", out, *sample[2:], "--out", tmp_path / "of-run.png")):
        made = run("qwen-train", *of_run)
        assert (made.code, made.stderr.count(cache_of_run)) == (0, 1), made.stderr
    assert (tmp_path / "of-run.png").read_bytes() == (tmp_path / "2.png").read_bytes()
    given = run("qwen-train", "plan", train.cache, "--model", train.model)
    assert given.code == 0
    assert "model.path is" not in given.stderr


@pytest.mark.parametrize("variant", ["edit-plus", "t2i", "qwen-image-21"])
def test_a_model_is_here_with_the_components_that_its_pipeline_has(
    tiny_model: Callable[[str], Path], tmp_path: Path, variant: str
) -> None:
    """Qwen-Image has no processor, and Qwen-Image-2.1 no tokenizer beside its processor."""
    model = tiny_model(variant)
    assert find_here(str(model), COMPONENTS) == model
    shutil.rmtree(copied(model, tmp_path / "model") / "vae")
    assert find_here(str(tmp_path / "model"), COMPONENTS) is None


def test_every_command_ends_with_the_next_one(train: Trainer) -> None:
    """Literally: each of them runs."""
    trained = without_model(train, settings=ONE_STEP).stderr
    _, _, after = trained.partition("next:\n")
    commands = [line.split() for line in after.splitlines()]
    assert [words[1] for words in commands] == ["decode", "predict", "export"]
    for program, *words in commands:
        small = ("--set", "predict.num_inference_steps=2") if words[0] == "predict" else ()
        ended = run(program, *words, *small)
        assert ended.code == 0, ended.stderr
        if words[0] == "predict":
            compared = ended.stderr.partition("next:\n")[2].splitlines()
            typed = " ".join(map(str, [*words, *small]))
            assert compared == [
                f"  qwen-train {typed} --compare",
                f"  qwen-train push {train.folder / 'out'} OWNER/NAME",
            ]
        elif words[0] == "decode":
            assert ended.stderr.endswith(f"next:\n  qwen-train best {words[1]}\n")
            assert run("qwen-train", "best", words[1]).code == 0
        else:
            assert ended.stderr.endswith(f"next:\n  qwen-train push {words[1]} OWNER/NAME\n")
    merged = run("qwen-train", *commands[1][1:], "--set", "predict.num_inference_steps=2", "--merge").stderr
    assert merged.endswith(f"next:\n  qwen-train push {train.folder / 'out'} OWNER/NAME\n"), "which is not compared"
    assert "next:" not in run("qwen-train", *commands[2][1:], "--json").stderr


def test_commands_on_a_cache_end_with_the_next_one(
    train: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check that finds faults, and a command that prints JSON, end without one."""
    monkeypatch.chdir(tmp_path)
    shards = Path(shutil.copytree(train.cache, tmp_path / "mine"))

    def following(program: str, *words: str) -> list[str]:
        ended = run(program, *words)
        assert ended.code == 0, ended.stderr
        assert "next:" not in run(program, *words, "--json").stderr
        return [line.strip() for line in ended.stderr.partition("next:\n")[2].splitlines()]

    to_train = ["qwen-train plan mine", "qwen-train run mine"]
    assert following("qwen-cache", "verify", "mine") == to_train
    page, plan = following("qwen-cache", "inspect", "mine", "--set", "cache.thumbnails=false")
    assert plan == to_train[0]
    assert page == "qwen-cache inspect mine --set cache.thumbnails=false --html mine.html"
    assert following(*page.split()) == [plan]
    assert Path("mine.html").is_file()
    following(*plan.split())
    assert following("qwen-cache", "gc", "mine", "--dry-run") == []
    (shards / f"{'0' * 32}.tar").write_bytes(b"")
    assert following("qwen-cache", "gc", "--dry-run", "mine") == ["qwen-cache gc mine"]
    assert following("qwen-cache", "gc", "mine") == []
    words = "export mine --to musubi --out theirs --leave-out edit_mask"
    assert following("qwen-cache", *words.split(), "--dry-run") == [f"qwen-cache {words}"]
    card = following("qwen-cache", "push", "mine", "me/mine", "--base-model", "Qwen/Qwen-Image-Edit-2509", "--dry-run")
    assert card == ["qwen-cache push mine me/mine --base-model Qwen/Qwen-Image-Edit-2509"]
    shard = next(shards.glob("*.tar"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert "next:" not in run("qwen-cache", "verify", "mine").stderr


@pytest.mark.usefixtures("fast")
def test_build_ends_with_what_can_be_trained(pairs: Path, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Nothing before there is a cache to train on; all of `train.caches`, if the cache is one of them."""

    def following(out: str, *options: str) -> list[str]:
        result = build(pairs, Path(out), tiny_model("edit-plus"), *options)
        assert result.code == 0, result.stderr
        return result.stderr.partition("next:\n")[2].splitlines()

    assert following("one", "--set", "validation.prompts=[a cat]", "--only-validation") == []
    assert following("one") == ["  qwen-train plan one", "  qwen-train run one"]
    named = f"--model {tiny_model('edit-plus')} --set model.revision=v2"
    assert following("one", "--set", "model.revision=v2")[1] == f"  qwen-train run one {named}"
    Path("qwen.yaml").write_text("train: {caches: [{path: one}, {path: ./two}]}", encoding="utf-8")
    assert following("one") == []
    assert following("two") == ["  qwen-train plan", "  qwen-train run"]
    assert following("three") == ["  qwen-train plan three", "  qwen-train run three"]


def test_the_next_command_names_a_model_that_would_not_be_taken(train: Trainer, tmp_path: Path) -> None:
    transformer = next((train.model / "transformer").glob("*.safetensors"))
    others = ("--transformer", str(transformer), "--set", "train.lora.type=oft")
    after = train.try_(*others, settings=ONE_STEP).stderr.partition("next:\n")[2].splitlines()
    model = f" --model {train.model} --transformer {transformer}"
    assert [line.endswith(model) for line in after] == [False, True, True]
    words = after[2].split()[1:]
    assert words[2:5] == ["--to", "merged", "--out"]
    assert run("qwen-train", *words).code == 0


def test_the_hub_is_not_asked_for_a_recorded_model(
    train: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for a newer version either, which would be downloaded, nor for a component that is not here."""
    asked: list[str] = []

    def ask(_: object, repo_id: str, **__: object) -> None:
        asked.append(repo_id)
        raise OfflineModeIsEnabled("no network")

    for name in ("repo_info", "list_repo_tree"):
        monkeypatch.setattr(HfApi, name, ask)
    monkeypatch.setattr(file_download, "get_hf_file_metadata", lambda url, **_: ask(None, url))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repository, commit = tmp_path / "hub" / "models--owner--name", "0" * 40
    snapshot = copied(train.model, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    cache = copied(train.cache, tmp_path / "cache")
    rewrite(cache / "qwen.yaml", lambda settings: settings["model"].update(path="owner/name"))
    train.cache = cache
    out = train.folder / "out"
    assert without_model(train, settings=ONE_STEP).code == 0
    for command in (
        ("plan", cache),
        ("decode", out),
        ("predict", "--lora", out, "--key", "cat", "--set", "predict.num_inference_steps=2"),
        ("export", out, "--to", "merged", "--out", tmp_path / "merged"),
    ):
        ended = run("qwen-train", *command)
        assert (ended.code, asked) == (0, []), ended.stderr
    shutil.rmtree(snapshot / "vae")
    assert (run("qwen-train", "plan", cache).code, asked) == (0, [])
    assert run("qwen-train", "plan", cache, "--model", "owner/name").code == 0
    assert asked, "the model that the user names may be newer"


def hostile(settings: dict[str, Any], tmp_path: Path) -> None:
    settings["model"]["path"] = "somebody/unknown"
    settings["data"] |= {"source": "https://example.invalid/rows.parquet", "mask_head": str(tmp_path / "pipe")}
    settings["cache"] |= {"vae_device": "cuda:7", "reuse": ["s3://somewhere/else"]}
    settings["optimizer"]["name"] = "hostile_module.Optimizer"
    settings["logging"] |= {"report_to": "wandb", "run_name": "x"}
    settings["train"]["output_dir"] = str(tmp_path / "written")


def test_nothing_of_a_strangers_settings_is_imported_opened_or_asked_for(
    train: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "hostile_module.py").write_text("raise AssertionError('it was imported')")
    monkeypatch.syspath_prepend(tmp_path / "modules")
    out = train(settings=ONE_STEP)
    cache, run_folder = copied(train.cache, tmp_path / "cache"), copied(out, tmp_path / "run")
    for folder in (cache, run_folder):
        rewrite(folder / "qwen.yaml", lambda settings: hostile(settings, tmp_path))
    hint = "give --model somebody/unknown, as in {}, or another model"
    of_cache, of_run = (hint.format(folder / "qwen.yaml") for folder in (cache, run_folder))
    sample = ("predict", "--from-cache", cache, "--key", "cat")
    for arguments, expected in (
        (("run", cache), of_cache),
        (("plan", cache), of_cache),
        (sample, of_cache),
        ((*sample, "--lora", run_folder), of_run),
        (("predict", "--lora", run_folder, "--prompt", "x"), of_run),
        (("decode", run_folder), of_run),
        (("export", run_folder, "--to", "merged", "--out", tmp_path / "merged"), of_run),
    ):
        refused(run("qwen-train", *arguments), "the recorded one is not here", expected)
    assert run("qwen-train", "report", run_folder).code == 0
    assert run("qwen-cache", "inspect", cache, "--html", tmp_path / "page.html").code == 0
    assert run("qwen-cache", "verify", cache).code == 0
    with_model = (*train.arguments(out="mine", settings=ONE_STEP)[:1], cache, *train.arguments(out="mine")[2:])
    assert run("qwen-train", *with_model).code == 0
    assert load_config(train.folder / "mine" / "qwen.yaml").optimizer.name == "adamw"
    assert "hostile_module" not in sys.modules
    assert not (tmp_path / "written").exists()


@pytest.mark.parametrize(
    ("part", "name"), [("vae", "VAE"), ("text_encoder", "text encoder"), ("processor", "tokenizer or processor")]
)
def test_a_cache_of_other_encoders_is_refused(
    part: str, name: str, train: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remembered, "SETTLED_NS", 0)  # what was written just now is remembered, too
    model = copied(train.model, tmp_path / "model")
    if part == "processor":
        path = model / part / "preprocessor_config.json"
        path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"rescale_factor": 0.5}))
    else:
        path = next((model / part).glob("*.safetensors"))
        tensors = load_file(path)
        changed = next(
            key for key in sorted(tensors) if key.startswith(("encoder", "model.")) or part == "text_encoder"
        )
        save_file(tensors | {changed: tensors[changed] + 1}, path, {"format": "pt"})
    message = f"the cache was built with another {name} than this model has"
    train.model = model
    refused(train.try_(), message, str(train.cache), "build a cache with this one")
    planned = run("qwen-train", "plan", train.cache, "--model", model)  # since the run has hashed what there is
    refused(planned, message)


def test_another_transformer_is_trained_and_named(train: Trainer, tmp_path: Path) -> None:
    model = copied(train.model, tmp_path / "model")
    path = next((model / "transformer").glob("*.safetensors"))
    tensors = load_file(path)
    save_file({name: tensor * 1.01 for name, tensor in tensors.items()}, path, {"format": "pt"})
    built_with, train.model = train.model, model
    trained = train.try_()
    assert trained.code == 0, trained.stderr
    assert f"note: {train.cache} was built with {built_with}, and {model} is trained\n" in trained.stderr
    shutil.rmtree(model / "text_encoder")  # a download of what is trained alone
    assert train.try_(out="again").code == 0


def test_a_text_encoder_in_a_file_is_not_compared_with_that_of_the_folder(
    train: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remembered, "SETTLED_NS", 0)
    cache, model = copied(train.cache, tmp_path / "cache"), copied(train.model, tmp_path / "model")
    path = next((model / "text_encoder").glob("*.safetensors"))
    save_file({name: tensor + 1 for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    rewrite(cache / "qwen.yaml", lambda settings: settings["model"].update(path=str(model)))
    train.cache, train.model = cache, model
    refused(train.try_(), "another text encoder")  # which has hashed it
    refused(without_model(train), "the recorded one has changed", "another text encoder than that of the cache")
    rewrite(cache / "qwen.yaml", lambda settings: settings["model"].update(text_encoder="a.safetensors"))
    assert without_model(train).code == 0
    sample = ("--from-cache", cache, "--key", "cat", "--set", "predict.num_inference_steps=2")
    assert run("qwen-train", "predict", *sample, "--out", tmp_path / "cat.png").code == 0, "which needs no text encoder"


def test_a_recorded_model_that_is_not_the_same_any_more_is_not_taken(train: Trainer, tmp_path: Path) -> None:
    cache, model = copied(train.cache, tmp_path / "cache"), copied(train.model, tmp_path / "model")
    rewrite(cache / "qwen.yaml", lambda settings: settings["model"].update(path=str(model)))
    train.cache = cache
    assert without_model(train).code == 0
    index = json.loads((model / "model_index.json").read_text(encoding="utf-8"))
    (model / "model_index.json").write_text(json.dumps(index | {"_class_name": "QwenImage21Pipeline"}))
    refused(without_model(train, out="b"), "the recorded one has changed", "pipeline QwenImage21Pipeline, not")
    rewrite(cache / "qwen.yaml", lambda settings: settings["model"].update(revision="v2", path=str(train.model)))
    named = f"give --model {train.model} --set model.revision=v2, as in {cache / 'qwen.yaml'}, or another model"
    refused(without_model(train, out="b"), named)
    for text in ("model: [", f"model: {{path: {train.model}}}\n{'#' * MAX_BYTES}"):
        (cache / "qwen.yaml").write_text(text, encoding="utf-8")
        refused(without_model(train, out="b"), "no model is named", "give --model FOLDER_OR_REPOSITORY")
