"""`doctor` knows the usual mistakes, crashes on no machine, leaves no files and prints no secret.

Also here: `--version` for bug reports, shell completion, CONTRIBUTING.md and the banned words.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import accelerate
import diffusers
import peft
import pytest
import safetensors
import torch
import transformers

import qwen_cache
from qwen_cache import extras
from qwen_cache.cli import doctor
from qwen_cache.cli.doctor import Device, Torch
from qwen_cache.extras import install_command
from qwen_cache.models import hardware
from qwen_cache.options import version_lines
from qwen_cache.settings.sections import LoggingConfig

from .support.commands import HEAVY, command, imported_by, run
from .support.paths import ROOT, load_tool

GPU = "NVIDIA H200"
CPU_BUILD = Torch("2.13.0+cpu")
NEEDS = (
    "pyarrow>=18",
    "torch>=2.6; extra == 'build'",
    "diffusers>=0.42; extra == 'build'",
    "qwen-cache[build]; extra == 'train'",
    "peft>=0.18; extra == 'train'",
    "s3fs>=2025.3; extra == 's3'",
    "ray>=2.40; extra == 'ray'",
)
GB = 10**9
HERE = "file:///here"


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with this Python and nothing else; each test adds what it needs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(doctor, "probe_torch", lambda: CPU_BUILD)
    monkeypatch.setattr(doctor, "probe_nvidia", list)


def examined(*options: str | Path, code: int = 0) -> dict[str, dict[str, Any]]:
    """The checks of `doctor --json` by their names."""
    result = run("qwen-cache", "doctor", "--json", *options)
    document = json.loads(result.stdout)
    assert (result.code, document["ok"]) == (code, code == 0), result
    return {check["name"]: check for check in document["checks"]}


def packages(monkeypatch: pytest.MonkeyPatch, present: dict[str, str], needs: Iterable[str] = NEEDS) -> None:
    """Fake the installed packages, and the requirements of this one."""

    def version(name: str) -> str:
        if name not in present:
            raise metadata.PackageNotFoundError(name)
        return present[name]

    fake = SimpleNamespace(
        version=version,
        requires=lambda _: list(needs),
        distribution=metadata.distribution,
        PackageNotFoundError=metadata.PackageNotFoundError,
    )
    monkeypatch.setattr(extras, "metadata", fake)


# ---- the command -----------------------------------------------------------------------------------------------------


def test_it_reports_the_machine_and_leaves_no_files(tmp_path: Path) -> None:
    result = command("qwen-cache", "doctor", "--json", cwd=tmp_path, fresh=False)
    document = json.loads(result.stdout)
    assert (result.code, document["ok"], result.stderr) == (0, True, "")
    checks = {check["name"]: check for check in document["checks"]}
    for module in (accelerate, diffusers, peft, safetensors, torch, transformers):
        assert checks[module.__name__]["facts"]["version"] == metadata.version(module.__name__)
    disk = checks["disk of shards"]["facts"]
    assert 0 < disk["free"] <= shutil.disk_usage(tmp_path).total
    assert checks["processors"]["facts"]["cores"] <= (os.cpu_count() or 1)
    assert checks["torch's build"]["facts"]["built_for"].startswith("CUDA") == (torch.version.cuda is not None)
    assert list(tmp_path.iterdir()) == []


def test_the_table_says_the_same_as_the_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "probe_nvidia", lambda: [GPU])
    result = run("qwen-cache", "doctor")
    assert result.code == 1
    lines = [line.strip() for line in result.stdout.splitlines()]
    for check in examined(code=1).values():
        assert any(line.startswith(f"{check['status']} ") and check["name"] in line for line in lines), check
        assert check["do"] is None or f"→ {check['do']}" in lines
    assert lines[-1] == "1 essential thing missing"


@pytest.mark.slow
def test_a_token_is_never_printed_and_offline_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = command("qwen-cache", "doctor", "--json")
    hub = next(check for check in json.loads(result.stdout)["checks"] if check["name"] == "hub")
    assert (hub["status"], hub["facts"]) == ("warning", {"offline": True, "token": True})
    assert "unset HF_HUB_OFFLINE" in hub["do"]
    monkeypatch.setenv("HF_TOKEN", "")
    (tmp_path / "hub" / "hub" / "models--Qwen--Qwen-Image-Edit-2509").mkdir(parents=True)
    table = command("qwen-cache", "doctor")
    assert re.search(r"ok +models .*has Qwen-Image-Edit-2509 *\n", table.stdout)
    assert re.search(r"ok +hub +offline \(HF_HUB_OFFLINE\), no token *\n", table.stdout)
    assert "hf_secret" not in result.stdout + result.stderr + table.stdout + table.stderr


# ---- accelerators ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "nvidia", "visible", "status", "says"),
    [
        (CPU_BUILD, [], None, "warning", ["none", "the real one needs a GPU"]),
        (CPU_BUILD, [GPU], None, "missing", [GPU, "pip uninstall -y torch && pip install torch==2.13.0 "]),
        (CPU_BUILD, [GPU], "", "missing", ["torch is the build for the CPU alone"]),
        (Torch("2.13.0", "CUDA 13.0"), [GPU], "", "warning", ["hidden by CUDA_VISIBLE_DEVICES=''", "unset"]),
        (
            Torch("2.13.0", "CUDA 13.0", complaint="The NVIDIA driver on your system is too old"),
            [GPU],
            "0",
            "missing",
            [GPU, "driver on your system is too old", "update the NVIDIA driver to one for CUDA 13.0"],
        ),
    ],
    ids=["no GPU", "CPU build", "CPU build, hidden", "hidden", "old driver"],
)
def test_no_device(
    monkeypatch: pytest.MonkeyPatch, found: Torch, nvidia: list[str], visible: str | None, status: str, says: list[str]
) -> None:
    monkeypatch.setattr(doctor, "probe_torch", lambda: found)
    monkeypatch.setattr(doctor, "probe_nvidia", lambda: nvidia)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    check = examined(code=int(status == "missing"))["accelerator"]
    assert check["status"] == status
    assert all(words in f"{check['found']} {check['do']}" for words in says), check


@pytest.mark.parametrize(
    ("device", "status", "says"),
    [
        (Device("cuda:0", GPU, 143 * GB, 142 * GB, True), "ok", "NVIDIA H200, 142 GB of 143 GB free, bfloat16"),
        (Device("cuda:0", GPU, 143 * GB, 3 * GB, True), "warning", "another process uses the rest"),
        (Device("cuda:0", "Tesla T4", 15 * GB, 15 * GB, False), "warning", "no bfloat16"),
        (Device("mps:0", "mps", None, None, None), "ok", "mps"),
    ],
    ids=["free", "in use", "without bfloat16", "with unknown memory"],
)
def test_devices(monkeypatch: pytest.MonkeyPatch, device: Device, status: str, says: str) -> None:
    monkeypatch.setattr(doctor, "probe_torch", lambda: Torch("2.13.0", "CUDA 13.0", (device,)))
    checks = examined()
    assert "accelerator" not in checks
    check = checks[device.device]
    assert check["status"] == status
    assert says in f"{check['found']} {check['do']}"
    facts = ("name", device.name), ("total", device.total), ("free", device.free), ("bf16", device.bf16)
    assert check["facts"].items() >= set(facts)


def test_a_torch_that_does_not_load_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "torch", None)
    check = examined(code=1)["torch's build"]
    assert check["status"] == "missing"
    assert "fails: import of torch halted" in check["found"]


def test_torch_is_asked_for_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through torch's own names, so that a name that a release removes fails here."""
    monkeypatch.undo()
    for kind in ("cuda", "xpu"):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda kind=kind: torch.device(kind))
        monkeypatch.setattr(torch.cuda, "device", nullcontext)
        backend = getattr(torch, kind)
        monkeypatch.setattr(backend, "mem_get_info", lambda number: (number, 80 * GB))
        monkeypatch.setattr(backend, "get_device_name", lambda number: f"number {number}")
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *, including_emulation: including_emulation)
        bf16 = False if kind == "cuda" else None
        devices = tuple(Device(f"{kind}:{i}", f"number {i}", 80 * GB, i, bf16) for i in range(2))
        assert doctor.probe_torch().devices == devices


