"""`ground` (experimental): the mask of a phrase in an image."""

from __future__ import annotations

from pathlib import Path

from qwen_cache.options import (
    CONFIG,
    INPUT,
    JSON,
    MODEL,
    MODEL_PATH,
    OUTPUT,
    SET,
    TEXT_DEVICE,
    TEXT_DTYPE,
    TEXT_ENCODER,
    command,
    option,
)
from qwen_cache.settings.given import Given
from qwen_cache.terminal import print_done, print_json


@command(
    page="howto/train-with-edit-masks.md",
    examples=[
        "qwen-cache ground --image photo.jpg --phrase 'the red car'",
        "qwen-cache ground --image photo.jpg --prompt 'remove [[the car]]' \\\n"
        "     --head mask_head.safetensors --out mask.png",
    ],
)
def ground(
    image: list[Path] = option(INPUT, "The image; repeat it for more. The mask is for the first.", "FILE", default=...),
    phrase: str | None = option(INPUT, "The words to find; with --prompt, a part of it.", "TEXT"),
    prompt: str | None = option(INPUT, "An edit prompt. Without --phrase: the words in [[ ]], or all.", "TEXT"),
    model: Given | None = MODEL_PATH,
    text_encoder: Given | None = TEXT_ENCODER,
    dtype: Given | None = TEXT_DTYPE,
    head: Path | None = option(MODEL, "A mask head of `qwen-train mask-head`. Without it: a heat map.", "FILE"),
    sam: Path | None = option(MODEL, "A folder with SAM or SAM 2, to refine the mask.", "FOLDER"),
    text_device: Given | None = TEXT_DEVICE,
    out: Path = option(
        OUTPUT,
        "The PNG of the mask; NAME-overlay.png shows it over the image.",
        "FILE",
        default=Path("mask.png"),
    ),
    json: bool = JSON,
    config: Path | None = CONFIG,
    set_: list[str] | None = SET,
) -> int:
    """Experimental: show where in an image the text encoder attends for a phrase. Loads only the text encoder."""
    from qwen_cache.experimental.grounding import GroundingQuery, write_mask
    from qwen_cache.settings.load import load_config

    settings = load_config(config, set_, [model, text_encoder, text_device, dtype])
    facts, text = write_mask(settings, image, GroundingQuery.of(phrase, prompt), out, head, sam)
    print_json(facts) if json else print_done(text)
    return 0
