"""Find words of tools/banned_words.txt in the text files of the project; `make check` runs it.

    python tools/check_words.py [PATH ...]

Prints file, line, word and replacement; the exit code is 1 if it finds any.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORDS = ROOT / "tools" / "banned_words.txt"
SUFFIXES = {".py", ".md", ".toml", ".yaml", ".yml", ".sh", ".jinja", ".js", ".css", ".in", ""}
SKIPPED = {"LICENSE", "schemas/LICENSE", "tools/banned_words.txt"}


def words() -> list[tuple[re.Pattern[str], str]]:
    """Patterns of whole words, and their replacements."""
    lines = [line for line in WORDS.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    pairs = [line.split(" -> ", 1) for line in lines]
    return [(re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE), instead) for pattern, instead in pairs]


def banned(text: str) -> list[tuple[int, str, str]]:
    """The banned words of a text: line number, word, replacement."""
    patterns = words()
    if not re.search("|".join(old.pattern for old, _ in patterns), text, re.IGNORECASE):
        return []  # five times as fast as line by line
    lines = list(enumerate(text.splitlines(), 1))
    return [(number, match[0], new) for number, line in lines for old, new in patterns for match in old.finditer(line)]


def project_files() -> list[Path]:
    """The text files that git tracks, and new ones that it does not ignore."""
    result = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    names = [name for name in result.stdout.split("\0") if name and name not in SKIPPED]
    return [ROOT / name for name in names if Path(name).suffix in SUFFIXES and (ROOT / name).is_file()]


def main(paths: list[str]) -> int:
    chosen = [Path(path).resolve() for path in paths]
    count = 0
    for path in project_files():
        if chosen and not any(path.resolve().is_relative_to(each) for each in chosen):
            continue
        for number, word, instead in banned(path.read_text(encoding="utf-8")):
            print(f"{path.relative_to(ROOT)}:{number}: {word} -> {instead}")
            count += 1
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
