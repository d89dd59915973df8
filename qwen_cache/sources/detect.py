"""Opening a source: which kind it is, the settings it is read with, and its rows with their problems.

Turn a source into rows, before anything is encoded: a folder or a file, local or remote.

Pairs, for editing. Names are compared whole, never by prefix; subfolders are part of a name:

    target_images/NAME.png           the target (the folder may be called training_images, targets or target as well)
    target_images/NAME.txt           its prompt
    control_images/NAME.png          the first control (or condition_images, controls, control)
    control_images/NAME_control_1.*  further controls, counted from 1
    control_images/NAME_mask.*       the mask, white where the target was edited
    rejected/NAME.*                  an image that is worse than the target; or NAME_rejected.* beside it

Every image in the target folder is a target. A file in the control folder belongs to the target with exactly its name;
only if there is none, `_control_1` and `_mask` are read as endings. So a target may be called `x_mask`, but then
`control_images/x_mask.png` is its control. Two folders such as before/ and after/, folders of other names, and the
layouts of other trainers are recognised too (`sources/layouts.py`). For text-to-image there are no controls, and a
folder of images with their prompts beside them is enough. A folder with a metadata.csv or metadata.jsonl stands for
that table.

A table (.csv, .jsonl, .json, .parquet, a folder of .parquet, or a folder that `datasets` wrote with save_to_disk) has
one row per sample. These are its columns or keys, in any case, with or without the suffix _file_name; others are
ignored, unless the name resembles that of a control, a mask or a rejected image:

    target   path_target, target, target_image, target_img, image, image_path, file_name, edited, edited_image,
             edited_img, output_image, output_img, after, after_image; else output; beside a rejected image also
             path_chosen, chosen, chosen_image, chosen_img, chosen_path, image_chosen, image_w, win, win_image, winner,
             winner_image, preferred, preferred_image
    control  path_control, control, control_image, control_images, control_path, edit_image, input_image, input_images,
             input_img, source_image, source_img, src_img, original_image, original_img, before, before_image;
             else input, source, original
             (several: one of these with the suffix _0, _1, _2, …, or a list if the table can hold one)
    mask     path_mask, mask, mask_image, mask_img, mask_path, control_mask, edit_mask
    rejected path_rejected, rejected, rejected_image, rejected_img, rejected_path, image_rejected, image_l, lose,
             lose_image, loser, loser_image, dispreferred, dispreferred_image: an image that is worse than the target
             (jpg_0, jpg_1 or image_0, image_1, with label_0, are both: 1 says that the first is better, 0 the second;
             with 0.5 the row is left out)
    prompt   prompt, text, caption, instruction, edit_prompt, edit_instruction; or a list, one sample per item:
             prompts, captions, edited_prompt_list; else edit
    positive_prompt and
    negative_prompt are the direction of a slider: two further prompts for the same images; both or neither. A table
             with them needs no target: then its rows are images to generate
    phrase   phrase, edit_phrase: words of the prompt that say where the edit is; with data.marked_phrases, `[[ ]]`
             around them in any prompt does the same (`sources/captions.py`)
    left_out left_out: true, 1, yes or x leaves the row out

Paths are relative to the table's folder; Parquet and Arrow may hold the images themselves. Tars (.tar, or a folder of
them) are those of `webdataset`; `sources/webdataset.py` has the names of members. `data/{000..009}.tar` means ten.
`data.columns` names columns, folders and parts of tars that are called otherwise. `hf://datasets/OWNER/NAME` is a
dataset on the hub (`sources/places.py`).

Rows left out are neither rows nor problems; their number is reported. In a folder of images, left_out.txt beside the
folders names the targets to leave out (`sources/left_out.py`).

Images to generate are read from the same sources, without targets: a table may also have columns `seed`, `width` and
`height`, and prompts alone may be a .txt, one per line.

Text is UTF-8; white space around prompts is dropped, and lines end with LF. Refuses a source that is unreadable, empty
or ambiguous with a `SourceError`. Everything else is a `Problem` of its row, so that one run shows all of them; what
every row lacks is one problem. No row is dropped silently, and files are never paired by position.
"""