def test_nvidia_gpus_are_found_with_and_without_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor, "NVIDIA_GPUS", tmp_path / "gpus")
    assert doctor.probe_nvidia() == []
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho NVIDIA H200\necho NVIDIA L4\n")
    program.chmod(0o755)
    assert doctor.probe_nvidia() == ["NVIDIA H200", "NVIDIA L4"]
    program.write_text("#!/bin/sh\necho NVIDIA-SMI has failed\nexit 9\n")
    assert doctor.probe_nvidia() == []
    information = tmp_path / "gpus" / "0000:01:00.0" / "information"
    information.parent.mkdir(parents=True)
    information.write_text("Model: \t\t NVIDIA L4\nIRQ:   \t\t 29\n")
    assert doctor.probe_nvidia() == ["NVIDIA L4"]


# ---- packages --------------------------------------------------------------------------------------------------------


def test_missing_and_old_packages_say_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    packages(monkeypatch, {"diffusers": "0.30.0", "s3fs": "2026.1"})
    checks = examined(code=1)
    assert (checks["pyarrow"]["status"], checks["pyarrow"]["found"]) == ("missing", "not installed, needs >=18")
    assert checks["pyarrow"]["do"] == "pip install 'pyarrow>=18'"
    assert (checks["diffusers"]["status"], checks["diffusers"]["found"]) == ("missing", "0.30.0, needs >=0.42")
    assert checks["diffusers"]["do"] == "pip install 'diffusers>=0.42'"


