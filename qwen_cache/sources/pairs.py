"""A folder of images that belong together by their names.

Names are compared whole, never by prefix; subfolders are part of a name. Refused: two files of one name, a gap in the
controls, and a file that belongs to no target. Where no targets are needed, a folder of controls is enough, each with
its prompt beside it.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from qwen_cache.errors import Problem, SourceError
from qwen_cache.sources.places import File, Folder, Place, read_bytes
from qwen_cache.sources.rows import Draft, Faults, Needs, Row

TARGET_FOLDERS = ("target_images", "training_images", "targets", "target")
CONTROL_FOLDERS = ("control_images", "condition_images", "controls", "control")
IMAGE_EXTENSIONS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".avif")
READERS = 16  # prompts read at once: behind a URL each takes 0.1 s


def read_pairs(folder: Folder, needs: Needs) -> Iterator[Problem | Draft]:
    if needs.control and not needs.target and not any(name in folder.folders for name in TARGET_FOLDERS):
        yield from _read_controls(folder)
        return
    target_folder, control_folder = _layout(folder, needs.control)
    targets = _scan(folder, target_folder, IMAGE_EXTENSIONS)
    prompts = _scan(folder, target_folder, [".txt"])
    if not targets:
        where, accepted = folder.path / target_folder, ", ".join(IMAGE_EXTENSIONS)
        raise SourceError("there is no image", where=where, expected=accepted, do="name another source")
    owned: dict[str, dict[int, list[Place]]] = {name: {} for name in targets}
    strays = [path for name, paths in prompts.items() if name not in targets for path in paths]
    for name, paths in _scan(folder, control_folder, IMAGE_EXTENSIONS).items() if control_folder else ():
        target, slot = _owner(name, targets)
        if target is None:
            strays += paths
        else:
            owned[target][slot] = paths
    controls_in = folder.path / control_folder if control_folder else None
    with ThreadPoolExecutor(READERS, "prompts") as pool:
        texts = pool.map(lambda name: _read_prompt(prompts.get(name, [])), targets)
        for (name, paths), text in zip(targets.items(), texts, strict=True):
            yield _row(name, paths, (prompts.get(name, []), text), owned[name], controls_in)
    for path in strays:
        what = f"{path} belongs to no target: {folder.path / target_folder} has no image of that name"
        do = "add the target or remove the file; further controls are called NAME_control_1, masks NAME_mask"
        yield Problem(str(path), what, do)


def _read_controls(folder: Folder) -> Iterator[Draft]:
    """Rows of nothing but controls, in a folder of that name or in this one."""
    place = next((name for name in CONTROL_FOLDERS if name in folder.folders), ".")
    images, prompts = _scan(folder, place, IMAGE_EXTENSIONS), _scan(folder, place, [".txt"])
    if not images:
        accepted = ", ".join(IMAGE_EXTENSIONS)
        raise SourceError("there is no image", where=folder.path / place, expected=accepted, do="name another source")
    firsts = {name for name in images if _further(name, images)[0] is None}
    owned: dict[str, dict[int, list[Place]]] = {}
    for name, paths in images.items():
        first, slot = _owner(name, firsts)
        owned.setdefault(first or name, {})[slot if first else 0] = paths
    for name, slots in owned.items():
        files = prompts.get(name, [])
        draft = _row(name, slots[0], (files, _read_prompt(files)), slots, folder.path / place)
        yield replace(draft, samples=tuple(replace(row, mask=None) for row in draft.samples))


def _layout(folder: Folder, needs_control: bool) -> tuple[str, str | None]:
    """The names of the folders in which targets and controls lie; `.` is the folder itself."""
    known = {"target": TARGET_FOLDERS, "control": CONTROL_FOLDERS}
    found = {role: [name for name in names if name in folder.folders] for role, names in known.items()}
    for role, names in known.items():
        if len(found[role]) > 1:
            raise SourceError(
                f"the folder has more than one {role} folder",
                where=folder.path,
                expected="one",
                found=", ".join(found[role]),
                do="rename or move the one that is not meant",
            )
        if needs_control and not found[role]:
            raise SourceError(
                f"the folder has no {role} folder, which an editing model needs",
                where=folder.path,
                expected=" or ".join(names),
                found=", ".join(sorted(folder.files + folder.folders)[:10]) or "nothing",
                do=f"put the {role} images into {folder.path / names[0]}, or name a source of another kind",
            )
    if found["control"] and not needs_control:
        raise SourceError(
            "there is a control folder, but a text-to-image model takes no controls",
            where=folder.path,
            expected="targets and prompts only",
            found=found["control"][0],
            do="choose an editing model, or name the folder of the targets itself",
        )
    return next(iter(found["target"]), "."), next(iter(found["control"]), None)


def _scan(folder: Folder, name: str, extensions: Iterable[str]) -> dict[str, list[Place]]:
    """Files below one of its folders by name: the path relative to that, without extension."""
    found: dict[str, list[Place]] = {}
    for path in folder.below(name):
        stem, extension = posixpath.splitext(path)
        if extension.lower() in extensions:
            found.setdefault(stem, []).append((folder.path if name == "." else folder.path / name) / path)
    return dict(sorted(found.items()))


_MASK = -1
"""The slot of the mask among what the control folder holds for a target; 0 is its first control, then 1, 2, …"""


def _owner(name: str, targets: Collection[str]) -> tuple[str | None, int]:
    """The target that a file of the control folder belongs to, and its slot there."""
    return (name, 0) if name in targets else _further(name, targets)


def _further(name: str, targets: Collection[str]) -> tuple[str | None, int]:
    """The same of what is called after a target: a further control, or a mask."""
    ending = re.fullmatch(r"(.+)_(?:control_([1-9][0-9]*)|mask)", name, re.DOTALL)
    if ending is None or ending[1] not in targets:
        return None, 0
    return ending[1], int(ending[2]) if ending[2] else _MASK


def _read_prompt(files: list[Place]) -> str | Exception:
    try:
        return read_bytes(files[0]).decode("utf-8-sig").strip() if files else ""
    except (SourceError, UnicodeDecodeError) as error:
        return error


def _row(
    name: str,
    targets: list[Place],
    prompt: tuple[list[Place], str | Exception],
    slots: dict[int, list[Place]],
    control_folder: Place | None,
) -> Draft:
    faults: Faults = {}
    prompts, text = prompt
    for files in (targets, prompts, *slots.values()):
        if len(files) > 1:
            what = f"several files have the same name: {', '.join(map(str, files))}"
            faults[what] = what, "keep the one that is meant"
    numbers = sorted(slot for slot in slots if slot != _MASK)
    missing = min(set(range(len(numbers) + 1)).difference(numbers))
    if control_folder and missing < max(len(numbers), 1):
        expected = control_folder / (f"{name}_control_{missing}.png" if missing else f"{name}.png")
        found = ", ".join(slots[slot][0].name for slot in numbers) or "none"
        what = f"the control {expected} (or .jpg, …) is missing, found {found}"
        faults["control"] = what, "add it, or remove the target"
    if isinstance(text, Exception):
        reason = text.fault if isinstance(text, SourceError) else text
        faults["prompt"] = f"the prompt {prompts[0]} cannot be read: {reason}", "save it as UTF-8 text"
        text = ""
    elif not prompts:
        do = "write it; an image that is no target, such as a mask, belongs elsewhere"
        faults["prompt"] = f"the prompt {posixpath.splitext(str(targets[0]))[0]}.txt is missing", do
    controls = tuple(File(slots[slot][0]) for slot in numbers)
    mask = File(slots[_MASK][0]) if _MASK in slots else None
    return Draft((Row(name, str(targets[0]), File(targets[0]), controls, mask, text),), faults)