from __future__ import annotations

import gc
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Required, TypedDict, Unpack

from qwen_cache.errors import Notice, Problem, SourceError, counted
from qwen_cache.format.identity import Slider
from qwen_cache.format.manifest import MANIFEST_NAME
from qwen_cache.models.folder import ModelFolder
from qwen_cache.settings.sections import ColumnsConfig, DataConfig
from qwen_cache.sources import left_out
from qwen_cache.sources.arrow import read_parquet, read_saved, splits
from qwen_cache.sources.captions import Captions, find, has_marks, parse
from qwen_cache.sources.layouts import CONTROL_FOLDERS, TARGET_FOLDERS
from qwen_cache.sources.pairs import read_pairs
from qwen_cache.sources.places import (
    IMAGE_EXTENSIONS,
    File,
    Folder,
    TableFolder,
    base_name,
    dataset_files,
    file_at,
    is_dataset,
    open_folder,
    similar_file,
    suffix,
)
from qwen_cache.sources.rows import (
    COLUMNS,
    TO_GENERATE,
    Columns,
    Draft,
    FieldProblems,
    Needs,
    NoControl,
    Readable,
    Row,
    limits_exceeded,
    unique,
)
from qwen_cache.sources.rows import read_rows as read_records
from qwen_cache.sources.tables import PROMPTS, READERS, read_text_table
from qwen_cache.sources.webdataset import read_tars
from qwen_cache.storage.remote import Location, Url, is_remote, location
from qwen_cache.text import shell_line

# ---- garbage ---------------------------------------------------------------------------------------------------------
# Python's cyclic garbage collector, off while millions of objects are made that stay and form no cycles.
#
# Searching them repeatedly takes a third of the time of reading a source. Not for decoding images, which may form
# cycles that hold their pixels.


