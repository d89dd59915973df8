"""Write schemas/examples: valid manifests and sample metadata, and for each rule that JSON can break one file that
breaks it.

    python tools/make_examples.py

A file in `invalid` is named by the rule that it breaks: `F2-unknown-version.cache.json`. The test suite holds parser
and schemas to all of them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qwen_cache.format.identity import Inputs, content_hash, dataset_identity
from qwen_cache.format.manifest import IndexFile, Manifest, Recipe, Shard
from qwen_cache.format.sample import SampleMeta, TensorSpec

EXAMPLES = Path(__file__).parents[1] / "schemas" / "examples"
RECIPE = {"encoder_version": 1, "pipeline": "QwenImageEditPlusPipeline", "dtype": "bfloat16"}


def digest(text: str) -> str:
    return content_hash(text.encode())


def manifest(format_version: int, samples: int) -> dict[str, Any]:
    keys = [digest(f"sample {i}") for i in range(samples)]
    shards = (Shard(f"{digest('shard')}.tar", samples, 10240),) if samples else ()
    made = Manifest(
        format_version,
        {"default": Recipe(RECIPE, samples, dataset_identity(keys))},
        IndexFile(samples, 4096, digest("index")),
        shards,
        {"qwen-cache": "0.1.0"},
    )
    return json.loads(made.to_bytes())


def sample(format_version: int, controls: int, mask: bool) -> dict[str, Any]:
    shapes = ((1, 4, 6), *((1, 2, 3 + i) for i in range(controls)))
    tensors = {"image_latents": (24, 64), "control_latents": (sum(h * w for _, h, w in shapes[1:]), 64)}
    tensors |= {"prompt_embeds": (30, 3584), "empty_prompt_embeds": (5 if format_version == 2 else 27, 3584)}
    if not controls:
        del tensors["control_latents"]
    specs = {name: TensorSpec("BF16", shape, digest(name)) for name, shape in tensors.items()}
    if mask:
        specs["edit_mask"] = TensorSpec("F32", (24,), digest("edit_mask"))
    inputs = Inputs(
        digest("target"), tuple(digest(f"control {i}") for i in range(controls)), digest("mask") if mask else None
    )
    prefix = 22 if format_version == 2 and controls else 0
    meta = SampleMeta(digest("recipe"), inputs, "make it 黑白", shapes, prefix, specs)
    return json.loads(meta.to_bytes(format_version))


def broken(value: dict[str, Any], change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    value = copy.deepcopy(value)
    change(value)
    return value


def rename_shard(value: dict[str, Any]) -> None:
    value["shards"][0]["name"] = "../" + value["shards"][0]["name"]


CACHE, SAMPLE = manifest(2, 3), sample(2, 1, mask=True)
VALID = {
    "empty.cache.v1.json": manifest(1, 0),
    "small.cache.v1.json": manifest(1, 3),
    "empty.cache.v2.json": manifest(2, 0),
    "small.cache.v2.json": CACHE,
    "ignorable-key.cache.v2.json": {**CACHE, "x-notes": {"must_understand": False, "text": "made on a Tuesday"}},
    "edit.sample.v1.json": sample(1, 1, mask=False),
    "three-controls.sample.v1.json": sample(1, 3, mask=False),
    "edit.sample.v2.json": SAMPLE,
    "three-controls.sample.v2.json": sample(2, 3, mask=False),
    "text-to-image.sample.v2.json": sample(2, 0, mask=False),
}
INVALID = {
    "F1-another-format.cache.v2.json": broken(CACHE, lambda v: v.update(format="webdataset")),
    "F1-no-shards.cache.v2.json": broken(CACHE, lambda v: v.pop("shards")),
    "F1-negative-count.cache.v2.json": broken(CACHE, lambda v: v["index"].update(bytes=-1)),
    "F1-hash-too-short.cache.v2.json": broken(CACHE, lambda v: v["index"].update(xxh3_128="abc")),
    "F2-version-3.cache.v2.json": broken(CACHE, lambda v: v.update(format_version=3)),
    "F2-version-3.sample.v2.json": broken(SAMPLE, lambda v: v.update(format_version=3)),
    "F3-unknown-key.cache.v2.json": {**CACHE, "compression": "zstd"},
    "F3-key-that-must-be-understood.cache.v2.json": {**CACHE, "compression": {"must_understand": True}},
    "F3-unknown-key.sample.v2.json": {**SAMPLE, "caption_language": "en"},
    "F4-counts-disagree.cache.v2.json": broken(CACHE, lambda v: v["index"].update(samples=4)),
    "F4-shard-twice.cache.v2.json": broken(
        CACHE,
        lambda v: (
            v["shards"].append(v["shards"][0]),
            v["index"].update(samples=6),
            v["recipes"]["default"].update(samples=6),
        ),
    ),
    "F5-recipe-changed.cache.v2.json": broken(
        CACHE, lambda v: v["recipes"]["default"]["recipe"].update(dtype="float32")
    ),
    "F6-path-out-of-the-directory.cache.v2.json": broken(CACHE, rename_shard),
    "F6-name-is-not-the-hash.cache.v2.json": broken(CACHE, lambda v: v["shards"][0].update(xxh3_128=digest("another"))),
    "F9-no-prompt.sample.v2.json": broken(SAMPLE, lambda v: v.pop("prompt")),
    "F9-prompt-is-a-number.sample.v2.json": broken(SAMPLE, lambda v: v.update(prompt=7)),
    "F9-mask-is-not-a-hash.sample.v2.json": broken(SAMPLE, lambda v: v["inputs"].update(mask="mask.png")),
    "F10-prompt-changed.sample.v2.json": broken(SAMPLE, lambda v: v.update(prompt="make it red")),
    "F11-no-image-latents.sample.v2.json": broken(SAMPLE, lambda v: v["tensors"].pop("image_latents")),
    "F11-no-control-latents.sample.v2.json": broken(SAMPLE, lambda v: v["tensors"].pop("control_latents")),
    "F11-unknown-tensor.sample.v2.json": broken(
        SAMPLE, lambda v: v["tensors"].update(depth=v["tensors"]["image_latents"])
    ),
    "F11-mask-in-v1.sample.v1.json": broken(
        sample(1, 1, mask=False), lambda v: v["tensors"].update(edit_mask=SAMPLE["tensors"]["edit_mask"])
    ),
    "F12-sides-swapped-in-number.sample.v2.json": broken(SAMPLE, lambda v: v.update(img_shapes=[[1, 4, 7], [1, 2, 3]])),
    "F12-two-frames.sample.v2.json": broken(SAMPLE, lambda v: v.update(img_shapes=[[2, 4, 3], [1, 2, 3]])),
    "F12-no-size.sample.v2.json": broken(SAMPLE, lambda v: v["tensors"]["image_latents"].update(shape=[0, 64])),
    "F12-prefix-too-long.sample.v2.json": broken(SAMPLE, lambda v: v.update(prefix_length=31)),
    "F12-not-a-multiple-of-16.sample.v1.json": broken(sample(1, 1, mask=False), lambda v: v.update(height=65)),
    "F13-half-precision.sample.v2.json": broken(SAMPLE, lambda v: v["tensors"]["prompt_embeds"].update(dtype="F16")),
    "F13-mixed.sample.v2.json": broken(SAMPLE, lambda v: v["tensors"]["prompt_embeds"].update(dtype="F32")),
}


def main() -> None:
    for folder, examples in (("valid", VALID), ("invalid", INVALID)):
        (EXAMPLES / folder).mkdir(parents=True, exist_ok=True)
        for old in (EXAMPLES / folder).glob("*.json"):
            old.unlink()
        for name, value in examples.items():
            text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
            (EXAMPLES / folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
