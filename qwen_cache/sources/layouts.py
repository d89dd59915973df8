"""The folders of a source of images by role: its targets, controls, masks, rejected images and prompts.

`data.columns` names them; else they are recognised by their names, or by their files: of two folders the one with
prompts has the targets, if at least 90 % of its names are in the other. Layouts of other trainers are
`NAME` beside `NAME_control`, and `NAME-condlabel` and `NAME-masklabel` beside `NAME` (OneTrainer). Everything that may
mean something else is refused, with the options that decide it.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

from qwen_cache.errors import Notice, SourceError
from qwen_cache.sources.places import IMAGE_EXTENSIONS, Folder, overlooked
from qwen_cache.sources.rows import NO_CONTROL_AT_ALL, SLIDER, Needs, check_named, given, setting
from qwen_cache.storage.remote import is_remote
from qwen_cache.text import shell_line

TARGET_FOLDERS = ("target_images", "training_images", "targets", "target")
CONTROL_FOLDERS = ("control_images", "condition_images", "controls", "control")
PAIRED_TARGET_FOLDERS = ("after", "output", "outputs", "edited", "output_images", "edited_images", "after_images")
PAIRED_CONTROL_FOLDERS = (
    *("before", "input", "inputs", "source", "sources", "original", "originals", "unedited"),
    *("input_images", "source_images", "original_images", "before_images"),
)
"""Names that are recognised only beside a folder for the other role: alone, they may be any subfolder."""
MASK_FOLDERS = ("masks", "mask", "mask_images", "edit_masks")
"""Names that are recognised beside the targets, if they hold masks of targets."""
REJECTED_FOLDERS = ("rejected", "rejected_images", "lose", "losers", "dispreferred")
"""Names that are recognised beside the targets, if they hold rejected images of targets."""
CHOSEN_FOLDERS = ("chosen", "chosen_images", "win", "winners", "preferred")
"""Names of folders of targets that are recognised only beside a folder of rejected images."""
KNOWN = {"target": TARGET_FOLDERS, "control": CONTROL_FOLDERS}
PAIRED = {"target": PAIRED_TARGET_FOLDERS, "control": PAIRED_CONTROL_FOLDERS}

ENDING = re.compile(r"(.+)_(?:control_([1-9][0-9]*)|mask)", re.DOTALL)
"""A further control, or a mask, in a folder of controls."""
NUMBERED = re.compile(r"(.+)_([0-9]{1,4})", re.DOTALL)
"""A control of musubi-tuner: NAME_0, NAME_1, … in place of NAME, or NAME_1, NAME_2, … in the whole folder."""
LABEL = re.compile(r"(.+)-(condlabel|masklabel)", re.DOTALL)
"""A control or a mask of OneTrainer, beside its target."""
WORSE = re.compile(r"(.+)_rejected", re.DOTALL)
"""A rejected image, beside its target."""
REPEATS = re.compile(r"([1-9][0-9]{0,3})_.+")
"""A folder of kohya's trainers, whose images come this often in an epoch."""
MASK = -1
"""The slot of the mask among a target's files; 0 is its first control, then 1, 2, …"""
REJECTED = -2
"""The slot of the rejected image."""

PAIRS = 0.9
"""The share of a folder's names that another folder has where the two are pairs."""
LIKE_PAIRS = 0.5
"""The share from which on they may be meant as pairs."""
SPECIAL = re.compile(
    r"(?:^|[\W_])(?:masks?|mattes?|alphas?|depths?|normals?|canny|edges?|poses?|openpose|segs?|segmentations?|scribbles?"
    r"|lineart|hed|thumbs?|thumbnails?|previews?|small|large|low|high|lowres|hires|resized|crops?|cropped"
    r"|[0-9]{2,5}(?:x[0-9]{2,5})?(?:px)?)(?:$|[\W_])",
    re.IGNORECASE,
)
"""Names of masks, of maps of an image, and of sizes: such a folder may be a control, or something else."""
MOST_OPTIONS = 6  # in a message


