"""`push`: a cache as a dataset on the hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen_cache.errors import ConfigError
from qwen_cache.extras import require
from qwen_cache.options import CONFIG, JSON, MODEL, OUTPUT, SET, argument, command, flag, option
from qwen_cache.settings.given import Given
from qwen_cache.terminal import (
    console,
    counting,
    human_bytes,
    plural,
    print_done,
    print_json,
    print_next,
    print_text,
    typed_again,
)
from qwen_cache.text import plain

if TYPE_CHECKING:
    from qwen_cache.share import SharedCache


@command(
    page="howto/store-and-share.md",
    examples=[
        "qwen-cache push shards hf://datasets/OWNER/NAME --dry-run",
        "qwen-cache push shards hf://datasets/OWNER/NAME --license cc-by-4.0 \\\n"
        "     --source-license 'CC BY 4.0, by Jane Doe'",
    ],
    renamed={"--no-gallery": "--no-images"},
)
def push(
    cache: str | None = argument("CACHE", "The folder of the cache.", shown="cache.path, else shards"),
    repo: str | None = argument(
        "REPO", "The dataset on the Hugging Face hub, required: hf://datasets/OWNER/NAME.", shown=False
    ),
    base_model: str | None = option(MODEL, "The model on the hub, if the cache was built with a local folder.", "REPO"),
    license: str | None = option(
        OUTPUT, "The licence of the dataset, by its name on the hub: cc-by-4.0, other, …", "NAME"
    ),
    source_license: str | None = option(OUTPUT, "The licence of the images and prompts, in any words.", "TEXT"),
    private: bool = flag("--private", OUTPUT, "Make the repository private."),
    revision: str | None = option(OUTPUT, "The branch; created if there is none.", "BRANCH"),
    no_images: bool = flag("--no-images", OUTPUT, "Show no samples on the card."),
    keep_card: bool = flag("--keep-card", OUTPUT, "Leave the repository's README.md as it is."),
    dry_run: bool = flag("--dry-run", OUTPUT, "Show the files and the card, and upload nothing."),
    preview: Path | None = option(
        OUTPUT, "Write the card and the gallery into this folder, and upload nothing.", "FOLDER"
    ),
    json: bool = JSON,
    config: Path | None = CONFIG,
    set_: list[str] | None = SET,
) -> int:
    """Publish a cache as a dataset on the Hugging Face hub, with a card."""
    from qwen_cache.settings.load import load_config

    cache, repo = (cache, repo) if repo else (None, cache)
    if repo is None or (cache is None and Path(repo).is_dir()):
        do = "name it: qwen-cache push shards hf://datasets/OWNER/NAME"
        raise ConfigError("push needs the dataset to publish to", do=do)
    path = load_config(config, set_, [Given("CACHE", "cache.path", cache) if cache else None]).cache.path
    require("huggingface_hub")
    from qwen_cache.share import Licences, repository_name, share
    from qwen_cache.storage.remote import is_remote, location

    name, folder, is_preview = repository_name(repo), location(path), dry_run or preview is not None
    if is_remote(folder):
        do = f"copy it: `qwen-cache merge {folder} --out FOLDER`, then push FOLDER"
        raise ConfigError("only a cache in a local folder can be pushed", where=folder, do=do)
    cards: dict[str, Any] = {"base_model": base_model, "with_gallery": not no_images, "with_card": not keep_card}
    shared = share(folder, name, Licences(license, source_license), **cards)
    if not json:
        for each, size in shared.published.sizes.items():
            console(always=is_preview).print(f"{plain(each)}, {human_bytes(size)}", markup=False)
    _warn(shared, has_licence=source_license is not None)
    result: dict[str, Any] = {"repo": name, "files": shared.published.sizes, "card": shared.published.card}
    if preview is not None:
        _write_preview(preview, shared)
    sent = {"sent": [], "removed": [], "commit": None} if is_preview else _upload(shared, name, revision, private)
    if json:
        print_json(result | sent)
    elif is_preview:
        print_text(shared.published.card)
        if dry_run and preview is None:
            print_next(typed_again("qwen-cache", without=["--dry-run"]))
    else:
        console().print(f"{plural(len(sent['sent']), 'file')} sent, {plural(len(sent['removed']), 'file')} removed")
        print_done(sent["commit"])
        print_next(["qwen-cache", "verify", f"hf://datasets/{name}{f'@{revision}' if revision else ''}"])
    return 0


def _warn(shared: SharedCache, *, has_licence: bool) -> None:
    """Say what becomes public, and what is not stated."""
    out = console(always=True)
    thumbnails = "thumbnails of its images, " if shared.has_thumbnails else ""
    out.print(
        f"this publishes the names and prompts of {plural(shared.samples, 'sample')}, {thumbnails}and latents, which "
        "anybody can decode to the images"
    )
    if not has_licence:
        out.print("the licence of the images and prompts is not stated: --source-license TEXT")


def _write_preview(folder: Path, shared: SharedCache) -> None:
    """Write the card and what it shows."""
    from qwen_cache.share import CARD, GALLERY
    from qwen_cache.storage.files import make_folder, write_durably

    make_folder(folder)
    write_durably(folder / CARD, shared.published.card.encode("utf-8"))
    if isinstance(gallery := shared.published.files.get(GALLERY), bytes):
        write_durably(folder / GALLERY, gallery)
    console().print(f"wrote {plain(folder / CARD)}", markup=False)


def _upload(shared: SharedCache, repo: str, revision: str | None, private: bool) -> dict[str, Any]:
    """Create the repository and change it by one commit; what was done, for --json."""
    from qwen_cache.share import changes, check_shards
    from qwen_cache.storage.hub_repository import Repository

    repository = Repository(repo, "dataset", revision)
    repository.create(private=private)
    state = repository.state()
    change = changes(shared, state, repo)
    with counting("checking", in_bytes=True) as on_bytes:
        check_shards(shared, change.send.keys(), on_bytes)
    with counting("uploading", in_bytes=True) as on_bytes:
        commit = repository.commit(
            change.send, "Upload from qwen-cache", remove=change.remove, parent=state.commit, on_bytes=on_bytes
        )
    return {"sent": list(change.send), "removed": list(change.remove), "commit": commit}
