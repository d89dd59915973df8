"""`serve` in qwen.yaml."""

from __future__ import annotations

from typing import Annotated

from pydantic import ByteSize, Field

from qwen_cache.settings.section import Positive, Section, UrlPrefix

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ServeConfig(Section):
    listen: str = "127.0.0.1:8077"
    """Where the server listens: HOST:PORT. Any other host than this machine's own needs a token."""
    token_file: str | None = None
    """A file with the token that every request must have, as `Authorization: Bearer TOKEN`."""
    source: str | None = None
    """A source that the server reads when it starts; clients name its rows in place of sending them."""
    allow_urls: list[UrlPrefix] = []
    """Addresses that a client may name in place of sending an image: their first parts, such as s3://team/pairs/. The
    server reads them with its own rights; without any, it reads none."""
    store: bool = True
    """Store what is encoded in the cache. false: keep the newest samples in memory, up to serve.memory."""
    commit_samples: Positive = 256
    """Commit when this many samples are not stored yet."""
    commit_seconds: Seconds = 10.0
    """Commit when a sample has waited this long."""
    memory: ByteSize = ByteSize(1_000_000_000)
    """Bytes of encoded samples in memory, with serve.store=false."""
    queue_samples: Positive = 512
    """Samples that may wait for the encoders; more are refused with 429, and the client tries again."""
    queue_bytes: ByteSize = ByteSize(2_000_000_000)
    """Bytes of uploaded images that may wait for the encoders."""
    max_body: ByteSize = ByteSize(256_000_000)
    """The largest body of a request, in bytes."""
    max_pixels: Positive = 100_000_000
    """The most pixels of an image."""
    body_seconds: Seconds = 60.0
    """How long a client may take to send the body of a request. Its head has 10 seconds, or this if it is less."""
    connections: Positive = 1024
    """Connections at a time, and at most half of the file descriptors of the process. The one that has waited longest
    for its next request gives way to a new one; if all have a request, a new one is refused with 503."""
    stop_seconds: Seconds = 600.0
    """After SIGTERM or Ctrl-C: how long the accepted samples may take to be encoded and stored."""
