"""Writing to S3, Google Cloud Storage and the Hugging Face hub: whole files, and one conditional write for a commit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from threading import Event
from time import time
from typing import Any, Protocol
from uuid import uuid4

from qwen_cache.errors import ConfigError, QwenCacheError
from qwen_cache.storage import bounds
from qwen_cache.storage.remote import Location, Url, is_remote, location
from qwen_cache.text import parse_json

# ---- store -----------------------------------------------------------------------------------------------------------
# Files in object storage, written: what S3, Google Cloud Storage and the Hugging Face hub have in common.
#
# A file is there whole or not at all. `swap` is the conditional write that commits rest on: of several writers, one
# succeeds. Requests are retried as for reading (`storage/remote.py`), a large file by parts, so that a broken
# connection costs one of them. A server that ignores conditions is refused.

NEVER = Event()
"""For uploads that nothing stops."""


@dataclass(frozen=True)
class StoredFile:
    """A file in a listing; `modified` is in seconds since 1970, by the clock of the store. Files with one `tag` are
    equal; equal files may have different ones."""

    size: int
    modified: float
    tag: str = ""


@dataclass(frozen=True)
class Listing:
    """The files below a folder, by path, and the time of the store."""

    files: Mapping[str, StoredFile]
    now: float


class Store(Protocol):
    """The operations needed of object storage. Every error is a QwenCacheError, except FileNotFoundError."""

    def put(self, url: Url, data: bytes) -> None:
        """Write a file whole, replacing an earlier one."""

    def put_file(self, url: Url, path: Path, first: Mapping[Url, bytes], stop: Event) -> None:
        """Write the small files `first`, then the local file `path`; CancelledError soon after `stop` is set."""

    def swap(
        self, url: Url, old: bytes | None, new: bytes, first: Mapping[Url, bytes], then: Mapping[Url, bytes]
    ) -> bool:
        """Write `first`; then `new`, if the file still is `old` (None: does not exist); then `then`.

        False, with nothing written but `first`, if the file is neither `old` nor `new`.
        """

    def copy(self, source: Url, target: Url) -> bool:
        """Copy a file without downloading it; False if this store cannot, or `source` is not in it."""

    def listing(self, folder: Url) -> Listing:
        """All files below a folder; QwenCacheError if its bucket or repository does not exist."""

    def delete(self, urls: Sequence[Url]) -> None:
        """Remove files; those that do not exist are no error."""

    def check(self, folder: Url) -> None:
        """QwenCacheError if nothing can be written to a folder, or conditions are ignored there."""


def check_conditions(store: Store, folder: Url, create: Callable[[Url, bytes], bool]) -> None:
    """QwenCacheError if `create` writes a file that exists, or nothing can be written; leaves nothing behind."""
    file = folder / f".check-{uuid4().hex}"
    store.put(file, b"whether this can be written\n")
    try:
        if create(file, b"whether conditions are ignored\n"):
            raise QwenCacheError(
                "this server ignores the condition of a write, so two builders could commit over each other",
                where=folder,
                do="update the server, or build into a local folder and copy that, cache.json last",
            )
    finally:
        store.delete([file])


def put_around(
    put: Callable[[Url, bytes], None],
    first: Mapping[Url, bytes],
    swapped: Callable[[], bool],
    then: Mapping[Url, bytes],
) -> bool:
    """`Store.swap` of a store that writes one file at a time."""
    for url, data in first.items():
        put(url, data)
    if not swapped():
        return False
    for url, data in then.items():
        put(url, data)
    return True


def swap_version(
    url: Url,
    old: bytes | None,
    new: bytes,
    read: Callable[[Url], tuple[bytes, str] | None],
    write: Callable[[Url, bytes, str | None], bool],
) -> bool:
    """Replace `old` by `new`, where `write` writes over the version that `read` has given, or over none (None).

    An answer may be lost after the file was written, so what is there decides. False if that is neither of the two.
    """
    now = read(url)
    while now is not None or old is None:
        data, version = now or (None, None)
        if data == new:
            return True
        if data != old:
            return False
        if write(url, new, version):
            return True
        now = read(url)
    return False


# ---- s3 store --------------------------------------------------------------------------------------------------------
# Files written to S3 and servers like it, by s3fs: conditions by If-Match and If-None-Match, large files by parts.

PART_BYTES = 1 << 24  # what a broken connection loses. A multipart upload has parts of at least 5 MiB
MOST_PARTS = 10_000
SENDERS = 4  # parts at a time, of one file: one connection does not fill a fast network
PER_DELETE = 1000
TORN = ("BadDigest", "IncompleteBody", "InvalidPart", "RequestTimeout", "XAmzContentSHA256Mismatch")
"""Errors of a request whose body did not arrive whole; s3fs takes them for faults of the request."""


class S3Store:
    """`Store` for s3://."""

    def put(self, url: Url, data: bytes) -> None:
        _call(url, "writing", "put_object", len(data), Body=data)

    def put_file(self, url: Url, path: Path, first: Mapping[Url, bytes], stop: Event) -> None:
        for other, data in first.items():
            self.put(other, data)
        if (size := path.stat().st_size) <= PART_BYTES:
            self.put(url, path.read_bytes())
        else:
            _put_parts(url, path, size, stop)

    def swap(
        self, url: Url, old: bytes | None, new: bytes, first: Mapping[Url, bytes], then: Mapping[Url, bytes]
    ) -> bool:
        return put_around(self.put, first, lambda: swap_version(url, old, new, _s3_read, _s3_write_over), then)

    def copy(self, source: Url, target: Url) -> bool:
        if source.root.partition(":")[0] not in ("s3", "s3a"):
            return False
        patience = bounds.seconds_for(0)
        source.call(lambda files, path: files.cp_file(path, _path(files, target)), "copying", patience)
        return True

    def listing(self, folder: Url) -> Listing:
        found: dict[str, StoredFile] = {}
        more: dict[str, str] = {}
        while True:
            page = _s3_list(folder, more)
            prefix = page["Prefix"]
            for each in page.get("Contents", ()):
                modified = each["LastModified"].timestamp()
                found[each["Key"].removeprefix(prefix)] = StoredFile(int(each["Size"]), modified, str(each["ETag"]))
            if not page.get("IsTruncated"):
                return Listing(found, _clock(page))
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def delete(self, urls: Sequence[Url]) -> None:
        for begin in range(0, len(urls), PER_DELETE):
            _delete(urls[begin : begin + PER_DELETE])

    def check(self, folder: Url) -> None:
        check_conditions(self, folder, lambda url, data: _s3_write_over(url, data, None))