@contextmanager
def without_gc() -> Iterator[None]:
    """Turn the collector off inside the block."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# ---- reading ---------------------------------------------------------------------------------------------------------
# The settings by which a source is read, made in one place from `data` and the model.


class SourceSettings(TypedDict, total=False):
    """How a source is read."""

    needs_control: Required[bool]
    """True if the source must have controls, as for an editing model."""
    takes_control: bool | None
    """Without, for text to image, there must be no control; by default `needs_control` decides."""
    no_control: NoControl | None
    """Which rows may lack a control: by default none where controls are needed, else those of which a table states it.
    Where any may, so may all."""
    needs_target: bool
    """Without, to generate, rows may lack the target, and the folder may hold only controls."""
    needs_prompt: bool
    to_generate: bool
    """True if the rows are images to generate, which may have a seed and a size, and no target."""
    has_direction: bool
    """True if `captions` give every row the direction of a slider: then a table needs no target."""
    allow_empty_prompt: bool
    allow_urls: Sequence[str]
    columns: ColumnsConfig | None
    split: str | None
    config_name: str | None
    """The settings of `data`."""
    marked_phrases: bool | None
    """True if `[[ ]]` in prompts mark words; None: no, and a notice counts the prompts that have them."""
    captions: Captions | None
    """The settings that change the prompts."""


def reading(data: DataConfig, model: ModelFolder | None = None) -> SourceSettings:
    """How `build` reads a source for a model, without what changes its prompts; None: for either kind of model."""
    return {
        "needs_control": model is not None and model.needs_controls and not data.allow_no_control,
        "takes_control": model is None or model.takes_controls,
        "no_control": "allowed" if data.allow_no_control else "stated",
        "allow_empty_prompt": data.allow_empty_prompt,
        "allow_urls": data.allow_urls,
        "columns": data.columns,
        "split": data.split,
        "config_name": data.config_name,
        "marked_phrases": data.marked_phrases,
        "has_direction": bool((data.positive_prompt or "").strip()),
    }


def needs_of(**settings: Unpack[SourceSettings]) -> Needs:
    """The requirements of these settings on a source."""
    needs_control, to_generate = settings["needs_control"], settings.get("to_generate", False)
    takes_control = settings.get("takes_control")
    return Needs(
        control=needs_control,
        no_control=settings.get("no_control") or ("refused" if needs_control else "stated"),
        target=settings.get("needs_target", True) and not to_generate,
        prompt=settings.get("needs_prompt", True),
        to_generate=to_generate,
        has_direction=settings.get("has_direction", False),
        takes_control=needs_control if takes_control is None else takes_control,
        marked_phrases=settings.get("marked_phrases"),
        allow_urls=tuple(settings.get("allow_urls", ())),
        columns=settings.get("columns") or ColumnsConfig(),
        split=settings.get("split"),
        config_name=settings.get("config_name"),
    )


# ---- detect ----------------------------------------------------------------------------------------------------------

__all__ = ["Problem", "Readable", "Row", "read_source"]

MAX_FILES = 100_000  # of a pattern: tars of one image each would still be a set for days
METADATA_TABLES = ("metadata.csv", "metadata.jsonl")
SAVED, SAVED_SPLITS = "state.json", "dataset_dict.json"
ARCHIVES: dict[str, Callable[[Sequence[Location], Needs], Iterator[Problem | Notice | Draft]]] = {
    ".parquet": read_parquet,
    ".tar": read_tars,
}
KINDS = (
    f"a table ({', '.join(READERS)}, .parquet), a .tar of images, or a folder of image pairs, of .parquet, "
    "of .tar, or that `datasets` saved"
)


@dataclass(frozen=True)
class Content:
    """The content of a source."""

    rows: list[Row]
    """The usable rows."""
    problems: list[Problem]
    """The problems of the others."""
    left_out: int
    """How many rows the source leaves out."""
    notices: tuple[Notice, ...] = ()
    """Facts about the rows that are used."""

    def __add__(self, other: Content) -> Content:
        """Both, with other names for rows of `other` whose names are taken."""
        taken = {row.name: 1 for row in self.rows}
        more = [replace(row, name=unique(row.name, taken)) for row in other.rows]
        return Content(
            self.rows + more,
            self.problems + other.problems,
            self.left_out + other.left_out,
            counted([*self.notices, *other.notices]),
        )


def read_source(source: Location, **settings: Unpack[SourceSettings]) -> tuple[list[Row], list[Problem]]:
    """The usable rows of `source`, and the problems of the others.

    The rows of a folder are sorted by name; those of tables and tars keep their order.
    """
    content = read_content(source, **settings)
    return content.rows, content.problems


def read_content(source: Location, **settings: Unpack[SourceSettings]) -> Content:
    """The rows of `read_source`, and the number of rows left out; SourceError if that is all."""
    needs, captions = needs_of(**settings), settings.get("captions")
    content = read_drafts(
        drafts_of(source, needs), str(source), needs, allow_empty_prompt=settings.get("allow_empty_prompt", False)
    )
    if content.left_out and not content.rows and not content.problems:
        do = f"take a row in again: in the column {left_out.COLUMN} or in {left_out.LIST}"
        raise SourceError("every row of this source is left out", where=source, found=content.left_out, do=do)
    if captions is None:
        return content
    notices = counted([*content.notices, *captions.notices(content.rows)])
    return replace(content, rows=captions.applied(content.rows), notices=notices)


def read_drafts(
    found: Iterable[Problem | Notice | Draft],
    source: str,
    needs: Needs,
    *,
    allow_empty_prompt: bool = False,
    on_draft: Callable[[Draft, Sequence[Problem]], None] = lambda draft, problems: None,
) -> Content:
    """The content that the drafts of `source` become; `on_draft` is called with each, and its problems."""
    rows: list[Row] = []
    problems: list[Problem] = []
    notices: list[Notice] = []
    drafts = out = 0
    shared: Problem | None = None
    for draft in found:
        if isinstance(draft, Notice):
            notices.append(draft)
            continue
        if isinstance(draft, Problem):
            drafts += 1
            problems.append(draft)
            continue
        samples, own = checked(draft, needs, allow_empty_prompt=allow_empty_prompt)
        on_draft(draft, own)
        drafts, out = drafts + (not draft.is_left_out), out + draft.is_left_out
        rows += samples
        for row in samples:
            if LOST in row.prompt:
                what = "prompts have U+FFFD, which stands for a character that was lost"
                notices.append(Notice(what, (row.name,), "write the right characters", is_fault=True))
            if needs.marked_phrases is None and has_marks(row.prompt):
                do = "if they mark words, set data.marked_phrases: true; false ends this notice"
                notices.append(Notice("prompts have [[ ]], which are part of the prompt", (row.name,), do))
        if draft.unusable is None or draft.unusable is not shared:
            problems += own
        shared = draft.unusable
    # A problem that all samples share is listed once.
    times = Counter((problem.what, problem.do) for problem in problems)
    of_all = [key for key, count in times.items() if count == drafts > 1]
    merged = [Problem(source, f"all {drafts} samples: {what}", do) for what, do in of_all]
    merged += [problem for problem in problems if (problem.what, problem.do) not in of_all]
    return Content(rows, merged, out, counted(notices))


def advice(problems: int, rows: int, skip: str) -> str:
    """Advice about the problems of a source beside its usable `rows`, which `skip` would leave.

    Where half is a problem, the source is probably read in another way than it is meant, and to skip would hide that.
    """
    it, their = ("it", "its row") if problems == 1 else ("them", "their rows")
    if problems < rows:
        return f"fix {it}, or skip {their} with {skip}"
    return f"fix {it}; if folders or columns are read in another way than you mean, name them: --targets, --controls"


def checked(draft: Draft, needs: Needs, *, allow_empty_prompt: bool) -> tuple[list[Row], list[Problem]]:
    """The rows of a draft, or its problems; neither if it is left out."""
    if draft.is_left_out:
        return [], []
    if draft.unusable:
        return [], [draft.unusable]
    samples, unmarked = _phrases(draft, marked=bool(needs.marked_phrases))
    field_problems = draft.field_problems | unmarked | _missing(draft, draft.field_problems, needs, allow_empty_prompt)
    for sample in samples:
        field_problems = limits_exceeded(sample) | field_problems
    if not needs.prompt:
        field_problems.pop("prompt", None)
    problems = [Problem(draft.samples[0].where, what, do) for what, do in field_problems.values()]
    return [] if problems else samples, problems


def read_written(records: Sequence[dict[str, Any]], where: str, **settings: Unpack[SourceSettings]) -> Content:
    """The images to generate that a settings file has under `where`; of their prompts only the placeholder is replaced.

    Each has the keys prompt, control (a list of paths from the working directory, or URLs), seed, width and height.
    """
    needs = replace(needs_of(**settings), control=False, no_control="allowed", target=False, to_generate=True)
    captions = settings.get("captions") or Captions()
    records = [{**record, "prompt": captions.replaced(record["prompt"])} for record in records]
    columns: Columns = {role: [] for role in COLUMNS}
    columns |= {role: [role] for role in ("prompt", "control", *TO_GENERATE)}
    located = ((f"{where}[{number}]", record) for number, record in enumerate(records))
    drafts = list(read_records(located, columns, TableFolder(Path()), {}))
    for number, draft in enumerate(drafts, 1):
        if isinstance(draft, Draft):
            samples = tuple(replace(sample, name=f"prompt-{number}") for sample in draft.samples)
            drafts[number - 1] = replace(draft, samples=samples)
    content = read_drafts(drafts, where, needs, allow_empty_prompt=settings.get("allow_empty_prompt", False))
    return replace(content, notices=counted([*content.notices, *captions.notices(content.rows)]))


LOST = "\ufffd"
"""The character that programs write for one that they could not read."""
CHANGED = re.compile(r"\r|^\s|\s\Z")
"""The parts of a prompt that are not read as they are: line ends of Windows, white space around it."""


def _phrases(draft: Draft, *, marked: bool) -> tuple[list[Row], FieldProblems]:
    """The samples with the given words as a phrase, or the marked ones; then without the marks."""
    samples, field_problems = [], FieldProblems()
    for sample in draft.samples:
        try:
            if sample.slider:
                sample = replace(sample, slider=Slider(*(_plain(text, marked=marked) for text in sample.slider)))
            if not draft.phrase and not CHANGED.search(sample.prompt) and not (marked and has_marks(sample.prompt)):
                samples.append(sample)
                continue
            text = unix(sample.prompt)
            prompt, spans = stripped(*(parse(text) if marked else (text, [])))
            if spans and draft.phrase:
                raise SourceError("words are marked and a phrase is given too", do="leave out one of them")
            if draft.phrase and prompt:
                spans = [find(prompt, unix(draft.phrase))]
            samples.append(replace(sample, prompt=prompt, phrase=tuple(spans)))
        except SourceError as error:
            field_problems["phrase"] = f"{sample.name}: {error.fault}", error.do or "correct it"
    return samples, field_problems


def _plain(text: str, *, marked: bool) -> str:
    """A further prompt as it is encoded, without marks."""
    return (parse(unix(text))[0] if marked else unix(text)).strip()


def unix(text: str) -> str:
    """The text with LF line ends, so that a prompt saved on Windows is the same prompt."""
    return text.replace("\r\n", "\n")


def stripped(prompt: str, spans: list[tuple[int, int]]) -> tuple[str, list[tuple[int, int]]]:
    """The prompt without surrounding white space that was inside marks, and its spans moved accordingly."""
    text = prompt.strip()
    cut = len(prompt) - len(prompt.lstrip())
    return text, [(max(0, begin - cut), min(len(text), end - cut)) for begin, end in spans]


def _missing(draft: Draft, known: FieldProblems, needs: Needs, allow_empty_prompt: bool) -> FieldProblems:
    """The missing parts of a row. Remote images are not checked before they are read."""
    field_problems: FieldProblems = {}
    row = draft.samples[0]
    if needs.no_control == "refused" and not row.controls and "control" not in known:
        owner = "row" if row.target is None else "target"
        field_problems["control"] = f"the {owner} has no control", f"add one, or remove the {owner}"
    empty = [number for number, sample in enumerate(draft.samples, 1) if not sample.prompt]
    if empty and not allow_empty_prompt and "prompt" not in known:
        which = "the prompt" if len(draft.samples) == 1 else f"prompt {empty[0]} of {len(draft.samples)}"
        do = "write one, or allow empty prompts with data.allow_empty_prompt: true"
        field_problems["prompt"] = f"{which} is empty", do
    named = [("target", row.target), *(("control", it) for it in row.controls), ("mask", row.mask)]
    for role, image in [*named, ("rejected image", row.rejected)]:
        if isinstance(image, File) and image.local is not None and not os.path.isfile(image.local):
            do = "put the file there, or correct the path (in a table it starts at the table's folder)"
            which = role if str(image) == row.where else f"{role} {image}"
            near = similar_file(image.local)
            hint = f"; did you mean {near!r}?" if near else ""
            field_problems[f"{role} {image}"] = f"the {which} does not exist{hint}", do
    return field_problems


def drafts_of(source: Location, needs: Needs) -> Iterator[Problem | Notice | Draft]:
    """The drafts of a source by its kind."""
    kind = suffix(source)
    if needs.config_name and not (is_remote(source) and is_dataset(source)):
        what, do = "only a dataset on the hub has configurations", "leave out data.config_name"
        raise SourceError(what, where=source, expected="hf://datasets/OWNER/NAME", found=needs.config_name, do=do)
    if needs.split and (kind in READERS or kind in ARCHIVES):
        raise SourceError("a file has no splits", where=source, found=needs.split, do="leave out data.split")
    if not is_remote(source) and source.is_dir():
        return _read_folder(_opened(source), needs)
    if kind in READERS or (kind == PROMPTS and (needs.to_generate or needs.has_direction)):
        return read_text_table(file_at(source), replace(needs, control=needs.control and kind != PROMPTS))
    if kind in ARCHIVES:
        paths = [source]
        if is_remote(source) or not source.exists():
            names = list(islice(expand(str(source)), MAX_FILES + 1))
            if len(names) > MAX_FILES:
                what, do = "the braces stand for too many files", "name the folder, or correct the numbers"
                raise SourceError(what, where=source, expected=f"at most {MAX_FILES}", do=do)
            paths = [file_at(location(name)) for name in names]
        return ARCHIVES[kind](paths, needs)
    if is_remote(source):
        return _read_hub(source, needs) if is_dataset(source) else _read_folder(_opened(source), needs)
    check_exists(source)
    raise SourceError("this is not a source that can be read", where=source, expected=KINDS, do="correct the path")


def check_exists(source: Location) -> None:
    """SourceError if there is nothing at a path of this machine; of tars, a pattern with braces may stand for many."""
    if not is_remote(source) and not source.exists() and suffix(source) not in ARCHIVES:
        raise SourceError("there is no such source", where=source, expected=KINDS, do="correct the path")


def _opened(path: Location) -> Folder:
    return open_folder(path, METADATA_TABLES)


def _read_hub(source: Url, needs: Needs) -> Iterator[Problem | Notice | Draft]:
    """The drafts of a dataset on the hub: of its Parquet files or tars, its table, or its folder of images."""
    by_split = dataset_files(source, needs.config_name)
    files = by_split[_chosen(by_split, source, needs.split)]
    kinds = {suffix(path) for path in files}
    tables = [path for path in files if suffix(path) in READERS]
    if len(kinds) == 1 and kinds <= ARCHIVES.keys():
        return ARCHIVES[kinds.pop()](files, needs)
    if len(tables) == 1 and kinds <= {suffix(tables[0]), *IMAGE_EXTENSIONS}:
        return read_text_table(tables[0], needs)
    if kinds <= {*IMAGE_EXTENSIONS}:
        return _read_folder(_opened(source), needs)
    do = "download it, and make a table of it: .csv, .jsonl, .json or .parquet"
    raise SourceError(
        "this dataset has no known layout", where=source, expected=KINDS, found=", ".join(sorted(kinds)), do=do
    )


def expand(pattern: str) -> Iterator[str]:
    """The names of a pattern with braces, as in a shell: `{000..009}` and `{a,b}`."""
    match = re.search(r"\{(?:(\d{1,9})\.\.(\d{1,9})|([^{}]*,[^{}]*))\}", pattern)
    if match is None:
        yield pattern
        return
    first, last, listed = match.groups()
    count = range(int(first), int(last) + 1) if listed is None else ()
    for item in listed.split(",") if listed is not None else (str(number).zfill(len(first)) for number in count):
        yield from expand(pattern[: match.start()] + item + pattern[match.end() :])


def _read_folder(folder: Folder, needs: Needs) -> Iterator[Problem | Notice | Draft]:
    if SAVED_SPLITS in folder.files:
        name = _chosen(folder.folders, folder.path, needs.split)
        return _read_folder(open_folder(folder.path / name), replace(needs, split=None))
    tables = [folder.path / name for name in METADATA_TABLES if name in folder.files]
    pairs = [folder.path / name for name in (*TARGET_FOLDERS, *CONTROL_FOLDERS) if name in folder.folders]
    archives = {ending: folder.having(ending) for ending in ARCHIVES}
    ways: list[list[Location]] = [*([table] for table in tables), pairs, *archives.values()]
    readable = [way for way in ways if way]
    if MANIFEST_NAME in folder.files:
        do = "name the images that it was made from; `qwen-cache merge` joins caches"
        raise SourceError("this is a cache, not a source", where=folder.path, expected=KINDS, do=do)
    if len(readable) > 1:
        raise SourceError(
            "the folder can be read in more than one way",
            where=folder.path,
            expected="one table, images in tars, or folders of images",
            found=", ".join(base_name(path) for way in readable for path in way[:3]),
            do=f"name the file itself, {readable[0][0]}, or move the others elsewhere",
        )
    if left_out.LIST in folder.files and (tables or SAVED in folder.files or any(archives.values())):
        what, do = "only a folder of images has such a list", f"use a column {left_out.COLUMN}, and remove the list"
        raise SourceError(what, where=folder.path / left_out.LIST, do=do)
    by_split = splits(path for paths in archives.values() for path in paths)
    if len(by_split) > 1 or needs.split:
        name = _chosen(by_split, folder.path, needs.split)
        return read_parquet(by_split[name], needs)
    if SAVED in folder.files:
        if is_remote(folder.path):
            do = "copy the folder to a disk, or save it as Parquet"
            raise SourceError(
                "a folder that `datasets` saved is memory-mapped, so it must be local", where=folder.path, do=do
            )
        return read_saved(folder.path, needs)
    for ending, paths in archives.items():
        if paths:
            return ARCHIVES[ending](paths, needs)
    return read_text_table(tables[0], needs) if tables else read_pairs(folder, needs)


def _chosen(names: Iterable[str], where: Location, split: str | None) -> str:
    """The split to read; SourceError, with the known splits, if it is ambiguous or missing."""
    known = sorted(names)
    if split in known or (split is None and len(known) == 1):
        return split or known[0]
    what = "the source holds several splits" if split is None else f"there is no split {split!r}"
    options = " or ".join(shell_line(["--set", f"data.split={name}"]) for name in known)
    do = f"choose one: {options}" if known else "leave out data.split"
    raise SourceError(what, where=where, expected="one", found=", ".join(known) or "none", do=do)


# ---- listing ---------------------------------------------------------------------------------------------------------
# Every row of a source as it stands there, for people to look at and edit: also rows with problems and rows left out.
#
# Prompts are raw: with marks, without trigger word, prefix and suffix. The problems are exactly those that
# `read_source` reports, by the same code. Nothing is opened but tables, tars and text files: an image that cannot be
# decoded is no problem here. Raises `SourceError` for a source that cannot be read at all.


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of a source: a target with its controls, or without, and one or more captions."""

    names: tuple[str, ...]
    """The name of each caption's sample: that of the row, then with `#2`, `#3`, …"""
    where: str
    """The place of the row, as in its problems: `data/metadata.csv:12`, or the target's path."""
    target: Readable | None
    controls: tuple[Readable, ...]
    mask: Readable | None
    prompts: tuple[str, ...]
    """The captions; one that is empty or missing is an empty text."""
    phrase: str
    """The words that a table gives for where the edit is."""
    is_left_out: bool
    problems: tuple[Problem, ...]
    """Why the row cannot be used; none if it is left out."""
    renames: tuple[tuple[Path, Path], ...] = ()
    """Files that only need another name to belong to the row, with that name."""
    rejected: Readable | None = None

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True)
class Listing:
    """A source as a list."""

    source: str
    entries: tuple[Entry, ...]
    """In the order of the source."""
    problems: tuple[Problem, ...]
    """All problems, as `read_source` reports them: what every row lacks is one of them."""

    @property
    def left_out(self) -> int:
        """How many rows are left out."""
        return sum(entry.is_left_out for entry in self.entries)

    @property
    def other_problems(self) -> list[Problem]:
        """Problems of no entry: of a file without a target, of a row that cannot be cut into cells, of all rows."""
        known = {problem for entry in self.entries for problem in entry.problems}
        return [problem for problem in self.problems if problem not in known]


@without_gc()
def list_source(source: Location, **settings: Unpack[SourceSettings]) -> Listing:
    """The rows of `source` for these settings of `read_source`; `captions` change nothing here."""
    needs, entries = needs_of(**settings), list[Entry]()
    content = read_drafts(
        drafts_of(source, needs),
        str(source),
        needs,
        allow_empty_prompt=settings.get("allow_empty_prompt", False),
        on_draft=lambda draft, problems: entries.append(as_entry(draft, problems)),
    )
    return Listing(str(source), tuple(entries), tuple(content.problems))


def as_entry(draft: Draft, problems: Sequence[Problem]) -> Entry:
    first = draft.samples[0]
    return Entry(
        tuple(row.name for row in draft.samples),
        first.where,
        first.target,
        first.controls,
        first.mask,
        tuple(unix(row.prompt) for row in draft.samples),
        unix(draft.phrase),
        draft.is_left_out,
        tuple(problems),
        draft.renames,
        first.rejected,
    )
