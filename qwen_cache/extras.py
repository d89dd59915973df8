"""This package: its version, and its extras with their purpose and requirements, from metadata. Imports nothing heavy.

`pyproject.toml` alone defines the requirements. `advice` names the extra that installs a missing module; `require`
checks for a module before a command starts its work. `install_command` is the command that installs an extra from
where this package came from. A source tree that was never installed has no metadata; its extras are unknown.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import url2pathname

from qwen_cache.text import shell_line

if TYPE_CHECKING:
    from packaging.requirements import Requirement

PACKAGE = "qwen-cache"
__version__ = "0.1.0"
"""The version of both packages."""
EXTRAS = {
    "build": "`qwen-cache build`, `import` and `ground`",
    "train": "`qwen-train`",
    "s3": "sources and caches in S3 buckets",
    "gs": "sources and caches in Google Cloud Storage",
    "http": "sources and caches on http and https servers",
    "hf": "sources and caches on the Hugging Face hub",
    "heic": "HEIC images in a source",
    "jxl": "JPEG XL images in a source",
    "ray": "`build --ray`: encoding on a cluster",
    "client": "`build --at` and `qwen-train run --encode-at`: encoders on another machine",
    "serve": "`qwen-cache serve`, and `qwen-train run --encode-on-the-fly`",
    "ui": "`qwen-cache ui`: a local web page",
    "prodigy": "optimizer.name: prodigy",
    "gguf": "GGUF files as model.transformer",
    "optimizers": "optimizer.name: Lion, CAME, AdEMAMix and schedule-free optimizers, by import path",
    "quantization": "nf4 weights, folders saved quantised, train.stochastic_rounding, and optimizer.name: adamw8bit",
}
"""The extras in pyproject.toml except `all` and those for this project's own demo, docs and tests."""
PREFERRED = {"qwen-train": "train"}
"""The extra that each program recommends where several install a module."""


def installed(name: str) -> str | None:
    """The version of a package, without importing it; None when it is not installed, or only its remains are."""
    try:
        return metadata.version(name) or None
    except (metadata.PackageNotFoundError, KeyError):
        return None


def requirements() -> tuple[list[Requirement], dict[str, list[Requirement]]]:
    """The requirements of this package without extras, and those of each extra."""
    from packaging.requirements import Requirement

    try:
        needs = [Requirement(text) for text in metadata.requires(PACKAGE) or ()]
    except metadata.PackageNotFoundError:  # run from a source tree
        return [], {}
    always = [need for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    extras = {name: list(_of_extra(name, needs)) for name in EXTRAS}
    return always, {name: own for name, own in extras.items() if own}


def _of_extra(extra: str, needs: list[Requirement]) -> Iterator[Requirement]:
    """The requirements of an extra, and of the extras of this package that it includes."""
    for need in needs:
        if need.marker is None or need.marker.evaluate({"extra": ""}) or not need.marker.evaluate({"extra": extra}):
            continue
        if need.name != PACKAGE:
            yield need
        for other in need.extras if need.name == PACKAGE else ():
            yield from _of_extra(other, needs)


def install_command(extra: str) -> str:
    """The command that adds an extra to this installation: from its checkout, wheel or repository, else by name.

    Where it came from is in direct_url.json (PEP 610); the file is missing after an installation from an index.
    """
    try:
        origin = json.loads(metadata.distribution(PACKAGE).read_text("direct_url.json") or "{}")
    except metadata.PackageNotFoundError:
        origin = {"url": Path(__file__).parents[1].as_uri(), "dir_info": {}}
    url = str(origin.get("url", ""))
    if vcs := origin.get("vcs_info"):
        revision = f"@{vcs['requested_revision']}" if "requested_revision" in vcs else ""
        return shell_line(["pip", "install", f"{PACKAGE}[{extra}] @ {vcs['vcs']}+{url}{revision}"])
    path = url2pathname(urlsplit(url).path) if url.startswith("file:") else ""
    if not path or not Path(path).exists():
        return shell_line(["pip", "install", f"{PACKAGE}[{extra}]"])
    editable = ["-e"] if origin.get("dir_info", {}).get("editable") else []
    return shell_line(["pip", "install", *editable, f"{path}[{extra}]"])


def require(module: str) -> None:
    """ModuleNotFoundError when the module is not installed, before any work is done; it is not imported."""
    if find_spec(module) is None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)


def advice(module: str, program: str) -> str | None:
    """The command that installs an extra with this module; None when no extra has it."""
    _, extras = requirements()
    candidates = [extra for extra, needs in extras.items() if module in {need.name.replace("-", "_") for need in needs}]
    if not candidates:
        return None
    preferred = PREFERRED.get(program)
    return install_command(preferred if preferred in candidates else candidates[0])
