"""`export`: a LoRA for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from qwen_cache.extras import require
from qwen_cache.options import CONFIG, JSON, MODEL_PATH, OUTPUT, SET, TRANSFORMER, argument, command, option
from qwen_cache.settings.given import Given
from qwen_cache.terminal import print_done, print_json, print_next
from qwen_train.cli.best import STEP, chosen


@command(
    page="howto/generate-and-publish.md",
    examples=[
        "qwen-train export out --to comfyui --out cats.safetensors",
        "qwen-train export out --to merged --out merged",
    ],
)
def export(
    source: Path = argument("LORA", "A LoRA: its file, or the folder of a run.", default=...),
    model: Given | None = MODEL_PATH,
    transformer: Given | None = TRANSFORMER,
    step: str | None = STEP,
    to: Literal["diffusers", "comfyui", "peft", "merged"] = option(
        OUTPUT, "The format; merged: the LoRA added to the model's weights.", default=...
    ),
    out: Path = option(
        OUTPUT, "The output: a .safetensors file; with --to peft or merged, a folder.", "PATH", default=...
    ),
    json: bool = JSON,
    config: Path | None = CONFIG,
    set_: list[str] | None = SET,
) -> int:
    """Convert a LoRA for other programs, or merge it into the model's weights."""
    from qwen_cache.settings.load import load_config
    from qwen_train.lora.files import check_export, find_lora
    from qwen_train.run import METRICS_NAME, in_one_process

    given = model or transformer or config or set_
    named = load_config(config, set_, [model, transformer]).model if given else None
    require("torch")
    in_one_process("export")
    check_export(to, out)
    lora_of = chosen(source, step)
    find_lora(lora_of)
    from qwen_train.lora import export as lora

    written = lora.export(lora_of, to, out, named)
    if json:
        print_json({"format": to, "out": str(written)})
        return 0
    print_done(written)
    if (source / METRICS_NAME).is_file():
        print_next(["qwen-train", "push", str(source), "OWNER/NAME", *(["--step", step] if step else [])])
    return 0
