"""`doctor`: what this machine has, what it lacks, and how to get it.

Probes gather facts; checks judge them and change nothing. A probe never fails: without /proc, nvidia-smi or a torch
that loads, it reports that. Versions come from package metadata. torch is the only heavy package that is imported,
because only torch knows which devices it can use. The report says whether there is a token for the hub, never the token
itself. Nothing is written.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from qwen_cache.errors import ConfigError, first_line
from qwen_cache.extras import EXTRAS, PACKAGE, __version__, install_command, installed, requirements
from qwen_cache.options import CONFIG, IN_BUG_REPORTS, INPUT, JSON, SET, command, setting
from qwen_cache.settings.given import Given
from qwen_cache.storage.files import cache_home
from qwen_cache.terminal import FAULTS, human_bytes, plural, print_json, results
from qwen_cache.text import plain

if TYPE_CHECKING:
    from packaging.requirements import Requirement


SHOWN_PACKAGES = (*IN_BUG_REPORTS, "safetensors")
PROGRAMS = ("build", "train")  # the extras that most commands need
TRACKERS = ("tensorboard", "wandb", "trackio", "aim", "comet_ml", "mlflow", "clearml", "dvclive", "swanlab")
NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")

BLOCKS = 60
OFFLOADED_BLOCK_BYTES = 680_000_000  # one of the blocks of the 20B transformer in bfloat16, pinned
TEXT_ENCODER_BYTES = 16_600_000_000  # Qwen2.5-VL 7B in bfloat16, in host memory when the encoder runs there
MODEL_BYTES = 58_000_000_000  # transformer 41, text encoder 16.6, VAE 0.3
SAMPLE_BYTES = 11_000_000  # an edit of one megapixel, uncompressed
SMALL_DATASET = 1000  # samples: a disk with room for fewer gets a warning
OWN_CACHE_BYTES = 3_200_000_000  # a table of train.tabulated_modulation

CPU_ALONE = "the CPU alone"
Status = Literal["ok", "warning", "missing"]
COLOURS = {"ok": "green", "warning": "yellow", "missing": "red"}


@dataclass(frozen=True)
class Check:
    """One line of the report: what was checked, the result, and what to do about it."""

    name: str
    status: Status
    found: str
    do: str | None = None
    essential: bool = True
    facts: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        fields = {"name": self.name, "status": self.status, "found": self.found, "do": self.do}
        return {**fields, "essential": self.essential, "facts": self.facts}


@dataclass(frozen=True)
class Device:
    """An accelerator that torch can use; None where its backend does not report a value."""

    device: str
    name: str
    total: int | None
    free: int | None
    bf16: bool | None
    uuid: str | None = None
    """The name that the driver's own tools give it."""


@dataclass(frozen=True)
class Torch:
    """The torch build, its devices and its warnings; nothing else is known of a `broken` or `absent` torch."""

    version: str = ""
    built_for: str = CPU_ALONE
    devices: tuple[Device, ...] = ()
    complaint: str = ""
    broken: bool = False
    absent: bool = False


@command(page="howto/troubleshooting.md", examples=["qwen-cache doctor", "qwen-cache doctor --path /data/shards"])
def doctor(
    path: Given | None = setting(
        "cache.path", INPUT, "The folder of the cache, which need not exist yet.", "FOLDER", name="--path"
    ),
    json: bool = JSON,
    config: Path | None = CONFIG,
    set_: list[str] | None = SET,
) -> int:
    """Check this machine: what is installed, what is missing, and how to get it."""
    from qwen_cache.settings.load import load_config

    folder = load_config(config, set_, [path]).cache.path
    if "://" in folder:
        if path is not None:
            raise ConfigError("a cache is built on a local disk", where=folder, do="name a local folder with --path")
        folder = "shards"
    checks = examine(Path(folder))
    missing = [check for check in checks if check.status == "missing" and check.essential]
    if json:
        print_json({"ok": not missing, "checks": [check.to_json() for check in checks]})
    else:
        print_checks(checks, len(missing))
    return FAULTS if missing else 0


def examine(path: Path) -> list[Check]:
    """Every check, in the order in which to fix things."""
    from qwen_cache.models.hardware import host_memory

    required, optional = requirements()
    return [
        Check("python", "ok", f"{platform.python_version()}, {sys.executable}, {platform.platform()}"),
        *check_packages(required, optional),
        *check_extras(optional),
        check_trackers(),
        *check_accelerators(probe_torch(), probe_nvidia(), os.environ.get("CUDA_VISIBLE_DEVICES")),
        check_memory(*host_memory()),
        Check("processors", "ok", plural(processors(), "core"), facts={"cores": processors()}),
        check_shards(path),
        *check_hub(),
        check_own_cache(),
    ]


