"""`push`: what reaches the hub is the result, generated images and a card made from the run, and nothing else; what is
damaged, unknown or refused by the hub is said before or instead."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from peft.utils import get_peft_model_state_dict
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from safetensors import safe_open
from safetensors.numpy import save
from safetensors.torch import load_file

from qwen_cache.settings.given import Given
from qwen_cache.settings.load import load_config
from qwen_cache.storage.remembered import sealed, write_checksums
from qwen_train.lora.files import settings_in
from qwen_train.training.publish import read_run, repository_of

from .support.commands import Result, refused, run
from .support.hub import UploadHub
from .support.marks import slow
from .support.paths import ROOT
from .support.runs import LORA, SMALL, Trainer
from .support.server import serving

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # huggingface_hub's way of sending
REPO = "me/cats"
BASE = "Qwen/Qwen-Image-Edit-2509"
SECRET = "s3cret"
"""In every path, address and text of the run that must not be published."""
TINY = {"w": np.zeros((2, 2), np.float32)}


def write_run(
    folder: Path,
    model: str = BASE,
    pipeline: str = "QwenImageEditPlusPipeline",
    origin: dict[str, str] | None = None,
    **changes: Any,
) -> Path:
    """The folder of a finished run with a validation image at two steps."""
    paths = {f"{part}": f"/home/{SECRET}/{part}" for part in ("cache.path", "train.output_dir", "data.source")}
    values = {**paths, "model.path": f"/models/{SECRET}", "train.lora.rank": 8, "data.trigger_word": "sks", **changes}
    config = load_config(None, given=[Given("", key, value) for key, value in values.items()])
    origin = {"model": model, "pipeline": pipeline, "cache": "0" * 32, **(origin or {})}
    facts = {"cache": f"/home/{SECRET}", "identity": "0" * 32, "pipeline": pipeline, "samples": 13}
    header = {"lora_adapter_metadata": json.dumps({"trained_on": origin})}
    folder.mkdir()
    (folder / "qwen.yaml").write_text(config.to_yaml(), encoding="utf-8")
    (folder / "about.json").write_text(json.dumps(facts), encoding="utf-8")
    (folder / "pytorch_lora_weights.safetensors").write_bytes(b"".join(sealed(save(TINY, header))))
    for step in (9, 10):
        images = folder / "validation" / f"step-{step}"
        images.mkdir(parents=True)
        metadata = {"name": SECRET, "prompt": f"sks, at step {step}"}
        (images / "a.safetensors").write_bytes(b"".join(sealed(save(TINY, metadata))))
        comment = PngInfo()
        comment.add_text("path", f"/home/{SECRET}")
        Image.new("RGB", (8, 8), (step, 0, 0)).save(images / "a.png", pnginfo=comment)
    for kind in ("controls", "target"):
        (folder / "validation" / kind).mkdir()
        Image.new("RGB", (8, 8)).save(folder / "validation" / kind / "a.png")
    return folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[UploadHub]:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)  # a protocol of its own, not LFS
    monkeypatch.setenv("HF_TOKEN", "hf_a_token")
    with serving(UploadHub(REPO)) as server:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
        yield server


def push(folder: Path, *options: str) -> Result:
    return run("qwen-train", "push", folder, REPO, *options)


def card_of(files: dict[str, bytes], folder: Path) -> ModelCard:
    """The card as the hub's own library reads it."""
    path = folder / "card.md"
    path.write_bytes(files["README.md"])
    return ModelCard.load(path)


def test_the_hub_gets_weights_images_and_card_and_nothing_of_this_machine(tmp_path: Path, hub: UploadHub) -> None:
    folder = write_run(tmp_path / "out")
    result = push(folder, "--json")
    assert result.code == 0, result.stderr
    files = hub.branches["main"]
    assert sorted(files) == ["README.md", "images/a.png", "pytorch_lora_weights.safetensors"]
    assert files["pytorch_lora_weights.safetensors"] == (folder / "pytorch_lora_weights.safetensors").read_bytes()
    assert json.loads(result.stdout)["files"] == {name: len(data) for name, data in files.items()}
    assert json.loads(result.stdout)["commit"].startswith(f"{hub.url}/{REPO}/commit/")
    (tmp_path / "a.png").write_bytes(files["images/a.png"])
    assert Image.open(tmp_path / "a.png").getpixel((0, 0)) == (10, 0, 0)
    assert not [name for name, data in files.items() if SECRET.encode() in data]
    card = card_of(files, tmp_path)
    facts = card.data.to_dict()
    assert {name: facts[name] for name in ("base_model", "base_model_relation", "library_name", "license")} == {
        "base_model": BASE,
        "base_model_relation": "adapter",
        "library_name": "diffusers",
        "license": "apache-2.0",
    }
    assert (facts["pipeline_tag"], facts["instance_prompt"]) == ("image-to-image", "sks")
    assert facts["widget"] == [{"text": "sks, at step 10", "output": {"url": "images/a.png"}}]
    assert "<Gallery />" in card.text
    assert "| `train.lora.rank` | 8 |" in card.text
    assert "| samples | 13 |" in card.text
    assert f'pipe.load_lora_weights("{REPO}")' in card.text
    assert "| `num_inference_steps` | 50; a distilled base has its own |" in card.text
    assert "| the images above | `num_inference_steps` 20, `true_cfg_scale` 1 |" in card.text
    assert "It was trained at" not in card.text


