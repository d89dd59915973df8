"""`caption`: what is missing, then captions into files for people to correct.

It stops there: nothing enters a cache before `build` reads those files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qwen_cache.errors import ConfigError, Problem, SourceError
from qwen_cache.extras import require
from qwen_cache.options import (
    CONFIG,
    CONTROLS,
    JSON,
    MODEL,
    MODEL_PATH,
    ON_ERROR,
    OUTPUT,
    SET,
    TARGETS,
    TEXT_DEVICE,
    TEXT_DTYPE,
    argument,
    command,
    flag,
    given_controls,
    option,
    setting,
)
from qwen_cache.settings.given import Given
from qwen_cache.terminal import console, counting, plural, print_json, print_next, print_problems

if TYPE_CHECKING:
    from qwen_cache.models.folder import ModelFolder
    from qwen_cache.settings.load import Config
    from qwen_cache.sources.captions import CaptionFiles
    from qwen_cache.sources.rows import Row

PARTS = ("text_encoder", "tokenizer", "processor")


@command(
    page="data.md",
    examples=["qwen-cache caption data --dry-run", "qwen-cache caption data/metadata.csv --text-device cuda:0,cuda:1"],
)
def caption(
    source: str | None = argument(
        "SOURCE", "A folder or table of images, on this machine.", shown="data.source of qwen.yaml, else data"
    ),
    model: Given | None = MODEL_PATH,
    captioner: Given | None = setting(
        "caption.model",
        MODEL,
        "Another Qwen2.5-VL or Qwen3-VL to write the captions.",
        "FOLDER",
        name="--captioner",
        default="the model's own text encoder",
    ),
    dtype: Given | None = TEXT_DTYPE,
    targets: Given | None = TARGETS,
    controls: list[str] | None = CONTROLS,
    on_error: Given | None = ON_ERROR,
    text_device: Given | None = TEXT_DEVICE,
    out: Path | None = option(OUTPUT, "The copy of a table, beside it.", "FILE", shown="NAME-captioned"),
    replace: bool = flag("--replace", OUTPUT, "Caption every sample, also over existing prompts."),
    dry_run: bool = flag("--dry-run", OUTPUT, "Count what is missing; write nothing."),
    json: bool = JSON,
    config: Path | None = CONFIG,
    set_: list[str] | None = SET,
) -> int:
    """Write missing prompts with a vision-language model, into files to correct before they are built."""
    from qwen_cache.settings.load import load_config

    settings = load_config(
        config, set_, [model, captioner, dtype, on_error, text_device, targets, given_controls(controls)]
    )
    return _caption(settings, source or settings.data.source, out, replace=replace, dry_run=dry_run, as_json=json)


def _caption(config: Config, source: str, out: Path | None, *, replace: bool, dry_run: bool, as_json: bool) -> int:
    """Caption the rows without a prompt; the exit code."""
    if not dry_run:
        require("torch")
    from qwen_cache.format.identity import canonical_json, content_hash
    from qwen_cache.models.folder import check_name, open_model
    from qwen_cache.sources.captions import caption_files
    from qwen_cache.sources.detect import read_source, reading
    from qwen_cache.storage.remote import location

    place, data = location(source), config.data
    if config.caption.model:
        check_name(config.caption.model)
    named = config.model
    if named.text_encoder is not None and config.caption.model is None:
        raise ConfigError(
            "the single file of a text encoder writes no captions: it is read without its lm_head",
            where="model.text_encoder",
            found=named.text_encoder,
            do="name another model with --captioner, or leave model.text_encoder out",
        )
    model = open_model(named.path, PARTS, named.revision, text_encoder=named.text_encoder)
    settings = reading(data, model) | {"needs_prompt": False, "allow_empty_prompt": True}
    rows, problems = read_source(place, **settings)
    if problems:
        print_problems(problems, "the source")
        if data.on_error == "stop":
            do = "correct them, or caption the other samples with --on-error skip"
            raise SourceError(f"{plural(len(problems), 'problem')} in the source", where=place, do=do)
    captioner = content_hash(canonical_json([config.caption.model or config.model.path, config.caption.model_dump()]))
    files = caption_files(place, data, out, captioner, replace=replace)
    missing = files.missing(rows)
    console(always=dry_run).print(f"{plural(len(rows), 'sample')}, {len(missing)} to caption", markup=False)
    failed = [] if dry_run else _write(missing, files, config, model)
    if as_json:
        print_json(
            {"samples": len(rows), "to_caption": len(missing), "failed": len(failed), "source": str(files.source)}
        )
    elif not dry_run:
        print_problems(failed, "the captions")
        done = plural(len(missing) - len(failed), "caption")
        console().print(f"{done} written; read and correct them", markup=False)
        print_next(["qwen-cache", "build", str(files.source)])
    return 1 if failed else 0


def _write(missing: Sequence[Row], files: CaptionFiles, config: Config, model: ModelFolder) -> list[Problem]:
    """Write the captions of these rows; the problems of those that have none."""
    from qwen_cache.models.folder import open_language_model
    from qwen_cache.sources.captions import literal

    failed: list[Problem] = []
    if missing:
        source = open_language_model(config.caption.model) if config.caption.model else model
        from qwen_cache.encode.caption import caption_rows, load_captioners

        captioners = load_captioners(source, config)
        with counting("captioning", total=len(missing)) as advance:
            for row, caption in caption_rows(missing, captioners, config.caption):
                if isinstance(caption, SourceError):
                    failed.append(Problem(row.where, caption.fault, caption.do or "write this prompt yourself"))
                else:
                    files.write(row, literal(caption) if config.data.marked_phrases else caption)
                advance(1)
    if not failed:
        files.finish()
    return failed
