"""YAML from a file or the command line, with bounds: also the qwen.yaml in a cache of somebody else is read.

Plain values only, never objects. Anchors and aliases work, but count each time that they are used, so no text becomes
larger than it looks. Refuses what is larger, deeper or longer than any settings, an alias of a value inside itself, and
a key that is there twice, whose first value the YAML library would drop without a word.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from qwen_cache.errors import ConfigError, first_line
from qwen_cache.system_errors import naming

MAX_BYTES = 1 << 20  # a file of all settings has 3 kB
MAX_NODES = 10_000  # keys and values, aliases expanded; all settings make 250, naming each layer for a LoRA 850
MAX_DEPTH = 32  # settings have five levels
MAX_DIGITS = 100  # of an integer; Python's own limit is 4,300, and it raises wherever a longer one is shown
MERGE = "tag:yaml.org,2002:merge"  # the key `<<`; two of them lose nothing
FIX = "simplify it; settings need nothing of this kind"


def read_yaml(path: Path) -> Any:
    """The value of a file of YAML; OSError if it cannot be read, ConfigError as `parse_yaml`."""
    with naming(path), path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise _too_long(path)
    try:
        return parse_yaml(data.decode("utf-8"), path)
    except UnicodeDecodeError as error:
        raise ConfigError(f"this is not YAML: {error}", where=path) from None


def parse_yaml(text: str, where: object | None = None) -> Any:
    """The value of a YAML document; ConfigError, which names `where`, if it is not one within the bounds."""
    if len(text) > MAX_BYTES:
        raise _too_long(where)
    loader = _BoundedLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _refuse_repeated(node, "", where)
        return loader.construct_document(node)
    except _BeyondError as error:
        raise ConfigError(f"the settings {error}", where=where, do=FIX) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"this is not YAML: {error}", where=where) from None
    except (ValueError, LookupError, AttributeError, TypeError, OverflowError) as error:  # of int, datetime, …
        raise ConfigError(f"a value does not fit its YAML type: {first_line(error)}", where=where) from None


def assignment(name: str, value: Any) -> str:
    """`name=value` for --set: text as it is, if YAML reads it as the same text, else JSON."""
    with suppress(ConfigError):
        if isinstance(value, str) and parse_yaml(value) == value:
            return f"{name}={value}"
    return f"{name}={json.dumps(value, ensure_ascii=False)}"


def _refuse_repeated(node: yaml.Node, name: str, where: object) -> None:
    """ConfigError for a key that is there twice in the value of `name`, or deeper in it."""
    if isinstance(node, yaml.SequenceNode):
        for index, each in enumerate(node.value):
            _refuse_repeated(each, f"{name}[{index}]", where)
    if isinstance(node, yaml.MappingNode):
        lines: dict[tuple[str, str], int] = {}
        for key, value in node.value:
            inner = name
            if isinstance(key, yaml.ScalarNode) and key.tag != MERGE:
                inner = f"{name}.{key.value}" if name else str(key.value)
                line, before = key.start_mark.line + 1, lines.get((key.tag, key.value))
                if before is not None:
                    found = f"line {line}" if line == before else f"lines {before} and {line}"
                    do = "write all that belongs to it under one of them, and remove the other"
                    raise ConfigError(f"{inner} is there twice", where=where, found=found, do=do)
                lines[key.tag, key.value] = line
            _refuse_repeated(value, inner, where)


def _too_long(where: object) -> ConfigError:
    return ConfigError("the settings are too long", where=where, expected=f"at most {MAX_BYTES} bytes", do=FIX)


class _BeyondError(Exception):
    """A bound is exceeded."""


class _BoundedLoader(yaml.SafeLoader):
    """SafeLoader with the bounds, checked before any value is made."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.depth = self.count = 0
        self.sizes: dict[str | None, int] = {}
        """Nodes in the value of each anchor, itself included, aliases expanded."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) and event.anchor in self.anchors and event.anchor not in self.sizes:
            raise _BeyondError(f"contain an alias inside its own value: *{event.anchor}")
        before = self.count
        self.count += self.sizes.get(event.anchor, 0) if isinstance(event, yaml.AliasEvent) else 1
        if self.count > MAX_NODES:
            raise _BeyondError(f"have more than {MAX_NODES} values, with aliases expanded")
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _BeyondError(f"are nested more than {MAX_DEPTH} deep")
        node = super().compose_node(parent, index)
        self.depth -= 1
        if isinstance(event, yaml.NodeEvent) and not isinstance(event, yaml.AliasEvent) and event.anchor:
            self.sizes[event.anchor] = self.count - before
        return node

    def compose_scalar_node(self, anchor: dict[Any, yaml.Node]) -> yaml.ScalarNode:
        node = super().compose_scalar_node(anchor)
        if node.tag == "tag:yaml.org,2002:int" and len(node.value) > MAX_DIGITS:
            raise _BeyondError(f"contain an integer of {len(node.value)} digits; at most {MAX_DIGITS} are read")
        return node
