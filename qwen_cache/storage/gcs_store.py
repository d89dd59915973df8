"""Files written to Google Cloud Storage, by gcsfs: conditions are generations, large files resumable uploads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from threading import Event
from time import time
from typing import Any

from qwen_cache.json_text import parse_json
from qwen_cache.storage import bounds
from qwen_cache.storage.store import Listing, StoredFile, check_conditions, put_around, swap_version
from qwen_cache.storage.url import Url

CHUNK = 1 << 25  # bytes of a request; the server takes multiples of 256 KiB
OBJECTS = "b/{}/o"


class GoogleStore:
    """`storage.store.Store` for gs://."""

    def put(self, url: Url, data: bytes) -> None:
        _write(url, data, None)

    def put_file(self, url: Url, path: Path, first: Mapping[Url, bytes], stop: Event) -> None:
        for other, data in first.items():
            self.put(other, data)

        def put(files: Any, where: str) -> None:
            files.put_file(str(path), where, chunksize=CHUNK)  # gcsfs retries each request

        size = path.stat().st_size
        url.call(put, "writing", bounds.PATIENCE + size / bounds.SLOWEST)

    def swap(
        self, url: Url, old: bytes | None, new: bytes, first: Mapping[Url, bytes], then: Mapping[Url, bytes]
    ) -> bool:
        return put_around(self.put, first, lambda: swap_version(url, old, new, _read, _write_over), then)

    def copy(self, source: Url, target: Url) -> bool:
        if source.root.partition(":")[0] not in ("gs", "gcs"):
            return False
        source.call(lambda files, path: files.cp_file(path, files._strip_protocol(str(target))), "copying")
        return True

    def listing(self, folder: Url) -> Listing:
        found: dict[str, StoredFile] = {}
        token: dict[str, str] = {}
        while True:
            prefix, page, now = _list(folder, token)
            for each in page.get("items", ()):
                modified = datetime.fromisoformat(each["updated"]).timestamp()
                file = StoredFile(int(each["size"]), modified, str(each.get("md5Hash")))
                found[each["name"].removeprefix(prefix)] = file
            if "nextPageToken" not in page:
                return Listing(found, now)
            token = {"pageToken": page["nextPageToken"]}

    def delete(self, urls: Sequence[Url]) -> None:
        def delete(files: Any, path: str) -> None:
            bucket, key, _ = files.split_path(path)
            files.call("DELETE", OBJECTS + "/{}", bucket, key)

        for url in urls:
            with suppress(FileNotFoundError):
                url.call(delete, "removing")

    def check(self, folder: Url) -> None:
        check_conditions(self, folder, lambda url, data: _write_over(url, data, None))


def _write_over(url: Url, data: bytes, generation: str | None) -> bool:
    """Write a file over this generation, or over none; False if another one is there."""
    return _write(url, data, generation or "0")


def _write(url: Url, data: bytes, generation: str | None) -> bool:
    """Write a file, with `generation` only over that one ("0": over none); False if another one is there."""

    def write(files: Any, path: str) -> bool:
        bucket, key, _ = files.split_path(path)
        options = {} if generation is None else {"ifGenerationMatch": generation}
        address = f"{files._location}/upload/storage/v1/b/{bucket}/o"
        seconds = bounds.seconds_for(len(data))
        try:
            files.call("POST", address, uploadType="media", name=key, data=data, timeout=seconds, **options)
        except FileExistsError:  # how gcsfs reports 412
            return False
        return True

    return url.call(write, "writing", bounds.PATIENCE + len(data) / bounds.SLOWEST)


def _read(url: Url) -> tuple[bytes, str] | None:
    """A file and its generation; None if it does not exist."""

    def read(files: Any, path: str) -> tuple[bytes, str]:
        bucket, key, _ = files.split_path(path)
        headers, data = files.call("GET", OBJECTS + "/{}", bucket, key, alt="media")
        return bytes(data), str(headers["X-Goog-Generation"])

    try:
        return url.call(read, "reading")
    except FileNotFoundError:
        return None


def _list(folder: Url, token: Mapping[str, str]) -> tuple[str, dict[str, Any], float]:
    """The prefix, a page of the listing, and the time of the server."""

    def ask(files: Any, path: str) -> tuple[str, dict[str, Any], float]:
        bucket, key, _ = files.split_path(path.rstrip("/"))
        prefix = f"{key}/" if key else ""
        headers, data = files.call("GET", OBJECTS, bucket, prefix=prefix, **token)
        said = headers.get("Date")
        return prefix, parse_json(data), parsedate_to_datetime(said).timestamp() if said else time()

    return folder.call(ask, "listing")
