"""A folder of images that are matched by their names.

Names are compared whole, never by prefix; subfolders are part of a name. `layouts` says which folder has which role.
Refuses two files of one name, a gap in the controls, and a file without a target; a
missing file and a similarly named one are one problem. If no targets are needed, a folder of controls with prompts is
enough.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from itertools import chain, islice
from pathlib import Path

from qwen_cache.errors import Notice, Problem, SourceError
from qwen_cache.sources import left_out
from qwen_cache.sources.layouts import ENDING, LABEL, MASK, NUMBERED, REJECTED, WORSE, Layout, find_layout
from qwen_cache.sources.places import (
    IMAGE_EXTENSIONS,
    OTHER_IMAGES,
    File,
    Folder,
    base_name,
    overlooked,
    read_bytes,
    suffix,
)
from qwen_cache.sources.rows import (
    MAX_TEXT,
    NO_CONTROL,
    Draft,
    FieldProblems,
    Needs,
    Row,
    setting,
)
from qwen_cache.storage.remembered import RememberedFiles
from qwen_cache.storage.remote import Location, Url, is_remote

READERS = 16  # prompts read in parallel: a remote one takes 0.1 s
PROMPTS = 64  # per task of the thread pool, on a disk
AHEAD = 2 * READERS  # tasks
MOST_COMPARED = 100  # names without a partner, on each side, that are compared with one another: takes 0.1 s


Named = str | Url
"""A file by its path: a local one as text, since to make a `Path` takes longer than to list the file."""
Texts = list[str | Exception]
Place = tuple[str, str]
"""The name of a file: its folder, and its path below the folder without extension."""


@dataclass(frozen=True)
class Files:
    """The files below a folder by name: the path relative to the folder, without extension."""

    images: dict[str, list[Named]] = field(default_factory=dict)
    prompts: dict[str, list[Named]] = field(default_factory=dict)
    others: dict[str, list[Named]] = field(default_factory=dict)
    """Files of `OTHER_IMAGES`."""


@dataclass(frozen=True)
class Leads:
    """Hints for missing files."""

    unread: Mapping[Place, Named]
    """Images of these names in formats that are not read."""
    similar: Mapping[Place, Named]
    """Files with similar names that belong to no target."""
    captions: Mapping[str, str] = field(default_factory=dict)
    """Texts with an ending of another tool in the folder of prompts, by their names without it."""

    def of(self, missing: Place) -> tuple[str, str] | None:
        """An addition to the problem of a missing file, and advice."""
        if path := self.unread.get(missing):
            return f"; {_base_name(path)} is there, but {_kind(path)} is not read", "save it as PNG, JPEG or WebP"
        if path := self.similar.get(missing):
            return f"; did you mean {_join(missing[0], _base_name(path))}?", "give both files the same name"
        return None

    def rename(self, source: Location, folder: str, stem: str, is_prompt: bool) -> tuple[Path, Path] | None:
        """The file on this machine that a missing one goes by, and the name that it needs."""
        if is_remote(source):
            return None
        if isinstance(path := self.similar.get((folder, stem)), str):
            return Path(path), source / folder / (stem + Path(path).suffix)
        if is_prompt and (caption := self.captions.get(stem)):
            return source / folder / caption, source / folder / f"{stem}.txt"
        return None


def read_pairs(folder: Folder, needs: Needs) -> Iterator[Problem | Notice | Draft]:
    layout = find_layout(folder, needs)
    yield from layout.notices
    yield from _read_targets(folder, layout, needs) if layout.target else _read_controls(folder, layout)


def read_some(folder: Folder, layout: Layout, needs: Needs, names: Collection[str], *, near: bool) -> dict[str, Draft]:
    """The drafts of some targets, without reading the prompts of the others.

    With `near`, only files of these names are looked at: a problem then lacks the hint at a file with a similar name,
    and none is common to all targets.
    """
    if near:
        folder = replace(
            folder, below=partial(_below_near, folder.path, {*names, posixpath.splitext(left_out.LIST)[0]})
        )
    found = _read_targets(folder, layout, needs, names, near=near)
    return {draft.samples[0].name: draft for draft in found if isinstance(draft, Draft)}


def prompts_of(folder: Folder, layout: Layout, names: Iterable[str]) -> dict[str, str]:
    """The prompts of these targets by name, empty if missing or unreadable; none of a target that is not there."""
    here = _scan(folder, layout.target, layout.others)
    prompts = (_scan(folder, layout.prompt) if layout.prompt else here).prompts
    texts = ((name, _read_prompt(prompts.get(name, []), None)) for name in names if name in here.images)
    return {name: text if isinstance(text, str) else "" for name, text in texts}


def _below_near(path: Location, names: Collection[str], name: str) -> list[str]:
    """The files below a folder that are called as one of the names, or as its further control or mask."""
    assert not is_remote(path)
    found, bases = [], dict[str, set[str]]()
    for each in names:
        bases.setdefault(posixpath.dirname(each), set()).add(posixpath.basename(each))
    for below, wanted in bases.items():
        with suppress(FileNotFoundError, NotADirectoryError):
            for entry in os.scandir(path / name / below):
                stem = entry.name.rpartition(".")[0]
                if stem not in wanted and ("_" in stem or "-" in stem):
                    endings = filter(None, (each.fullmatch(stem) for each in (ENDING, NUMBERED, LABEL, WORSE)))
                    stem = next((ending[1] for ending in endings if ending[1] in wanted), stem)
                if stem in wanted and not entry.name.startswith(".") and not entry.is_dir():
                    found.append(posixpath.join(below, entry.name))
    return sorted(found)


Names = Mapping[str, Sequence[str]]
"""The names in a folder, by what they are without extension."""


def beside(
    folder: Path, name: str, endings: Collection[str], names: Callable[[Path], Names] | None = None
) -> list[Path]:
    """The files of this name in a folder, whatever their extension's case; `names` may remember those of folders."""
    path = folder / name
    found = (names or names_of)(path.parent).get(path.name, ())
    return [path.parent / each for each in sorted(found) if suffix(Path(each)) in endings]


