"""Measured once: entries in the user's cache folder, and the devices of a machine without asking torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qwen_cache.errors import DeviceError
from qwen_cache.models import hardware
from qwen_cache.storage.measured import MOST, measured
from qwen_cache.storage.remembered import rehashing

from .support.processes import popen

# ---- entries ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "qwen-cache" / "measured"


class Measuring:
    """A measurement that counts its calls."""

    def __init__(self, value: Any = None) -> None:
        self.value, self.calls = value, 0

    def __call__(self) -> Any:
        self.calls += 1
        return self.value


def test_a_value_is_measured_once_for_each_key(home: Path) -> None:
    for value in ([1, 2.5, {"a": None}], 7, None, "text"):
        measuring = Measuring(value)
        for _ in range(3):
            assert measured({"what": "test", "of": [repr(value)]}, measuring) == value
        assert measuring.calls == 1
    assert measured({"what": "test", "of": "another"}, Measuring(8)) == 8
    assert len(list(home.iterdir())) == 5


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"null", b'{"key": 1}', None])
def test_a_damaged_entry_is_measured_again(home: Path, damage: bytes | None) -> None:
    """Cut off, of another kind, or with one number changed; then it is remembered again."""
    measuring = Measuring([41, 42])
    measured({"what": "test"}, measuring)
    (entry,) = home.iterdir()
    entry.write_bytes(entry.read_bytes().replace(b"41", b"40") if damage is None else damage)
    for _ in range(2):
        assert measured({"what": "test"}, measuring) == [41, 42]
    assert measuring.calls == 2


def test_rehashing_measures_again_and_errors_are_not_remembered(home: Path) -> None:
    measuring = Measuring(1)
    measured({"what": "test"}, measuring)
    with rehashing():
        measured({"what": "test"}, measuring)
    assert measuring.calls == 2

    def fail() -> None:
        raise DeviceError("no")

    with pytest.raises(DeviceError):
        measured({"what": "another"}, fail)
    assert len(list(home.iterdir())) == 1


def test_without_a_folder_to_write_to_it_is_measured_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    measuring = Measuring(3)
    assert [measured({"what": "test"}, measuring) for _ in range(2)] == [3, 3]
    assert measuring.calls == 2


def test_the_least_recently_used_entries_are_removed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qwen_cache.storage.measured.MOST", 3)
    assert MOST > 100
    for number in range(5):
        measured({"number": number}, Measuring(number))
    assert len(list(home.iterdir())) == 3
    last = Measuring(9)
    assert measured({"number": 4}, last) == 4
    assert last.calls == 0


WRITING = """
import sys
from qwen_cache.storage.measured import measured
for number in range(40):
    assert measured({"number": number % 4}, lambda: list(range(2000))) == list(range(2000))
"""


def test_processes_measure_at_once(home: Path) -> None:
    processes = [popen([sys.executable, "-c", WRITING]) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert len([path for path in home.iterdir() if path.suffix == ".json"]) == 4
    assert not list(home.glob("*.tmp"))


# ---- devices ---------------------------------------------------------------------------------------------------------

BUILDS = {
    "a build for CPUs": ("cuda: Optional[str] = None\nhip: Optional[str] = None\nxpu = None\n", False),
    "CUDA": ("cuda = '12.8'\nhip = None\nxpu = None\n", True),
    "ROCm": ("cuda = None\nhip: Optional[str] = '6.4'\nxpu = None\n", True),
    "one that does not say": ("cuda = None\nhip = None\n", True),
    "one that computes it": ("cuda = None\nhip = None\nxpu = str(3)\n", True),
    "another language": ("cuda = = None", True),
}


@pytest.mark.parametrize(("text", "support"), BUILDS.values(), ids=BUILDS)
def test_a_build_of_torch_says_what_it_supports(text: str, support: bool, tmp_path: Path) -> None:
    """Anything else is not known, and torch is asked."""
    path = tmp_path / "version.py"
    path.write_text(text, encoding="utf-8")
    assert hardware.has_support(path) == support
    assert hardware.has_support(tmp_path / "missing.py")


def test_a_package_may_bring_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "version.py"
    path.write_text("cuda = hip = None\ncuda = None\nhip = None\nxpu = None", encoding="utf-8")
    asked: list[str] = []
    monkeypatch.setattr(hardware, "entry_points", lambda group: asked.append(group) or ["a device"])
    assert hardware.has_support(path)
    assert asked == ["torch.backends"]


@pytest.fixture
def with_support(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A torch with support for accelerators that has not been imported; yields what it was asked."""
    asked: list[str] = []
    monkeypatch.setattr(hardware, "sys", SimpleNamespace(modules={}, platform="linux"))
    monkeypatch.setattr(hardware, "has_support", lambda: True)
    monkeypatch.setattr(hardware, "_ask_for_names", lambda: asked.append("names") or ["cuda:0", "cuda:1", "cpu"])
    monkeypatch.setattr(hardware, "_ask_for_memory", lambda name: asked.append(name) or 24_000)
    return asked


