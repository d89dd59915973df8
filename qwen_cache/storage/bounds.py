"""How much a server may send and how long it may be silent: whoever gives an address may also have chosen the server.

A request over HTTP holds at most the bytes that were asked for. It ends when the head of the answer takes more than
`SILENCE`, redirects and connections included, or when a piece of its body, `SLOWEST` times `SILENCE` bytes, takes more.
It never ends because a large file takes long. No attempt begins later than `PATIENCE` after the first. An attempt has
two heads at most, so a server that never answers is an error after at most two minutes. The clients of S3 and the hub
have time limits of their own besides, and their servers are trusted to send no more than they were asked for.
"""

from __future__ import annotations

SILENCE = 30.0  # seconds; busy object stores answer within 10
SLOWEST = 10_000  # bytes per second of one of 16 requests: together 1.3 Mbit/s
PATIENCE = 60.0  # seconds; an overloaded server that says so is asked again after 4 seconds in all
WHOLE_FILE = 1_000_000_000  # bytes of a file that is read whole, such as an image or a table; shards are not
LISTING = 100_000_000  # bytes of a folder's listing, or of all its names: about a million
PAGE_SECONDS = 600.0  # of one page of a listing in all: pages of a million names take minutes to write


def seconds_for(size: int) -> float:
    """The longest that a request for `size` bytes may take in all, its connection and headers included."""
    return 2 * SILENCE + size / SLOWEST


def silence(head: float | None = None) -> str:
    """The message about a server that was too slow; `head`: the seconds that it had to begin, if not `SILENCE`."""
    begin = f"no answer for {SILENCE if head is None else head:g} seconds"
    return f"{begin}, or less than {SLOWEST} bytes a second for {SILENCE:g}"