def print_checks(checks: Iterable[Check], missing: int) -> None:
    """The checks as a table, on stdout."""
    from rich.table import Table
    from rich.text import Text

    out, table = results(), Table.grid(padding=(0, 2))
    for check in checks:
        colour = COLOURS[check.status if check.essential or check.status != "missing" else "warning"]
        found = Text(plain(check.found))
        if check.do:
            found.append(f"\n→ {plain(check.do)}", style=colour)
        table.add_row(Text(check.status, style=colour), Text(check.name, style="bold"), found)
    out.print(table)
    out.print(f"[bold red]{plural(missing, 'essential thing')} missing[/]" if missing else "nothing essential missing")


# ---- packages --------------------------------------------------------------------------------------------------------


def satisfied(need: Requirement) -> bool:
    """True if the package is installed and new enough; a version that is not a number is a local build, and passes."""
    from packaging.version import InvalidVersion, Version

    version = installed(need.name)
    try:
        return version is not None and need.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return True


def check_packages(required: Sequence[Requirement], optional: Mapping[str, Sequence[Requirement]]) -> Iterator[Check]:
    """A line for each package that bug reports list, and for every other whose version does not fit.

    Packages of `build` and `train` that are not installed are left to `check_extras`.
    """
    if required:
        yield Check(PACKAGE, "ok", __version__)
    else:
        yield Check(PACKAGE, "warning", f"{__version__}, not installed", install_command("all"))
    heavy = {need.name: need for extra in PROGRAMS for need in optional.get(extra, ()) if installed(need.name)}
    for need in (*required, *heavy.values()):
        version, fits = installed(need.name), satisfied(need)
        do = None if fits else f"pip install '{need.name}{need.specifier}'"
        found = version if fits else f"{version or 'not installed'}, needs {need.specifier}"
        if not fits or need.name in SHOWN_PACKAGES:
            yield Check(need.name, "ok" if fits else "missing", str(found), do, facts={"version": version})


def check_extras(optional: Mapping[str, Sequence[Requirement]]) -> Iterator[Check]:
    """One line for all installed extras, one for each extra that lacks packages."""
    lacking = {extra: [need.name for need in needs if not satisfied(need)] for extra, needs in optional.items()}
    present = [extra for extra, names in lacking.items() if not names]
    if present:
        yield Check("extras", "ok", ", ".join(present), essential=False)
    for extra, names in lacking.items():
        if names:
            found = f"without {' and '.join(names)}; for {EXTRAS[extra]}"
            yield Check(f"extra {extra}", "missing", found, install_command(extra), essential=False)


def check_trackers() -> Check:
    """The trackers that training can log to."""
    present = [name for name in TRACKERS if installed(name)]
    others = ", ".join(name for name in TRACKERS if name not in present)
    found = f"{', '.join(present) or 'none'}; not installed: {others}"
    return Check("trackers", "ok", found, essential=False, facts={"installed": present})


# ---- accelerators ----------------------------------------------------------------------------------------------------


def probe_torch() -> Torch:
    """Import torch and ask it for devices; a torch that does not load, or a driver that it rejects, is a result too."""
    if installed("torch") is None and find_spec("torch") is None:
        return Torch(absent=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            import torch

            caught.clear()  # warnings of the import are not about devices
            torch.cuda.is_available()  # warns with a reason; torch.accelerator does not
            available = torch.accelerator.is_available()
            kind = torch.accelerator.current_accelerator().type if available else ""  # type: ignore[union-attr]
            devices = tuple(_device(kind, i) for i in range(torch.accelerator.device_count() if available else 0))
        except (ImportError, OSError, RuntimeError, AttributeError) as error:
            return Torch(complaint=first_line(error), broken=True)
    builds = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "XPU": getattr(torch.version, "xpu", None)}
    built_for = next((f"{name} {version}" for name, version in builds.items() if version), None)
    built_for = built_for or (kind.upper() if devices else CPU_ALONE)  # Apple's has no version
    return Torch(str(torch.__version__), built_for, devices, "; ".join(first_line(it.message) for it in caught))


