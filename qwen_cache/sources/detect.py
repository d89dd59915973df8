"""Turn a source into rows, before anything is encoded: a folder or a file, local or remote.

Pairs, for editing. Names are compared whole, never by prefix; subfolders are part of a name:

    target_images/NAME.png           the target (the folder may be called training_images, targets or target as well)
    target_images/NAME.txt           its prompt
    control_images/NAME.png          the first control (or condition_images, controls, control)
    control_images/NAME_control_1.*  further controls, counted from 1
    control_images/NAME_mask.*       the mask, white where the target was edited

Every image in the target folder is a target. A file in the control folder belongs to the target with exactly its name;
only if there is none, `_control_1` and `_mask` are read as endings. So a target may be called `x_mask`, but then
`control_images/x_mask.png` is its control. For text-to-image there are no controls, and a folder of images with their
prompts beside them is enough. A folder with a metadata.csv or metadata.jsonl stands for that table.

A table (.csv, .jsonl, .json, .parquet, a folder of .parquet, or a folder that `datasets` wrote with save_to_disk) has
one row per sample. These are its columns or keys, in upper or lower case; others are ignored, unless the name resembles
that of a control or a mask:

    target   path_target, target, target_image, target_img, image, image_path, file_name, edited_image, edited_img,
             output_image
    control  path_control, control, control_image, control_images, control_path, edit_image, input_image, input_images,
             source_image, source_img, src_img, original_image
             (several: one of these with the suffix _0, _1, _2, …, or a list if the table can hold one)
    mask     path_mask, mask, mask_image, mask_img, mask_path, control_mask, edit_mask
    prompt   prompt, text, caption, instruction, edit_prompt; or a list, one sample per item: prompts, captions
    phrase   phrase, edit_phrase: words of the prompt that say where the edit is; `[[ ]]` around them in any prompt does
             the same (`grounding/phrase.py`)

Paths are relative to the table's folder; Parquet and Arrow may hold the images themselves. Tars (.tar, or a folder of
them) are those of `webdataset`; `sources/webdataset.py` has the names of members. `data/{000..009}.tar` means ten.

Text is UTF-8; white space around prompts is dropped. Refuses a source that is unreadable, empty or ambiguous with a
`SourceError`. Everything else is a `Problem` of its row, so that one run shows all of them. No row is dropped silently,
and files are never paired by position.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from qwen_cache.errors import Problem, SourceError
from qwen_cache.format.manifest import MANIFEST_NAME
from qwen_cache.grounding.phrase import find, parse
from qwen_cache.sources.arrow import read_parquet, read_saved, splits
from qwen_cache.sources.pairs import CONTROL_FOLDERS, TARGET_FOLDERS, read_pairs
from qwen_cache.sources.places import File, Folder, Location, base_name, file_at, open_folder, suffix
from qwen_cache.sources.rows import Draft, FieldProblems, Needs, Readable, Row
from qwen_cache.sources.text_table import READERS, read_text_table
from qwen_cache.sources.webdataset import read_tars
from qwen_cache.storage.url import Url, location

__all__ = ["Problem", "Readable", "Row", "read_source"]

MAX_FILES = 100_000  # of a pattern: tars of one image each would still be a set for days
METADATA_TABLES = ("metadata.csv", "metadata.jsonl")
SAVED, SAVED_SPLITS = "state.json", "dataset_dict.json"
ARCHIVES: dict[str, Callable[[Sequence[Location], Needs], Iterator[Problem | Draft]]] = {
    ".parquet": read_parquet,
    ".tar": read_tars,
}
KINDS = (
    f"a table ({', '.join(READERS)}, .parquet), a .tar of images, or a folder of image pairs, of .parquet, "
    "of .tar, or that `datasets` saved"
)


def read_source(
    source: Location,
    *,
    needs_control: bool,
    takes_control: bool | None = None,
    needs_target: bool = True,
    needs_prompt: bool = True,
    allow_empty_prompt: bool = False,
    allow_urls: Sequence[str] = (),
) -> tuple[list[Row], list[Problem]]:
    """The usable rows of `source`, and the problems of the others.

    The rows of a folder are sorted by name; those of tables and tars keep their order. With `needs_control`, for an
    editing model, every target needs a control; without `takes_control`, for text-to-image, there must be none (by
    default `needs_control` decides both). Without
    `needs_target`, to generate images, the first control of a row without target takes the target's place, and the
    folder may hold only controls. `allow_urls` is what a remote table may name besides its own server.
    """
    takes_control = needs_control if takes_control is None else takes_control
    needs = Needs(needs_control, needs_target, needs_prompt, takes_control, tuple(allow_urls))
    rows: list[Row] = []
    problems: list[Problem] = []
    for draft in _read(source, needs):
        if isinstance(draft, Problem):
            problems.append(draft)
            continue
        samples, unmarked = _phrases(draft)
        field_problems = (
            draft.field_problems | unmarked | _missing(draft, draft.field_problems, needs, allow_empty_prompt)
        )
        if not needs_prompt:
            field_problems.pop("prompt", None)
        problems += [Problem(draft.samples[0].where, what, do) for what, do in field_problems.values()]
        if not field_problems:
            rows += samples
    return rows, problems


def _phrases(draft: Draft) -> tuple[list[Row], FieldProblems]:
    """The samples with their marks removed from the prompt, and the marked or given words as a phrase."""
    samples, field_problems = [], FieldProblems()
    for sample in draft.samples:
        try:
            prompt, marked = stripped(*parse(sample.prompt))
            if marked and draft.phrase:
                raise SourceError("words are marked and a phrase is given too", do="leave out one of them")
            spans = [find(prompt, draft.phrase)] if draft.phrase and prompt else marked
            samples.append(replace(sample, prompt=prompt, phrase=tuple(spans)))
        except SourceError as error:
            field_problems["phrase"] = f"{sample.name}: {error.fault}", error.do or "correct it"
    return samples, field_problems


def stripped(prompt: str, spans: list[tuple[int, int]]) -> tuple[str, list[tuple[int, int]]]:
    """The prompt without surrounding white space that was inside marks, and its spans moved accordingly."""
    text = prompt.strip()
    cut = len(prompt) - len(prompt.lstrip())
    return text, [(max(0, begin - cut), min(len(text), end - cut)) for begin, end in spans]


def _missing(draft: Draft, known: FieldProblems, needs: Needs, allow_empty_prompt: bool) -> FieldProblems:
    """The missing parts of a row. Remote images are not checked before they are read."""
    field_problems: FieldProblems = {}
    row = draft.samples[0]
    if needs.control and not row.controls and "control" not in known:
        field_problems["control"] = f"the target {row.target} has no control", "add one, or remove the target"
    empty = [number for number, sample in enumerate(draft.samples, 1) if not sample.prompt]
    if empty and not allow_empty_prompt and "prompt" not in known:
        which = "the prompt" if len(draft.samples) == 1 else f"prompt {empty[0]}"
        do = "write one, or allow empty prompts with data.allow_empty_prompt: true"
        field_problems["prompt"] = f"{which} of {row.target} is empty", do
    for role, image in [("target", row.target), *(("control", it) for it in row.controls), ("mask", row.mask)]:
        if isinstance(image, File) and isinstance(image.path, Path) and not os.path.isfile(image.path):
            do = "put the file there, or correct the path (in a table it starts at the table's folder)"
            field_problems[f"{role} {image}"] = f"the {role} {image} does not exist", do
    return field_problems


def _read(source: Location, needs: Needs) -> Iterator[Problem | Draft]:
    """The drafts of a source by its kind."""
    kind = suffix(source)
    if isinstance(source, Path) and source.is_dir():
        return _read_folder(open_folder(source, METADATA_TABLES), needs)
    if kind in READERS:
        return read_text_table(file_at(source), needs)
    if kind in ARCHIVES:
        paths = (
            [source]
            if isinstance(source, Path) and source.exists()
            else [file_at(location(name)) for name in _expanded(str(source))]
        )
        return ARCHIVES[kind](paths, needs)
    if isinstance(source, Url):
        return _read_folder(open_folder(source, METADATA_TABLES), needs)
    what = "this is not a source that can be read" if source.exists() else "there is no such source"
    raise SourceError(what, where=source, expected=KINDS, do="correct the path")


def _expanded(pattern: str) -> list[str]:
    names = list(islice(expand(pattern), MAX_FILES + 1))
    if len(names) > MAX_FILES:
        what, expected = "the braces stand for too many files", f"at most {MAX_FILES}"
        raise SourceError(what, where=pattern, expected=expected, do="name the folder, or correct the numbers")
    return names


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


def _read_folder(folder: Folder, needs: Needs) -> Iterator[Problem | Draft]:
    tables = [folder.path / name for name in METADATA_TABLES if name in folder.files]
    pairs = [folder.path / name for name in (*TARGET_FOLDERS, *CONTROL_FOLDERS) if name in folder.folders]
    archives = {ending: folder.having(ending) for ending in ARCHIVES}
    _refuse(folder, [[table] for table in tables] + [pairs, *archives.values()])
    if SAVED in folder.files:
        if isinstance(folder.path, Url):
            do = "copy the folder to a disk, or save it as Parquet"
            raise SourceError(
                "a folder that `datasets` saved is memory-mapped, so it must be local", where=folder.path, do=do
            )
        return read_saved(folder.path, needs)
    for ending, paths in archives.items():
        if paths:
            return ARCHIVES[ending](paths, needs)
    return read_text_table(tables[0], needs) if tables else read_pairs(folder, needs)


def _refuse(folder: Folder, ways: list[list[Location]]) -> None:
    """SourceError if a folder is not a source, or more than one."""
    readable = [way for way in ways if way]
    if MANIFEST_NAME in folder.files:
        do = "name the images that it was made from; `qwen-cache merge` joins caches"
        raise SourceError("this is a cache, not a source", where=folder.path, expected=KINDS, do=do)
    if SAVED_SPLITS in folder.files:
        raise SourceError(
            "the folder holds several splits",
            where=folder.path,
            expected="one",
            found=", ".join(folder.folders) or "none of their folders",
            do=f"name one of its folders: {', '.join(str(folder.path / name) for name in folder.folders)}",
        )
    if len(readable) > 1:
        raise SourceError(
            "the folder can be read in more than one way",
            where=folder.path,
            expected="one table, images in tars, or folders of images",
            found=", ".join(base_name(path) for way in readable for path in way[:3]),
            do=f"name the file itself, {readable[0][0]}, or move the others elsewhere",
        )
    several = splits(path for way in readable for path in way)
    if len(several) > 1:
        raise SourceError(
            "the folder holds several splits",
            where=folder.path,
            expected="one",
            found=", ".join(sorted(several)),
            do="name the files of one: data/train-{00000..00007}-of-00008.parquet",
        )
