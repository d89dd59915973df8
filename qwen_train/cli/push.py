"""Terminal front end of `qwen-train push`: what would be uploaded, or the address of what was."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from qwen_cache.extras import require
from qwen_cache.terminal import console, human_bytes, print_done, print_json, print_text
from qwen_cache.text import plain
from qwen_train.run import in_one_process


def run_push(
    folder: Path,
    repo: str,
    *,
    base_model: str | None,
    private: bool,
    revision: str | None,
    with_images: bool,
    keep_card: bool,
    dry_run: bool,
    assignments: Sequence[str],
    as_json: bool,
) -> int:
    """Show or upload a trained result; the exit code."""
    require("huggingface_hub")
    in_one_process("push")
    from qwen_train.training.publish import read_run, repository_of, upload

    run = read_run(folder, base_model, assignments)
    published = repository_of(run, repo, with_images=with_images, with_card=not keep_card)
    for name, size in published.sizes.items():
        console(always=dry_run).print(f"{plain(name)}, {human_bytes(size)}", markup=False)
    address = None if dry_run else upload(published, repo, private=private, revision=revision)
    if as_json:
        print_json({"repo": repo, "files": published.sizes, "card": published.card, "commit": address})
    elif address:
        print_done(address)
    else:
        print_text(published.card)
    return 0