def _device(kind: str, number: int) -> Device:
    import torch

    backend, bf16 = torch.get_device_module(kind), None
    if kind == "cuda":
        with torch.cuda.device(number):
            bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    free, total = backend.mem_get_info(number) if hasattr(backend, "mem_get_info") else (None, None)
    name = backend.get_device_name(number) if hasattr(backend, "get_device_name") else kind
    uuid = None
    with suppress(AttributeError, RuntimeError, AssertionError):  # no backend but CUDA's has one
        uuid = f"GPU-{backend.get_device_properties(number).uuid}"
    return Device(f"{kind}:{number}", name, total, free, bf16, uuid)


def probe_nvidia() -> list[str]:
    """The NVIDIA GPUs of the system, whether or not torch can use them."""
    if program := shutil.which("nvidia-smi"):
        command = [program, "--query-gpu=name", "--format=csv,noheader"]
        try:
            result = subprocess.run(command, capture_output=True, timeout=20, check=True)
            return [line.strip() for line in result.stdout.decode("utf-8", "replace").splitlines() if line.strip()]
        except (OSError, subprocess.SubprocessError):
            pass  # nvidia-smi without a driver; the kernel may still list them
    lines = [line for path in sorted(NVIDIA_GPUS.glob("*/information")) for line in _lines(path)]
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]


def check_accelerators(torch: Torch, nvidia: Sequence[str], visible: str | None) -> Iterator[Check]:
    """The check that torch loads, then each device, or why there is none; `visible` is CUDA_VISIBLE_DEVICES."""
    if torch.absent:
        found = "torch is not installed: caches can be read and checked, not built or trained on"
        yield Check("accelerator", "warning", found, install_command("all"))
        return
    if torch.broken:
        yield Check("torch's build", "missing", f"fails: {torch.complaint}", "install torch again, or its driver")
        return
    yield Check("torch's build", "ok", f"for {torch.built_for}", facts={"built_for": torch.built_for})
    yield from map(check_device, torch.devices)
    if torch.devices:
        return
    names, do = ", ".join(nvidia), None
    if not nvidia:
        do = "the tiny model of `make demo` runs on the CPU; the real one needs a GPU"
        yield Check("accelerator", "warning", "none" + (f"; {torch.complaint}" if torch.complaint else ""), do)
    elif torch.built_for == CPU_ALONE:
        number = torch.version.partition("+")[0]
        do = f"pip uninstall -y torch && pip install torch=={number} (Linux; elsewhere as pytorch.org says)"
        yield Check("accelerator", "missing", f"{names}, but torch is the build for {CPU_ALONE}", do)
    elif visible is not None and not torch.complaint:
        found = f"{names}, hidden by CUDA_VISIBLE_DEVICES={visible!r}"
        yield Check("accelerator", "warning", found, "unset CUDA_VISIBLE_DEVICES")
    else:
        found = f"{names}, which torch cannot use" + (f": {torch.complaint}" if torch.complaint else "")
        do = f"update the NVIDIA driver to one for {torch.built_for}, or install torch for the CUDA of this driver"
        yield Check("accelerator", "missing", found, do)


def check_device(device: Device) -> Check:
    """The memory of a device, whether another process uses it, and whether it computes in bfloat16."""
    status: Status = "ok"
    parts, do = [device.name], None
    if device.total is not None and device.free is not None:
        parts.append(f"{human_bytes(device.free)} of {human_bytes(device.total)} free")
        if device.free < 0.8 * device.total:
            status, do = "warning", "another process uses the rest; nvidia-smi, or a similar tool, names it"
    if device.bf16 is not None:
        parts.append("bfloat16" if device.bf16 else "no bfloat16")
    if device.bf16 is False:
        status, do = "warning", "train and build in float32, or use a device that computes in bfloat16"
    facts = {"place": device.device, "name": device.name, "total": device.total, "free": device.free}
    facts |= {"bf16": device.bf16, "uuid": device.uuid}
    return Check(device.device, status, ", ".join(parts), do, facts=facts)


# ---- the host --------------------------------------------------------------------------------------------------------


