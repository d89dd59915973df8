"""Read exported caches with the code of the trainers that they are for, and compare every tensor.

    git clone https://github.com/kohya-ss/musubi-tuner peers/musubi-tuner
    git -C peers/musubi-tuner checkout 30c658c
    python tools/check_exports.py CACHE peers

`peers` has clones of any of musubi-tuner, diffusion-pipe, DiffSynth-Studio and qwen-image-finetune, at the commits in
COMMITS; others are left out. CACHE is a cache of Qwen-Image-Edit. Of it each trainer gets the samples that it can hold.
Their code needs opencv-python-headless, pandas, einops, toml, voluptuous, omegaconf, av and imagehash; what else it
imports but does not use to read a cache, such as deepspeed, is replaced by empty modules. Nothing in the clones is
changed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock, patch

import torch
import yaml

from qwen_cache import Cache, Sample, open_cache
from qwen_cache.trainers.convert import ExportPlan, ToolName, plan_export, write_export
from qwen_cache.trainers.files import images_of

LEFT_OUT = ("empty_prompt_embeds", "edit_mask")
COMMITS = {
    "musubi-tuner": "30c658c4f4b0bf05038b3346eff9670259b10fc7",
    "diffusion-pipe": "8f83dbf25d03219df705570ec03e62be04bc402f",
    "DiffSynth-Studio": "fed7b18fac2ed4cb802796eec91970e7659bccde",
    "qwen-image-finetune": "460ba1aac9264b17501a40c93c8206a5f1ce8474",
}


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of these packages whose attributes are all mocks."""

    def __init__(self, packages: tuple[str, ...]) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in self.packages:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__name__ = [], spec, spec.name
        return module  # type: ignore[return-value]

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextmanager
def importing(folder: Path, *stubs: str) -> Iterator[None]:
    """Import from `folder` inside the block."""
    finder = Stubs(stubs)
    sys.path.insert(0, str(folder))
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        sys.meta_path.remove(finder)


def check(found: dict[str, torch.Tensor], sample: Sample) -> None:
    """AssertionError unless these are the tensors of the sample: `image i` `[16, H, W]` and `prompt` `[L, D]`."""
    expected = {f"image {i}": latents[:, 0] for i, latents in enumerate(images_of(sample))}
    expected["prompt"] = sample["prompt_embeds"]
    assert found.keys() == expected.keys(), (sample.name, sorted(found), sorted(expected))
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), f"{name} of {sample.name}"


# ---- the trainers ----------------------------------------------------------------------------------------------------


def read_musubi(plan: ExportPlan, folder: Path, clone: Path) -> int:
    """Its dataset, from its TOML file to its batches."""
    with importing(clone / "src"):
        config = importlib.import_module("musubi_tuner.dataset.config_utils")
        user = config.load_user_config(str(folder / "dataset.toml"))
        generator = config.BlueprintGenerator(config.ConfigSanitizer())
        blueprint = generator.generate(user, argparse.Namespace(), architecture="qie")
        shared = MagicMock(value=0)
        group = config.generate_dataset_group_by_blueprint(blueprint.dataset_group, training=True, shared_epoch=shared)
    (dataset,) = group.datasets
    stems = {stem: position for position, stem in plan.stems.items()}
    manager = dataset.batch_manager
    for i in range(len(manager)):
        (size, number), batch = manager.bucket_batch_indices[i], dataset[i]
        item = manager.buckets[size][number]
        latents = [batch["latents"], *(batch[name] for name in sorted(batch) if name.startswith("latents_control_"))]
        assert size[:2] == (8 * latents[0].shape[-1], 8 * latents[0].shape[-2]), "not in the bucket of its size"
        found = {f"image {k}": each[0, :, 0] for k, each in enumerate(latents)}
        check({**found, "prompt": batch["vl_embed"][0]}, plan.cache[stems[item.item_key]])
    return len(manager)


