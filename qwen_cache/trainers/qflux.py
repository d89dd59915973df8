"""Files of qflux, read and written."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from qwen_cache.errors import SourceError
from qwen_cache.format.cache import Sample
from qwen_cache.format.sample import PIXELS_PER_TOKEN, ImgShapes, SampleMeta, token_count
from qwen_cache.inspect.flags import stored_thumbnails
from qwen_cache.sources.places import read_bytes
from qwen_cache.sources.rows import MAX_TEXT
from qwen_cache.text import parse_json
from qwen_cache.trainers.files import (
    ALWAYS,
    Export,
    FoundSample,
    ImportedSample,
    NamedSample,
    Options,
    Refusal,
    Tool,
    check_tensor,
    load_pickled,
    unpad,
)

# ---- qflux -----------------------------------------------------------------------------------------------------------
# Caches of qwen-image-finetune ("qflux"): trees of `.pt` files with one JSON per sample, its v1.0 and v2.0.
#
# Read in tsiendragon/qwen-image-finetune, data/cache_manager.py, data/dataset.py, trainer/qwen_image_edit_trainer.py
# and utils/tools.py (18cf6ac to 294c2f5):
#
#     metadata/<hash>.json, or <hash>_metadata.json    {"image_latents": <hash>, "control_latents": <hash>, …}
#     <kind>/<hash>.pt                                 image_latents [S, 64], control_latents [Sc, 64] (all controls),
#                                                      prompt_embeds [L, D], prompt_embeds_mask [L], empty_… of both
#
# v2.0 has `"version": "2.0"`. All tensors, including masks, were cast to float16, which float32 represents exactly;
# values beyond 65504 became Inf, which is refused. Latents are normalised and packed. Only some releases store the
# image sizes (`img_shapes`, as a tensor or as JSON); for others `--image-size` gives them. Of a prompt only the MD5 is
# stored; `--captions` finds the text: the name of the embeddings, or the end of v2.0's name of the JSON, which follows
# those of target and first control; exports of ours name embeddings by the sample where samples share a prompt.
#
# Files whose sample is unknown are refused: embeddings shared by samples with different controls (they are stored under
# the prompt's hash, but depend on the control images), and latents shared under a perceptual hash (16 digits, for
# datasets that are not from the hub), which collides for different images. The oldest trees (`pixel_latent/`) do not
# store which files belong together.

TENSORS = ("image_latents", "control_latents", "prompt_embeds", "empty_prompt_embeds")
MASKS = {"prompt_embeds": "prompt_embeds_mask", "empty_prompt_embeds": "empty_prompt_embeds_mask"}
KINDS = {*TENSORS, *MASKS.values(), "img_shapes"}
HASH = re.compile(r"[0-9a-f]{16,}")
MAX_CHOICES = 1_000_000  # of sizes for the controls of a sample: a second
MD5_DIGITS = 32  # digits of a file's hash; a perceptual hash has 16


def find(folder: Path, options: Options) -> Iterator[FoundSample | SourceError]:
    """The samples in `folder`, sorted by the name of their JSON."""
    paths = sorted([*folder.glob("metadata/*.json"), *folder.glob("*_metadata.json")])
    if not paths and (folder / "pixel_latent").is_dir():
        raise SourceError(
            "this early layout does not store which latents belong to which embeddings",
            where=folder,
            expected="metadata/*.json",
            found="pixel_latent/ without metadata",
            do="run `qwen-cache build` on the images",
        )
    if not paths:
        expected = "metadata/*.json or *_metadata.json"
        raise SourceError("not a cache of qwen-image-finetune", where=folder, expected=expected, found="none")
    prompts = _prompts(options.captions)
    samples: dict[Path, dict[str, Any]] = {}
    for path in paths:
        try:
            samples[path] = _parse(path)
        except SourceError as error:
            yield error
    ambiguous: set[Path] = set()
    for problem, sharing in _shared(folder, samples):
        ambiguous |= sharing
        yield problem
    for path, entry in samples.items():
        if path not in ambiguous:
            yield _found_sample(folder, path, entry, prompts, options)


def _parse(path: Path) -> dict[str, Any]:
    """The JSON of a sample; SourceError for unknown contents."""
    try:
        entry = parse_json(read_bytes(path, MAX_TEXT).decode("utf-8"))
    except ValueError as error:
        raise SourceError(f"not JSON: {error}", where=path, do="make this sample's cache again") from None
    if not isinstance(entry, dict) or not {"image_latents", "prompt_embeds"} <= entry.keys():
        raise SourceError("not the metadata of a sample", where=path, expected="image_latents and prompt_embeds")
    if (version := entry.pop("version", "1.0")) not in ("1.0", "2.0"):
        raise SourceError("an unknown version of the layout", where=path, expected="1.0 or 2.0", found=version)
    if unknown := sorted(entry.keys() - KINDS):
        raise SourceError("a cache of another model, such as FLUX", where=path, found=", ".join(unknown))
    for kind, value in entry.items():
        is_hash = isinstance(value, str) and HASH.fullmatch(value)
        if not is_hash and not (kind == "img_shapes" and isinstance(value, list)):
            raise SourceError(f"{kind} is not the name of a file", where=path, expected="a hash", found=value)
    return entry


def _shared(folder: Path, samples: Mapping[Path, Mapping[str, Any]]) -> Iterator[tuple[SourceError, set[Path]]]:
    """Files that several samples share although at most one of them can own it, as errors with these samples."""
    users: dict[tuple[str, str], set[Path]] = defaultdict(set)
    for path, entry in samples.items():
        for kind in TENSORS:
            if kind in entry:
                users[kind, entry[kind]].add(path)
    for (kind, digest), paths in users.items():
        where, names = folder / kind / f"{digest}.pt", ", ".join(path.name for path in sorted(paths))
        if kind in MASKS and len({samples[path].get("control_latents") for path in paths}) > 1:
            what = "samples with different control images share these embeddings; they belong to the last one"
        elif kind not in MASKS and len(paths) > 1 and len(digest) % MD5_DIGITS:
            what = "samples share these latents under a perceptual hash, which collides for different images"
        else:
            continue
        do = "run `qwen-cache build` on the images, or skip these samples with --on-error skip"
        yield SourceError(what, where=where, found=names, do=do), paths


def _found_sample(
    folder: Path, path: Path, entry: Mapping[str, Any], prompts: Mapping[str, str], options: Options
) -> FoundSample:
    name = path.stem.removesuffix("_metadata")
    digests = entry["prompt_embeds"], name[-MD5_DIGITS:]
    prompt = next((prompts[digest] for digest in digests if digest in prompts), "")
    return FoundSample(name, str(path), lambda: _read(folder, path, entry, prompt, options))


def _read(folder: Path, path: Path, entry: Mapping[str, Any], prompt: str, options: Options) -> ImportedSample:
    def load(kind: str, shape: str) -> torch.Tensor:
        file = folder / kind / f"{entry[kind]}.pt"
        return check_tensor(load_pickled(file, str(file)), shape, str(file))

    tensors = {}
    for kind in TENSORS:
        if kind in entry:
            tensors[kind] = load(kind, "[L, D]" if kind in MASKS else "[S, 64]")
            if (mask := MASKS.get(kind)) in entry:
                tensors[kind] = unpad(tensors[kind], load(str(mask), "[L]"), f"{path}: {mask}")
    shapes = entry.get("img_shapes")
    if shapes is None:
        img_shapes = _shapes_from_sizes(tensors, _controls(entry), options, str(path))
    else:
        rows = shapes if isinstance(shapes, list) else load("img_shapes", "[N, 3]").tolist()
        img_shapes = _stored_shapes(rows, str(path))
    return ImportedSample(prompt, img_shapes, tensors)


def _controls(entry: Mapping[str, Any]) -> int:
    """The number of controls; their hashes, each as long as the target's, are concatenated."""
    return len(entry.get("control_latents", "")) // len(entry["image_latents"])


