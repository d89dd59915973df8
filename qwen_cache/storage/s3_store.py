"""Files written to S3 and servers like it, by s3fs: conditions by If-Match and If-None-Match, large files by parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from email.utils import parsedate_to_datetime
from pathlib import Path
from threading import Event
from time import time
from typing import Any

from qwen_cache.errors import QwenCacheError
from qwen_cache.storage import bounds
from qwen_cache.storage.store import Listing, StoredFile, check_conditions, put_around, swap_version
from qwen_cache.storage.url import Url

PART_BYTES = 1 << 24  # what a broken connection loses. A multipart upload has parts of at least 5 MiB
MOST_PARTS = 10_000
SENDERS = 4  # parts at a time, of one file: one connection does not fill a fast network
PER_DELETE = 1000
TORN = ("BadDigest", "IncompleteBody", "InvalidPart", "RequestTimeout", "XAmzContentSHA256Mismatch")
"""Errors of a request whose body did not arrive whole; s3fs takes them for faults of the request."""


class S3Store:
    """`storage.store.Store` for s3://."""

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
        return put_around(self.put, first, lambda: swap_version(url, old, new, _read, _write_over), then)

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
            page = _list(folder, more)
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
        check_conditions(self, folder, lambda url, data: _write_over(url, data, None))


def _write_over(url: Url, data: bytes, tag: str | None) -> bool:
    """Write a file over the version with this ETag, or over none; False if another one is there."""
    condition = {"IfMatch": tag} if tag else {"IfNoneMatch": "*"}
    return _call(url, "writing", "put_object", len(data), Body=data, **condition) is not None


def _read(url: Url) -> tuple[bytes, str] | None:
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


def _list(folder: Url, more: Mapping[str, str]) -> dict[str, Any]:
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