@dataclass(frozen=True)
class Layout:
    """The folders of a source, relative to it; `.` is the source itself."""

    target: str
    """Empty: there are only controls."""
    controls: tuple[str, ...] = ()
    """With several, each has one control of every target, under its name."""
    mask: str | None = None
    """None: beside the controls, as NAME_mask, or beside the targets, as NAME-masklabel."""
    prompt: str | None = None
    """None: beside the targets."""
    has_labels: bool = False
    """True if the controls are beside the targets, as NAME-condlabel."""
    notices: tuple[Notice, ...] = ()
    """The reading that the files decided, and the options that decide otherwise."""
    rejected: str | None = None
    """None: beside the targets, as NAME_rejected."""
    first_number: int | None = None
    """The number of the first control of a target, NAME_0 or NAME_1; None where not all are numbered."""

    @property
    def others(self) -> tuple[str, ...]:
        """The folders without targets."""
        return tuple(name for name in (*self.controls, self.mask, self.rejected, self.prompt) if name)

    def slot(self, folder: str) -> int | None:
        """The slot of the files in a folder; None if it depends on their names."""
        if folder == self.mask:
            return MASK
        if folder == self.rejected:
            return REJECTED
        return self.controls.index(folder) if len(self.controls) > 1 else None


@dataclass(frozen=True)
class Group:
    """The images of one folder, by their names."""

    name: str
    images: set[str] = field(default_factory=set)
    texts: set[str] = field(default_factory=set)

    @property
    def has_prompts(self) -> bool:
        return not self.images.isdisjoint(self.texts)

    def __str__(self) -> str:
        count = len(self.images)
        return f"{self.name} ({count} image{'s' * (count != 1)}, {'with' if self.has_prompts else 'no'} prompts)"


def find_layout(folder: Folder, needs: Needs) -> Layout:
    """The folders with targets, controls, masks, rejected images and prompts; no target folder to read controls only.

    If there is a folder of controls, every target needs one there unless `data.allow_no_control` says otherwise, also
    for a model that takes images without a control: a missing file must not turn an edit into text to image. A table
    can have both.
    """
    named = _named(folder, needs)
    folders, notices = _by_name(folder, named), tuple[Notice, ...]()
    worse = named.get("rejected") or [each for each in folder.folders if each.lower() in REJECTED_FOLDERS][:1]
    better = [each for each in folder.folders if each.lower() in CHOSEN_FOLDERS]
    is_pair = bool(worse and len(better) == 1 and not folders["target"] and named.get("rejected") != [])
    if is_pair:
        folders |= {"target": better}
    is_open = not {"target", "prompt"} & named.keys() and named.get("control") != []
    if is_open and not all(folders.values()) and (needs.target or not folders["control"]):
        folders, notices = _by_files(folder, folders, needs, [*named.get("mask", []), *worse])
    target = next(iter(folders["target"]), ".")
    mask, prompt = (next(iter(named.get(role, ())), None) for role in ("mask", "prompt"))
    may_have_labels = "control" not in named and needs.takes_control and not folders["control"]
    has_labels = may_have_labels and _labelled(folder, target, prompt or target)
    reads_controls = needs.control or folders["control"] or (needs.to_generate and needs.takes_control)
    if not needs.target and not folders["target"] and reads_controls and not has_labels:
        return Layout("", tuple(folders["control"]), prompt=prompt)
    for role in KNOWN if needs.some_control and not has_labels else ():
        if not folders[role]:
            beside = None if folders["control"] else _controls_beside(folder)
            raise SourceError(
                f"the folder has no {role} folder, which an editing model needs",
                where=folder.path,
                expected=" or ".join((*KNOWN[role], *PAIRED[role])),
                found=", ".join(sorted(folder.files + folder.folders)[:10]) or "nothing",
                do=beside
                or f"put the {role} images into {folder.path / KNOWN[role][0]}, or name their folder: "
                + setting(role, "FOLDER")
                + (f"; {NO_CONTROL_AT_ALL}" if needs.no_control == "stated" and not folders["control"] else ""),
            )
    if folders["control"] and not needs.takes_control:
        raise SourceError(
            "there is a control folder, but a text-to-image model takes no controls",
            where=folder.path,
            expected="targets and prompts only",
            found=folders["control"][0],
            do="choose an editing model, or name the folder of the targets itself",
        )
    if not (folders["control"] or has_labels or "control" in named):
        notices += tuple(_of_text_to_image(folder, target, needs))
    layout = Layout(target, tuple(folders["control"]), mask, prompt, has_labels, notices)
    if mask is None and "mask" not in named:
        layout = _with_masks(folder, layout)
    if worse and named.get("rejected") != []:
        are_named = is_pair or "rejected" in named
        found = _stems(folder, worse[0])
        if are_named or (found and len(found & _stems(folder, target)) >= PAIRS * len(found)):
            layout = replace(layout, rejected=worse[0])
    return replace(layout, first_number=_first_number(folder, layout))


