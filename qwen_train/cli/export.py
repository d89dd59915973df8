"""Terminal front end of `qwen-train export`."""

from __future__ import annotations

from pathlib import Path

from qwen_cache.extras import require
from qwen_cache.settings.sections import ModelConfig
from qwen_cache.terminal import print_done, print_json
from qwen_train.lora.files import check_export, find_lora
from qwen_train.run import in_one_process


def run_export(source: Path, to: str, out: Path, model: ModelConfig | None, *, as_json: bool) -> int:
    """Convert a LoRA for other programs; the exit code."""
    require("torch")
    in_one_process("export")
    check_export(to, out)
    find_lora(source)
    from qwen_train.lora.export import export

    written = export(source, to, out, model)
    if as_json:
        print_json({"format": to, "out": str(written)})
    else:
        print_done(written)
    return 0
