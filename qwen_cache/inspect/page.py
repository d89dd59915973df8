"""The page of a cache: rows, cards, curves, and the files beside it."""

from __future__ import annotations

import json
import os
import re
import shutil
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from qwen_cache.errors import ConfigError, QwenCacheError
from qwen_cache.format.cache import Sample
from qwen_cache.format.index import INDEX_NAME, SLIDER
from qwen_cache.format.manifest import MANIFEST_NAME
from qwen_cache.format.sample import PIXELS_PER_TOKEN
from qwen_cache.html.page import Bar, bars, compact_json, relative_url, render
from qwen_cache.inspect.flags import (
    FLAGS,
    ImageSource,
    Integers,
    batches,
    data_url,
    digests,
    images,
    integers,
    no_images,
    reading,
    stored_images,
    take,
)
from qwen_cache.inspect.summary import (
    BATCH_COLUMNS,
    SIZE_COLUMNS,
    RecipeSurvey,
    Survey,
    batch_note,
    batch_row,
    import_origin,
    labelled_bins,
    measured_line,
    partial_state,
    resolution,
    sample_counts,
    savings_rows,
    source_state,
)
from qwen_cache.storage.files import (
    REMOVED,
    LockHeldError,
    is_link,
    locked,
    make_folder,
    remove_folder,
    remove_left,
    replace,
    sync_file,
    sync_folder,
    write_durably,
)
from qwen_cache.storage.remote import Location, is_remote, location
from qwen_cache.terminal import counting, human_bytes, naming, plural

# ---- rows ------------------------------------------------------------------------------------------------------------
# The samples of a survey as the page lists them: rows, and the small columns that its filters need.
#
# Made from columns of the index, some rows at a time, so that a page of any number of samples takes little memory.
# Positions count the samples of all recipes, one recipe after another.

COLUMNS = (
    *("key", "name", "prompt", "sizes", "text_tokens", "image_tokens", "edit_mask_from", "to_generate", "recipe"),
    *("slider", "flags", "near", "images"),
)
READ = ("key", "name", "prompt", "text_length", "edit_mask_from", "target", "seed", *SLIDER, *SIZE_COLUMNS)
MAX_LINKS = 12
"""Samples that are named: per flag, and to each near-duplicate; filters list all."""


