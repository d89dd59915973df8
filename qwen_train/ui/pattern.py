"""A regular expression over many texts, in a process of its own: a slow pattern ends with it.

Run as a script, with JSON on stdin and stdout; it imports nothing but the standard library.
"""

import json
import re
import signal
import sys

SECONDS = 20
"""The most that the process takes, if nobody ends it before."""
MOST_WRITTEN = 100_000_000
"""The most characters that replace others, in all texts."""


def replaced(pattern: str, text: str, texts: list[str], *, ignore_case: bool) -> dict[int, str]:
    """By its number, each text that the replacement changes."""
    wanted = re.compile(pattern, re.IGNORECASE if ignore_case else 0)
    size = 0

    def new(match: re.Match[str]) -> str:
        nonlocal size
        part = match.expand(text)
        size += len(part)
        if size > MOST_WRITTEN:
            raise MemoryError
        return part

    found = ((number, wanted.sub(new, each)) for number, each in enumerate(texts))
    return {number: each for number, each in found if each != texts[number]}


def main() -> None:
    if hasattr(signal, "alarm"):  # not on Windows
        signal.alarm(SECONDS)  # which ends the process, also within a match
    given = json.load(sys.stdin)
    try:
        answer: dict[str, object] = {"changed": replaced(**given)}
    except (re.error, IndexError) as error:
        answer = {"error": str(error)}
    except (MemoryError, RecursionError, OverflowError) as error:
        answer = {"error": f"it takes too much memory ({type(error).__name__})"}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