def check_memory(total: int | None, free: int | None) -> Check:
    """The check that the text encoder fits into host memory, where it waits for its device or runs without one."""
    facts = {"total": total, "free": free}
    if total is None:
        return Check("memory", "ok", "unknown", facts=facts)
    blocks = min(BLOCKS, (total if free is None else free) // OFFLOADED_BLOCK_BYTES)
    found = f"{human_bytes(total)}, " + ("free memory unknown" if free is None else f"{human_bytes(free)} free")
    found += f", for train.offload_blocks of at most {blocks}"
    if (total if free is None else free) >= TEXT_ENCODER_BYTES:
        return Check("memory", "ok", found, facts=facts)
    do = f"the text encoder alone is {human_bytes(TEXT_ENCODER_BYTES)}: keep it on a GPU, without offloading"
    return Check("memory", "warning", found, do, facts=facts)


def processors() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ---- disks and the hub -----------------------------------------------------------------------------------------------


def check_shards(path: Path) -> Check:
    """Free space for a cache at `path`."""
    folder = _existing(path)
    name = f"disk of {path}"
    try:
        if not folder.is_dir():
            raise NotADirectoryError(f"{folder} is a file")
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} cannot be written to")
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Check(name, "missing", error.strerror or str(error), "name a folder that can be written to with --path")
    return judge_disk(name, free)


def judge_disk(name: str, free: int) -> Check:
    """The check of a disk with this many bytes free."""
    samples = free // SAMPLE_BYTES
    found = f"{human_bytes(free)} free, for about {_rounded(samples)} edits of a megapixel"
    do = "name a disk with more space with --path" if samples < SMALL_DATASET else None
    return Check(name, "warning" if do else "ok", found, do, facts={"free": free})


def _rounded(count: int) -> str:
    """An estimate, with two significant digits: `5,500` of 5546."""
    return f"{round(count, 2 - len(str(count))):,}"


def check_hub() -> Iterator[Check]:
    """The folder of downloaded models, and whether more can be downloaded."""
    try:
        from huggingface_hub import constants, get_token

        token = get_token() is not None
    except (ImportError, OSError) as error:
        yield Check("hub", "warning", f"unknown: {first_line(error)}", "fix that, or give a folder as --model")
        return
    folder = Path(constants.HF_HUB_CACHE)
    models = [path.name.split("--")[-1] for path in sorted(folder.glob("models--Qwen--Qwen-Image*"))]
    yield judge_models(folder, _free(folder), models)
    yield judge_hub(offline=constants.HF_HUB_OFFLINE, token=token, models=bool(models))


def check_own_cache() -> Check:
    """Free space for the files that both programs keep for later runs."""
    folder = cache_home()
    free = _free(folder)
    found = f"{folder}, {_free_space(free)}; for modulation tables, large indexes and copies of remote shards"
    short = free is not None and free < OWN_CACHE_BYTES
    do = "set XDG_CACHE_HOME, or cache.local_copies, to a folder on a disk with space" if short else None
    return Check("own cache", "warning" if short else "ok", found, do, facts={"folder": str(folder), "free": free})


def judge_models(folder: Path, free: int | None, models: Sequence[str]) -> Check:
    """The check that a model is downloaded, or there is space for one."""
    found = f"{folder}, {_free_space(free)}; " + (f"has {', '.join(models)}" if models else "no Qwen-Image model yet")
    short = not models and free is not None and free < MODEL_BYTES
    do = f"a model is {human_bytes(MODEL_BYTES)}: set HF_HOME to a folder on a disk with space" if short else None
    facts = {"folder": str(folder), "free": free, "models": list(models)}
    return Check("models", "warning" if short else "ok", found, do, facts=facts)


def judge_hub(*, offline: bool, token: bool, models: bool) -> Check:
    """The check that a model can be downloaded."""
    found = ("offline (HF_HUB_OFFLINE)" if offline else "downloads allowed") + (
        ", with a token" if token else ", no token"
    )
    stuck = offline and not models
    do = "unset HF_HUB_OFFLINE to download a model, or give a folder as --model" if stuck else None
    return Check("hub", "warning" if stuck else "ok", found, do, facts={"offline": offline, "token": token})


# ---- helpers ---------------------------------------------------------------------------------------------------------


def _lines(path: Path) -> list[str]:
    """The lines of a file; none where it does not exist."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _existing(path: Path) -> Path:
    """The path, or its nearest parent that exists; the path itself on a Windows drive that does not exist."""
    path = Path(os.path.expanduser(path)).absolute()
    return next((each for each in (path, *path.parents) if os.path.exists(each)), path)


def _free(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(_existing(folder)).free
    except OSError:
        return None


def _free_space(free: int | None) -> str:
    return "free space unknown" if free is None else f"{human_bytes(free)} free"
