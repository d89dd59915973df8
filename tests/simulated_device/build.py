"""Compiles `device.cpp` once per checkout and loads it.

One g++ command of about 20 seconds, without ninja and cmake. The library is in `.simulated-device` of the checkout. Its
name depends on the source, the command, torch and Python, so that a change of any of them compiles again. Processes
that want it at once wait for the first; a killed compiler leaves nothing that would be loaded.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import torch
from filelock import FileLock
from torch.utils import cpp_extension

NAME = "simulated_device"
SOURCE = Path(__file__).with_name("device.cpp")
FOLDER = Path(__file__).parents[2] / ".simulated-device"  # the tests have a user's cache folder for each session
SUPPORTED = (2, 13)
"""The version of torch whose internals `device.cpp` uses; they change from one to the next."""
LIBRARIES = ("torch", "torch_cpu", "c10", "torch_python")


def obstacle() -> str | None:
    """Why the device cannot be built here; None if it can."""
    version = torch.__version__.split("+")[0].split(".")
    if tuple(map(int, version[:2])) != SUPPORTED:
        return f"the simulated device is written for torch {'.'.join(map(str, SUPPORTED))}, not {torch.__version__}"
    if platform.system() != "Linux":
        return "the simulated device is built on Linux only"
    if shutil.which("g++") is None:
        return "there is no g++ in PATH"
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        return "Python's header files are not installed"
    return None


def command() -> list[str]:
    """The call of g++, without its output; optimised code takes longer to compile than it saves."""
    return [
        *("g++", "-std=c++20", "-O0", "-fPIC", "-shared", "-w", f"-DTORCH_EXTENSION_NAME={NAME}"),
        *(f"-isystem{path}" for path in (*cpp_extension.include_paths(), sysconfig.get_paths()["include"])),
        str(SOURCE),
        *(f"-L{path}" for path in cpp_extension.library_paths()),
        *(f"-l{name}" for name in LIBRARIES),
        *(f"-Wl,-rpath,{path}" for path in cpp_extension.library_paths()),
    ]


def build() -> Path:
    """The compiled library; RuntimeError with the compiler's messages if it refuses the source."""
    key = (SOURCE.read_text(encoding="utf-8"), torch.__version__, sysconfig.get_config_var("SOABI"), *command())
    digest = hashlib.sha256("\n".join(map(str, key)).encode()).hexdigest()[:16]
    library = FOLDER / digest / f"{NAME}.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(library.with_suffix(".lock")):
        if not library.exists():
            compile_to(library)
    return library


def compile_to(library: Path) -> None:
    unfinished = library.with_suffix(f".{os.getpid()}")
    process = subprocess.run([*command(), "-o", str(unfinished)], capture_output=True, text=True)
    if process.returncode:
        unfinished.unlink(missing_ok=True)
        raise RuntimeError(f"g++ refuses {SOURCE}:\n{process.stderr}")
    unfinished.replace(library)


@functools.cache
def extension() -> ModuleType:
    """The loaded library, whose operators are registered from now on."""
    if reason := obstacle():
        raise RuntimeError(reason)
    spec = importlib.util.spec_from_file_location(NAME, build())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[NAME] = module
    return module