# ---- by name ---------------------------------------------------------------------------------------------------------


def _by_name(folder: Folder, named: dict[str, list[str]]) -> dict[str, list[str]]:
    """The folders of targets and of controls: those in `named`, else with a known name; SourceError for several."""
    folders = {role: [each for each in folder.folders if each in KNOWN[role]] for role in KNOWN} | named
    paired = {role: [each for each in folder.folders if each.lower() in PAIRED[role]] for role in KNOWN} | named
    pairs = {role: folders[role] or paired[role] for role in KNOWN}
    if all(pairs.values()):
        folders = pairs
    for role in KNOWN:
        if len(folders[role]) > 1 and role not in named:
            raise SourceError(
                f"the folder has more than one {role} folder",
                where=folder.path,
                expected="one",
                found=", ".join(folders[role]),
                do=f"name the right one: {' or '.join(setting(role, name) for name in folders[role])}",
            )
    return {role: folders[role] for role in KNOWN}


def _named(folder: Folder, needs: Needs) -> dict[str, list[str]]:
    """The folders of `data.columns` by role; SourceError if one does not exist."""
    named = given(needs.columns)
    if "phrase" in named:
        do = "mark the words in the prompt with [[ ]] and set data.marked_phrases: true, or write a table"
        raise SourceError("a folder of images has no phrases", where=folder.path, found=needs.columns.phrase, do=do)
    if role := next((role for role in SLIDER if named.get(role)), None):
        do = "set data.positive_prompt and data.negative_prompt, or write a table"
        raise SourceError(f"a folder of images has no {role}", where=folder.path, found=named[role][0], do=do)
    named = {role: [posixpath.normpath(name) for name in names] for role, names in named.items()}
    nested = [name for names in named.values() for name in names if "/" in name and _is_below(folder, name)]
    own = ["."] if ["."] in named.values() else []
    check_named(named, [*folder.folders, *dict.fromkeys(nested), *own], folder.path, "folder")
    return named


def _is_below(folder: Folder, name: str) -> bool:
    try:
        return name.partition("/")[0] in folder.folders and bool(folder.below(name))
    except SourceError:
        return False


def _with_masks(folder: Folder, layout: Layout) -> Layout:
    """The layout with a folder of masks beside its folders, if one has a known name and the names of targets."""
    used = (layout.target, *layout.others)
    found = [name for name in folder.folders if name.lower() in MASK_FOLDERS and name not in used]
    if len(found) != 1 or (layout.target == "." and not layout.controls):
        return layout
    masks, targets = _stems(folder, found[0]), _stems(folder, layout.target)
    if not masks or len(masks & targets) < PAIRS * len(masks):
        return layout
    what = f"images of {found[0]} are the edit masks of their targets: the name of the folder"
    notice = Notice(what, tuple(sorted(masks)[:3]), "if they are none: --set data.edit_mask=none", len(masks))
    return replace(layout, mask=found[0], notices=(*layout.notices, notice))


def _first_number(folder: Folder, layout: Layout) -> int | None:
    """The number of the first control in a folder where no target has a control called NAME: 1 if none has NAME_0."""
    if len(layout.controls) != 1:
        return None
    controls = _stems(folder, layout.controls[0])
    if any(path.rpartition(".")[0] in controls and _is_image(path) for path in folder.below(layout.target)):
        return None
    targets = _stems(folder, layout.target)
    matches = [match for match in map(NUMBERED.fullmatch, controls) if match and match[1] in targets]
    return next((first for first in (0, 1) if any(int(match[2]) == first for match in matches)), None)


def _stems(folder: Folder, name: str) -> set[str]:
    return {path.rpartition(".")[0] for path in folder.below(name) if _is_image(path)}


