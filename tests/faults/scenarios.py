"""The commands that are disturbed: what is there before, and whether what is there afterwards is whole.

All work in one folder, `work`, at one path, so that files that name paths are comparable. What they read (the source,
other caches, the model) is beside it and never changes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .runs import Program, call
from .shim import Shim

WORK, HOME, LOGS, BEFORE = "work", "home", "logs", "before"
SETTINGS = ("--set", "cache.shard_size=80kB")  # several shards
RUN = {
    "train.mixed_precision": "no",
    "train.max_steps": 3,
    "train.checkpointing_steps": 1,
    "train.checkpoints_total_limit": 1,
    "train.ema_decay": 0.9,
    "train.caption_dropout": 0.5,
    "logging.report_to": "none",
}
Files = dict[str, bytes]


@dataclass(frozen=True)
class Scenario:
    """A command, and its judge."""

    name: str
    program: Program
    before: Path
    """A copy of `work` as it is before the command."""
    outcome: Callable[[Path], Files]
    """The part of `work` that has to be equal after the command, byte for byte, however the command was disturbed."""
    faults: Callable[[Path, Files, Files], list[str]]
    """Files in `work` in neither the old nor the new state, given the outcomes before and after an undisturbed run."""
    prints: bool = False
    """True if the output is the result."""
    found_faults: int = 2
    """An exit code that also tells of faults."""


def make(base: Path) -> list[Scenario]:
    """The scenarios, with everything they need made in `base`; the commands run here, so that all is imported."""
    return Maker(base).scenarios()


def watched(base: Path) -> list[Path]:
    """The folders that the commands read and write."""
    return [path for path in base.iterdir() if path.name not in (LOGS, BEFORE)]


class Maker:
    """Makes the folders of the scenarios."""

    def __init__(self, base: Path) -> None:
        from tests.support.paths import load_tool
        from tests.support.sources import change_target, write_pairs

        self.base, self.work = base, base / WORK
        os.environ["XDG_CACHE_HOME"] = str(self.work / HOME)
        tool: Any = load_tool("make_tiny_model")
        self.model = tool.make_tiny_model(base / "model", "edit-plus")
        self.data, self.changed = write_pairs(base / "data"), write_pairs(base / "changed")
        change_target(self.changed)
        self.work.mkdir()
        (base / LOGS).mkdir()

    def scenarios(self) -> list[Scenario]:
        return [*self.writing_caches(), *self.other_writers(), *self.reading()]

    def scenario(
        self, name: str, arguments: list[str | Path], folder: str, *preparation: list[str | Path], **options: Any
    ) -> Scenario:
        """A command after others have prepared `work`; its result is in `folder` there."""
        shutil.rmtree(self.work)
        self.work.mkdir()
        for each in preparation:
            self.run(each)
        before = Path(shutil.copytree(self.work, self.base / BEFORE / name.replace(" ", "-")))
        self.run(arguments)
        defaults: dict[str, Any] = {"outcome": partial(files_of, folder), "faults": partial(cache_faults, folder)}
        return Scenario(name, reporting(call([str(it) for it in arguments])), before, **(defaults | options))

    def run(self, arguments: list[str | Path]) -> None:
        from accelerate.state import AcceleratorState

        from tests.support.commands import run

        AcceleratorState._reset_state(reset_partial_state=True)
        result = run(*map(str, arguments))
        assert result.code == 0, result.stderr

    def build(self, source: Path, out: Path, *options: str) -> list[str | Path]:
        from tests.support.caches import SMALL

        return ["qwen-cache", "build", source, "--out", out, "--model", self.model, *SMALL, *SETTINGS, *options]

    # ---- caches ----

    def writing_caches(self) -> list[Scenario]:
        from tests.support.imports import MODEL, make, write_musubi

        cache, one, two = self.work / "cache", self.base / "one", self.base / "two"
        self.run(self.build(self.data, one))
        self.run(self.build(self.changed, two))
        theirs = write_musubi(
            self.base / "musubi", [make(f"s{i}", f"prompt {i}", [(4, 6), (4, 4)], 9, i) for i in (0, 1)]
        )
        first, again = self.build(self.data, cache), self.build(self.changed, cache)
        merge: list[str | Path] = ["qwen-cache", "merge", one, two, "--out", cache, *SETTINGS]
        migrate: list[str | Path] = ["qwen-cache", "migrate", "v1", "v2", cache, *SETTINGS]
        gathered = self.scenario("merge linked", merge, "cache")
        return [
            self.scenario("build first", first, "cache"),
            self.scenario("build changed", again, "cache", first),
            self.scenario("migrate in place", migrate, "cache", self.build(self.data, cache, "--format", "v1")),
            gathered,
            self.scenario("merge compressed", [*merge, "--compression", "zstd"], "cache", first),
            self.scenario(
                "import",
                ["qwen-cache", "import", "musubi", theirs, "--out", cache, "--model", MODEL, *SETTINGS],
                "cache",
            ),
            self.scenario("gc", ["qwen-cache", "gc", cache], "cache", first, again),
        ]

    # ---- others ----

    def other_writers(self) -> list[Scenario]:
        from qwen_cache.inspect import page

        page.ONE_FILE = 0  # samples in files beside the page
        one, two, page_file = self.base / "one", self.base / "two", self.work / "pages" / "page.html"
        settings = {**RUN, "train.output_dir": str(self.work / "out")}
        train: list[str | Path] = ["qwen-train", "run", one, "--model", self.model, "--resume"]
        train += [f"--set={name}={json.dumps(value)}" for name, value in settings.items()]
        html: list[str | Path] = ["qwen-cache", "inspect", one, "--html", page_file]
        older: list[str | Path] = ["qwen-cache", "inspect", two, "--html", page_file]
        judge: dict[str, Any] = {"outcome": run_files, "faults": self.run_faults(train)}
        return [
            self.scenario("train", train, "out", **judge),
            self.scenario("resume", train, "out", [*train, "--set=train.max_steps=1"], **judge),
            self.scenario("inspect --html", html, "pages", older, faults=partial(file_faults, "pages")),
            self.scenario("predict", self.predict(), "made", faults=partial(file_faults, "made")),
            self.scenario("mask-head", self.mask_head(), "heads", faults=partial(file_faults, "heads")),
            self.scenario(
                "init",
                self.init(),
                "settings",
                self.init("--set=train.max_steps=5"),
                faults=partial(file_faults, "settings"),
            ),
        ]

    def predict(self) -> list[str | Path]:
        image, out = self.data / "control_images" / "cat.png", self.work / "made" / "fox.png"
        given: list[str | Path] = ["--prompt", "a fox", "--image", image, "--out", out, "--seed", "1"]
        small = ["--height", "32", "--width", "32", "--num-inference-steps", "2", "--set", "predict.dtype=float32"]
        return ["qwen-train", "predict", "--model", self.model, *given, *small]

    def init(self, *options: str) -> list[str | Path]:
        return ["qwen-cache", "init", self.data, "--force", "--out", self.work / "settings" / "qwen.yaml", *options]

    def mask_head(self) -> list[str | Path]:
        from tests.support.scenes import QUICK, RECIPE, scene, write_scenes

        cache = write_scenes(self.base / "scenes", {"default": [scene(i) for i in range(8)]}, {"default": RECIPE})
        settings = [f"--set=mask_head.{name}={value}" for name, value in {**QUICK, "steps": 2}.items()]
        out = self.work / "heads" / "head.safetensors"
        return ["qwen-train", "mask-head", cache, "--out", out, "--device", "cpu", *settings]

    def run_faults(self, train: list[str | Path]) -> Callable[[Path, Files, Files], list[str]]:
        """A judge that knows every checkpoint of an undisturbed run."""
        shutil.rmtree(self.work / "out", ignore_errors=True)
        self.run([*train, "--set=train.checkpoints_total_limit=0"])
        checkpoints = {
            path.name: {each.name: each.read_bytes() for each in path.iterdir()}
            for path in (self.work / "out").glob("checkpoint-*")
        }
        return partial(run_faults, checkpoints)

    def reading(self) -> list[Scenario]:
        cache = self.work / "cache"
        first = self.build(self.data, cache)
        commands: dict[str, tuple[Program | list[str | Path], int]] = {
            "read all samples": (partial(read_all, cache), 2),
            "verify": (["qwen-cache", "verify", cache, "--json"], 1),
            "inspect": (["qwen-cache", "inspect", cache, "--scan", "--json"], 2),
            "plan": (["qwen-cache", "build", *self.build(self.data, cache)[2:], "--dry-run", "--check", "--json"], 1),
        }
        self.run(first)
        before = Path(shutil.copytree(self.work, self.base / BEFORE / "reading"))
        return [
            Scenario(
                name,
                call([str(it) for it in what]) if isinstance(what, list) else what,
                before,
                partial(files_of, "cache"),
                partial(cache_faults, "cache"),
                prints=True,
                found_faults=code,
            )
            for name, (what, code) in commands.items()
        ]


def reporting(program: Program) -> Program:
    """The program, with a mark in the record after each checkpoint that it reports as saved."""

    def marked() -> None:
        from qwen_train import train

        save, shim = train.save, Shim()

        def saving(p: Any) -> None:
            save(p)
            shim.mark(f"out/checkpoint-{p.saved}")

        train.save = saving
        program()

    return marked


# ---- outcomes --------------------------------------------------------------------------------------------------------


def files_of(folder: str, work: Path) -> Files:
    """Every file of a folder but locks, and those that a cache keeps for itself."""
    from tests.support.caches import contents

    settings = work / folder / "qwen.yaml"
    found = contents(work / folder) | ({settings.name: settings.read_bytes()} if settings.is_file() else {})
    return {name: data for name, data in found.items() if Path(name).name != ".lock"}


def run_files(work: Path) -> Files:
    """The weights, the newest checkpoint, the settings and the losses of a run."""
    from qwen_train.training.checkpoint import checkpoints
    from qwen_train.training.metrics import read_metrics

    out = work / "out"
    newest = [path for _, folder in checkpoints(out)[-1:] for path in folder.iterdir()]
    names = [*out.glob("[!.]*.safetensors"), *out.glob("qwen.yaml"), *newest]
    found = {str(path.relative_to(out)): path.read_bytes() for path in names}
    if (metrics := out / "metrics.jsonl").is_file():
        lines = read_metrics(metrics)
        found["losses"] = json.dumps([[line["step"], line["loss"]] for line in lines]).encode()
    if (page := out / "report.html").is_file():
        found["report"] = str(page.read_bytes().endswith(b"</html>\n")).encode()
    return found


def read_all(cache: Path) -> None:
    """Print a hash of every sample; errors that a user can cause as a command prints them."""
    from qwen_cache import open_cache
    from qwen_cache.errors import QwenCacheError
    from qwen_cache.options import fail
    from qwen_cache.terminal import message_of

    try:
        for sample in open_cache(cache):
            for name in sorted(sample.tensors()):
                print(sample.key, name, hashlib.sha256(sample.buffer(name)).hexdigest())
    except QwenCacheError as error:
        raise SystemExit(fail(str(error))) from None
    except OSError as error:
        if (message := message_of(error)) is None:
            raise
        raise SystemExit(fail(message)) from None


# ---- judges ----------------------------------------------------------------------------------------------------------


def cache_faults(folder: str, work: Path, old: Files, new: Files) -> list[str]:
    """The cache is the old or the new one, with every byte; before a first build there may be none."""
    from qwen_cache.errors import StrayFileError
    from qwen_cache.format.verify import verify_cache

    cache = work / folder
    manifest = (cache / "cache.json").read_bytes() if (cache / "cache.json").exists() else None
    if manifest not in [each.get("cache.json") for each in (old, new)]:
        return ["cache.json is neither the old nor the new one" if manifest else "cache.json is missing"]
    if manifest is None:
        return []
    return [str(fault) for fault in verify_cache(str(cache)) if not isinstance(fault, StrayFileError)]


def file_faults(folder: str, work: Path, old: Files, new: Files) -> list[str]:
    """Each file is that of the old or the new state; what both have is there."""
    found = files_of(folder, work)
    strange = [
        name for name, data in found.items() if not _is_temporary(name) and data not in (old.get(name), new.get(name))
    ]
    return [f"{name} is neither the old nor the new file" for name in strange] + [
        f"{name} is missing" for name in old.keys() & new.keys() if name not in found
    ]


def _is_temporary(name: str) -> bool:
    return any(part.startswith(".") for part in Path(name).parts)


def run_faults(checkpoints: Mapping[str, Files], work: Path, old: Files, new: Files) -> list[str]:
    """The newest checkpoint is whole, and so is the result; where a checkpoint was, there is one."""
    from qwen_train.training.checkpoint import checkpoints as complete

    out = work / "out"
    known = complete(out)
    result = {name: data for name, data in run_files(work).items() if "/" not in name and name.endswith(".safetensors")}
    faults = [f"{name} is damaged" for name, data in result.items() if data not in (old.get(name), new.get(name))]
    if known:
        newest = known[-1][1]
        if {each.name: each.read_bytes() for each in newest.iterdir()} != checkpoints[newest.name]:
            faults.append(f"{newest.name}, the newest, is damaged")
    elif any(name.startswith("checkpoint-") for name in old):
        faults.append("no checkpoint is left")
    return faults
