"""Terminal front end of `qwen-train decode`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from qwen_cache.console import plural, print_done, print_json
from qwen_cache.extras import require
from qwen_cache.models.folder import open_model
from qwen_cache.settings.given import Given
from qwen_cache.settings.load import CONFIG_NAME, load_config
from qwen_train.latents import latents_files, latents_folder
from qwen_train.launch import in_one_process
from qwen_train.run_folder import METRICS_NAME


def run_decode(
    folder: Path | None,
    model: Given | None,
    vae_device: str,
    config: Path | None,
    assignments: Sequence[str],
    *,
    as_json: bool,
) -> int:
    """Decode the latents of validation images; the exit code."""
    require("torch")
    in_one_process("decode")
    saved = folder / CONFIG_NAME if folder is not None and (folder / CONFIG_NAME).is_file() else None
    settings = load_config(config or saved, assignments, [model])
    folder = folder or Path(settings.train.output_dir)
    latents_files(folder)
    vae = open_model(settings.model.path, ("vae",), settings.model.revision)
    from qwen_cache.models.devices import choose_device, torch_dtype
    from qwen_train.inference.decode import decode_folder
    from qwen_train.report import write_report

    device, dtype = choose_device(vae_device, "--vae-device"), torch_dtype(settings.predict.dtype)
    made = decode_folder(folder, vae, device, dtype)
    if (folder / METRICS_NAME).is_file():
        write_report(folder)
    if as_json:
        print_json({"folder": str(folder), "images": [str(path) for path in made]})
        return 0
    print_done(f"{plural(len(made), 'new image')} in {latents_folder(folder)}")
    return 0
