"""The packages: an sdist with everything, a typed wheel, and a core that reads and checks caches without torch.

The core is tried twice, by the same steps (CORE): here with every package hidden that the core does not ask for, and,
slowly, in an empty environment into which the wheel was installed. That one asks a package index.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

import qwen_cache
from qwen_cache.cli import COMMANDS as CACHE_COMMANDS
from qwen_train.cli import COMMANDS as TRAIN_COMMANDS

from .support.paths import ROOT
from .support.project import project_files, tracked

EXAMPLES = ROOT / "schemas" / "examples" / "valid"
PROGRAMS = {"qwen-cache": CACHE_COMMANDS, "qwen-train": TRAIN_COMMANDS}
HELP = [[program, name, "--help"] for program, commands in PROGRAMS.items() for name in commands]
WORKS = [
    ["qwen-cache", "--version"],
    ["qwen-cache", "verify", "cache.v2"],
    ["qwen-cache", "verify", "cache.v1", "--json"],
    ["qwen-cache", "inspect", "cache.v1"],
    ["qwen-cache", "inspect", "cache.v2", "--scan", "--json"],
    ["qwen-cache", "inspect", "cache.v2", "--sample", "edit"],
    ["qwen-cache", "inspect", "cache.v2", "--html", "page.html"],
    ["qwen-cache", "migrate", "v1", "v2", "cache.v1", "--out", "migrated"],
    ["qwen-cache", "merge", "cache.v2", "--out", "merged", "--select", "edit", "--compression", "zstd"],
    ["qwen-cache", "gc", "merged"],
    ["qwen-cache", "verify", "migrated"],
    ["qwen-cache", "verify", "merged"],
]
"""Commands of the core, in a folder with both example caches."""
NEEDS_BUILD = [
    ["qwen-cache", "build", "data"],
    ["qwen-cache", "import", "musubi", "theirs", "--out", "ours", "--model", "Qwen/Qwen-Image-Edit-2509"],
    ["qwen-cache", "ground", "--image", "a.png", "--phrase", "the car"],
    ["qwen-cache", "inspect", "cache.v2", "--mask-head", "head.safetensors"],
    ["qwen-cache", "inspect", "cache.v2", "--html", "decoded.html", "--decode"],
]
NEEDS_TRAIN = [
    ["qwen-train", "run", "cache.v2"],
    ["qwen-train", "predict", "--prompt", "a cat"],
    ["qwen-train", "decode"],
    ["qwen-train", "plan", "cache.v2"],
    ["qwen-train", "export", "out", "--to", "comfyui", "--out", "a.safetensors"],
    ["qwen-train", "mask-head", "cache.v2"],
]
OPEN_WITHOUT_EXTRAS = ("qwen_cache.format", "qwen_cache.html", "qwen_cache.inspect", "qwen_cache.batching")
"""The packages that need only the core. Modules of the others may also need packages of an extra."""
DOUBTFUL_MASKS = "qwen_cache.inspect.doubtful_masks"  # computed by a mask head, so with torch

HIDE = """
import sys
from importlib.metadata import distribution, packages_distributions
from packaging.requirements import Requirement

def closure(name, extras=()):
    found = {name.lower().replace("_", "-")}
    for need in map(Requirement, distribution(name).requires or ()):
        if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            found |= closure(need.name, need.extras)
    return found

core = closure("qwen-cache")
owners = {
    module: {name.lower().replace("_", "-") for name in names} for module, names in packages_distributions().items()
}

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if "." not in name and not owners.get(name, core) & core:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
"""
"""Restricts this environment to the dependencies of the core, and theirs."""

CORE = """
import contextlib, importlib, io, json, sys, traceback
from pathlib import Path

def run(program, *arguments):
    module = {"qwen-cache": "qwen_cache.cli", "qwen-train": "qwen_train.cli"}[program]
    out, err = io.StringIO(), io.StringIO()
    sys.argv, code = [program, *arguments], None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            importlib.import_module(module).main()
        except SystemExit as leaving:
            code = leaving.code
        except BaseException:
            traceback.print_exc()
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}

def lacks(name):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        return error.name.split(".")[0]

def modules():
    for package in ("qwen_cache", "qwen_train"):
        root = Path(importlib.import_module(package).__file__).parent
        for path in sorted(root.rglob("*.py")):
            if path.name != "__main__.py":
                yield ".".join([package, *path.relative_to(root).with_suffix("").parts]).removesuffix(".__init__")

