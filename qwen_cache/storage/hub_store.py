"""Files written to a dataset on the Hugging Face hub, by huggingface_hub: every write is a commit with a parent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from email.utils import parsedate_to_datetime
from pathlib import Path
from threading import Event
from time import time
from typing import Any

from qwen_cache.errors import QwenCacheError
from qwen_cache.storage import bounds
from qwen_cache.storage.store import Listing, StoredFile
from qwen_cache.storage.url import Url

TRIES = 20  # of a commit, while other writers add theirs to the same branch
MOVED = (409, 412)  # the hub's answers to a commit whose parent is no longer the newest


class HubStore:
    """`storage.store.Store` for hf://datasets/…; the repository must exist."""

    def put(self, url: Url, data: bytes) -> None:
        _commit(url, {url: data}, f"Add {url.name}")

    def put_file(self, url: Url, path: Path, first: Mapping[Url, bytes], stop: Event) -> None:
        _commit(url, {**first, url: path}, f"Add {url.name}")

    def swap(
        self, url: Url, old: bytes | None, new: bytes, first: Mapping[Url, bytes], then: Mapping[Url, bytes]
    ) -> bool:
        for _ in range(TRIES):
            parent = _head(url)
            data = _read(url, parent)
            if data == new:
                return True
            if data != old:
                return False
            if _commit(url, {**first, url: new, **then}, f"Update {url.name}", parent):
                return True
        what = "others commit to this repository faster than this program can"
        raise QwenCacheError(what, where=url, do="run the same command again: it keeps what is done")

    def copy(self, source: Url, target: Url) -> bool:
        return False

    def listing(self, folder: Url) -> Listing:
        return folder.call(_list, "listing")

    def delete(self, urls: Sequence[Url]) -> None:
        if not urls:
            return
        here = self.listing(Url(urls[0].root))
        known = [url for url in urls if url.path in here.files]
        if known:
            _commit(known[0], {}, "Remove files of finished builds", remove=known)

    def check(self, folder: Url) -> None:
        folder.call(_check, "writing")


def _place(files: Any, path: str) -> Any:
    """The repository, revision and path of an address; QwenCacheError if there is no such repository."""
    files.invalidate_cache()
    try:
        return files.resolve_path(path)
    except FileNotFoundError:
        do = "create it with `hf repo create NAME --repo-type dataset`, or check the address and `hf auth whoami`"
        raise QwenCacheError("there is no such dataset on the hub", where=f"hf://{path}", do=do) from None


def _check(files: Any, path: str) -> None:
    files._api.auth_check(_place(files, path).repo_id, repo_type="dataset", write=True)


def _head(url: Url) -> str:
    """The newest commit of the branch."""

    def ask(files: Any, path: str) -> str:
        place = _place(files, path)
        info = files._api.repo_info(place.repo_id, repo_type="dataset", revision=place.revision)
        return str(info.sha)

    return url.call(ask, "reading")


def _read(url: Url, commit: str) -> bytes | None:
    """A file at a commit; None if it does not exist."""

    def read(files: Any, path: str) -> bytes:
        place = _place(files, path)
        files.invalidate_cache()
        data: bytes = files.cat_file(f"datasets/{place.repo_id}@{commit}/{place.path_in_repo}")
        return data

    try:
        return url.call(read, "reading")
    except FileNotFoundError:
        return None


def _commit(
    url: Url,
    files: Mapping[Url, bytes | Path],
    message: str,
    parent: str | None = None,
    remove: Iterable[Url] = (),
) -> bool:
    """Commit files; False if `parent` is no longer the newest commit."""
    size = sum(each.stat().st_size if isinstance(each, Path) else len(each) for each in files.values())

    def commit(system: Any, path: str) -> bool:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete
        from huggingface_hub.errors import HfHubHTTPError
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()  # ours is on the terminal
        place = _place(system, path)

        def within(url: Url) -> str:
            return str(system.resolve_path(str(url)).path_in_repo)

        operations: list[Any] = [CommitOperationAdd(within(each), _content(data)) for each, data in files.items()]
        operations += [CommitOperationDelete(within(each)) for each in remove]
        options = {"repo_type": "dataset", "revision": place.revision, "commit_message": message}
        try:
            system._api.create_commit(place.repo_id, operations, parent_commit=parent, **options)
        except HfHubHTTPError as error:
            if parent is not None and error.response is not None and error.response.status_code in MOVED:
                return False
            raise
        system.invalidate_cache()
        return True

    return url.call(commit, "writing", bounds.PATIENCE + size / bounds.SLOWEST)


def _content(data: bytes | Path) -> bytes | str:
    return data if isinstance(data, bytes) else str(data)


def _list(files: Any, path: str) -> Listing:
    """The files below a folder with the dates of their last commits; FileNotFoundError without such a repository."""
    from huggingface_hub import RepoFile, get_session
    from huggingface_hub.errors import EntryNotFoundError

    place = _place(files, path.rstrip("/"))
    folder = place.path_in_repo
    options = {"repo_type": "dataset", "revision": place.revision, "recursive": True, "expand": True}
    now = parsedate_to_datetime(get_session().head(files.endpoint).headers["Date"]).timestamp()
    try:
        entries = list(files._api.list_repo_tree(place.repo_id, folder or None, **options))
    except EntryNotFoundError:
        entries = []
    found = {
        each.path.removeprefix(f"{folder}/" if folder else ""): _stored(each)
        for each in entries
        if isinstance(each, RepoFile)
    }
    return Listing(found, now)


def _stored(file: Any) -> StoredFile:
    return StoredFile(file.size, file.last_commit.date.timestamp() if file.last_commit else time(), str(file.blob_id))
