"""A folder of images that are matched by their names.

Names are compared whole, never by prefix; subfolders are part of a name. Refuses two files of one name, a gap in the
controls, and a file without a target. If no targets are needed, a folder of controls with their prompts is enough.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from qwen_cache.errors import Problem, SourceError
from qwen_cache.sources.places import MAX_TEXT, File, Folder, Location, read_bytes
from qwen_cache.sources.rows import Draft, FieldProblems, Needs, Row

TARGET_FOLDERS = ("target_images", "training_images", "targets", "target")
CONTROL_FOLDERS = ("control_images", "condition_images", "controls", "control")
IMAGE_EXTENSIONS = (
    *(".png", ".apng", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".bmp", ".tif", ".tiff", ".avif", ".gif"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".heic", ".heif", ".hif", ".jxl"),
)
READERS = 16  # prompts read in parallel: a remote one takes 0.1 s


def read_pairs(folder: Folder, needs: Needs) -> Iterator[Problem | Draft]:
    has_targets, has_controls = (
        any(name in folder.folders for name in names) for names in (TARGET_FOLDERS, CONTROL_FOLDERS)
    )
    if not needs.target and not has_targets and (needs.control or has_controls):
        yield from _read_controls(folder)
        return
    target_folder, control_folder = _layout(folder, needs)
    targets = _scan(folder, target_folder, IMAGE_EXTENSIONS)
    prompts = _scan(folder, target_folder, [".txt"])
    if not targets:
        where, accepted = folder.path / target_folder, ", ".join(IMAGE_EXTENSIONS)
        raise SourceError("there is no image", where=where, expected=accepted, do="name another source")
    owned: dict[str, dict[int, list[Location]]] = {name: {} for name in targets}
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
    """Rows of controls only, from a control folder or from this folder."""
    control_folder = next((name for name in CONTROL_FOLDERS if name in folder.folders), ".")
    images, prompts = _scan(folder, control_folder, IMAGE_EXTENSIONS), _scan(folder, control_folder, [".txt"])
    if not images:
        accepted = ", ".join(IMAGE_EXTENSIONS)
        raise SourceError(
            "there is no image", where=folder.path / control_folder, expected=accepted, do="name another source"
        )
    firsts = {name for name in images if _further(name, images)[0] is None}
    owned: dict[str, dict[int, list[Location]]] = {}
    for name, paths in images.items():
        first, slot = _owner(name, firsts)
        owned.setdefault(first or name, {})[slot if first else 0] = paths
    for name, slots in owned.items():
        files = prompts.get(name, [])
        draft = _row(name, slots[0], (files, _read_prompt(files)), slots, folder.path / control_folder)
        yield replace(draft, samples=tuple(replace(row, mask=None) for row in draft.samples))


def _layout(folder: Folder, needs: Needs) -> tuple[str, str | None]:
    """The names of the folders with targets and with controls; `.` is the folder itself.

    If there is a folder of controls, every target needs one there, also for a model that takes images without a
    control: a missing file must not turn an edit into text to image. A table can have both.
    """
    known = {"target": TARGET_FOLDERS, "control": CONTROL_FOLDERS}
    folders = {role: [name for name in names if name in folder.folders] for role, names in known.items()}
    for role, names in known.items():
        if len(folders[role]) > 1:
            raise SourceError(
                f"the folder has more than one {role} folder",
                where=folder.path,
                expected="one",
                found=", ".join(folders[role]),
                do="rename or move the wrong one",
            )
        if needs.control and not folders[role]:
            raise SourceError(
                f"the folder has no {role} folder, which an editing model needs",
                where=folder.path,
                expected=" or ".join(names),
                found=", ".join(sorted(folder.files + folder.folders)[:10]) or "nothing",
                do=f"put the {role} images into {folder.path / names[0]}, or name a source of another kind",
            )
    if folders["control"] and not needs.takes_control:
        raise SourceError(
            "there is a control folder, but a text-to-image model takes no controls",
            where=folder.path,
            expected="targets and prompts only",
            found=folders["control"][0],
            do="choose an editing model, or name the folder of the targets itself",
        )
    return next(iter(folders["target"]), "."), next(iter(folders["control"]), None)


def _scan(folder: Folder, name: str, extensions: Iterable[str]) -> dict[str, list[Location]]:
    """Files below a subfolder by name: the path relative to the subfolder, without extension."""
    paths_by_name: dict[str, list[Location]] = {}
    for path in folder.below(name):
        stem, extension = posixpath.splitext(path)
        if extension.lower() in extensions:
            paths_by_name.setdefault(stem, []).append((folder.path if name == "." else folder.path / name) / path)
    return dict(sorted(paths_by_name.items()))


_MASK = -1
"""The slot of the mask among a target's files in the control folder; 0 is its first control, then 1, 2, …"""


def _owner(name: str, targets: Collection[str]) -> tuple[str | None, int]:
    """The target that a file of the control folder belongs to, and its slot there."""
    return (name, 0) if name in targets else _further(name, targets)


def _further(name: str, targets: Collection[str]) -> tuple[str | None, int]:
    """`_owner` of a further control or a mask, by the ending of its name."""
    ending = re.fullmatch(r"(.+)_(?:control_([1-9][0-9]*)|mask)", name, re.DOTALL)
    if ending is None or ending[1] not in targets:
        return None, 0
    return ending[1], int(ending[2]) if ending[2] else _MASK


def _read_prompt(files: list[Location]) -> str | Exception:
    try:
        return read_bytes(files[0], MAX_TEXT).decode("utf-8-sig").strip() if files else ""
    except (SourceError, UnicodeDecodeError) as error:
        return error


def _row(
    name: str,
    targets: list[Location],
    prompt: tuple[list[Location], str | Exception],
    slots: dict[int, list[Location]],
    control_folder: Location | None,
) -> Draft:
    field_problems: FieldProblems = {}
    prompts, text = prompt
    for files in (targets, prompts, *slots.values()):
        if len(files) > 1:
            what = f"several files have the same name: {', '.join(map(str, files))}"
            field_problems[what] = what, "keep the right one"
    numbers = sorted(slot for slot in slots if slot != _MASK)
    missing = min(set(range(len(numbers) + 1)).difference(numbers))
    if control_folder and missing < max(len(numbers), 1):
        expected = control_folder / (f"{name}_control_{missing}.png" if missing else f"{name}.png")
        found = ", ".join(slots[slot][0].name for slot in numbers) or "none"
        what = f"the control {expected} (or .jpg, …) is missing, found {found}"
        field_problems["control"] = what, "add it, or remove the target"
    if isinstance(text, Exception):
        reason = text.fault if isinstance(text, SourceError) else text
        field_problems["prompt"] = f"the prompt {prompts[0]} cannot be read: {reason}", "save it as UTF-8 text"
        text = ""
    elif not prompts:
        do = "write it, or move an image that is not a target, such as a mask, elsewhere"
        field_problems["prompt"] = f"the prompt {posixpath.splitext(str(targets[0]))[0]}.txt is missing", do
    controls = tuple(File(slots[slot][0]) for slot in numbers)
    mask = File(slots[_MASK][0]) if _MASK in slots else None
    return Draft((Row(name, str(targets[0]), File(targets[0]), controls, mask, text),), field_problems)
