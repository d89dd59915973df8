"""`report`: the page of a run, written again."""

from __future__ import annotations

from pathlib import Path

from qwen_cache.options import CONFIG, JSON, SET, command, setting_argument
from qwen_cache.settings.given import Given
from qwen_cache.terminal import print_done, print_json


@command(page="howto/watch-and-resume.md", examples=["qwen-train report", "qwen-train report runs/cats"])
def report(
    folder: Given | None = setting_argument("train.output_dir", "FOLDER", "The output folder of a run."),
    json: bool = JSON,
    config: Path | None = CONFIG,
    set_: list[str] | None = SET,
) -> int:
    """Write report.html again: curves, settings and images of a run on one page."""
    from qwen_cache.settings.load import load_config
    from qwen_train.run import in_one_process
    from qwen_train.training.report import write_report

    path = Path(load_config(config, set_, [folder]).train.output_dir)
    in_one_process("report")
    written = write_report(path)
    print_json({"report": str(written)}) if json else print_done(written)
    return 0