def names_of(folder: Path) -> Names:
    """The names in a folder; none if there is no such folder."""
    found: dict[str, list[str]] = {}
    with suppress(FileNotFoundError, NotADirectoryError):
        for name in os.listdir(folder):
            found.setdefault(posixpath.splitext(name)[0], []).append(name)
    return found


def mask_name(source: Path, layout: Layout, name: str) -> str:
    """The file for the mask of a target that has none, from the source on; SourceError if none would be read."""
    if layout.mask:
        return f"{layout.mask}/{name}.png"
    if layout.has_labels:
        return f"{layout.target}/{name}-masklabel.png"
    if len(layout.controls) != 1:
        do = f"name a folder of masks: {setting('mask', 'FOLDER')}"
        raise SourceError("this source has no place for masks", where=source, found=name, do=do)
    if beside(source / layout.target, f"{name}_mask", IMAGE_EXTENSIONS):
        what, do = f"the mask would be the control of another target, {name}_mask", "rename that target"
        raise SourceError(what, where=source / layout.target, do=do)
    return f"{layout.controls[0]}/{name}_mask.png"


def _read_targets(
    folder: Folder, layout: Layout, needs: Needs, only: Collection[str] | None = None, *, near: bool = False
) -> Iterator[Problem | Draft]:
    """The rows of a folder with targets; of `only` some of them, and no problem that belongs to none.

    With `near`, the folder does not show all of its targets.
    """
    here = _scan(folder, layout.target, layout.others)
    targets, prompts = here.images, (_scan(folder, layout.prompt) if layout.prompt else here).prompts
    prompt_folder = layout.prompt or layout.target
    if not targets:
        raise _no_image(folder, layout.target, here)
    lines = _left_out(folder, prompt_folder, targets, prompts)
    others = {layout.target: here.others}
    owned: dict[str, dict[int, list[Named]]] = {name: {} for name in targets}
    for name in [name for name in targets if name not in prompts]:
        label = LABEL.fullmatch(name)
        if label and label[1] in owned and (layout.has_labels if label[2] == "condlabel" else layout.mask is None):
            owned[label[1]][0 if label[2] == "condlabel" else MASK] = targets.pop(name)
            del owned[name]
        worse = WORSE.fullmatch(name)
        if worse and worse[1] in owned and layout.rejected is None and needs.columns.rejected != []:
            owned[worse[1]][REJECTED] = targets.pop(name)
            del owned[name]
    strays = {(prompt_folder, name): paths for name, paths in prompts.items() if name not in targets}
    for name in filter(None, (*layout.controls, layout.mask, layout.rejected)):
        files = _scan(folder, name)
        others[name], of_folder, least = files.others, layout.slot(name), layout.first_number or 0
        for stem, paths in files.images.items():
            target, number = _owner(stem, targets, of_folder, files.images, least)
            if target is None:
                strays[name, stem] = paths
            elif number in (slots := owned[target]):
                slots[number] += paths
            else:
                slots[number] = [*paths]
    out = {line.name for line in lines if line.name in targets}
    kept = {name: paths for name, paths in targets.items() if name not in out}
    common = None if near else _common_problem(folder, layout, kept, prompts, [owned[name] for name in kept], needs)
    first = layout.first_number
    gaps = {name: gap for name, slots in owned.items() if (gap := _gap(name, slots, layout.controls, first))}
    if layout.has_labels:
        gaps = {name: (layout.target, f"{name}-condlabel") for name, slots in owned.items() if 0 not in slots}
    wanted = {*gaps.values(), *((prompt_folder, name) for name in targets if name not in prompts)}
    unread = {(name, stem): paths[0] for name, each in others.items() for stem, paths in each.items()}
    of_captions = (each for each in folder.below(prompt_folder) if each.lower().endswith(OTHER_PROMPTS))
    captions = {posixpath.splitext(each)[0]: each for each in of_captions}
    leads = Leads(unread, _similar(wanted - unread.keys(), strays), captions)
    if needs.no_control == "allowed":  # but not where a file looks like the control, or others are there
        gaps = {name: gap for name, gap in gaps.items() if _controls(owned[name]) or leads.of(gap)}
    hint = f", or {NO_CONTROL}" if needs.no_control == "stated" else ""
    chosen = [name for name in targets if only is None or name in only]
    memory = RememberedFiles.of("prompts 1", folder.path)
    with memory.saved(), ThreadPoolExecutor(READERS, "prompts") as pool:
        # From a disk a task reads many prompts, since submitting a task costs as much as reading one.
        written = [prompts.get(name, []) for name in chosen]
        size = PROMPTS if written and written[0] and isinstance(written[0][0], str) else 1
        chunks = (written[begin : begin + size] for begin in range(0, len(written), size))
        texts = _ahead(pool, lambda chunk: [_read_prompt(each, memory) for each in chunk], chunks)
        for name, text in zip(chosen, chain.from_iterable(texts), strict=True):
            prompt = prompts.get(name, []), text
            draft = _row(name, targets[name], prompt, owned[name], gaps.get(name), prompt_folder, leads, hint)
            missing = [(prompt_folder, name, True)] if name not in prompts else []
            missing += [(*gap, False)] if (gap := gaps.get(name)) else []
            if missing and (renames := [leads.rename(folder.path, *each) for each in missing]):
                draft = replace(draft, renames=tuple(filter(None, renames)))
            is_out = name in out
            yield replace(draft, is_left_out=is_out, unusable=None if is_out else common) if is_out or common else draft
    if only is None:
        yield from left_out.wrong_lines(lines, targets, folder.path / left_out.LIST)
    if only is None and not common:
        yield from _strays(strays, leads, prompt_folder, layout)