class PageSamples:
    """All samples of a survey, in order, and which of them have images on the page."""

    def __init__(self, survey: Survey, with_images: Integers) -> None:
        """`with_images` are the ascending positions of the samples with images."""
        self.recipes, self.with_images = survey.recipes, with_images
        sizes = [len(recipe.cache) for recipe in survey.recipes.values()]
        self.ends: dict[str, int] = dict(zip(survey.recipes, np.cumsum(sizes).tolist(), strict=True))
        self.count = sum(sizes)
        self.groups = [
            group + self.begin(name) for name, recipe in self.recipes.items() for group in recipe.flagged.groups
        ]

    def begin(self, recipe: str) -> int:
        """The position of the first sample of a recipe."""
        return self.ends[recipe] - len(self.recipes[recipe].cache)

    def sample(self, position: int) -> Sample:
        name, begin = next((name, self.begin(name)) for name, end in self.ends.items() if position < end)
        return self.recipes[name].cache[position - begin]

    @cached_property
    def bits(self) -> npt.NDArray[np.uint16]:
        """`[N]`: the flags of each sample, as bits in the order of `FLAGS`."""
        each = [recipe.flagged.bits(len(recipe.cache)) for recipe in self.recipes.values()]
        return np.concatenate([np.empty(0, np.uint16), *each])

    @cached_property
    def has_images(self) -> npt.NDArray[np.bool_]:
        has = np.zeros(self.count, bool)
        has[self.with_images] = True
        return has

    @cached_property
    def group_of(self) -> npt.NDArray[np.int32]:
        """`[N]`: the position of each sample's group of near-duplicates among all groups; -1 for none."""
        found = np.full(self.count if self.groups else 0, -1, np.int32)
        for number, group in enumerate(self.groups):
            found[group] = number
        return found

    @cached_property
    def sizes(self) -> dict[str, int]:
        """How many samples have each size of the target, the most frequent first."""
        counts = Counter[str]()
        for recipe in self.recipes.values():
            counts.update(recipe.counted["resolutions"])
        return dict(counts.most_common())

    def facts(self) -> dict[str, Any]:
        """The facts that the page needs at once: columns, counts, and the choices of its filters."""
        flags = {flag: int(np.count_nonzero(self.bits >> i & 1)) for i, flag in enumerate(FLAGS)}
        choices = [("any", int(np.count_nonzero(self.bits)))]
        choices += [("images", len(self.with_images))] if 0 < len(self.with_images) < self.count else []
        choices += sorted(((flag, count) for flag, count in flags.items() if count), key=lambda each: -each[1])
        return {
            "columns": COLUMNS,
            "count": self.count,
            "sizes": list(self.sizes.items()),
            "flags": choices,
            "recipes": [(name, len(recipe.cache)) for name, recipe in self.recipes.items() if len(recipe.cache)],
            "groups": len(self.groups),
        }

    def rows(self, begin: int, end: int) -> list[list[Any]]:
        """The values of `COLUMNS` for samples from `begin` to before `end`, without images."""
        rows = [row for name, table in self._tables(begin, end) for row in self._recipe_rows(name, table)]
        near = self._near(begin, end)
        for i, row in enumerate(rows, begin):
            row += [[flag for bit, flag in enumerate(FLAGS) if self.bits[i] >> bit & 1], near.get(i), []]
        return rows

    def kinds(self, begin: int, end: int) -> tuple[list[list[int]], npt.NDArray[np.uint16]]:
        """The distinct combinations of size, recipe, flags and images of at most 65,536 samples, and each one's.

        A combination has the position of the size in `sizes`, that of the recipe, the flags as bits, and 0 or 1.
        """
        columns, places = [], {size: i for i, size in enumerate(self.sizes)}
        for number, (_, table) in enumerate(self._tables(begin, end)):
            for batch in batches(table, SIZE_COLUMNS):
                found = images(batch)
                shapes, which = np.unique(found.shapes[found.first, 1:], axis=0, return_inverse=True)
                sizes = np.array([places[resolution(h, w)] for h, w in shapes.tolist()])[which.reshape(-1)]
                columns.append(np.column_stack([sizes, np.full(len(batch), number)]))
        both = np.column_stack([np.concatenate(columns), self.bits[begin:end], self.has_images[begin:end]])
        kinds, codes = np.unique(both, axis=0, return_inverse=True)
        return kinds.tolist(), codes.reshape(-1).astype(np.uint16)

    def keys(self) -> npt.NDArray[np.uint64]:
        """`[N]`: the first 16 digits of each key, as a number."""
        parts = [np.empty(0, np.uint64)]
        for recipe in self.recipes.values():
            with reading(recipe.cache.folder):
                parts += [digests(batch["key"])[:, 0] for batch in batches(recipe.cache.table, ("key",))]
        return np.concatenate(parts)

    def _tables(self, begin: int, end: int) -> Iterator[tuple[str, pa.Table]]:
        """Each recipe with its part of the index between two positions."""
        for name, recipe in self.recipes.items():
            first = self.begin(name)
            yield name, recipe.cache.table.slice(max(0, begin - first), max(0, end - max(begin, first)))

    def _recipe_rows(self, name: str, table: pa.Table) -> Iterator[list[Any]]:
        with reading(self.recipes[name].cache.folder):
            for batch in batches(table, READ):
                found = images(batch)
                sides, first = (PIXELS_PER_TOKEN * found.shapes[:, :0:-1]).tolist(), found.first.tolist()
                texts, tokens = integers(batch["text_length"]).tolist(), found.tokens.tolist()
                for i, record in enumerate(_texts(batch)):
                    sizes = sides[first[i] : first[i] + int(found.counts[i])]
                    seed = "" if record["seed"] is None else f", seed {record['seed']}"
                    to_generate = None if record["target"] else f"to generate{seed}"
                    row = [record["key"], record["name"], record["prompt"], sizes, texts[i], tokens[i]]
                    slider = [record[each] for each in SLIDER] if record[SLIDER[0]] is not None else None
                    yield [*row, record["edit_mask_from"], to_generate, name, slider]

    def _near(self, begin: int, end: int) -> Mapping[int, tuple[int, list[list[str]], int]]:
        """The near-duplicates of samples by position: number of the group, keys and names of some, number of others."""
        found = {}
        for i in (begin + np.flatnonzero(self.group_of[begin:end] >= 0)).tolist():
            number = int(self.group_of[i])
            others = [each for each in self.groups[number][: MAX_LINKS + 1].tolist() if each != i][:MAX_LINKS]
            found[i] = number + 1, self._named(others), len(self.groups[number]) - 1 - len(others)
        return found

    def _named(self, positions: list[int]) -> list[list[str]]:
        """Keys and names; all positions are of one recipe."""
        name, first = next((name, self.begin(name)) for name, end in self.ends.items() if positions[0] < end)
        within, cache = np.array(positions) - first, self.recipes[name].cache
        return [list(each) for each in zip(take(cache, "key", within), take(cache, "name", within), strict=True)]