def _s3_write_over(url: Url, data: bytes, tag: str | None) -> bool:
    """Write a file over the version with this ETag, or over none; False if another one is there."""
    condition = {"IfMatch": tag} if tag else {"IfNoneMatch": "*"}
    return _call(url, "writing", "put_object", len(data), Body=data, **condition) is not None


def _s3_read(url: Url) -> tuple[bytes, str] | None:
    """A file and its ETag; None if it does not exist."""

    def read(files: Any, path: str) -> tuple[bytes, str]:
        from fsspec.asyn import sync

        async def get() -> tuple[bytes, str]:
            bucket, key, _ = files.split_path(path)
            answer = await files._call_s3("get_object", Bucket=bucket, Key=key)
            async with answer["Body"] as body:
                return await body.read(), str(answer["ETag"])

        data: tuple[bytes, str] = sync(files.loop, get, timeout=bounds.seconds_for(bounds.WHOLE_FILE))
        return data

    try:
        return url.call(read, "reading")
    except FileNotFoundError:
        return None


def _put_parts(url: Url, path: Path, size: int, stop: Event) -> None:
    """A multipart upload. It ends with the call, however that ends, unless the process is killed."""
    step = max(PART_BYTES, -(-size // MOST_PARTS))
    upload = str(_call(url, "writing", "create_multipart_upload", 0)["UploadId"])

    def send(begin: int) -> dict[str, Any]:
        if stop.is_set():
            raise CancelledError
        with open(path, "rb") as file:
            file.seek(begin)
            data = file.read(step)
        number, what = begin // step + 1, f"writing the bytes {begin} to {begin + len(data)}"
        answer = _call(url, what, "upload_part", len(data), Body=data, PartNumber=number, UploadId=upload)
        kept = {name: answer[name] for name in answer if name.startswith("Checksum") and name != "ChecksumType"}
        return {"PartNumber": number, "ETag": answer["ETag"], **kept}

    try:
        with ThreadPoolExecutor(SENDERS, "send") as pool:
            sent = [pool.submit(send, begin) for begin in range(0, size, step)]
            try:
                parts = [each.result() for each in sent]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        _complete(url, upload, parts, size)
    except BaseException:
        with suppress(Exception):  # what stays of it is invisible, and a rule of the bucket can remove it
            _call(url, "ending an upload", "abort_multipart_upload", 0, UploadId=upload)
        raise


def _complete(url: Url, upload: str, parts: list[dict[str, Any]], size: int) -> None:
    """End a multipart upload. Its answer may be lost: then the next attempt finds no such upload, but the file."""
    try:
        _call(url, "writing", "complete_multipart_upload", 0, UploadId=upload, MultipartUpload={"Parts": parts})
    except FileNotFoundError:
        if url.size() != size:
            raise


def _call(url: Url, what: str, method: str, size: int, **options: Any) -> Any:
    """Call `method` of S3 for a file, with a body of `size` bytes; None if its condition does not hold."""

    def call(files: Any, path: str) -> Any:
        bucket, key, _ = files.split_path(path)
        return files.call_s3(method, Bucket=bucket, Key=key, timeout=bounds.seconds_for(size), **options)

    return _explained(url, what, call, bounds.PATIENCE + size / bounds.SLOWEST)


def _explained(url: Url, what: str, call: Callable[[Any, str], Any], patience: float = bounds.PATIENCE) -> Any:
    def attempt(files: Any, path: str) -> Any:
        try:
            return call(files, path)
        except Exception as error:
            answer = getattr(error.__cause__, "response", None) or {}
            code = str(answer.get("Error", {}).get("Code", ""))
            if code in ("PreconditionFailed", "412"):
                return None
            if code == "NoSuchBucket":
                raise QwenCacheError(
                    "there is no such bucket", where=url, do="create it, or check the address"
                ) from None
            if code in TORN:
                raise ConnectionError(str(error)) from None
            raise

    return url.call(attempt, what, patience)


def _s3_list(folder: Url, more: Mapping[str, str]) -> dict[str, Any]:
    """One page of a listing, with its prefix."""

    def ask(files: Any, path: str) -> dict[str, Any]:
        bucket, key, _ = files.split_path(path.rstrip("/"))
        prefix = f"{key}/" if key else ""
        page = files.call_s3("list_objects_v2", Bucket=bucket, Prefix=prefix, timeout=bounds.PAGE_SECONDS, **more)
        return {**page, "Prefix": prefix}

    page: dict[str, Any] = _explained(folder, "listing", ask)
    return page


def _clock(answer: Mapping[str, Any]) -> float:
    """The time of the server, from the header of an answer."""
    said = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    return parsedate_to_datetime(said).timestamp() if said else time()


def _delete(urls: Sequence[Url]) -> None:
    def delete(files: Any, path: str) -> None:
        bucket = files.split_path(path)[0]
        keys = [{"Key": files.split_path(_path(files, url))[1]} for url in urls]
        answer = files.call_s3(
            "delete_objects", Bucket=bucket, Delete={"Objects": keys, "Quiet": True}, timeout=bounds.PAGE_SECONDS
        )
        if refused := answer.get("Errors"):
            raise PermissionError(f"{refused[0].get('Code')}: {refused[0].get('Key')}")

    _explained(urls[0], "removing", delete)


def _path(files: Any, url: Url) -> str:
    """The bucket and key of an address."""
    return str(files._strip_protocol(str(url)))


# ---- gcs store -------------------------------------------------------------------------------------------------------
# Files written to Google Cloud Storage, by gcsfs: conditions are generations, large files resumable uploads.

CHUNK = 1 << 25  # bytes of a request; the server takes multiples of 256 KiB
OBJECTS = "b/{}/o"


class GoogleStore:
    """`Store` for gs://."""

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
        return put_around(self.put, first, lambda: swap_version(url, old, new, _gcs_read, _gcs_write_over), then)

    def copy(self, source: Url, target: Url) -> bool:
        if source.root.partition(":")[0] not in ("gs", "gcs"):
            return False
        source.call(lambda files, path: files.cp_file(path, files._strip_protocol(str(target))), "copying")
        return True

    def listing(self, folder: Url) -> Listing:
        found: dict[str, StoredFile] = {}
        token: dict[str, str] = {}
        while True:
            prefix, page, now = _gcs_list(folder, token)
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
        check_conditions(self, folder, lambda url, data: _gcs_write_over(url, data, None))


def _gcs_write_over(url: Url, data: bytes, generation: str | None) -> bool:
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


def _gcs_read(url: Url) -> tuple[bytes, str] | None:
    """A file and its generation; None if it does not exist."""

    def read(files: Any, path: str) -> tuple[bytes, str]:
        bucket, key, _ = files.split_path(path)
        headers, data = files.call("GET", OBJECTS + "/{}", bucket, key, alt="media")
        return bytes(data), str(headers["X-Goog-Generation"])

    try:
        return url.call(read, "reading")
    except FileNotFoundError:
        return None


def _gcs_list(folder: Url, token: Mapping[str, str]) -> tuple[str, dict[str, Any], float]:
    """The prefix, a page of the listing, and the time of the server."""

    def ask(files: Any, path: str) -> tuple[str, dict[str, Any], float]:
        bucket, key, _ = files.split_path(path.rstrip("/"))
        prefix = f"{key}/" if key else ""
        headers, data = files.call("GET", OBJECTS, bucket, prefix=prefix, **token)
        said = headers.get("Date")
        return prefix, parse_json(data), parsedate_to_datetime(said).timestamp() if said else time()

    return folder.call(ask, "listing")


# ---- hub store -------------------------------------------------------------------------------------------------------
# Files written to a dataset on the Hugging Face hub, by huggingface_hub: every write is a commit with a parent.

TRIES = 20  # of a commit, while other writers add theirs to the same branch
MOVED = (409, 412)  # the hub's answers to a commit whose parent is no longer the newest


class HubStore:
    """`Store` for hf://datasets/…; the repository must exist."""

    def put(self, url: Url, data: bytes) -> None:
        _commit(url, {url: data}, f"Add {url.name}")

    def put_file(self, url: Url, path: Path, first: Mapping[Url, bytes], stop: Event) -> None:
        _commit(url, {**first, url: path}, f"Add {url.name}")

    def swap(
        self, url: Url, old: bytes | None, new: bytes, first: Mapping[Url, bytes], then: Mapping[Url, bytes]
    ) -> bool:
        for _ in range(TRIES):
            parent = _head(url)
            data = _hub_read(url, parent)
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
        return folder.call(_hub_list, "listing")

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


def _hub_read(url: Url, commit: str) -> bytes | None:
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

        sources = {each: data if isinstance(data, bytes) else str(data) for each, data in files.items()}
        operations: list[Any] = [CommitOperationAdd(within(each), data) for each, data in sources.items()]
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


def _hub_list(files: Any, path: str) -> Listing:
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


# ---- upload ----------------------------------------------------------------------------------------------------------
# Where files may be written: the store of an address, and the place of a cache.
#
# Refused: protocols without a conditional write, on which commits rest (`storage/stores.py`).

WRITABLE = "s3://, gs:// or hf://datasets/…"


def store_of(url: Url) -> Store:
    """The store of an address; ConfigError if its protocol cannot be written."""
    protocol = "" if "::" in url.root else url.root.partition("://")[0]
    if protocol in ("s3", "s3a"):
        return S3Store()
    if protocol in ("gs", "gcs"):
        return GoogleStore()
    if protocol == "hf" and url.root.startswith("hf://datasets/"):
        return HubStore()
    raise ConfigError(
        "caches are not written there",
        where=url,
        expected=f"a local folder, {WRITABLE}",
        do="build into a local folder and copy that: shards and index first, cache.json last",
    )


def destination(address: str | Location) -> Location:
    """The place of a cache to be written; ConfigError for a URL that cannot be."""
    place = location(address)
    if is_remote(place):
        if not str(place).partition("://")[2].strip("/"):
            raise ConfigError("no bucket is named", where=place, expected="such as s3://BUCKET/NAME")
        store_of(place)
        return Url(str(place).rstrip("/"))
    return place
