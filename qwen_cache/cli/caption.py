"""Terminal front end of `qwen-cache caption`: what is missing, then captions into files for people to correct.

It stops there: nothing enters a cache before `build` reads those files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from qwen_cache.errors import Problem, SourceError
from qwen_cache.extras import require
from qwen_cache.format.identity import canonical_json, content_hash
from qwen_cache.models.folder import ModelFolder, check_name, open_language_model, open_model
from qwen_cache.settings.load import Config
from qwen_cache.sources.captions import CaptionFiles, caption_files, literal
from qwen_cache.sources.detect import read_source, reading
from qwen_cache.sources.rows import Row
from qwen_cache.storage.remote import location
from qwen_cache.terminal import console, counting, plural, print_json, print_problems
from qwen_cache.text import plain, shell_line

PARTS = ("text_encoder", "tokenizer", "processor")


def run_caption(
    config: Config, source: str | None, out: Path | None, *, replace: bool, dry_run: bool, as_json: bool
) -> int:
    """Caption the rows without a prompt; the exit code."""
    if not dry_run:
        require("torch")
    place, data = location(source or config.data.source), config.data
    if config.caption.model:
        check_name(config.caption.model)
    model = open_model(config.model.path, PARTS, config.model.revision)
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
        again = shell_line(["qwen-cache", "build", str(files.source)])
        done = plural(len(missing) - len(failed), "caption")
        console().print(f"{done} written; read and correct them, then: {plain(again)}", markup=False)
    return 1 if failed else 0


def _write(missing: Sequence[Row], files: CaptionFiles, config: Config, model: ModelFolder) -> list[Problem]:
    """Write the captions of these rows; the problems of those that have none."""
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