# ---- by files --------------------------------------------------------------------------------------------------------
# Only what would be a problem for every image is read in another way: a folder whose images have no prompts, beside one
# whose images do. So recognising more changes no sample.


def _by_files(
    folder: Folder, folders: dict[str, list[str]], needs: Needs, masks: list[str]
) -> tuple[dict[str, list[str]], tuple[Notice, ...]]:
    """The folders of targets and of controls, of which one role or none has a known name; SourceError if unclear."""
    if not folder.folders:
        return folders, ()
    groups = {name: group for name, group in _groups(folder).items() if name not in masks}
    controls = [groups[name] for name in folders["control"] if name in groups]
    beside = [*masks, *(name for name in folder.folders if name.lower() in MASK_FOLDERS)]
    if controls and _share(_outside(folder, folders["control"] + beside), controls[0]) >= LIKE_PAIRS:
        return folders | {"target": ["."]}, ()
    targets = [groups[name] for name in folders["target"] if name in groups]
    free = [each for each in groups.values() if each not in controls and each not in targets]
    for target in [] if targets or controls else free:
        further = _controls_of(target, free)
        if further and len(free) == 1 + len(further):
            names = [each.name for each in further]
            return {"target": [target.name], "control": names}, (_paired(target, names, "the names of the folders"),)
    owners = targets or [each for each in free if each.has_prompts]
    pairs = [
        (owner, other)
        for owner in owners or free
        for other in controls or free
        if owner is not other and not (owners and other.has_prompts) and _share(owner, other) >= LIKE_PAIRS
    ]
    if not pairs:
        return folders, ()
    owner, other = pairs[0]
    is_special = not controls and any(SPECIAL.search(each.name) for each in pairs[0])
    if (
        owners
        and not targets
        and len(free) + len(controls[:1]) == 2
        and _share(owner, other) >= PAIRS
        and not is_special
    ):
        names = folders["control"] or [other.name]
        why = f"{owner.name} has prompts, {' and '.join(names)} none"
        return {"target": [owner.name], "control": names}, (_paired(owner, names, why),)
    is_stated = not needs.takes_control or (targets and needs.no_control == "allowed")
    if is_stated or not (owners or needs.prompt or needs.some_control):
        return folders, ()
    raise SourceError(
        "it is not clear which folder has the targets and which the controls",
        where=folder.path,
        expected="two folders, one with prompts, and at least 90 % of its names in the other",
        found=", ".join(str(each) for each in islice(groups.values(), 10)),
        do=f"choose one: {', or '.join(islice(_options(pairs), MOST_OPTIONS))} "
        "(in qwen.yaml: data.columns.target, data.columns.control)",
    )


def _groups(folder: Folder) -> dict[str, Group]:
    """The folders of the source that have images, and `.` for those directly in it."""
    groups: dict[str, Group] = {}
    for path in folder.below("."):
        first, _, rest = path.partition("/")
        stem, extension = posixpath.splitext(rest or first)
        name = first if rest else "."
        if extension.lower() in IMAGE_EXTENSIONS:
            groups.setdefault(name, Group(name)).images.add(stem)
        elif extension.lower() == ".txt":
            groups.setdefault(name, Group(name)).texts.add(stem)
    return {name: group for name, group in sorted(groups.items()) if group.images}


def _outside(folder: Folder, others: list[str]) -> Group:
    """The images of the source that are in none of these folders."""
    group = Group(".")
    for path in folder.below("."):
        stem, extension = posixpath.splitext(path)
        if extension.lower() in IMAGE_EXTENSIONS and not path.startswith(tuple(f"{other}/" for other in others)):
            group.images.add(stem)
    return group


def _share(owner: Group, other: Group) -> float:
    """The share of the names of `owner` that `other` has, numbered or not.

    Names that differ in what people overlook count: they are problems of their rows, with the right name.
    """
    names = set(other.images)
    for pattern in (ENDING, NUMBERED):
        names |= {match[1] for match in map(pattern.fullmatch, other.images) if match}
    names = set(map(overlooked, names))
    targets = {overlooked(name) for name in owner.images if name in owner.texts or not LABEL.fullmatch(name)}
    return len(targets & names) / max(1, len(targets))


