"""What each extra of this package is for and needs, read from package metadata; nothing heavy is imported.

`pyproject.toml` is the one home of the requirements. `advice` says which extra brings a missing module; `require`
refuses before any work where a command would miss it later. Sources that were never installed have no metadata, so
nothing is known there.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement

PACKAGE = "qwen-cache"
EXTRAS = {
    "build": "`qwen-cache build`, `import` and `ground`",
    "train": "`qwen-train`",
    "s3": "sources and caches in S3 buckets",
    "gs": "sources and caches in Google Cloud Storage",
    "http": "sources and caches behind http and https",
    "hf": "sources and caches on the Hugging Face hub",
    "ray": "`build --ray`: encoding on a cluster",
    "prodigy": "optimizer.name: prodigy",
    "quantization": "model.quantization, and optimizer.name: adamw8bit",
}
"""Of pyproject.toml, but for `all` and those that only this project's own demo, documents and tests need."""
PREFERRED = {"qwen-train": "train"}
"""Which extra each program names first, where several bring a module."""


def installed(name: str) -> str | None:
    """The version of a package, without importing it; None when it is not there, or only its ruins are."""
    try:
        return metadata.version(name) or None
    except (metadata.PackageNotFoundError, KeyError):
        return None


def requirements() -> tuple[list[Requirement], dict[str, list[Requirement]]]:
    """What this package needs always, and what for each of its extras."""
    from packaging.requirements import Requirement

    try:
        found = [Requirement(text) for text in metadata.requires(PACKAGE) or ()]
    except metadata.PackageNotFoundError:  # run from a folder of sources
        return [], {}
    always = [need for need in found if need.marker is None or need.marker.evaluate({"extra": ""})]
    extras = {name: list(_of_extra(name, found)) for name in EXTRAS}
    return always, {name: needs for name, needs in extras.items() if needs}


def _of_extra(extra: str, found: list[Requirement]) -> Iterator[Requirement]:
    """The requirements of an extra, and of the extras of this package that it asks for."""
    for need in found:
        if need.marker is None or need.marker.evaluate({"extra": ""}) or not need.marker.evaluate({"extra": extra}):
            continue
        if need.name != PACKAGE:
            yield need
        for other in need.extras if need.name == PACKAGE else ():
            yield from _of_extra(other, found)


def require(module: str) -> None:
    """ModuleNotFoundError when there is no such module, without importing it: before work that would be lost."""
    if find_spec(module) is None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)


def advice(module: str, program: str) -> str | None:
    """The command that installs the extra with this module; None when no extra has it."""
    _, extras = requirements()
    brings = [extra for extra, needs in extras.items() if module in {need.name.replace("-", "_") for need in needs}]
    if not brings:
        return None
    preferred = PREFERRED.get(program)
    return f"pip install '{PACKAGE}[{preferred if preferred in brings else brings[0]}]'"