def has_thumbnails(survey: Survey) -> npt.NDArray[np.bool_]:
    """`[N]`: which samples of a survey have thumbnails in the cache."""
    parts = [np.zeros(0, bool)]
    for recipe in survey.recipes.values():
        table = recipe.cache.table
        if "thumbnails" in table.column_names:
            stored = (batch["thumbnails"].is_valid() for batch in batches(table, ("thumbnails",)))
            parts += [each.to_numpy(zero_copy_only=False) for each in stored]
        else:
            parts.append(np.zeros(table.num_rows, bool))
    return np.concatenate(parts)


def _texts(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """The columns of a row that are not numbers of its sizes; None for those that its index lacks."""
    names = ("key", "name", "prompt", "edit_mask_from", "target", "seed", *SLIDER)
    missing = [None] * len(batch)
    columns = [batch[name].to_pylist() if name in batch.schema.names else missing for name in names]
    for values in zip(*columns, strict=True):
        yield dict(zip(names, values, strict=True))


# ---- page files ------------------------------------------------------------------------------------------------------
# The files of a page with many samples: its rows and images, for its scripts to load as they are needed.
#
# They are scripts that call `data(name, value)`, because a browser lets a page that is opened from a disk load scripts
# from its folder, and fetch nothing. `FILE_files/<hash>/` has them, named by their content, so a page never shows those
# of another:
#
#     rows-<i>.js     1024 samples, as `rows.COLUMNS`
#     images-<i>.js   the images of 32 samples, as data URLs; only those of samples that have some
#     kinds-<i>.js    size, recipe, flags of 65,536 samples, for the filters
#     keys-<digits>.js  the positions of the samples whose keys begin so
#     near-<i>.js     the positions of near-duplicates, group by group
#
# The folder gets its name when all of it is on the disk, before the page; folders of older pages are removed after it.

CHUNK = 1024  # samples per file of rows: some 300 kB
PACK = 32  # samples per file of images: some 1 MB
SECTION = 1 << 16  # samples per file of kinds, so that 16 bits number them
BUCKET = 4096  # samples per file of keys, at most, on average
KEY_DIGITS = 12  # of a key in those files, after the digits in their names; the row then has the whole key
WRITING, LOCK = ".writing.tmp", ".lock"
OURS, SCRIPT = re.compile("[0-9a-f]{32}"), re.compile(r"(rows|images|kinds|keys|near)-[0-9a-f]+\.js")


def folder_of(page: Path) -> Path:
    """The folder for the files of a page."""
    return page.with_name(f"{page.stem}_files")


@contextmanager
def files_beside(page: Path, listing: PageSamples, source: ImageSource) -> Iterator[dict[str, Any]]:
    """Write the files of a page; yields what the page must say about them, and removes older files once it is written.

    QwenCacheError where another process writes this page.
    """
    folder = folder_of(page)
    if is_link(folder) or (folder.exists() and not folder.is_dir()):
        what, do = "the files of a page of this size cannot be written here: not a folder", "give --html another file"
        raise ConfigError(what, where=folder, do=do)
    make_folder(folder)
    try:
        with locked(folder / LOCK, remove=True):
            shutil.rmtree(folder / WRITING, ignore_errors=True)
            try:
                facts, digest = write_files(folder / WRITING, listing, source)
                _give_name(folder / WRITING, folder / digest)
            except BaseException:
                shutil.rmtree(folder / WRITING, ignore_errors=True)
                raise
            yield facts | {"folder": relative_url(f"{folder.name}/{digest}")}
            _remove_older(folder, digest)
    except LockHeldError as held:
        what, do = "another process is writing this page", "wait for it, or give --html another file"
        raise QwenCacheError(what, where=page, found=held.holder, do=do) from None


def remove_files(page: Path) -> None:
    """Remove the files of an older page of this name, if it had some."""
    folder = folder_of(page)
    if folder.is_dir() and not is_link(folder):
        _remove_older(folder, "")


def _give_name(written: Path, final: Path) -> None:
    for path in written.iterdir():
        sync_file(path)
    sync_folder(written)
    if final.is_dir() and _contents(final) == _contents(written):
        _remove_files(written)
        return
    if final.exists():  # somebody changed its files
        remove_folder(final)
    replace(written, final)
    sync_folder(final.parent)


def _contents(folder: Path) -> dict[str, bytes]:
    """The hash of each file."""
    return {path.name: xxhash.xxh3_128_digest(path.read_bytes()) for path in folder.iterdir()}


def _remove_older(folder: Path, digest: str) -> None:
    remove_left(folder)
    for old in list(folder.iterdir()):
        if not OURS.fullmatch(old.name) or old.name == digest or not old.is_dir():
            continue
        if all(SCRIPT.fullmatch(path.name) for path in old.iterdir()):
            removed = old.with_name(f".{old.name}{REMOVED}")
            replace(old, removed)
            _remove_files(removed)
    with suppress(OSError):  # it has other files
        folder.rmdir()


def _remove_files(folder: Path) -> None:
    """Remove a folder without folders. Errors of `shutil.rmtree` would not name the whole path."""
    for path in list(folder.iterdir()):
        path.unlink()
    folder.rmdir()


def write_files(folder: Path, listing: PageSamples, source: ImageSource) -> tuple[dict[str, Any], str]:
    """Write all files into a new folder; returns what the page must say about them, and the hash of their content."""
    folder.mkdir()
    digest = xxhash.xxh3_128()

    def write(name: str, value: Any) -> None:
        script = f"data({compact_json(name)},{compact_json(value)});\n".encode()
        digest.update(script)
        path = folder / f"{name}.js"
        with naming(path):
            path.write_bytes(script)

    with counting("writing the page", listing.count) as advance:
        for i, begin in enumerate(range(0, listing.count, CHUNK)):
            end = min(begin + CHUNK, listing.count)
            rows = listing.rows(begin, end)
            for pack in range(begin, end, PACK):
                titles, images = _images(listing, source, pack, min(pack + PACK, end))
                for row, named in zip(rows[pack - begin : pack - begin + PACK], titles, strict=True):
                    row[-1] = [[title, None] for title in named]
                if any(titles):
                    write(f"images-{pack // PACK}", images)
            write(f"rows-{i}", rows)
            advance(end - begin)
    for i, begin in enumerate(range(0, listing.count, SECTION)):
        kinds, codes = listing.kinds(begin, min(begin + SECTION, listing.count))
        write(f"kinds-{i}", {"kinds": kinds, "codes": b64encode(codes.astype("<u2").tobytes()).decode("ascii")})
    near = np.concatenate([np.zeros(0, np.int64), *listing.groups])
    for i, begin in enumerate(range(0, len(near), SECTION)):
        write(f"near-{i}", near[begin : begin + SECTION].tolist())
    digits = 1
    while listing.count > BUCKET * 16**digits:
        digits += 1
    # For each start of a key its file: the next digits of each key, and its position.
    keys = listing.keys()
    order = np.argsort(keys)
    bounds = np.searchsorted(keys[order] >> np.uint64(64 - 4 * digits), np.arange(16**digits + 1))
    for bucket in range(16**digits):
        positions = order[bounds[bucket] : bounds[bucket + 1]]
        starts = [f"{key:016x}"[digits : digits + KEY_DIGITS] for key in keys[positions].tolist()]
        write(f"keys-{bucket:0{digits}x}", (starts, positions.tolist()))
    numbers = {"chunk": CHUNK, "pack": PACK, "section": SECTION, "key_digits": digits, "near": len(near)}
    facts = listing.facts() | numbers | {"flag_names": list(FLAGS), "has_images": bool(len(listing.with_images))}
    return facts, digest.hexdigest()


def _images(listing: PageSamples, source: ImageSource, begin: int, end: int) -> tuple[list[list[str]], list[list[str]]]:
    """The titles and the data URLs of the images of each sample from `begin` to before `end`."""
    found = [list(source(listing.sample(i))) if listing.has_images[i] else [] for i in range(begin, end)]
    titles = [[image.title for image in images] for images in found]
    return titles, [[data_url(image) for image in images] for images in found]


# ---- page ------------------------------------------------------------------------------------------------------------
# The page of `qwen-cache inspect --html`: it needs no network, and has all that `inspect --json` reports.
#
# A page of few samples is one file. It contains two JSON documents: `overview`, the output of `inspect --json`, and
# `samples`, a row for each sample. With more, rows and images are in files of a folder beside the page (`page_files`),
# and the overview has no list of flagged samples. Scripts search, filter and show the samples. The template
# `cache.html.jinja` has the markup; this module collects its values. Text of a source, such as a prompt, stays text. A
# path that is not a plain file, or is inside a cache, is an error.

ONE_FILE = 1000  # samples: half a megabyte without images, and a browser keeps all of their cards
ONE_FILE_IMAGES = 200  # samples: some 10 MB; a larger page opens slowly
MAX_NAME_BYTES = 240  # of the 255 of a file system: the folder beside the page has a longer name
SCRIPTS = ("sample_files.js", "sample_cards.js", "sample_filters.js", "sample_list.js")
FILES_SCRIPTS = ("sample_files.js", "sample_cards.js", "sample_filters.js", "sample_scroll.js", "sample_search.js")


def check_page_path(path: Path, cache: str) -> None:
    """Raise ConfigError where a page cannot be written, or would replace something other than a page."""
    try:
        fault = _fault(path, location(cache))
    except OSError as error:  # a folder with too long a name, or without permission to look into it
        fault = str(error.strerror)
    if fault:
        raise ConfigError(f"a page cannot be written here: {fault}", where=path, do="give --html another file")


def _fault(path: Path, cache: Location) -> str | None:
    if path.name in ("", "..", "-"):
        return "this names no file"
    if len(os.fsencode(path.name)) > MAX_NAME_BYTES:
        return "its name is too long"
    if path.is_symlink():
        return "this is a symbolic link"
    if path.exists() and not path.is_file():
        return "this is a folder" if path.is_dir() else "this is a device or a pipe"
    if not next(parent for parent in path.absolute().parents if parent.exists()).is_dir():
        return "it would be inside a file"
    if not is_remote(cache) and path.parent.resolve().is_relative_to(cache.resolve()):
        return "it would be inside the cache"
    return "a cache has a file of this name" if path.name in (MANIFEST_NAME, INDEX_NAME) else None


def write_page(path: Path, survey: Survey, source: ImageSource | None = None, thumbnails: int = 0) -> None:
    """Write the page of a survey, with images of at most `thumbnails` samples; replace an older one."""
    count = sum(len(recipe.cache) for recipe in survey.recipes.values())
    chosen = evenly(count, thumbnails) if source else np.zeros(0, np.int64)
    if source is stored_images:
        chosen = chosen[has_thumbnails(survey)[chosen]]
    listing, images = PageSamples(survey, chosen), source or no_images
    make_folder(path.parent)
    if count <= ONE_FILE and len(chosen) <= ONE_FILE_IMAGES:
        write_durably(path, page(survey, listing.facts() | {"rows": complete_rows(listing, images)}).encode("utf-8"))
        remove_files(path)
    else:
        with files_beside(path, listing, images) as facts:
            write_durably(path, page(survey, facts).encode("utf-8"))


def page(survey: Survey, samples: Mapping[str, Any]) -> str:
    """The page as HTML; `samples` are the facts of the list, and its rows unless they are in files."""
    overview = survey.overview
    in_files = bool(samples.get("folder"))
    recipes = {name: recipe.counted if in_files else recipe.to_json() for name, recipe in survey.recipes.items()}
    return render(
        "cache.html.jinja",
        title=Path(overview["cache"].rstrip("/")).name or overview["cache"],
        summary=summary_line(survey),
        facts=list(cache_facts(overview)),
        recipes=[recipe_section(name, recipe.counted) for name, recipe in survey.recipes.items()],
        flags=[flag_section(name, recipe) for name, recipe in survey.recipes.items()],
        overview=overview | {"recipes": recipes},
        samples={"folder": None, **samples},
        scripts=FILES_SCRIPTS if in_files else SCRIPTS,
    )


def complete_rows(listing: PageSamples, source: ImageSource) -> list[list[Any]]:
    """All rows of the list, with images as data URLs."""
    rows = listing.rows(0, listing.count)
    with counting("making images", len(listing.with_images)) as advance:
        for i in listing.with_images.tolist():
            rows[i][-1] = [[image.title, data_url(image)] for image in source(listing.sample(i))]
            advance(1)
    return rows


def evenly(count: int, most: int) -> Integers:
    """At most `most` of `count` positions, evenly spaced; with two or more, the first and the last are among them."""
    if count <= most:
        return np.arange(count)
    return np.arange(most) * (count - 1) // max(most - 1, 1)


# ---- overview --------------------------------------------------------------------------------------------------------


def summary_line(survey: Survey) -> str:
    """The number of samples, their size, and what needs attention, on one line."""
    overview = survey.overview
    if overview["state"] == "partial":
        return f"partial: {partial_state(overview)}"
    samples = sum(len(recipe.cache) for recipe in survey.recipes.values())
    flagged = sum(np.count_nonzero(recipe.flagged.bits(len(recipe.cache))) for recipe in survey.recipes.values())
    parts = [f"{samples:,} {'sample' if samples == 1 else 'samples'}", human_bytes(overview["bytes"])]
    parts += [source_state(overview)] if "source" in overview else []
    return ", ".join([*parts, f"{flagged:,} flagged" if flagged else "none flagged"])


def cache_facts(overview: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "cache", overview["cache"]
    if overview["state"] == "partial":
        yield "state", f"partial: {partial_state(overview)}"
        return
    if "source" in overview:
        yield "state", source_state(overview)
    yield "format", f"v{overview['format_version']}"
    yield "size", f"{human_bytes(overview['bytes'])} in {plural(overview['shards'], 'shard')}"
    yield "written by", ", ".join(f"{name} {version}" for name, version in overview["written_by"].items())
    if overview.get("garbage_bytes"):
        yield "garbage", f"{human_bytes(overview['garbage_bytes'])}; `qwen-cache gc` removes it"


def recipe_section(name: str, recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `recipe.html.jinja`."""
    return {
        "name": name,
        "facts": list(recipe_facts(recipe)),
        "settings": json.dumps(recipe["recipe"], indent=1, ensure_ascii=False),
        "charts": list(recipe_charts(recipe)),
        "batches": batch_section(recipe["batches"]),
    }


def recipe_charts(recipe: Mapping[str, Any]) -> Iterator[tuple[str, list[Bar]]]:
    """Titles and bars of the charts; a chart may have no bars."""
    histograms = recipe["histograms"]
    yield "target sizes", bars(recipe["resolutions"])
    yield "width over height", bars(labelled_bins(histograms["width_over_height"]))
    yield "text tokens", bars(labelled_bins(histograms["text_tokens"]))
    yield "all tokens: text, target and controls", bars(labelled_bins(histograms["all_tokens"]))
    yield "controls per sample", bars(recipe["controls"])
    yield "edit masks by origin", bars(recipe["edit_masks_from"])


def batch_section(batches: Sequence[Mapping[str, float]]) -> dict[str, Any] | None:
    """The table of batches under a few token budgets; None where there are no samples."""
    if not batches:
        return None
    return {"titles": BATCH_COLUMNS, "lines": [batch_row(budget) for budget in batches], "note": batch_note(batches)}


def flag_section(recipe_name: str, recipe: RecipeSurvey) -> dict[str, Any]:
    """The flags of a recipe, and whether tensors and images were checked.

    Each has a description, a count, at most `MAX_LINKS` groups of keys and names (one group, except for
    near-duplicates), and the number of samples not shown.
    """
    flagged = []
    for flag, positions in recipe.flagged.flags.items():
        groups = recipe.flagged.groups if flag == "near_duplicate" else [positions]
        listed = [group[:MAX_LINKS] for group in groups[:MAX_LINKS]]
        shown = [list(zip(recipe.keys(each), recipe.names(each), strict=True)) for each in listed]
        if len(positions):
            flagged.append((FLAGS[flag], len(positions), shown, len(positions) - sum(map(len, shown))))
    return {
        "recipe": recipe_name,
        "flagged": flagged,
        "scanned": "extreme_numbers" in recipe.flagged.flags,
        "compared": "near_duplicate" in recipe.flagged.flags,
    }


def recipe_facts(recipe: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    settings = recipe["recipe"]
    yield "pipeline", f"{settings['pipeline']}, {settings['dtype']}"
    weights = [f"{part} {settings[part]}" for part in ("vae", "text_encoder", "processor") if settings.get(part)]
    if weights:
        yield "fingerprints", ", ".join(weights)
    if "imported_from" in settings:
        yield "imported", import_origin(settings)
    yield "model", f"{recipe['family']}, licence {recipe['license']}"
    yield "samples", sample_counts(recipe)
    if line := measured_line(recipe["measured"]):
        yield "images", line
    yield "identity", recipe["identity"]
    sizes = (f"{tensor} {human_bytes(count)}" for tensor, count in recipe["tensor_bytes"].items())
    yield "tensors", ", ".join(sizes)
    yield from savings_rows(recipe["saved"])
