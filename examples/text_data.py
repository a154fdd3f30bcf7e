"""From a file to blocks of tokens: reads records, splits off held-out text, tokenizes and cuts.

Knows nothing of ranks, models or training. The shortest use:

    train, held_out = split(render(read_records(None), tokenizer))
    blocks = to_blocks(train, tokenizer, 128)  # LongTensor (blocks, 128)
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import torch

Message = dict[str, str]  # {"role": ..., "content": ...}
Record: TypeAlias = "str | list[Message]"  # finished text, or a conversation that the tokenizer's template will lay out

HELD_OUT_SHARE = 0.1  # of all characters
SPLIT_SEED = 0  # not --seed: runs with other seeds must be judged on the same held-out text
PART_CHARACTERS = 4000  # a text file is one long document: it is cut into parts of about this size


class DataError(ValueError):
    """The text cannot be used; says which file and line, what was found and what is allowed."""


def read_records(path: Path | None) -> list[Record]:
    """Reads `path`: JSON lines if named .jsonl, .ndjson or .json, else plain text. None: Python's own reference pages.

    Raises DataError.
    """
    if path is None:
        return list(python_reference())
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as UTF-8 text: {error}") from error
    if path.suffix in (".jsonl", ".ndjson", ".json"):
        # Not splitlines(): JSON strings may hold U+2028 and the like unescaped.
        lines = enumerate(text.split("\n"), start=1)
        return [parse_record(line, f"{path}:{number}") for number, line in lines if line.strip()]
    return list(cut_into_parts(text))


def parse_record(line: str, where: str) -> Record:
    """One JSON line: `text`, or `prompt` and `completion`, or `messages`. Raises DataError, starting with `where`."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not a JSON object on one line: {error}") from error
    match record:
        case {"text": str(text)}:
            return text
        case {"prompt": str(prompt), "completion": str(completion)}:
            return prompt + completion
        case {"messages": [_, *_] as messages} if all(map(is_message, messages)):
            return list(messages)
    found = f"an object with {sorted(record)}" if isinstance(record, dict) else f"a {type(record).__name__}"
    raise DataError(
        f"{where}: found {found}. Allowed: an object with a string `text`, with strings `prompt` and `completion`, "
        "or with `messages`, a list of objects with strings `role` and `content`"
    )


def is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def python_reference() -> Iterator[str]:
    """The pages of pydoc's topics, about 370 kB of English that comes with Python.

    Pages quote each other (`compound` holds all of `if`, `for`, `while`...). Each paragraph is kept only where it is
    seen first, or held-out text would be trained on elsewhere.
    """
    from pydoc_data.topics import topics

    seen: set[str] = set()
    for name in sorted(topics):
        paragraphs = [p for p in re.split(r"\n\s*\n", topics[name]) if p.strip()]
        fresh = [p for p in paragraphs if p.strip() not in seen]
        seen.update(p.strip() for p in paragraphs)
        if fresh:
            yield "\n\n".join(fresh)


def cut_into_parts(text: str) -> Iterator[str]:
    """Cuts at blank lines, at line ends where there are none; a short text gives about twenty parts."""
    border = "\n\n" if "\n\n" in text else "\n"
    wanted = min(PART_CHARACTERS, len(text) // 20 + 1)
    part: list[str] = []
    length = 0
    for piece in text.split(border):
        part.append(piece)
        length += len(piece)
        if length >= wanted:
            yield border.join(part)
            part, length = [], 0
    if part:
        yield border.join(part)


def render(records: list[Record], tokenizer: Any) -> list[str]:
    """Conversations become text by the tokenizer's chat template; one without a template gets `role: content` lines."""

    def conversation(messages: list[Message]) -> str:
        if tokenizer.chat_template:
            return str(tokenizer.apply_chat_template(messages, tokenize=False))
        return "\n".join(f"{message['role']}: {message['content']}" for message in messages)

    return [record if isinstance(record, str) else conversation(record) for record in records]


def split(documents: list[str]) -> tuple[list[str], list[str]]:
    """(train, held out): whole documents, chosen by a fixed seed, about a tenth of the characters. Equal documents
    count once, so none is on both sides. Raises DataError if there are fewer than two.
    """
    unique = list(dict.fromkeys(document for document in documents if document.strip()))
    if len(unique) < 2:
        raise DataError(
            f"{len(unique)} distinct document(s): at least 2 are needed, one to train on and one to hold out"
        )
    random.Random(SPLIT_SEED).shuffle(unique)
    wanted = HELD_OUT_SHARE * sum(map(len, unique))
    held_out = [unique.pop()]
    while len(unique) > 1 and sum(map(len, held_out)) < wanted:
        held_out.append(unique.pop())
    return unique, held_out


def to_blocks(documents: list[str], tokenizer: Any, length: int) -> torch.Tensor:
    """All documents as one stream, each ended by the end-of-text token, cut into rows of `length`; the rest is dropped.

    Raises DataError if not even one row is full.
    """
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    stream: list[int] = []
    # verbose=False: no warning that a document is longer than the model's context, it is cut right below.
    for ids in tokenizer(documents, add_special_tokens=False, verbose=False)["input_ids"]:
        stream += ids + end
    count = len(stream) // length
    if count == 0:
        raise DataError(f"{len(stream)} tokens do not fill one block of {length}. Try: a smaller --sequence-length")
    return torch.tensor(stream[: count * length]).view(count, length)


def endless_order(count: int, seed: int) -> Iterator[int]:
    """Indices 0..count-1 in a new random order per epoch, forever, the same on every rank.

    A batch that meets the end of an epoch takes its rest from the next one, so no rank ever gets a shorter batch.
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(count, generator=generator).tolist()