def test_options_decide_images_card_branch_and_privacy(
    tmp_path: Path, hub: UploadHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is that of the settings, unless it is named, and the repository may be an address."""
    folder = write_run(tmp_path / "out")
    shown = push(folder, "--dry-run", "--no-images")
    assert shown.code == 0
    assert "at step 10" not in shown.stdout
    monkeypatch.chdir(tmp_path)
    assert run("qwen-train", "push", f"hf://{REPO}", "--dry-run", "--no-images").stdout == shown.stdout
    for alone in ((), (folder,), ("out",)):  # never the name of a new repository
        refused(run("qwen-train", "push", *alone), "push needs the repository to upload to", "push out OWNER/NAME")
    refused(
        run("qwen-train", "push", folder, "cats"), "not the name of a repository", "expected OWNER/NAME, found cats"
    )
    assert not hub.requests
    assert push(folder, "--private", "--no-images", "--keep-card", "--revision", "r8").code == 0
    assert hub.private
    assert sorted(hub.branches["r8"]) == ["pytorch_lora_weights.safetensors"]
    assert not hub.branches["main"]
    hub.private = False
    refused(push(folder, "--private"), f"{REPO}: this repository is public", "leave out --private")
    assert not hub.branches["main"]


def test_a_checkpoint_is_published_with_the_facts_of_its_run(tmp_path: Path, hub: UploadHub) -> None:
    folder = write_run(tmp_path / "out")
    (folder / "checkpoint-9").mkdir()
    (folder / "pytorch_lora_weights.safetensors").rename(folder / "checkpoint-9/pytorch_lora_weights.safetensors")
    assert push(folder / "checkpoint-9", "--set", "data.trigger_word=tok").code == 0
    assert card_of(hub.branches["main"], tmp_path).data.to_dict()["instance_prompt"] == "tok"


def test_the_card_of_a_model_under_the_research_licence_says_so(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "out", "Qwen/Qwen-Image-2.1", "QwenImage21Pipeline")
    card = ModelCard(json.loads(push(folder, "--dry-run", "--json").stdout)["card"])
    facts = card.data.to_dict()
    link = "https://huggingface.co/Qwen/Qwen-Image-2.1/blob/main/LICENSE"
    assert (facts["license"], facts["license_name"], facts["license_link"]) == ("other", "qwen-research", link)
    assert f"[qwen-research]({link}) licence, which allows **no commercial use**" in card.text


def test_the_card_warns_of_sizes_that_the_pipeline_does_not_have(tmp_path: Path) -> None:
    """Sizes of the run or of its caches; and links to a section that exists."""
    of_21 = {"model": "Qwen/Qwen-Image-2.1", "pipeline": "QwenImage21Pipeline"}
    write = {
        "area": ({"data.vae_image_size": [512**2, 1024**2]}, "at about 512² pixels: give `height` and `width`"),
        "fixed": ({"data.resolution": [[512, 768]]}, "at 512×768 pixels: give `height` and `width` of that size"),
        "2.1": ({**of_21, "data.vae_image_size": [512**2]}, "at about 512² pixels: set `output_resolution`"),
    }
    for name, (changes, said) in write.items():
        card = repository_of(read_run(write_run(tmp_path / name, **changes)), REPO).card
        assert said in card
        assert ("resizes controls to about 1024² all the same" in card) == (name != "2.1")
        (link,) = re.findall(r"blob/main/(docs/\S+)#([\w-]+)\)", card)
        headings = re.findall(r"^#+ (.*)", (ROOT / link[0]).read_text(encoding="utf-8"), re.MULTILINE)
        assert link[1] in [heading.lower().replace(" ", "-") for heading in headings]


def test_the_card_names_the_file_of_the_transformer_and_the_assistant_without_their_folders(tmp_path: Path) -> None:
    origin = {"assistant_lora": "turbo.safetensors, xxh3-128 0, weight 1"}
    paths = {
        "model.transformer": f"C:\\{SECRET}\\tuned.gguf",
        "train.assistant_lora": f"{SECRET}/turbo.safetensors:0.5",
    }
    card = json.loads(push(write_run(tmp_path / "out", origin=origin, **paths), "--dry-run", "--json").stdout)["card"]
    assert "trained on is not that repository's, but the file `tuned.gguf`." in card
    assert "beside the assistant LoRA `turbo.safetensors, xxh3-128 0, weight 1`, which is not part of it." in card
    assert SECRET not in card
    origin["assistant_lora_from"] = "someone/adapter@0123/turbo.safetensors"
    card = json.loads(push(write_run(tmp_path / "hub", origin=origin), "--dry-run", "--json").stdout)["card"]
    assert "`turbo.safetensors, xxh3-128 0, weight 1, someone/adapter@0123/turbo.safetensors`, which is not" in card


def test_the_card_shows_every_image_with_its_prompt_and_its_guidance(tmp_path: Path, hub: UploadHub) -> None:
    """Several of a file, as of a validation cache, and one without latents."""
    folder = write_run(tmp_path / "out")
    images = folder / "validation" / "step-10"
    metadata = {"prompt": "sks at night", "true_cfg_scale": "[1.0, 4.0]"}
    (images / "b.safetensors").write_bytes(b"".join(sealed(save(TINY, metadata))))
    for name in ("b", "b-2", "c"):
        Image.new("RGB", (8, 8)).save(images / f"{name}.png")
    assert push(folder).code == 0
    assert card_of(hub.branches["main"], tmp_path).data.to_dict()["widget"] == [
        {"text": "sks, at step 10", "output": {"url": "images/a.png"}},
        {"text": "sks at night", "parameters": {"true_cfg_scale": 1.0}, "output": {"url": "images/b.png"}},
        {"text": "sks at night", "parameters": {"true_cfg_scale": 4.0}, "output": {"url": "images/b-2.png"}},
        {"text": " ", "output": {"url": "images/c.png"}},
    ]
    (images / "b.safetensors").write_bytes(b"".join(sealed(save(TINY, metadata | {"true_cfg_scale": "x"}))))
    refused(push(folder), "b.safetensors: the prompt of an image cannot be read", "or add --no-images")


def test_all_weights_are_published_without_the_path_that_diffusers_wrote(tmp_path: Path, hub: UploadHub) -> None:
    folder = write_run(tmp_path / "out")
    (folder / "pytorch_lora_weights.safetensors").unlink()
    (folder / "transformer").mkdir()
    (folder / "transformer/model.safetensors").write_bytes(save(TINY))
    (folder / "transformer/config.json").write_text(json.dumps({"_name_or_path": f"/{SECRET}", "num_layers": 2}))
    write_checksums(folder / "transformer")
    assert push(folder, "--base-model", BASE).code == 0
    files = hub.branches["main"]
    assert sorted(files) == ["README.md", "images/a.png", "transformer/config.json", "transformer/model.safetensors"]
    assert json.loads(files["transformer/config.json"]) == {"num_layers": 2}
    assert card_of(files, tmp_path).data.to_dict()["base_model_relation"] == "finetune"
    with (folder / "transformer/model.safetensors").open("ab") as file:
        file.write(b"x")
    refused(push(folder, "--base-model", BASE), "model.safetensors: this file was changed after it was written")


def test_what_cannot_be_published_is_refused_before_the_hub_is_asked(tmp_path: Path, hub: UploadHub) -> None:
    folder = write_run(tmp_path / "out", model="my-base")
    refused(push(folder), "the base model has no name on the hub", "found my-base", f"--base-model {BASE}")
    wrong = run("qwen-train", "push", folder, "me/a/b", "--base-model", BASE)
    refused(wrong, "not the name of a repository", "expected OWNER/NAME", "me/a/b")
    (folder / "validation/step-10/a.png").write_bytes(b"no image")
    refused(push(folder, "--base-model", BASE), "a.png: this image cannot be read", "--no-images")
    (folder / "validation/step-10/a.png").unlink()
    if hasattr(os, "mkfifo"):
        os.mkfifo(folder / "validation/step-10/z.png")
        refused(push(folder, "--base-model", BASE), "z.png: this image cannot be read: [Errno 22] not a regular file")
        (folder / "validation/step-10/z.png").unlink()
    data = bytearray((folder / "pytorch_lora_weights.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "pytorch_lora_weights.safetensors").write_bytes(data)
    refused(push(folder), "pytorch_lora_weights.safetensors: this file was changed after it was written")
    (folder / "about.json").unlink()
    (folder / "pytorch_lora_weights.safetensors").write_bytes(save(TINY))
    refused(push(folder), "this is not the folder of a run", "expected qwen.yaml and about.json")
    refused(push(tmp_path), "no LoRA here")
    assert not hub.requests


@pytest.mark.parametrize(
    ("status", "what", "do"),
    [
        (401, "the hub does not know you", "hf auth login"),
        (403, "you may not write to this repository", "a token with write access"),
        (404, "the hub has no such repository or revision", "check the name and the token"),
        (400, "the hub refused the upload", "run the same command again"),
    ],
)
def test_an_answer_of_the_hub_becomes_a_sentence(
    status: int, what: str, do: str, tmp_path: Path, hub: UploadHub
) -> None:
    hub.status = status
    refused(push(write_run(tmp_path / "out")), f"{REPO}: {what}", f"found status {status}: no, {status}", do)


def test_a_hub_that_cannot_be_reached_is_a_sentence(
    tmp_path: Path, hub: UploadHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path / "out")
    with serving(UploadHub(REPO)) as other:
        closed = other.url
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", closed)
    refused(push(folder), f"{REPO}: the hub cannot be reached", "check the connection")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    refused(push(folder), f"{REPO}: the hub cannot be reached")


def test_the_trigger_word_is_that_of_the_caches_without_the_teachers(tmp_path: Path) -> None:
    for word in ("sks", "dog"):
        (tmp_path / word).mkdir()
        (tmp_path / word / "qwen.yaml").write_text(f"data: {{trigger_word: {word}}}", encoding="utf-8")
    for teacher in (True, False):
        caches = [{"path": str(tmp_path / "sks")}, {"path": str(tmp_path / "dog"), "teacher": teacher}]
        changes = {"data.trigger_word": None, "train.caches": caches}
        card = repository_of(read_run(write_run(tmp_path / f"out-{teacher}", **changes)), REPO).card
        assert ModelCard(card).data.to_dict().get("instance_prompt") == ("sks" if teacher else None)


@pytest.mark.parametrize("variant", [slow(each) for each in ("lora", "lokr", "loha", "oft", "full")])
def test_the_code_of_the_card_loads_what_was_trained(
    variant: str, train: Trainer, tmp_path: Path, hub: UploadHub
) -> None:
    """With the uploaded files in a folder in place of the repository, and the tiny model in place of the base, without
    its processor, which needs torchvision."""
    settings = {"train.method": "full"} if variant == "full" else {"train.lora.type": variant}
    folder = train(settings=SMALL | settings | ({"train.lora.rank_pattern": {"to_q": 2}} if variant == "loha" else {}))
    assert push(folder, "--base-model", BASE).code == 0
    copy = tmp_path / "copy"
    for name, data in hub.branches["main"].items():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes(data)
    match = re.search(r"```python\n(.*?)```", (copy / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert match
    base = f"{str(train.model)!r}, processor=None"
    code = match[1].replace(f'"{BASE}"', base).replace(f'"{REPO}"', repr(str(copy))).replace("cuda", "cpu")
    names: dict[str, Any] = {}
    exec(code, names)
    transformer = names["pipe"].transformer
    if variant == "full":
        found, trained = transformer.state_dict(), load_file(next((folder / "transformer").glob("*.safetensors")))
    else:
        ((adapter, config),) = transformer.peft_config.items()
        found, trained = get_peft_model_state_dict(transformer, adapter_name=adapter), load_file(folder / LORA)
        assert config.peft_type.lower() == variant
        with safe_open(folder / LORA, framework="np") as file:
            assert getattr(config, "rank_pattern", {}) == settings_in(file.metadata()).get(
                "transformer.rank_pattern", {}
            )
    assert len(found) == len(trained)
    for name, tensor in trained.items():
        loaded = found[name.removeprefix("transformer.")]
        assert torch.equal(loaded, tensor.to(loaded.dtype))
    inputs = {"hidden_states": torch.zeros(1, 4, 64), "encoder_hidden_states": torch.zeros(1, 5, 64)}
    cast = {name: tensor.bfloat16() for name, tensor in inputs.items()}
    output = transformer(**cast, timestep=torch.tensor([0.5]), img_shapes=[[(1, 2, 2)]], return_dict=False)[0]
    assert output.dtype == torch.bfloat16
