"""What a run says of itself: `metrics.jsonl`, one line per logged step, and the tracker's curves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qwen_cache.config import LoggingConfig
from qwen_cache.format.directory import write_durably

METRICS_NAME = "metrics.jsonl"


class MetricsLog:
    """Appends to metrics.jsonl, from which a resumed run first drops the steps that it will do again."""

    def __init__(self, folder: Path, accelerator: Any, config: LoggingConfig, done: int) -> None:
        self.accelerator, self.every_steps = accelerator, config.every_steps
        self.main = bool(accelerator.is_main_process)
        if not self.main:
            return
        path = folder / METRICS_NAME
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= done]
        write_durably(path, "".join(f"{line}\n" for line in kept).encode("utf-8"))
        self.file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)
        accelerator.init_trackers("logs")

    def write(self, step: int, **values: float) -> None:
        if not self.main or step % self.every_steps:
            return
        self.file.write(json.dumps({"step": step, **values}) + "\n")
        self.file.flush()
        self.accelerator.log(values, step=step)

    def close(self) -> None:
        if self.main:
            self.file.close()
            self.accelerator.end_training()
