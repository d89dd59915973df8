"""Terminal front end of `qwen-cache push`: what would be published, or the address of what was."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen_cache.errors import ConfigError
from qwen_cache.extras import require
from qwen_cache.storage.remote import Url, location
from qwen_cache.terminal import console, counting, human_bytes, plural, print_done, print_json, print_text
from qwen_cache.text import plain


@dataclass(frozen=True)
class PushOptions:
    """The options of the command."""

    base_model: str | None
    licence: str | None
    source_licence: str | None
    private: bool
    revision: str | None
    with_gallery: bool
    keep_card: bool
    dry_run: bool
    preview: Path | None
    as_json: bool


def run_push(path: str, address: str, options: PushOptions) -> int:
    """Show or publish the cache at `path`; the exit code."""
    require("huggingface_hub")
    from qwen_cache.share.card import Licences
    from qwen_cache.share.contents import repository_name, share

    repo, folder = repository_name(address), location(path)
    if isinstance(folder, Url):
        do = f"copy it: `qwen-cache merge {folder} --out FOLDER`, then push FOLDER"
        raise ConfigError("only a cache in a local folder can be pushed", where=folder, do=do)
    shared = share(
        folder,
        repo,
        Licences(options.licence, options.source_licence),
        base_model=options.base_model,
        with_gallery=options.with_gallery,
        with_card=not options.keep_card,
    )
    is_preview = options.dry_run or options.preview is not None
    if not options.as_json:
        for name, size in shared.published.sizes.items():
            console(always=is_preview).print(f"{plain(name)}, {human_bytes(size)}", markup=False)
    _warn(shared, options)
    result: dict[str, Any] = {"repo": repo, "files": shared.published.sizes, "card": shared.published.card}
    if is_preview:
        result |= {"sent": [], "removed": [], "commit": None}
        if options.preview is not None:
            _write_preview(options.preview, shared.published.card, shared.published.files)
    else:
        result |= _upload(shared, repo, options)
    if options.as_json:
        print_json(result)
    elif is_preview:
        print_text(shared.published.card)
    else:
        sent, removed = plural(len(result["sent"]), "file"), plural(len(result["removed"]), "file")
        console().print(f"{sent} sent, {removed} removed")
        print_done(result["commit"])
    return 0


def _warn(shared: Any, options: PushOptions) -> None:
    """Say what becomes public, and what is not stated."""
    out = console(always=True)
    thumbnails = "thumbnails of its images, " if shared.has_thumbnails else ""
    out.print(
        f"this publishes the names and prompts of {plural(shared.samples, 'sample')}, {thumbnails}and latents, which "
        "anybody can decode to the images"
    )
    if options.source_licence is None:
        out.print("the licence of the images and prompts is not stated: --source-license TEXT")


def _write_preview(folder: Path, card: str, files: dict[str, Path | bytes]) -> None:
    """Write the card and what it shows."""
    from qwen_cache.share.card import CARD
    from qwen_cache.share.gallery import GALLERY
    from qwen_cache.storage.files import make_folder, write_durably

    make_folder(folder)
    write_durably(folder / CARD, card.encode("utf-8"))
    if isinstance(gallery := files.get(GALLERY), bytes):
        write_durably(folder / GALLERY, gallery)
    console().print(f"wrote {plain(folder / CARD)}", markup=False)


def _upload(shared: Any, repo: str, options: PushOptions) -> dict[str, Any]:
    """Create the repository and change it by one commit; what was done, for --json."""
    from qwen_cache.share.contents import changes, check_shards
    from qwen_cache.storage.hub_repository import Repository

    repository = Repository(repo, "dataset", options.revision)
    repository.create(private=options.private)
    state = repository.state()
    change = changes(shared, state, repo)
    with counting("checking", in_bytes=True) as on_bytes:
        check_shards(shared, change.send.keys(), on_bytes)
    with counting("uploading", in_bytes=True) as on_bytes:
        commit = repository.commit(
            change.send, "Upload from qwen-cache", remove=change.remove, parent=state.commit, on_bytes=on_bytes
        )
    return {"sent": list(change.send), "removed": list(change.remove), "commit": commit}