def test_extras_are_not_essential(monkeypatch: pytest.MonkeyPatch) -> None:
    present = {"pyarrow": "26.0", "torch": "2.13.0+cpu", "diffusers": "0.43.0.dev0", "s3fs": "2026.1", "ray": "2.9"}
    packages(monkeypatch, present)
    checks = examined()
    assert checks["extras"]["found"] == "build, s3"
    assert checks["extra train"]["found"] == "without peft; for `qwen-train`"
    assert (checks["extra ray"]["status"], checks["extra ray"]["essential"]) == ("missing", False)
    assert checks["extra ray"]["do"] == install_command("ray")
    assert "without ray; for `build --ray`" in checks["extra ray"]["found"]
    assert "extra s3" not in checks


def test_the_core_alone_lacks_nothing_essential(monkeypatch: pytest.MonkeyPatch) -> None:
    packages(monkeypatch, {"pyarrow": "26.0"})
    monkeypatch.setattr(doctor, "probe_torch", lambda: Torch(absent=True))
    checks = examined()
    assert checks["extra build"]["do"] == install_command("build")
    assert checks["extra train"]["found"] == "without torch and diffusers and peft; for `qwen-train`"
    assert "can be read and checked, not built or trained on" in checks["accelerator"]["found"]
    assert checks["accelerator"]["do"] == install_command("all")


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        ({"url": HERE, "dir_info": {}}, "pip install '{here}[s3]'"),
        ({"url": HERE, "dir_info": {"editable": True}}, "pip install -e '{here}[s3]'"),
        ({"url": HERE + "/missing.whl", "archive_info": {}}, "pip install 'qwen-cache[s3]'"),
        ({"url": "https://h/q.git", "vcs_info": {"vcs": "git"}}, "pip install 'qwen-cache[s3] @ git+https://h/q.git'"),
        (
            {"url": "https://h/q.git", "vcs_info": {"vcs": "git", "requested_revision": "v1"}},
            "pip install 'qwen-cache[s3] @ git+https://h/q.git@v1'",
        ),
        (None, "pip install 'qwen-cache[s3]'"),
    ],
    ids=["a checkout", "an editable checkout", "a wheel that was removed", "git", "a tag in git", "an index"],
)
def test_an_extra_is_installed_from_where_the_package_came_from(
    origin: dict[str, Any] | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    text = json.dumps(origin).replace(HERE, folder.as_uri()) if origin else None
    monkeypatch.setattr(extras.metadata, "distribution", lambda _: SimpleNamespace(read_text=lambda _: text))
    assert install_command("s3") == expected.format(here=folder)


def test_a_version_that_is_not_a_number_is_a_local_build(monkeypatch: pytest.MonkeyPatch) -> None:
    packages(monkeypatch, {"pyarrow": "26.0", "torch": "built here", "diffusers": "0.42.1"})
    assert (examined()["torch"]["status"], examined()["torch"]["found"]) == ("ok", "built here")


def test_every_extra_and_every_tracker_is_known() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(extras.EXTRAS) == set(project["optional-dependencies"]) - {"all", "demo", "docs", "bench", "dev"}
    known = get_args(LoggingConfig.model_fields["report_to"].annotation)
    assert (*doctor.TRACKERS, "none") == known


# ---- the host --------------------------------------------------------------------------------------------------------


def test_an_odd_machine_is_no_reason_to_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without /proc, nvidia-smi, a home folder and our package metadata."""

    def unknown(_: str) -> list[str]:
        raise metadata.PackageNotFoundError

    nowhere = tmp_path / "nowhere"
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(nowhere))
    monkeypatch.setenv("HOME", str(nowhere))
    monkeypatch.setattr(hardware, "MEMINFO", nowhere)
    monkeypatch.setattr(doctor, "NVIDIA_GPUS", nowhere)
    monkeypatch.setattr(hardware, "CONTAINER_LIMITS", (nowhere,))
    monkeypatch.setattr(extras.metadata, "requires", unknown)
    for name in ("sched_getaffinity", "sysconf_names"):
        monkeypatch.delattr(os, name, raising=False)
    result = run("qwen-cache", "doctor", "--json")
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert result.code == 0, result
    assert checks["memory"]["found"] == "unknown"
    assert checks["qwen-cache"]["do"] == install_command("all")


def test_memory_is_that_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meminfo, limit = tmp_path / "meminfo", tmp_path / "memory.max"
    meminfo.write_text("MemTotal:       65536000 kB\nMemFree:  1 kB\nMemAvailable:   32768000 kB\n")
    monkeypatch.setattr(hardware, "MEMINFO", meminfo)
    monkeypatch.setattr(hardware, "CONTAINER_LIMITS", (limit,))
    limit.write_text("max\n")
    assert hardware.host_memory() == (65_536_000 * 1024, 32_768_000 * 1024)
    assert examined()["memory"]["status"] == "ok"
    limit.write_text(f"{8 * GB}\n")
    check = examined()["memory"]
    assert (check["status"], check["found"]) == (
        "warning",
        "8.0 GB, 8.0 GB free, for train.offload_blocks of at most 11",
    )
    assert "the text encoder alone is 16.6 GB" in check["do"]


# ---- disks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("free", "status", "says"),
    [
        (1100 * GB, "ok", "1.1 TB free, for about 100,000 edits of a megapixel"),
        (61 * GB, "ok", "61.0 GB free, for about 5,500 edits of a megapixel"),
        (2 * GB, "warning", "2.0 GB free, for about 180 edits of a megapixel name a disk with more space"),
        (0, "warning", "0 B free, for about 0 edits of a megapixel"),
    ],
)
def test_a_disk_may_be_small(free: int, status: str, says: str) -> None:
    check = doctor.judge_disk("disk", free)
    assert check.status == status
    assert says in f"{check.found} {check.do}"


def test_nowhere_to_write_is_essential(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    for path in (file, file / "shards"):
        check = examined("--path", path, code=1)[f"disk of {path}"]
        assert (check["status"], check["found"]) == ("missing", f"{file} is a file")
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert examined(code=1)["disk of shards"]["found"] == f"{tmp_path} cannot be written to"


def test_a_bucket_is_no_disk() -> None:
    result = run("qwen-cache", "doctor", "--path", "s3://bucket/shards")
    assert result.code == 2
    assert "s3://bucket/shards: a cache is built on a local disk\n  → name a local folder with --path" in result.stderr


def test_a_hub_that_is_not_reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    check = examined()["hub"]
    assert check["status"] == "warning"
    assert "unknown: import of huggingface_hub halted" in check["found"]


def test_space_for_our_own_files_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "not" / "there"))
    check = examined()["own cache"]
    assert check["facts"]["folder"] == str(tmp_path / "not" / "there" / "qwen-cache")
    assert check["status"] == "ok"
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=GB))
    check = examined()["own cache"]
    assert (check["status"], check["facts"]["free"]) == ("warning", GB)
    assert "set XDG_CACHE_HOME" in check["do"]


def test_space_for_a_model_is_needed_where_there_is_none() -> None:
    folder = Path("hub")
    assert doctor.judge_models(folder, 100 * GB, []).status == "ok"
    assert doctor.judge_models(folder, 10 * GB, ["Qwen-Image-Edit"]).status == "ok"
    check = doctor.judge_models(folder, 10 * GB, [])
    assert (check.status, check.found) == ("warning", "hub, 10.0 GB free; no Qwen-Image model yet")
    assert check.do == "a model is 58.0 GB: set HF_HOME to a folder on a disk with space"


# ---- --version, completion, CONTRIBUTING.md --------------------------------------------------------------------------


@pytest.mark.parametrize("program", ["qwen-cache", "qwen-train"])
def test_the_version_has_what_a_bug_report_needs(program: str) -> None:
    first, second = command(program, "--version").stdout.splitlines()
    assert first == f"{program} {qwen_cache.__version__}"
    named = dict(part.split(" ") for part in second.split(", "))
    modules = (torch, diffusers, transformers, peft, accelerate)
    assert named == {"python": sys.version.split()[0]} | {it.__name__: metadata.version(it.__name__) for it in modules}


def test_versions_are_read_without_imports_and_gaps_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not imported_by("from qwen_cache.options import version_lines; version_lines('x')") & {
        *HEAVY,
        "pyarrow",
    }
    packages(monkeypatch, {"torch": "2.13.0"})
    assert "torch 2.13.0, diffusers missing, " in version_lines("qwen-cache")


@pytest.mark.fast_cases(1)
@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("program", "typed", "offered"),
    [
        ("qwen-cache", ["doc"], {"doctor"}),
        ("qwen-cache", ["build", "--vae"], {"--vae-device"}),
        ("qwen-cache", ["import", "mu"], {"musubi"}),
        ("qwen-cache", ["build", "--edit-mask", "d"], {"diff"}),
        ("qwen-train", ["pre"], {"predict"}),
        ("qwen-train", ["run", "--enc"], {"--encode-on-the-fly", "--encode-at"}),
    ],
)
def test_bash_completes(program: str, typed: list[str], offered: set[str]) -> None:
    """By the function that --show-completion prints, called as bash calls it; torch is not loaded."""
    name = program.replace("-", "_")
    folder = Path(sys.executable).parent
    script = (
        f"set -e; source <(_{name.upper()}_COMPLETE=source_bash {program}); "
        f'COMP_WORDS=({program} "$@"); COMP_CWORD=$#; '
        f'export PYTHONPROFILEIMPORTTIME=1; _{name}_completion {program}; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(
        ["bash", "-c", script, "bash", *typed],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"},
    )
    assert set(done.stdout.split()) == offered
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if "import time:" in line}
    assert "qwen_cache.terminal" in imported
    assert not imported & {*HEAVY, "pyarrow", "numpy"}


@pytest.mark.parametrize("program", ["qwen-cache", "qwen-train"])
def test_completion_is_offered(program: str) -> None:
    help_ = command(program, "--help").stdout
    assert "--install-completion" in help_
    assert "--show-completion" in help_


def test_banned_words_are_found_with_their_replacements() -> None:
    tool: Any = load_tool("check_words")
    word = "pict" + "ures"  # in two parts, so that this file passes the check
    assert tool.banned(f"a line\nof {word}") == [(2, word, "image")]
    assert tool.banned("an image of a depicted scene") == []


def test_contributing_names_real_files() -> None:
    """Every path of this repository in backquotes, every name that a module is said to define, every target of make."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    quoted = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    paths = [name for name in quoted if re.fullmatch(r"[\w.-]+(?:/[\w.-]+)*(?:/|\.(?:py|md|json|toml|txt))", name)]
    assert len(paths) > 20
    assert [name for name in paths if not (ROOT / name).exists()] == []
    named = re.findall(
        r"`(\w+)`(?: and `(\w+)`)? (?:of|in)\s+`((?:qwen_cache|qwen_train|tests|tools)/[\w/]+\.py)`", text
    )
    assert len(named) > 8
    for *names, path in named:
        lines = (ROOT / path).read_text(encoding="utf-8")
        for name in filter(None, names):
            assert re.search(rf"^(?:class |def )?{name}\b", lines, flags=re.MULTILINE), (name, path)
    targets = set(re.findall(r"^make ([\w-]+)", text, flags=re.MULTILINE))
    assert targets >= {"setup", "demo", "test"}
    assert targets <= set(
        re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    )
