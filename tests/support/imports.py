"""Caches of other trainers, written as their published code writes them, and their import."""

from __future__ import annotations

import hashlib
import io
import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import QwenImagePipeline
from safetensors.torch import save_file

from .commands import Result, run

WIDTH = 64  # of the tiny model's text encoder
MODEL = "Qwen/Qwen-Image-Edit-2509"


@dataclass(frozen=True)
class TrainerSample:
    """A sample before a trainer writes it: latents `[16, 1, H, W]` of the target and of each control."""

    name: str
    prompt: str
    latents: tuple[torch.Tensor, ...]
    embeds: torch.Tensor
    empty: torch.Tensor

    @property
    def shapes(self) -> list[list[int]]:
        return [[1, latents.shape[2] // 2, latents.shape[3] // 2] for latents in self.latents]

    @property
    def packed(self) -> list[torch.Tensor]:
        """The latents as diffusers packs them."""
        return [QwenImagePipeline._pack_latents(z[None], 1, 16, *z.shape[2:])[0] for z in self.latents]


def make(name: str, prompt: str, sizes: Sequence[tuple[int, int]], length: int, seed: int) -> TrainerSample:
    """A random sample. Sizes are (h, w) in tokens; the first 3 rows of the empty prompt equal those of the prompt."""
    generator = torch.Generator().manual_seed(seed)
    latents = tuple(torch.randn(16, 1, 2 * h, 2 * w, generator=generator).bfloat16() for h, w in sizes)
    embeds = torch.randn(length, WIDTH, generator=generator).bfloat16()
    empty = torch.cat([embeds[:3], torch.randn(4, WIDTH, generator=generator).bfloat16()])
    return TrainerSample(name, prompt, latents, embeds, empty)


def write_musubi(folder: Path, samples: Sequence[TrainerSample], arch: str = "qie") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for sample in samples:
        latents = {}
        for i, z in enumerate(sample.latents):
            _, frames, height, width = z.shape
            role = f"control_{i - 1}_" if i else ""
            latents[f"latents_{role}{frames}x{height}x{width}_{str(z.dtype)[6:]}"] = z
        common = {"architecture": "qwen_image_edit" if arch == "qie" else "qwen_image", "format_version": "1.0.1"}
        stem = folder / sample.name
        save_file(latents, f"{stem}_0800x0600_{arch}.safetensors", {**common, "width": "800", "height": "600"})
        text = {f"varlen_vl_embed_{str(sample.embeds.dtype)[6:]}": sample.embeds}
        save_file(text, f"{stem}_{arch}_te.safetensors", {**common, "caption1": sample.prompt})
    return folder


def md5(text: str) -> str:
    return hashlib.md5(text.encode("utf-8")).hexdigest()


def write_qflux(
    folder: Path, samples: Sequence[TrainerSample], version: str | None = "2.0", shapes: str = "json", padding: int = 2
) -> Path:
    """Write the cache; `shapes` are stored as `json` (in pixels), as `tensor`, or not at all (`none`)."""
    for sample in samples:
        image, prompt = md5(f"{sample.name}.png"), md5(sample.prompt)
        controls = [md5(f"{sample.name}-{i}.png") for i in range(len(sample.latents) - 1)]
        main = image + "".join(controls[:1]) + prompt
        tensors = {"image_latents": (sample.packed[0], image)}
        if controls:
            tensors["control_latents"] = (torch.cat(sample.packed[1:]), "".join(controls))
        for kind, embeds in {"prompt_embeds": sample.embeds, "empty_prompt_embeds": sample.empty}.items():
            mask = torch.tensor([1] * len(embeds) + [0] * padding)
            tensors[f"{kind}_mask"] = (mask, prompt)
            tensors[kind] = (torch.cat([embeds, embeds.new_zeros(padding, WIDTH)]), prompt)
        metadata: dict[str, Any] = {"version": version} if version else {}
        if shapes == "tensor":
            tensors["img_shapes"] = (torch.tensor(sample.shapes).to(torch.int32), main)
        for kind, (tensor, digest) in tensors.items():
            (folder / kind).mkdir(parents=True, exist_ok=True)
            torch.save(tensor.to(torch.float16), folder / kind / f"{digest}.pt")
            metadata[kind] = digest
        if shapes == "json":
            metadata["img_shapes"] = [[3, 16 * h, 16 * w] for _, h, w in sample.shapes]
        (folder / "metadata").mkdir(exist_ok=True)
        (folder / "metadata" / f"{main}.json").write_text(json.dumps(metadata, indent=2), encoding="utf-8")
    return folder


def write_pieces(folder: Path, items: Sequence[dict[str, Any]], per_shard: int = 2) -> None:
    folder.mkdir(parents=True)
    database = sqlite3.connect(folder / "metadata.db")
    database.execute("CREATE TABLE fingerprint(value)")
    database.execute("INSERT INTO fingerprint VALUES('0123456789abcdef')")
    database.execute("CREATE TABLE items(shard, shard_index)")
    for i, item in enumerate(items):
        shard, index = divmod(i, per_shard)
        if not index:
            database.execute(f"CREATE TABLE shard_{shard}(offset, size)")
        buffer = io.BytesIO()
        torch.save(item, buffer)
        with open(folder / f"shard_{shard}.bin", "ab") as file:
            entry = (file.tell(), file.write(buffer.getbuffer()))
        database.execute("INSERT INTO items VALUES(?, ?)", (shard, index))
        database.execute(f"INSERT INTO shard_{shard} VALUES (?, ?)", entry)
    database.commit()
    database.close()


def write_diffusion_pipe(folder: Path, samples: Sequence[TrainerSample], mask: torch.Tensor | None = None) -> Path:
    for size in {tuple(sample.shapes[0]) for sample in samples}:
        bucket = folder / f"cache_{size[2] / size[1]:.3f}x{16 * size[2]}x{16 * size[1]}x1"
        latents, text = [], []
        for sample in (s for s in samples if tuple(s.shapes[0]) == size):
            spec = [None, f"/data/{sample.name}.png"]
            item: dict[str, Any] = {"latents": sample.latents[0]}
            if len(sample.latents) > 1:
                item["control_latents"] = sample.latents[1]
            latents.append({**item, "image_spec": spec, "mask": mask, "caption": [sample.prompt]})
            text.append({"prompt_embeds": sample.embeds, "image_spec": spec})
        write_pieces(bucket / "latents", latents)
        write_pieces(bucket / "text_embeddings_1", text)
    return folder


def import_(tool: str, source: Path, out: Path, *options: str | Path, model: str = MODEL) -> Result:
    return run("qwen-cache", "import", tool, source, "--out", out, "--model", model, *options)


def imported(tool: str, source: Path, out: Path, *options: str | Path, model: str = MODEL) -> Path:
    result = import_(tool, source, out, *options, model=model)
    assert result.code == 0, result.stderr
    return out