def _left_out(
    folder: Folder, prompt_folder: str, targets: Collection[str], prompts: dict[str, list[Named]]
) -> list[left_out.Line]:
    """The lines of left_out.txt, which is then no prompt; SourceError if it would be the prompt of a target too."""
    if left_out.LIST not in folder.files:
        return []
    path, stem = folder.path / left_out.LIST, posixpath.splitext(left_out.LIST)[0]
    if prompt_folder == ".":
        if stem in targets:
            what = f"this would be both the list of the targets left out and the prompt of {stem!r}"
            raise SourceError(what, where=path, expected="one of them", do="rename the image and its prompt")
        prompts[stem] = [each for each in prompts.get(stem, []) if each != str(path)]
        if not prompts[stem]:
            del prompts[stem]
    try:
        return left_out.lines_of(read_bytes(path).decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise SourceError("the list is not UTF-8 text", where=path, found=error, do="save it as UTF-8") from error


def _strays(strays: Mapping[Place, list[Named]], leads: Leads, prompt_folder: str, layout: Layout) -> Iterator[Problem]:
    explained = set(leads.similar.values())
    for (name, stem), paths in strays.items():
        for path in paths:
            if path in explained:
                continue
            unread = leads.unread.get((layout.target, stem)) if name == prompt_folder else None
            if unread:
                yield Problem(str(unread), f"{_kind(unread)} is not read", "save it as PNG, JPEG or WebP")
                continue
            do = "add the target or remove the file"
            if len(layout.controls) == 1:
                do += "; further controls are called NAME_control_1, masks NAME_mask"
            yield Problem(str(path), f"this belongs to no target: {layout.target} has no image of that name", do)


def _read_controls(folder: Folder, layout: Layout) -> Iterator[Problem | Draft]:
    """Rows of controls only, from control folders or from this folder."""
    first, *further = layout.controls or (".",)
    here = _scan(folder, first)
    images, prompts = here.images, (_scan(folder, layout.prompt) if layout.prompt else here).prompts
    if not images:
        raise _no_image(folder, first, here)
    lines = _left_out(folder, layout.prompt or first, images, prompts)
    firsts = {name for name in images if further or _further(name, images)[0] is None}
    owned: dict[str, dict[int, list[Named]]] = {}
    for name, paths in images.items():
        owner, slot = _owner(name, firsts, 0 if further else None)
        owned.setdefault(owner or name, {})[slot if owner else 0] = paths
    for number, other in enumerate(further, 1):
        for name, paths in _scan(folder, other).images.items():
            if name in owned:
                owned[name][number] = paths
            else:
                what, do = f"this belongs to no image of {first}", "add that or remove the file"
                yield from (Problem(str(path), what, do) for path in paths)
    none, out = Leads({}, {}), {line.name for line in lines}
    for name, slots in owned.items():
        files, gap = prompts.get(name, []), _gap(name, slots, layout.controls or (".",))
        draft = _row(name, slots[0], (files, _read_prompt(files, None)), slots, gap, layout.prompt or first, none)
        samples = tuple(replace(row, target=None, mask=None) for row in draft.samples)
        yield replace(draft, samples=samples, is_left_out=name in out)
    yield from left_out.wrong_lines(lines, owned, folder.path / left_out.LIST)


def _scan(folder: Folder, name: str, without: Sequence[str] = ()) -> Files:
    """The files below a folder; of the source itself, without those below some of its folders."""
    starts = tuple(f"{other}/" for other in without) if name == "." else ()
    files = Files()
    kinds = {".txt": files.prompts} | dict.fromkeys(IMAGE_EXTENSIONS, files.images)
    kinds = {ending[1:]: kind for ending, kind in (kinds | dict.fromkeys(OTHER_IMAGES, files.others)).items()}
    base = folder.path if name == "." else folder.path / name
    start = os.path.join(base, "") if isinstance(base, Path) and base.parts else ""
    is_text = isinstance(base, Path) and os.sep == "/"
    for path in folder.below(name):
        stem, _, extension = path.rpartition(".")
        kind = kinds.get(extension) or kinds.get(extension.lower())
        if kind is None or not stem or (starts and path.startswith(starts)):
            continue
        file = start + path if is_text else _named(base / path)
        if stem in kind:
            kind[stem].append(file)
        else:
            kind[stem] = [file]
    return Files(*({stem: kind[stem] for stem in sorted(kind)} for kind in (files.images, files.prompts, files.others)))


def _no_image(folder: Folder, name: str, files: Files) -> SourceError:
    kinds = sorted({_kind(path) for paths in files.others.values() for path in paths})
    return SourceError(
        "there is no image that can be read" if kinds else "there is no image",
        where=folder.path / name,
        expected=", ".join(IMAGE_EXTENSIONS),
        found=", ".join(kinds) or None,
        do="save them as PNG, JPEG or WebP" if kinds else "name another source",
    )


def _kind(path: Named) -> str:
    return suffix(_at(path)).removeprefix(".").upper()


def _base_name(path: Named) -> str:
    return base_name(_at(path))


def _at(path: Named) -> Location:
    return Path(path) if isinstance(path, str) else path


def _named(path: Location) -> Named:
    return path if is_remote(path) else str(path)


def _join(folder: str, name: str) -> str:
    return posixpath.normpath(posixpath.join(folder, name))


def _common_problem(
    folder: Folder,
    layout: Layout,
    targets: Mapping[str, list[Named]],
    prompts: Mapping[str, object],
    owned: Iterable[Mapping[int, object]],
    needs: Needs,
) -> Problem | None:
    """One problem if no target has a control, or none has a prompt, instead of one for each target."""
    if len(targets) < 2:
        return None
    first = _base_name(next(iter(targets.values()))[0])
    stem = posixpath.splitext(first)[0]
    what = f"none of the {len(targets)} targets has a "
    some = folder.below(layout.controls[0]) if layout.controls else []
    if (some or (layout.controls and needs.no_control != "allowed")) and not any(map(_controls, owned)):
        found = ", ".join(some[:3]) or "nothing"
        what += f"control (expected {stem}.png for {first}, found {found})"
        return Problem(str(folder.path / layout.controls[0]), what, CONTROL_NAMES)
    if needs.prompt and not any(name in prompts for name in targets):
        beside = folder.below(layout.prompt or layout.target)
        others = [name for name in beside if posixpath.splitext(name)[1].lower() in OTHER_PROMPTS]
        found = ", ".join([*(f"{name}.txt" for name in prompts), *others][:3]) or "no .txt"
        what += f"prompt (expected {stem}.txt for {first}, found {found})"
        do = "write a prompt for each target, or name a table"
        if others and not prompts:
            do = f"rename them: {posixpath.splitext(others[0])[0]}.txt"
        return Problem(str(folder.path / (layout.prompt or layout.target)), what, do)
    return None


CONTROL_NAMES = (
    "give each control the name of its target, and further ones NAME_control_1, …; or all of them NAME_0, NAME_1, …"
)
OTHER_PROMPTS = (".caption", ".cap", ".tags")
"""Endings that other tools give to text files with captions."""


def _owner(
    name: str, targets: Collection[str], slot: int | None, beside: Collection[str] = (), first: int = 0
) -> tuple[str | None, int]:
    """The target that a file belongs to, and its slot there: `slot`, or in a folder of all controls by its name.

    NAME_0, NAME_1, … are controls of NAME if the one of the number `first` is there, `beside` it, and NAME is not.
    """
    if name in targets:
        return name, slot or 0
    if slot is not None:
        return None, 0
    numbered = NUMBERED.fullmatch(name)
    if numbered and numbered[1] in targets and numbered[1] not in beside:
        owner, number = numbered.groups()
        if f"{owner}_{first:0{len(number)}}" in beside and int(number) >= first:
            return owner, int(number) - first
    return _further(name, targets)


def _further(name: str, targets: Collection[str]) -> tuple[str | None, int]:
    """`_owner` of a further control or a mask, by the ending of its name."""
    ending = ENDING.fullmatch(name)
    if ending is None or ending[1] not in targets:
        return None, 0
    return ending[1], int(ending[2]) if ending[2] else MASK


def _controls(slots: Mapping[int, object]) -> set[int]:
    """The slots of controls."""
    return {slot for slot in slots if slot >= 0}


def _gap(name: str, slots: Mapping[int, object], controls: tuple[str, ...], first: int | None = None) -> Place | None:
    """The first control that a target lacks; `first` is the number of the first one where all are numbered."""
    if len(controls) > 1:
        return next(((folder, name) for slot, folder in enumerate(controls) if slot not in slots), None)
    if slots.keys() == {0}:
        return None
    numbers = _controls(slots)
    missing = min(set(range(len(numbers) + 1)) - numbers)
    if not controls or missing >= max(len(numbers), 1):
        return None
    if first is not None:
        return controls[0], f"{name}_{first + missing}"
    return controls[0], f"{name}_control_{missing}" if missing else name


def _similar(wanted: Iterable[Place], strays: Mapping[Place, list[Named]]) -> dict[Place, Named]:
    """Files without a target for missing files of similar names in the same folder, each once."""
    found: dict[Place, Named] = {}
    free = {(folder, overlooked(stem)): paths[0] for (folder, stem), paths in strays.items()}
    for folder, stem in sorted(wanted):
        if path := free.pop((folder, overlooked(stem)), None):
            found[folder, stem] = path
    rest = [place for place in sorted(wanted) if place not in found]
    if max(len(rest), len(free)) > MOST_COMPARED:
        return found
    for folder, stem in rest:
        # a number is never a typo of another: photo_001 and photo_002
        names = [name for where, name in free if where == folder and _numbers(name) == _numbers(overlooked(stem))]
        for name in get_close_matches(overlooked(stem), names, 1, 0.8):
            found[folder, stem] = free.pop((folder, name))
    return found


def _numbers(stem: str) -> list[str]:
    return re.findall(r"\d+", stem)


def _read_prompt(files: list[Named], memory: RememberedFiles | None) -> str | Exception:
    try:
        return _text_of(files[0], memory).decode("utf-8-sig").strip() if files else ""
    except (SourceError, UnicodeDecodeError) as error:
        return error


def _ahead(
    pool: Executor, read: Callable[[list[list[Named]]], Texts], chunks: Iterable[list[list[Named]]]
) -> Iterator[Texts]:
    """The results in order, a few tasks ahead: the first one waits for no other than these."""
    left = iter(chunks)
    waiting = deque(pool.submit(read, chunk) for chunk in islice(left, AHEAD))
    while waiting:
        yield waiting.popleft().result()
        waiting.extend(pool.submit(read, chunk) for chunk in islice(left, 1))


def _text_of(file: Named, memory: RememberedFiles | None) -> bytes:
    """The bytes of a prompt; those of a remote one are remembered by its version in the listing."""
    if memory is None or isinstance(file, str) or not file.listed:
        return read_bytes(file, MAX_TEXT)
    return memory.read("prompt", str(file), [file], lambda: read_bytes(file, MAX_TEXT))


def _row(
    name: str,
    targets: list[Named],
    prompt: tuple[list[Named], str | Exception],
    slots: dict[int, list[Named]],
    gap: Place | None,
    prompt_folder: str,
    leads: Leads,
    hint: str = "",
) -> Draft:
    """A row; `hint` is more advice for a target without controls."""
    field_problems: FieldProblems = {}
    prompts, text = prompt
    for files in (targets, prompts, *slots.values()):
        if len(files) > 1:
            what = f"several files have the same name: {', '.join(map(_base_name, files))}"
            field_problems[what] = what, "keep the right one"
    numbers = sorted(_controls(slots))
    if gap:
        found = ", ".join(_base_name(slots[slot][0]) for slot in numbers) or "none"
        more, do = leads.of(gap) or (f", found {found}", "add it, or remove the target" + ("" if numbers else hint))
        field_problems["control"] = f"the control {_join(*gap)}.png (or .jpg, …) is missing{more}", do
    if isinstance(text, Exception):
        reason = text.fault if isinstance(text, SourceError) else text
        field_problems["prompt"] = (
            f"the prompt {_base_name(prompts[0])} cannot be read: {reason}",
            "save it as UTF-8 text",
        )
        text = ""
    elif not prompts:
        do = "write it, or move an image that is not a target, such as a mask, elsewhere"
        more, do = leads.of((prompt_folder, name)) or ("", do)
        if caption := leads.captions.get(name):
            more, do = f"; {posixpath.basename(caption)} is there", f"rename it to {posixpath.basename(name)}.txt"
        field_problems["prompt"] = f"the prompt {_join(prompt_folder, name)}.txt is missing{more}", do
    controls = tuple(File(slots[slot][0]) for slot in numbers)
    mask, rejected = (File(slots[slot][0]) if slot in slots else None for slot in (MASK, REJECTED))
    row = Row(name, str(targets[0]), File(targets[0]), controls, mask, text, rejected=rejected)
    return Draft((row,), field_problems)
