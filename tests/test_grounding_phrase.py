"""Which words are meant, and which tokens they are: marks, phrases and characters of any width."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from qwen_cache.errors import SourceError
from qwen_cache.sources.captions import find, parse, token_positions


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Callable[[str], Path]) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model("edit") / "processor")


@pytest.mark.parametrize(
    ("prompt", "text", "words"),
    [
        ("make it black and white", "make it black and white", []),
        ("make [[the red car]] blue", "make the red car blue", ["the red car"]),
        ("[[the car]] goes", "the car goes", ["the car"]),
        ("remove [[the car]]", "remove the car", ["the car"]),
        ("swap [[cup]] and [[plate]]", "swap cup and plate", ["cup", "plate"]),
        ("[[a]][[b]]", "ab", ["a", "b"]),
        ("变成[[黑白]]的", "变成黑白的", ["黑白"]),
        (r"write \[[x\]] on [[the sign]]", "write [[x]] on the sign", ["the sign"]),
        (r"write [[the word \[[x\]]]] large", "write the word [[x]] large", ["the word [[x]]"]),
        (r"a \n and a [single] one", r"a \n and a [single] one", []),
        ("", "", []),
    ],
)
def test_marks_are_taken_out_and_enclose_what_they_enclosed(prompt: str, text: str, words: list[str]) -> None:
    plain, spans = parse(prompt)
    assert plain == text
    assert [plain[start:end] for start, end in spans] == words


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("make [[the car blue", r"\[\[ without \]\]"),
        (r"make [[the car\]] blue", r"\[\[ without \]\]"),
        ("make the car]] blue", r"\]\] without \[\["),
        ("make [[the]] car]] blue", r"\]\] without \[\["),
        ("make [[the [[red]] car]] blue", r"\[\[ within \[\["),
        ("make [[]] blue", r"nothing is between \[\[ and \]\]"),
        ("make [[ \t]] blue", r"nothing is between \[\[ and \]\]"),
    ],
)
def test_marks_that_enclose_nothing_whole_are_refused(prompt: str, message: str) -> None:
    with pytest.raises(SourceError, match=message) as caught:
        parse(prompt, where="data/cat.txt")
    assert str(caught.value).startswith("data/cat.txt: ")
    assert caught.value.found == prompt
    assert caught.value.do


def test_a_phrase_is_found_where_it_stands_once() -> None:
    assert find("变成黑白, make the (red) car blue", "the (red) car") == (11, 24)
    assert find("the car", "the car") == (0, 7)


def test_a_phrase_that_is_not_there_once_is_refused() -> None:
    with pytest.raises(SourceError, match=r"cat: the phrase 'the Car' is not in the prompt \(found 'wash the car'\)"):
        find("wash the car", "the Car", where="cat")
    with pytest.raises(SourceError, match=r"cat: the phrase 'a a' is in the prompt 2 times") as caught:
        find("a a a", "a a", where="cat")
    assert caught.value.do == "name words that occur once, or mark the intended ones in the prompt: [[a a]]"
    with pytest.raises(SourceError, match="cat: the phrase is empty"):
        find("wash the car", " ", where="cat")


def reference(tokenizer: Any, text: str, start: int, end: int) -> list[int]:
    """By bytes: a byte-level tokenizer's tokens, spelled out, are the bytes of the text from the first to the last."""
    first, last = len(text[:start].encode()), len(text[:end].encode())
    positions, at = [], 0
    for position, token in enumerate(tokenizer(text)["input_ids"]):
        bytes_ = len(tokenizer.convert_ids_to_tokens(token))  # one character stands for each byte
        mine = text.encode()[max(at, first) : min(at + bytes_, last)]
        if at < last and at + bytes_ > first and mine.strip():
            positions.append(position)
        at += bytes_
    assert at == len(text.encode())
    return positions


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("make the red car blue", "the red car"),
        ("make the red car blue", "make"),
        ("make the red car blue", "blue"),
        ("make the red car blue", " the red car "),
        ("make the red car blue", "make the red car blue"),
        ("make the red car blue", "ed c"),
        ("变成黑白的 photo", "黑白"),
        ("变成黑白的 photo", "变成"),
        ("变成黑白的 photo", "photo"),
        ("ein schöner Käfer, 🚗 rot", "Käfer"),
        ("ein schöner Käfer, 🚗 rot", "🚗"),
        ("Describe the key features of the input image, explain the text", "the input image"),
        ("Describe the key features of the input image, explain the text", "features"),
    ],
)
def test_tokens_are_those_that_share_a_letter_with_the_phrase(tokenizer: Any, text: str, phrase: str) -> None:
    start, end = find(text, phrase)
    positions = token_positions(tokenizer, text, [(start, end)])
    assert positions == reference(tokenizer, text, start, end)
    ids = tokenizer(text)["input_ids"]
    shown = tokenizer.decode([ids[position] for position in positions])
    assert phrase.replace(" ", "") in shown.replace(" ", "")  # a space may be a token of its own, which does not count


def test_several_spans_are_one_phrase(tokenizer: Any) -> None:
    text, spans = parse("swap [[the input]] and [[the 黑白]] image")
    wanted = sorted({position for span in spans for position in token_positions(tokenizer, text, [span])})
    assert token_positions(tokenizer, text, spans) == wanted
    assert len(wanted) < len(tokenizer(text)["input_ids"])


def test_a_text_that_the_tokenizer_normalises_keeps_its_characters(tokenizer: Any) -> None:
    text = "ein scho\u0308ner Ka\u0308fer im image"  # letters and their dots apart: the tokenizer joins them
    start, end = find(text, "image")
    ids = tokenizer(text)["input_ids"]
    positions = token_positions(tokenizer, text, [(start, end)])
    assert tokenizer.decode([ids[position] for position in positions]).strip() == "image"


def test_a_phrase_without_a_token_is_refused(tokenizer: Any) -> None:
    with pytest.raises(SourceError, match=r"cat: no token belongs to the phrase \(found characters \[\(4, 5\)\]"):
        token_positions(tokenizer, "make it", [(4, 5)], where="cat")
    with pytest.raises(SourceError, match="no token belongs to the phrase"):
        token_positions(tokenizer, "make it", [])
