"""`qwen-cache doctor`: what this machine has of what both programs need, and what to do about the rest.

Probes gather facts; checks judge them and touch nothing. A probe that finds no /proc, no nvidia-smi or no torch that
can be loaded says so, and never fails. Versions are read from package metadata: of the heavy packages only torch is
imported, since nothing else knows what it can use. Whether there is a token for the hub is said, the token never.
Nothing is written.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from qwen_cache.console import FAULTS, IN_BUG_REPORTS, human_bytes, plural, print_json
from qwen_cache.errors import ConfigError
from qwen_cache.extras import EXTRAS, PACKAGE, installed, requirements
from qwen_cache.storage.durable import cache_home
from qwen_cache.version import __version__

if TYPE_CHECKING:
    from packaging.requirements import Requirement


SHOWN_PACKAGES = (*IN_BUG_REPORTS, "safetensors")
PROGRAMS = ("build", "train")  # the extras that are most of what both programs do
TRACKERS = ("tensorboard", "wandb", "trackio", "aim", "comet_ml", "mlflow", "clearml", "dvclive", "swanlab")
MEMINFO, NVIDIA_GPUS = Path("/proc/meminfo"), Path("/proc/driver/nvidia/gpus")
CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))

TEXT_ENCODER_BYTES = 16_600_000_000  # Qwen2.5-VL 7B in bfloat16: what the host takes when the encoder runs there
MODEL_BYTES = 58_000_000_000  # transformer 41, text encoder 16.6, VAE 0.3
SAMPLE_BYTES = 11_000_000  # an edit of one megapixel, uncompressed
SAMPLES_WANTED = 1000  # a small dataset: a disk with less room deserves a warning
OWN_CACHE_BYTES = 3_200_000_000  # one table of train.tabulated_modulation

CPU_ALONE = "the CPU alone"
Status = Literal["ok", "warning", "missing"]
COLOURS = {"ok": "green", "warning": "yellow", "missing": "red"}


@dataclass(frozen=True)
class Check:
    """One line: what was looked at, what was found, and what to do where that is not enough."""

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
    """An accelerator that torch can use; None where its kind does not tell."""

    place: str
    name: str
    total: int | None
    free: int | None
    bf16: bool | None


@dataclass(frozen=True)
class Torch:
    """What torch says of itself, and what it complains of; when it is `broken` or `absent` that is all."""

    version: str = ""
    built_for: str = CPU_ALONE
    devices: tuple[Device, ...] = ()
    complaint: str = ""
    broken: bool = False
    absent: bool = False


def run_doctor(path: str, *, as_json: bool) -> int:
    """Look, print, and say in the exit code whether something essential is missing."""
    if "://" in path:
        raise ConfigError("a cache is built on a local disk", where=path, do="name a local folder with --path")
    checks = examine(Path(path))
    lacking = [check for check in checks if check.status == "missing" and check.essential]
    if as_json:
        print_json({"ok": not lacking, "checks": [check.to_json() for check in checks]})
    else:
        print_checks(checks, len(lacking))
    return FAULTS if lacking else 0


def examine(path: Path) -> list[Check]:
    """Every check, in the order in which one would mend things."""
    required, optional = requirements()
    return [
        Check("python", "ok", f"{platform.python_version()}, {sys.executable}, {platform.platform()}"),
        *check_packages(required, optional),
        *check_extras(optional),
        check_trackers(),
        *check_accelerators(probe_torch(), probe_nvidia(), os.environ.get("CUDA_VISIBLE_DEVICES")),
        check_memory(*probe_memory()),
        Check("processors", "ok", plural(processors(), "core"), facts={"cores": processors()}),
        check_shards(path),
        *check_hub(),
        check_own_cache(),
    ]


def print_checks(checks: Iterable[Check], lacking: int) -> None:
    """The checks as a table, on stdout."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    out, table = Console(highlight=False), Table.grid(padding=(0, 2))
    for check in checks:
        colour = COLOURS[check.status if check.essential or check.status != "missing" else "warning"]
        found = Text(check.found)
        if check.do:
            found.append(f"\n→ {check.do}", style=colour)
        table.add_row(Text(check.status, style=colour), Text(check.name, style="bold"), found)
    out.print(table)
    out.print(f"[bold red]{plural(lacking, 'essential thing')} missing[/]" if lacking else "nothing essential missing")


# ---- packages --------------------------------------------------------------------------------------------------------


def satisfied(need: Requirement) -> bool:
    """Whether it is installed and new enough; a version that is no number at all is somebody's own build, and taken."""
    from packaging.version import InvalidVersion, Version

    version = installed(need.name)
    try:
        return version is not None and need.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return True


