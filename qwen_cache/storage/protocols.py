"""The protocols of URLs: servers of files, and archives of them. Others of fsspec are refused.

fsspec knows protocols that run templates and name any file of this machine (`reference`), open local repositories
(`git`, `dvc`), or hand the work to other programs (`dask`, `jupyter`). A URL is often copied from somewhere.
"""

from __future__ import annotations

import re

SERVERS = {
    *("http", "https", "webdav", "ftp", "sftp", "ssh", "smb"),
    *("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "ocilake", "oss", "tos", "tosfs"),
    *("hf", "hdfs", "webhdfs", "lakefs", "github", "gdrive", "dropbox", "box", "dbfs", "memory"),
}
ARCHIVES = {"zip", "tar"}
"""Around a file: `zip://images::https://example.com/a.zip`."""
LOCAL = {"file", "local"}


def refused_protocol(address: str) -> str | None:
    """The first protocol of a URL, or of a chain of them, that is not read; None if all are."""
    for part in address.split("::"):
        protocol, separator, _ = part.partition("://")
        if not separator:  # fsspec takes a single word for a protocol, and anything else for a local path
            protocol = part if re.fullmatch("[a-z]+", part) else "file"
        if protocol not in SERVERS | ARCHIVES | LOCAL:
            return protocol
    return None