def _stored_shapes(rows: list[Any], where: str) -> ImgShapes:
    """`(1, h, w)` of each image; rows with 3 channels are in pixels."""
    shapes = []
    for row in rows:
        numbers = isinstance(row, list) and len(row) == 3 and all(isinstance(n, (int, float)) for n in row)
        if (
            not numbers
            or row[0] not in (1, 3)
            or not all(n > 0 and (isinstance(n, int) or n.is_integer()) for n in row)
        ):
            expected = "[1, h, w] in tokens or [3, height, width] in pixels"
            raise SourceError("img_shapes is not a list of sizes", where=where, expected=expected, found=row)
        scale = PIXELS_PER_TOKEN if row[0] == 3 else 1
        shapes.append((1, int(row[1]) // scale, int(row[2]) // scale))
    return tuple(shapes)


def _shapes_from_sizes(tensors: Mapping[str, torch.Tensor], controls: int, options: Options, where: str) -> ImgShapes:
    """The one choice among the user's image sizes that fits the numbers of tokens; SourceError for none or several."""
    if not options.image_sizes:
        raise SourceError(
            "this release of qwen-image-finetune does not store the sizes of the images",
            where=where,
            do="give all sizes that occur, as in --image-size 832x576 (width and height after resizing)",
        )
    sizes = [(1, h, w) for h, w in dict.fromkeys(options.image_sizes)]
    if len(sizes) ** controls > MAX_CHOICES:
        raise SourceError(
            "too many image sizes for this many controls", where=where, found=f"{len(sizes)} and {controls}"
        )
    target = len(tensors["image_latents"])
    control = len(tensors["control_latents"]) if "control_latents" in tensors else 0
    first = [shape for shape in sizes if token_count([shape]) == target]
    rest = [some for some in itertools.product(sizes, repeat=controls) if token_count(some) == control]
    if len(first) != 1 or len(rest) != 1:
        raise SourceError(
            "--image-size does not determine the sizes of this sample's images",
            where=where,
            expected=f"one choice with {target} tokens, and one of {controls} controls with {control}",
            found=f"{len(first)} and {len(rest)}",
            do="give all sizes that occur; if a size and its transpose do, run `qwen-cache build` on the images",
        )
    return (*first, *rest[0])


def _prompts(folder: Path | None) -> dict[str, str]:
    """The captions below `folder` by their MD5, as qwen-image-finetune reads and hashes them."""
    if folder is None:
        return {}
    if not folder.is_dir():
        raise SourceError("no such folder", where=folder, do="give the folder of the .txt files to --captions")
    prompts = {}
    for path in sorted(folder.rglob("*.txt")):
        try:
            text = io.StringIO(read_bytes(path, MAX_TEXT).decode("utf-8"), newline=None).read().strip()
        except UnicodeDecodeError as error:
            raise SourceError(f"not UTF-8: {error}", where=path) from None
        prompts[hashlib.md5(text.encode("utf-8"), usedforsecurity=False).hexdigest()] = text
    return prompts


# ---- qflux -----------------------------------------------------------------------------------------------------------
# Caches for qwen-image-finetune ("qflux"), its v2.0: the mirror of `qwen_cache.trainers.qflux`.
#
# Read in tsiendragon/qwen-image-finetune 460ba1a: data/cache_manager.py, data/dataset.py, data/preprocess.py. Its
# dataset opens the images of a sample also when it is cached: their MD5 names the sample's JSON, and their sizes after
# its preprocessing are `img_shapes`. So the export has an image for each: the thumbnail if the cache has one, else
# grey, in the size of the latents, which its settings keep. All samples have the same sizes, since its preprocessing
# knows only one. Embeddings are stored under the prompt's MD5 there; here under the sample's key where samples with
# other images have the same prompt.

GREY = (128, 128, 128)
DROPPED = ["empty_prompt_embeds", "empty_prompt_embeds_mask"]


def refusing(samples: Iterable[SampleMeta]) -> Callable[[SampleMeta], Refusal | None]:
    """One size for all targets, one for each control: those of most samples; at least one control."""
    sizes = Counter(tuple(meta.img_shapes) for meta in samples if len(meta.img_shapes) > 1).most_common(1)

    def refusal(meta: SampleMeta) -> Refusal | None:
        if len(meta.img_shapes) < 2:
            return Refusal("it has no control image, which qwen-image-finetune needs", "leave it out")
        if tuple(meta.img_shapes) != sizes[0][0]:
            what = "its images have other sizes than those of most samples; qwen-image-finetune has one for all"
            return Refusal(what, "build a cache of images that were cropped to one size")
        return None

    return refusal


def write(export: Export) -> None:
    """The images and prompts in `data/`, the tensors in `cache/`, and the settings that belong to both."""
    prompts = Counter(_prompt(sample) for _, sample in export.samples)
    for kind in ("images", "control_images"):
        (export.folder / "data" / kind).mkdir(parents=True)
    for named in export.samples:
        hashes = _write_images(export.folder / "data", named)
        prompt = _prompt(named.sample)
        digest = hashlib.md5(prompt.encode(), usedforsecurity=False).hexdigest()
        name = digest if prompts[prompt] == 1 else named.sample.key
        _write_tensors(export.folder / "cache", named.sample, "".join([*hashes, digest]), name)
        export.on_sample()
    (export.folder / "qflux.yaml").write_text(_settings(export), encoding="utf-8")


def _prompt(sample: Sample) -> str:
    """The prompt as it is read from a text file there."""
    return io.StringIO(sample.prompt, newline=None).read().strip()


def _write_images(folder: Path, named: NamedSample) -> list[str]:
    """Images of the latents' sizes, and the prompt; the MD5 of the target and of the first control."""
    stem, sample = named
    names = [f"images/{stem}.png", f"control_images/{stem}.png"]
    names += [f"control_images/{stem}_control_{i}.png" for i in range(1, len(sample.img_shapes) - 1)]
    digests = []
    for i, (name, image) in enumerate(zip(names, _images(sample), strict=True)):
        about = PngInfo()
        about.add_text("sample", f"{sample.key} {i}")  # no two files are equal
        image.save(folder / name, pnginfo=about)
        digests.append(hashlib.md5((folder / name).read_bytes(), usedforsecurity=False).hexdigest())
    (folder / "images" / f"{stem}.txt").write_text(sample.prompt, encoding="utf-8", newline="")
    return digests[:2]


def _images(sample: Sample) -> list[Image.Image]:
    sizes = [(PIXELS_PER_TOKEN * w, PIXELS_PER_TOKEN * h) for _, h, w in sample.img_shapes]
    if "thumbnails" not in sample:
        return [Image.new("RGB", size, GREY) for size in sizes]
    return [image.convert("RGB").resize(size) for image, size in zip(stored_thumbnails(sample), sizes, strict=True)]


def _write_tensors(folder: Path, sample: Sample, json_name: str, text_name: str) -> None:
    """A file for each tensor, and the JSON that names them."""
    tensors = {name: sample[name].clone() for name in TOOL.holds if name in sample}  # a view would save its shard
    entry: dict[str, object] = {"version": "2.0"}
    for name, tensor in tensors.items():
        stored = {name: tensor}
        if name.endswith("prompt_embeds"):
            stored[f"{name}_mask"] = torch.ones(len(tensor), dtype=torch.float16)  # as it stores them
        for kind, value in stored.items():
            entry[kind] = text_name if "prompt" in kind else sample.key
            path = folder / kind / f"{entry[kind]}.pt"
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(value, path)
    entry["img_shapes"] = [[3, PIXELS_PER_TOKEN * h, PIXELS_PER_TOKEN * w] for _, h, w in sample.img_shapes]
    (folder / "metadata").mkdir(parents=True, exist_ok=True)
    (folder / "metadata" / f"{json_name}.json").write_text(json.dumps(entry, indent=2), encoding="utf-8")


def _settings(export: Export) -> str:
    sizes = [[PIXELS_PER_TOKEN * h, PIXELS_PER_TOKEN * w] for _, h, w in export.samples[0].sample.img_shapes]
    has_empty = all("empty_prompt_embeds" in sample for _, sample in export.samples)
    settings = {
        "data": {
            "class_path": "qflux.data.dataset.ImageDataset",
            "init_args": {
                "dataset_path": [str(export.final / "data")],
                "caption_dropout_rate": 0.1 if has_empty else 0.0,
                "prompt_empty_drop_keys": DROPPED if has_empty else [],
                "processor": {
                    "class_path": "qflux.data.preprocess.ImageProcessor",
                    "init_args": {"process_type": "resize", "target_size": sizes[0], "controls_size": sizes[1:]},
                },
            },
        },
        "cache": {"use_cache": True, "cache_dir": str(export.final / "cache")},
    }
    return yaml.safe_dump(settings, sort_keys=False)


TOOL = Tool(
    "qwen-image-finetune",
    ALWAYS | {"empty_prompt_embeds"},
    refusing,
    write,
    "python -m qflux.main --config CONFIG, with the sections of {folder}/qflux.yaml",
)