def _controls_of(target: Group, others: list[Group]) -> list[Group]:
    """The folders `NAME_control`, `NAME_control_1`, … of a folder NAME, in their order, none with prompts."""
    pattern = re.compile(rf"{re.escape(target.name)}_controls?(?:_?([0-9]{{1,4}}))?")
    found = [(int(match[1] or 0), each) for each in others if (match := pattern.fullmatch(each.name))]
    return (
        [] if any(each.has_prompts for _, each in found) else [each for _, each in sorted(found, key=lambda it: it[0])]
    )


def _paired(target: Group, controls: list[str], why: str) -> Notice:
    first, *_ = controls
    images = f"images of {target.name} are the targets, and those of {' and '.join(controls)} their controls"
    do = f"if it is the other way round: {_option(first, target.name)}"
    return Notice(f"{images}: {why}", tuple(sorted(target.images)[:3]), do, len(target.images))


def _options(pairs: list[tuple[Group, Group]]) -> Iterator[str]:
    """The options that decide between pairs of folders."""
    partners: dict[str, list[str]] = {}
    for owner, other in pairs:
        partners.setdefault(owner.name, []).append(other.name)
    for target, controls in partners.items():
        yield from (_option(target, control) for control in controls)
        if len(controls) > 1:
            yield _option(target, *controls)
        masks = [name for name in controls if "mask" in name.lower()]
        yield from (f"{_option(target)} {setting('mask', name)}" for name in masks)
    yield from (f"without controls {_option(target)}" for target in partners)


def _option(target: str, *controls: str) -> str:
    words = ["--targets", target]
    for name in controls:
        words += ["--controls", name]
    return shell_line(words)


# ---- other trainers --------------------------------------------------------------------------------------------------


def _labelled(folder: Folder, target: str, prompt: str) -> bool:
    """True if a target has a control beside it, as NAME-condlabel, without a prompt of its own."""
    stems = {posixpath.splitext(name)[0] for name in folder.below(target) if _is_image(name)}
    labels = {stem: match[1] for stem in stems if (match := LABEL.fullmatch(stem)) and match[2] == "condlabel"}
    prompts = {name for name in folder.below(prompt) if name.lower().endswith(".txt")} if labels else set()
    return any(name in stems and f"{stem}.txt" not in prompts for stem, name in labels.items())


def _is_image(name: str) -> bool:
    return name.lower().endswith(IMAGE_EXTENSIONS)


def repeats_of(folder: Folder) -> dict[str, int]:
    """The repeats of each folder in a source for kohya's trainers; empty for another source."""
    matches = {name: REPEATS.fullmatch(name) for name in folder.folders}
    if not all(matches.values()) or any(map(_is_image, folder.files)):
        return {}
    return {name: int(match[1]) for name, match in matches.items() if match}


def _controls_beside(folder: Folder) -> str | None:
    """The options that read a folder of targets with the controls in a folder beside it, as `NAME_control`."""
    if is_remote(folder.path) or not folder.path.resolve().name:
        return None
    path = folder.path.resolve()
    names = [f"{path.name}_control"]
    if path.name.lower() in (*TARGET_FOLDERS, *PAIRED_TARGET_FOLDERS):
        names += [*CONTROL_FOLDERS, *PAIRED_CONTROL_FOLDERS]
    name = next((name for name in names if (path.parent / name).is_dir()), None)
    if name is None:
        return None
    above = shell_line([str(folder.path.parent if folder.path.name else path.parent)])
    return f"{name} is beside it: name the folder above, {above}, with {_option(path.name, name)}"


def _of_text_to_image(folder: Folder, target: str, needs: Needs) -> Iterator[Notice]:
    """Facts that another trainer would have read in a folder without controls."""
    if target == "." and len(repeats := repeats_of(folder)) > 1:
        what = "folders have numbers that kohya's trainers read as repeats; here each image comes once per epoch"
        do = "`qwen-cache init` writes a cache and a weight for each folder"
        yield Notice(what, tuple(repeats)[:3], do, len(repeats))
    if needs.takes_control and (beside := _controls_beside(folder)):
        yield Notice("folder of targets is read without its controls", (str(folder.path),), beside)
