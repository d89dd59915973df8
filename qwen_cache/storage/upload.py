"""Where files may be written: the store of an address, and the place of a cache.

Refused: protocols without a conditional write, on which commits rest (`storage/store.py`).
"""

from __future__ import annotations

from pathlib import Path

from qwen_cache.errors import ConfigError
from qwen_cache.storage.store import Store
from qwen_cache.storage.url import Url, location

WRITABLE = "s3://, gs:// or hf://datasets/…"


def store_of(url: Url) -> Store:
    """The store of an address; ConfigError if its protocol cannot be written."""
    protocol = "" if "::" in url.root else url.root.partition("://")[0]
    if protocol in ("s3", "s3a"):
        from qwen_cache.storage.s3_store import S3Store

        return S3Store()
    if protocol in ("gs", "gcs"):
        from qwen_cache.storage.gcs_store import GoogleStore

        return GoogleStore()
    if protocol == "hf" and url.root.startswith("hf://datasets/"):
        from qwen_cache.storage.hub_store import HubStore

        return HubStore()
    raise ConfigError(
        "caches are not written there",
        where=url,
        expected=f"a local folder, {WRITABLE}",
        do="build into a local folder and copy that: shards and index first, cache.json last",
    )


def destination(address: str | Path | Url) -> Path | Url:
    """The place of a cache to be written; ConfigError for a URL that cannot be."""
    place = location(address)
    if isinstance(place, Url):
        if not str(place).partition("://")[2].strip("/"):
            raise ConfigError("no bucket is named", where=place, expected="such as s3://BUCKET/NAME")
        store_of(place)
        return Url(str(place).rstrip("/"))
    return place