def test_devices_are_asked_for_once_until_anything_changes(
    with_support: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The environment, the device nodes, the boot or the driver."""
    boot, nodes = tmp_path / "boot_id", tmp_path / "dev"
    monkeypatch.setattr(hardware, "DEV", nodes)
    for _ in range(2):
        assert hardware.device_names() == ["cuda:0", "cuda:1", "cpu"]
        assert hardware.device_memory("cuda:1") == 24_000
        assert hardware.device_memory("cuda:7") is None
        assert hardware.device_memory("cpu") is None
    assert with_support == ["names", "cuda:1"]
    changes = [
        lambda: monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1"),
        lambda: monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "0"),
        lambda: monkeypatch.setattr(hardware, "STATE", (str(boot),)),
        lambda: boot.write_text("another boot"),
        lambda: (nodes / "dri").mkdir(parents=True),
        lambda: (nodes / "dri" / "renderD128").touch(),
        lambda: (nodes / "nvidia0").touch(),
        lambda: (nodes / "nvidia0").chmod(0o600),
    ]
    for count, change in enumerate(changes, start=2):
        change()
        for _ in range(2):
            hardware.device_names()
        assert with_support.count("names") == count
    (nodes / "tty0").touch()
    hardware.device_names()
    assert with_support.count("names") == len(changes) + 1


@pytest.mark.parametrize("system", [{"modules": {"torch": object()}}, {"platform": "darwin"}, {"platform": "win32"}])
def test_torch_is_asked_where_it_is_loaded_and_on_other_systems(
    with_support: list[str], monkeypatch: pytest.MonkeyPatch, system: dict[str, Any]
) -> None:
    monkeypatch.setattr(hardware, "sys", SimpleNamespace(**{"modules": {}, "platform": "linux"} | system))
    for _ in range(2):
        hardware.device_names()
        hardware.device_memory("cuda:0")
    assert with_support == ["names", "names", "cuda:0"] * 2


def test_devices_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "device_names", lambda: ["cuda:0", "cuda:1", "cpu"])
    chosen = {name: hardware.choose_names(name, "--option") for name in ("auto", "cuda", "cuda:1, cpu")}
    assert chosen == {"auto": ["cuda:0"], "cuda": ["cuda:0"], "cuda:1, cpu": ["cuda:1", "cpu"]}
    assert hardware.choose_name("auto", "--option", preferred=5) == "cuda:1"
    with pytest.raises(DeviceError, match=r"--option: no such device .*expected cuda:0 or cuda:1 or cpu, found xpu"):
        hardware.choose_name("xpu", "--option")
    known = {name: hardware.is_device_name(name) for name in ("cuda:3", "mps", "vulkan", "gpu7", "cuda:x", "")}
    assert known == {"cuda:3": True, "mps": True, "vulkan": True, "gpu7": False, "cuda:x": False, "": False}
    assert [hardware.is_accelerator_name(each) for each in ("cuda", "cpu", "meta")] == [True, False, False]
    assert json.loads(json.dumps(hardware._state_of_machine()))  # a key