def check_packages(required: Sequence[Requirement], optional: Mapping[str, Sequence[Requirement]]) -> Iterator[Check]:
    """A line for each package that bug reports are about, and for every other that does not do.

    Of what `build` and `train` need, what is not installed at all is left to the lines about extras.
    """
    if required:
        yield Check(PACKAGE, "ok", __version__)
    else:
        yield Check(PACKAGE, "warning", f"{__version__}, not installed", "pip install '.[all]' in its folder")
    heavy = {need.name: need for extra in PROGRAMS for need in optional.get(extra, ()) if installed(need.name)}
    for need in (*required, *heavy.values()):
        version, fits = installed(need.name), satisfied(need)
        do = None if fits else f"pip install '{need.name}{need.specifier}'"
        found = version if fits else f"{version or 'not installed'}, needs {need.specifier}"
        if not fits or need.name in SHOWN_PACKAGES:
            yield Check(need.name, "ok" if fits else "missing", str(found), do, facts={"version": version})


def check_extras(optional: Mapping[str, Sequence[Requirement]]) -> Iterator[Check]:
    """One line for all that are there, one for each that is not."""
    lacking = {extra: [need.name for need in needs if not satisfied(need)] for extra, needs in optional.items()}
    present = [extra for extra, names in lacking.items() if not names]
    if present:
        yield Check("extras", "ok", ", ".join(present), essential=False)
    for extra, names in lacking.items():
        if names:
            found = f"without {' and '.join(names)}; for {EXTRAS[extra]}"
            yield Check(f"extra {extra}", "missing", found, f"pip install '{PACKAGE}[{extra}]'", essential=False)


def check_trackers() -> Check:
    """Where training can send its curves."""
    present = [name for name in TRACKERS if installed(name)]
    others = ", ".join(name for name in TRACKERS if name not in present)
    found = f"{', '.join(present) or 'none'}; not installed: {others}"
    return Check("trackers", "ok", found, essential=False, facts={"installed": present})


# ---- what computes ---------------------------------------------------------------------------------------------------


def probe_torch() -> Torch:
    """Import torch and ask it; a torch that cannot be loaded, or a driver that it dislikes, is an answer as well."""
    if installed("torch") is None and find_spec("torch") is None:
        return Torch(absent=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            import torch

            said.clear()  # what an import warns of is not about devices
            torch.cuda.is_available()  # it explains itself with a warning, which torch.accelerator does not
            there = torch.accelerator.is_available()
            kind = torch.accelerator.current_accelerator().type if there else ""  # type: ignore[union-attr]
            devices = tuple(_device(kind, i) for i in range(torch.accelerator.device_count() if there else 0))
        except (ImportError, OSError, RuntimeError, AttributeError) as error:
            return Torch(complaint=_first_line(error), broken=True)
    builds = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "XPU": getattr(torch.version, "xpu", None)}
    built_for = next((f"{name} {version}" for name, version in builds.items() if version), None)
    built_for = built_for or (kind.upper() if devices else CPU_ALONE)  # Apple's needs no version
    return Torch(str(torch.__version__), built_for, devices, "; ".join(_first_line(it.message) for it in said))


def _device(kind: str, number: int) -> Device:
    import torch

    backend, bf16 = getattr(torch, kind), None
    if kind == "cuda":
        with torch.cuda.device(number):
            bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    free, total = backend.mem_get_info(number) if hasattr(backend, "mem_get_info") else (None, None)
    name = backend.get_device_name(number) if hasattr(backend, "get_device_name") else kind
    return Device(f"{kind}:{number}", name, total, free, bf16)


def probe_nvidia() -> list[str]:
    """The NVIDIA GPUs that the system knows, whether or not torch can use them."""
    if program := shutil.which("nvidia-smi"):
        asked = [program, "--query-gpu=name", "--format=csv,noheader"]
        try:
            done = subprocess.run(asked, capture_output=True, timeout=20, check=True)
            return [line.strip() for line in done.stdout.decode("utf-8", "replace").splitlines() if line.strip()]
        except (OSError, subprocess.SubprocessError):
            pass  # it is there without its driver; the kernel may still know
    lines = [line for path in sorted(NVIDIA_GPUS.glob("*/information")) for line in _lines(path)]
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]


def check_accelerators(torch: Torch, nvidia: Sequence[str], visible: str | None) -> Iterator[Check]:
    """Whether torch loads, then each device, or why there is none. `visible` is CUDA_VISIBLE_DEVICES."""
    if torch.absent:
        found = "torch is not installed: caches can be read and checked, not built or trained on"
        yield Check("accelerator", "warning", found, f"pip install '{PACKAGE}[all]'")
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
        do = "the tiny model of `make demo` runs on the CPU; the real one wants a GPU"
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
    """Its memory, who else uses it, and whether it computes in bfloat16."""
    status: Status = "ok"
    parts, do = [device.name], None
    if device.total is not None and device.free is not None:
        parts.append(f"{human_bytes(device.free)} of {human_bytes(device.total)} free")
        if device.free < 0.8 * device.total:
            status, do = "warning", "another process holds the rest: nvidia-smi, or its like, names it"
    if device.bf16 is not None:
        parts.append("bfloat16" if device.bf16 else "no bfloat16")
    if device.bf16 is False:
        status, do = "warning", "train and build with float32, or take a device that computes in bfloat16"
    return Check(device.place, status, ", ".join(parts), do, facts=asdict(device))


