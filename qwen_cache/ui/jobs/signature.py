"""Which jobs are the user's own: each is signed with a key that is not in the opened folder.

A folder from elsewhere may have queued jobs in it, and opening it would run their commands. So only jobs with a valid
signature start by themselves. The key stays in the user's cache folder; where that cannot be written it is that of the
process, and jobs of an earlier one count as those of others.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any

from qwen_cache.storage.files import cache_home, make_folder, read_file

SIGNATURE = "signature"
KEY_NAME, KEY_BYTES = "ui-key", 32


def signed(job: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON of a job with its signature."""
    return {**job, SIGNATURE: _signature(job)}


def is_signed(job: Mapping[str, Any]) -> bool:
    """Whether the JSON of a job has been signed by this user on this machine."""
    given = job.get(SIGNATURE)
    return isinstance(given, str) and given.isascii() and hmac.compare_digest(given, _signature(job))


def _signature(job: Mapping[str, Any]) -> str:
    content = {name: value for name, value in job.items() if name != SIGNATURE}
    return hmac.new(_key(), json.dumps(content, sort_keys=True).encode("ascii"), "sha256").hexdigest()


@cache
def _key() -> bytes:
    """The key of the user, made at the first call."""
    path, new = cache_home() / KEY_NAME, secrets.token_bytes(KEY_BYTES)
    with suppress(OSError):
        make_folder(path.parent)
        with suppress(FileExistsError), open(path, "xb", opener=_open_for_owner) as file:
            file.write(new)
        key = read_file(path, KEY_BYTES)
        return key if len(key) == KEY_BYTES else new
    return new


def _open_for_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
