"""A diffusers folder of Qwen-Image(-Edit), on disk or on the hub: which pipeline it is, and whether its parts are
there.

Only the parts that are asked for are downloaded or looked at: a builder never touches the transformer, a trainer
never the encoders. Imports neither torch nor diffusers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from qwen_cache.errors import ModelError

PipelineName = Literal["QwenImageEditPipeline", "QwenImageEditPlusPipeline", "QwenImagePipeline"]
PIPELINES: tuple[PipelineName, ...] = ("QwenImageEditPipeline", "QwenImageEditPlusPipeline", "QwenImagePipeline")


@dataclass(frozen=True)
class ModelFolder:
    """A local folder with `model_index.json`; `name` is what the user called it."""

    name: str
    path: Path
    pipeline: PipelineName

    def part(self, name: str) -> Path:
        """The folder of a part, such as `vae`."""
        return self.path / name

    @property
    def takes_controls(self) -> bool:
        return self.pipeline != "QwenImagePipeline"

    @property
    def text_width(self) -> int:
        """The width of the text encoder's embeddings."""
        config = json.loads((self.part("text_encoder") / "config.json").read_text(encoding="utf-8"))
        return int(config.get("text_config", config)["hidden_size"])

    @property
    def max_controls(self) -> int | None:
        """How many control images the pipeline takes; None is any number."""
        return {"QwenImagePipeline": 0, "QwenImageEditPipeline": 1}.get(self.pipeline)


def open_model(name: str | None, parts: Sequence[str], revision: str | None = None) -> ModelFolder:
    """Find the model, download the `parts` that are missing, and check that they are there."""
    if name is None:
        raise ModelError("no model is named", do="give --model FOLDER_OR_REPOSITORY, or model.path in qwen.yaml")
    path = Path(name) if Path(name).is_dir() else _download(name, parts, revision)
    index = path / "model_index.json"
    if not index.is_file():
        do = "name the folder that has vae/, text_encoder/ and transformer/ in it, or a repository on the hub"
        raise ModelError("not a diffusers model folder: it has no model_index.json", where=path, do=do)
    pipeline = json.loads(index.read_text(encoding="utf-8")).get("_class_name")
    if pipeline not in PIPELINES:
        raise ModelError("not a Qwen-Image model", where=index, expected=" or ".join(PIPELINES), found=pipeline)
    wanted = [part for part in parts if not (part == "processor" and pipeline == "QwenImagePipeline")]
    if missing := [part for part in wanted if not (path / part).is_dir()]:
        found = ", ".join(sorted(p.name for p in path.iterdir() if p.is_dir())) or "no folders"
        raise ModelError(
            f"the model has no {' and no '.join(missing)}",
            where=path,
            expected=", ".join(wanted),
            found=found,
            do="download the whole model, or name another with --model",
        )
    return ModelFolder(name, path, pipeline)


def _download(name: str, parts: Sequence[str], revision: str | None) -> Path:
    if name.count("/") != 1 or name.startswith((".", "/", "~")) or Path(name).is_file():
        raise ModelError(
            "this is one file, and no folder" if Path(name).is_file() else "no such folder",
            where=name,
            do="give a diffusers folder, or a repository such as Qwen/Qwen-Image-Edit-2509",
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    patterns = ["model_index.json", *(f"{part}/*" for part in parts)]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelError("neither a folder here nor a repository on the hub", where=name, do=str(error)) from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"no such folder here, and the hub could not be reached: {first_line}", where=name) from None