# ---- the host --------------------------------------------------------------------------------------------------------


def probe_memory() -> tuple[int | None, int | None]:
    """Bytes that there are, and that are free, within the limit of the container where there is one."""
    fields = {name: rest.split() for name, _, rest in (line.partition(":") for line in _lines(MEMINFO))}
    total, free = (int(fields[name][0]) * 1024 if name in fields else None for name in ("MemTotal", "MemAvailable"))
    if total is None and "SC_PHYS_PAGES" in getattr(os, "sysconf_names", ()):
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    bounds = [int(line) for path in CONTAINER_LIMITS for line in _lines(path) if line.isdigit()]
    return (total and min([total, *bounds])), (free and min([free, *bounds]))


def check_memory(total: int | None, free: int | None) -> Check:
    """Enough for the text encoder, which waits here for its device and runs here where there is none."""
    facts = {"total": total, "free": free}
    if total is None:
        return Check("memory", "ok", "not known", facts=facts)
    found = f"{human_bytes(total)}, {'not known how much is' if free is None else human_bytes(free)} free"
    if (total if free is None else free) >= TEXT_ENCODER_BYTES:
        return Check("memory", "ok", found, facts=facts)
    do = f"the text encoder alone is {human_bytes(TEXT_ENCODER_BYTES)}: keep it on a GPU, without offloading"
    return Check("memory", "warning", found, do, facts=facts)


def processors() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ---- disks and the hub -----------------------------------------------------------------------------------------------


def check_shards(path: Path) -> Check:
    """Room for a cache at `path`."""
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
    """The line about a disk with this many bytes free."""
    samples = free // SAMPLE_BYTES
    found = f"{human_bytes(free)} free, for about {samples} edits of a megapixel"
    do = "name a disk with more room with --path" if samples < SAMPLES_WANTED else None
    return Check(name, "warning" if do else "ok", found, do, facts={"free": free})


def check_hub() -> Iterator[Check]:
    """The folder of downloaded models, and whether more can be downloaded."""
    try:
        from huggingface_hub import constants, get_token

        token = get_token() is not None
    except (ImportError, OSError) as error:
        yield Check("hub", "warning", f"not known: {_first_line(error)}", "see to that, or give a folder as --model")
        return
    folder = Path(constants.HF_HUB_CACHE)
    models = [path.name.split("--")[-1] for path in sorted(folder.glob("models--Qwen--Qwen-Image*"))]
    yield judge_models(folder, _free(folder), models)
    yield judge_hub(offline=constants.HF_HUB_OFFLINE, token=token, models=bool(models))


def check_own_cache() -> Check:
    """Room for what both programs keep for themselves."""
    folder = cache_home()
    free = _free(folder)
    found = f"{folder}, {_room(free)}; for modulation tables and copies of remote shards"
    short = free is not None and free < OWN_CACHE_BYTES
    do = "set XDG_CACHE_HOME, or cache.local_copies, to a folder on a disk with room" if short else None
    return Check("own cache", "warning" if short else "ok", found, do, facts={"folder": str(folder), "free": free})


def judge_models(folder: Path, free: int | None, models: Sequence[str]) -> Check:
    """Whether a model is there, or there is room for one."""
    found = f"{folder}, {_room(free)}; " + (f"has {', '.join(models)}" if models else "no Qwen-Image model yet")
    short = not models and free is not None and free < MODEL_BYTES
    do = f"a model is {human_bytes(MODEL_BYTES)}: set HF_HOME to a folder on a disk with room" if short else None
    facts = {"folder": str(folder), "free": free, "models": list(models)}
    return Check("models", "warning" if short else "ok", found, do, facts=facts)


def judge_hub(*, offline: bool, token: bool, models: bool) -> Check:
    """Whether a model can be downloaded."""
    found = ("offline (HF_HUB_OFFLINE)" if offline else "may be asked") + (
        ", a token is there" if token else ", no token"
    )
    stuck = offline and not models
    do = "unset HF_HUB_OFFLINE to download a model, or give a folder as --model" if stuck else None
    return Check("hub", "warning" if stuck else "ok", found, do, facts={"offline": offline, "token": token})


# ---- for the probes above --------------------------------------------------------------------------------------------


def _lines(path: Path) -> list[str]:
    """Of a file that may not be there."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _first_line(error: object) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _existing(path: Path) -> Path:
    """The path, or the nearest above it that is there; of a drive that Windows does not have, the path."""
    path = Path(os.path.expanduser(path)).absolute()
    return next((each for each in (path, *path.parents) if os.path.exists(each)), path)


def _free(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(_existing(folder)).free
    except OSError:
        return None


def _room(free: int | None) -> str:
    return "free room not known" if free is None else f"{human_bytes(free)} free"