from qwen_cache import open_cache
asked = json.load(sys.stdin)
sample = open_cache("cache.v2")[0]
tensors = {name: sample.numpy(name) for name in sample.row.meta.tensors}
print(json.dumps({
    "commands": [run(*arguments) for arguments in asked],
    "lacks": {name: lacks(name) for name in modules()},
    "home": importlib.import_module("qwen_cache").__file__,
    "tensors": {name: [str(array.dtype), array.tobytes().hex()] for name, array in tensors.items()},
}))
"""


def in_the_core(python: Path, code: str, folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    """The output of CORE, run by `python` in `folder`, where the example caches are."""
    for name in ("cache.v1", "cache.v2"):
        shutil.copytree(EXAMPLES / name, folder / name)
    asked = json.dumps([*HELP, *WORKS, *NEEDS_BUILD, *NEEDS_TRAIN])
    done = subprocess.run(
        [python, "-c", code], input=asked, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def check_core(found: dict[str, Any]) -> None:
    """The checks of this output in both environments."""
    from qwen_cache import open_cache

    results = iter(found["commands"])
    for arguments in HELP:
        result = next(results)
        assert result["code"] == 0, (arguments, result)
        assert "Usage" in result["out"]
    for arguments in WORKS:
        result = next(results)
        assert result["code"] == 0, (arguments, result)
    for arguments in NEEDS_BUILD:
        check_refusal(arguments, "build", next(results))
    for arguments in NEEDS_TRAIN:
        check_refusal(arguments, "train", next(results))
    packages = modules_of_extras()
    for module, missing in found["lacks"].items():
        if missing == "pytest" and module.startswith("qwen_cache.conformance."):
            continue  # it runs these
        assert missing is None or missing in packages, (module, missing)
        core = module.startswith(OPEN_WITHOUT_EXTRAS) and module != DOUBTFUL_MASKS
        assert missing is None or not core, (module, missing)
    sample = open_cache(EXAMPLES / "cache.v2")[0]
    assert found["tensors"] == {
        name: [str(sample.numpy(name).dtype), sample.numpy(name).tobytes().hex()] for name in sample.row.meta.tensors
    }


def check_refusal(arguments: list[str], extra: str, result: dict[str, Any]) -> None:
    """Exit code 2, and one message with the program, the command, the package and the extra."""
    assert result["code"] == 2, (arguments, result)
    program, command, *_ = arguments
    says = rf"pip install .*\[{extra}\]\S*"
    found = re.search(rf"error: {program} {command} needs (\w+), which is not installed\n  → {says}\n", result["err"])
    assert found, (arguments, result["err"])
    assert found[1] in modules_of_extras()
    assert "Traceback" not in result["err"]


def modules_of_extras() -> set[str]:
    """The packages of [build], [train], [http], [client] and [serve], by their import names."""
    extras = project()["optional-dependencies"]
    names = ("build", "train", "http", "client", "serve")
    needs = {re.split(r"[\[>=]", need)[0] for extra in names for need in extras[extra]}
    return {need.replace("-", "_") for need in needs} - {"qwen_cache"}


def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return found


# ---- fast ------------------------------------------------------------------------------------------------------------


def test_the_sdist_has_what_git_tracks(tmp_path: Path) -> None:
    listed = tracked()
    code = f"from setuptools import setup; setup(script_args=['-q', 'egg_info', '--egg-base', {str(tmp_path)!r}])"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, check=True, capture_output=True)
    (sources,) = tmp_path.glob("*.egg-info/SOURCES.txt")
    names = {name for name in sources.read_text(encoding="utf-8").splitlines() if ".egg-info/" not in name}
    assert names == listed
    assert {"qwen_cache/py.typed", "qwen_train/py.typed", "LICENSE", "schemas/LICENSE"} <= listed


def test_the_licence_is_named_and_its_text_is_included() -> None:
    assert project()["license"] == "Apache-2.0"
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in project()["license-files"]]
    assert "Apache License\n                           Version 2.0, January 2004" in texts[0]
    assert "CC0 1.0 Universal" in texts[1]
    assert "CC0-1.0" in (ROOT / "schemas" / "FORMAT.md").read_text(encoding="utf-8")


def test_pre_commit_runs_what_make_check_runs() -> None:
    recipe = re.search(r"^check:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert recipe
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    assert [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe[1].splitlines()] == [
        hook["entry"] for hook in hooks
    ]


def test_the_core_needs_no_package_of_an_extra(tmp_path: Path) -> None:
    """Reading, checking and changing a cache, every --help, and messages that name the missing extra."""
    check_core(in_the_core(Path(sys.executable), HIDE + CORE, tmp_path, {**os.environ, "COLUMNS": "200"}))


# ---- slow ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_wheel_alone_reads_a_cache_in_an_empty_environment(tmp_path: Path) -> None:
    sdist, wheel = build_both(tmp_path / "dist")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"Makefile", "tests/conftest.py", "tools/demo.sh", "schemas/LICENSE", ".ci/run"} <= names
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name for name in project_files() if name.startswith(("qwen_cache/", "qwen_train/"))} <= names
    metadata = wheel.name.split("-py3")[0] + ".dist-info"
    assert {name.split("/")[0] for name in names} == {"qwen_cache", "qwen_train", metadata}
    assert {name.split("licenses/")[1] for name in names if "licenses/" in name} == {"LICENSE", "schemas/LICENSE"}

    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment["COLUMNS"] = "200"
    empty = tmp_path / "empty"
    subprocess.run([sys.executable, "-m", "venv", empty], check=True)
    binaries = empty / ("Scripts" if os.name == "nt" else "bin")
    install = [binaries / "python", "-m", "pip", "install", "-q", "--constraint", ROOT / "constraints.txt", wheel]
    subprocess.run(install, check=True, env=environment, cwd=tmp_path)

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    found = in_the_core(binaries / "python", CORE, elsewhere, environment)
    assert Path(found["home"]).is_relative_to(empty)
    check_core(found)
    for program in PROGRAMS:
        done = subprocess.run([binaries / program, "--version"], env=environment, cwd=elsewhere, capture_output=True)
        assert done.stdout.decode().startswith(f"{program} {qwen_cache.__version__}\n"), done
    doctor = [binaries / "qwen-cache", "doctor"]
    said = subprocess.run(doctor, env=environment, cwd=elsewhere, capture_output=True, text=True, check=True).stdout
    assert "nothing essential missing" in said
    assert f"pip install '{wheel}[train]'" in said


def build_both(folder: Path) -> tuple[Path, Path]:
    """The sdist of this tree, and the wheel built from it."""
    folder.mkdir()
    tree = folder / "tree"
    for name in project_files():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    code = f"from setuptools.build_meta import build_sdist; build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=tree, check=True, capture_output=True)
    (sdist,) = folder.glob("*.tar.gz")
    make = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        folder,
        sdist,
    ]
    subprocess.run(make, check=True)
    (wheel,) = folder.glob("*.whl")
    return sdist, wheel
