"""The devices of this machine, as `qwen-cache doctor --json` finds them: torch is never imported here.

The first answer is kept, since a look takes seconds; `again` repeats it. The CPU is always one of them, the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from threading import Lock
from typing import Any

from fastapi import APIRouter

from qwen_cache.ui.jobs.checks import Checked, Checks
from qwen_cache.ui.jobs.command import Command

CPU = "cpu"
WHY_NONE = ("accelerator", "torch's build")
"""The checks of `doctor` that say why there is no accelerator."""
LOOK = Command("qwen-cache", ("doctor", "--json"))


@dataclass(frozen=True)
class Device:
    """A device by the name that commands take; None for what its backend does not report."""

    name: str
    title: str
    memory: int | None = None
    free: int | None = None
    bf16: bool | None = None


@dataclass(frozen=True)
class Found:
    """The devices, and why there may be fewer than expected."""

    devices: tuple[Device, ...]
    problem: str = ""
    do: str = ""


def devices(checks: Checks) -> list[Device]:
    """The devices of this machine, from one look that takes seconds."""
    return list(look(checks).devices)


def look(checks: Checks) -> Found:
    """The result of `qwen-cache doctor --json`."""
    return found(checks.check(LOOK))


def found(checked: Checked) -> Found:
    """The devices in an answer of `doctor`; its reason where it found no accelerator or failed."""
    if not isinstance(checked.document, dict):
        return Found((Device(CPU, "CPU"),), f"qwen-cache doctor failed: {checked.message}", "run it in a terminal")
    examined: Sequence[dict[str, Any]] = checked.document["checks"]
    facts = [each["facts"] for each in examined if "place" in each["facts"]]
    accelerators = [Device(it["place"], it["name"], it["total"], it["free"], it["bf16"]) for it in facts]
    host = next((each["facts"] for each in examined if each["name"] == "memory"), {"total": None, "free": None})
    here = (*accelerators, Device(CPU, "CPU", host["total"], host["free"]))
    lacking = [each for each in examined if each["name"] in WHY_NONE and each["status"] != "ok"]
    if accelerators or not lacking:
        return Found(here)
    return Found(here, f"{lacking[0]['name']}: {lacking[0]['found']}", lacking[0]["do"] or "")


def routes_of(checks: Checks) -> APIRouter:
    router, lock, kept = APIRouter(), Lock(), list[Found]()

    def answer(*, again: bool) -> dict[str, Any]:
        with lock:
            if again or not kept:
                kept[:] = [look(checks)]
            return asdict(kept[0])

    @router.get("/api/devices")
    def known() -> dict[str, Any]:
        """The devices, found once."""
        return answer(again=False)

    @router.post("/api/devices/again")
    def again() -> dict[str, Any]:
        """The devices and their free memory as they are now."""
        return answer(again=True)

    return router
