"""pyarrow in a command's process: without pandas, which it would import to convert its first Python value."""

from __future__ import annotations

import sys
from typing import Any

import pyarrow as pa


class _Missing:
    """A finder of modules that says that there is no pandas."""

    @staticmethod
    def find_spec(name: str, *_: Any) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("not needed here", name=name)


def convert_without_pandas() -> None:
    """Let pyarrow convert Python values without pandas, which takes 0.3 s of CPU time to import.

    pyarrow asks once whether there is pandas, to recognise its series. It imports pandas all the same where a program
    converts to it or from it. For processes of our own, in which nobody hands pyarrow a series.
    """
    if "pandas" in sys.modules:
        return
    sys.meta_path.insert(0, _Missing)
    try:
        pa.scalar(None)
    finally:
        sys.meta_path.remove(_Missing)