def read_diffsynth(plan: ExportPlan, folder: Path, clone: Path) -> int:
    """Its dataset of cached files, and its loss with a model that notes its inputs."""
    with importing(clone, "modelscope", "torchvision", "imageio", "torchaudio", "ftfy", "sentencepiece"):
        unified = importlib.import_module("diffsynth.core.data.unified_dataset")
        loss = importlib.import_module("diffsynth.diffusion.loss")
        flow = importlib.import_module("diffsynth.diffusion.flow_match")
    dataset, seen = unified.UnifiedDataset(base_path=str(folder), metadata_path=None), dict[str, Any]()
    pipe = MagicMock(torch_dtype=torch.float32, device="cpu", in_iteration_models=())
    pipe.scheduler = flow.FlowMatchScheduler("Qwen-Image")
    pipe.scheduler.set_timesteps(1000, training=True)
    pipe.model_fn = lambda **inputs: seen.update(inputs) or inputs["latents"]
    positions = list(plan.stems)
    for i, path in enumerate(dataset.cached_data):
        shared, positive, _ = dataset[i]
        loss.FlowMatchSFTLoss(pipe, **shared, **positive)
        assert seen["latents"].shape[2:] == (seen["height"] // 8, seen["width"] // 8)
        edit = seen.get("edit_latents", [])
        images = [seen["input_latents"], *(edit if isinstance(edit, list) else [edit])]
        assert bool(seen["prompt_emb_mask"].all())
        found = {f"image {k}": each[0] for k, each in enumerate(images)}
        check({**found, "prompt": seen["prompt_emb"][0]}, plan.cache[positions[int(Path(path).stem)]])
        seen.clear()
    return len(dataset)


def read_diffusion_pipe(plan: ExportPlan, folder: Path, clone: Path) -> int:
    """Its dataset of one folder as with --trust_cache, whose encoders must not be called."""
    connect = sqlite3.connect

    def before_python_312(*arguments: Any, autocommit: bool, **options: Any) -> sqlite3.Connection:
        return connect(*arguments, **options)

    def encode(*_: object) -> None:
        raise AssertionError("an encoder would run")

    tomllib = importlib.import_module("tomllib")
    config = tomllib.loads((folder / "dataset.toml").read_text(encoding="utf-8"))
    with importing(clone, "deepspeed", "comfy", "comfy_api", "imageio", "multiprocess"):
        module = importlib.import_module("utils.dataset")
        fixed = patch.object(sqlite3, "connect", before_python_312) if sys.version_info < (3, 12) else patch.dict({})
        with fixed:
            (directory,) = config["directory"]
            dataset = module.DirectoryDataset(directory, config, "qwen_image")
            dataset.cache_metadata(trust_cache=True)
            dataset.cache_latents(encode, trust_cache=True)
            for part in dataset.ar_bucket_datasets:
                part.cache_text_embeddings(encode, 1)
    stems, count = {stem: position for position, stem in plan.stems.items()}, 0
    for part in dataset.get_size_bucket_datasets():
        part.uncond_text_embeddings.append(None)
        for i in range(len(part)):
            item = part[i]
            images = [item["latents"], *([item["control_latents"]] if "control_latents" in item else [])]
            found = {f"image {k}": each[:, 0] for k, each in enumerate(images)}
            sample = plan.cache[stems[Path(item["image_spec"][1]).stem]]
            assert item["caption"] == sample.prompt
            check({**found, "prompt": item["prompt_embeds"]}, sample)
            count += 1
    return count


def read_qflux(plan: ExportPlan, folder: Path, clone: Path) -> int:
    """Its dataset with a cache; it opens the images of the export."""
    settings = yaml.safe_load((folder / "qflux.yaml").read_text(encoding="utf-8"))
    login = patch.dict(os.environ, {"HF_TOKEN": "none"}), patch("huggingface_hub.login")  # when it is imported
    with importing(clone / "src", "swanlab", "wandb", "easydict", "dotenv", "blake3"), login[0], login[1]:
        config = importlib.import_module("qflux.data.config")
        dataset_module = importlib.import_module("qflux.data.dataset")
        arguments = {**settings["data"]["init_args"], **settings["cache"], "caption_dropout_rate": 0.0}
        dataset = dataset_module.ImageDataset(config.DatasetInitArgs(**arguments))
        stems = {stem: position for position, stem in plan.stems.items()}
        for i, entry in enumerate(dataset.all_samples):
            item, sample = dataset[i], plan.cache[stems[Path(entry["image"]).stem]]
            assert item["cached"]
            assert [(h // 16, w // 16) for _, h, w in item["img_shapes"]] == [(h, w) for _, h, w in sample.img_shapes]
            assert torch.equal(item["image_latents"], sample["image_latents"])
            assert torch.equal(item["control_latents"], sample["control_latents"])
            assert torch.equal(item["prompt_embeds"], sample["prompt_embeds"])
            assert bool(item["prompt_embeds_mask"].all())
    return len(dataset)


READERS: dict[ToolName, tuple[str, Callable[[ExportPlan, Path, Path], int]]] = {
    "musubi": ("musubi-tuner", read_musubi),
    "diffsynth": ("DiffSynth-Studio", read_diffsynth),
    "diffusion-pipe": ("diffusion-pipe", read_diffusion_pipe),
    "qflux": ("qwen-image-finetune", read_qflux),
}


def check_tool(cache: Cache, tool: ToolName, clone: Path, folder: Path) -> dict[str, object]:
    """Export, read, compare; the commit and the numbers of samples."""
    _, read = READERS[tool]
    plan = plan_export(cache, tool, LEFT_OUT)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=clone, capture_output=True, text=True, check=True).stdout
    if not plan.stems:
        return {"commit": commit.strip(), "samples": 0, "refused": len(plan.problems)}
    write_export(plan, folder)
    count = read(plan, folder, clone)
    assert count == len(plan.stems), f"{count} of {len(plan.stems)} samples were read"
    return {"commit": commit.strip(), "samples": count, "refused": len(plan.problems)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache")
    parser.add_argument("peers", type=Path)
    parser.add_argument("--only", choices=list(READERS), help="read with this trainer, in this process")
    options = parser.parse_args()
    if options.only:
        name = READERS[options.only][0]
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):  # they print
            report = check_tool(open_cache(options.cache), options.only, options.peers / name, Path(folder) / "export")
        if report["commit"] != COMMITS[name]:
            print(f"{name}: not at {COMMITS[name][:7]}", file=sys.stderr)
        print(json.dumps(report))
        return
    reports = {}
    for tool in [tool for tool, (name, _) in READERS.items() if (options.peers / name).is_dir()]:
        command = [sys.executable, __file__, options.cache, str(options.peers), "--only", tool]
        reports[tool] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    print(json.dumps(reports, indent=2))


if __name__ == "__main__":
    main()
