"""Real documents of real lengths, and which of them make up step s.

A document is a paragraph of text: it starts at an unindented line behind a blank one. In Python sources these are the top-level
functions and classes, in prose the paragraphs. What is longer than half the buffer is cut.
"""

from __future__ import annotations

import hashlib
import random
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from packed_moe.config import Config, UserError

_BREAK = re.compile(rb"\n(?:[ \t\r]*\n)+(?=\S)")
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "node_modules"}
_MAX_BYTES = 8 << 20


@dataclass(frozen=True)
class Documents:
    """`texts` are uint8 tensors, one per document; `digest` names their content."""

    source: str
    texts: list[Tensor]
    files: int
    digest: str


def load_documents(folder: str | None, max_length: int) -> Documents:
    """Every text below `folder` (default: the standard library's sources), up to 8 MiB, in a fixed order.

    Raises `UserError` where there is no such folder or no text in it.
    """
    root = Path(folder or sysconfig.get_paths()["stdlib"])
    if not root.is_dir():
        raise UserError(f"--data must be a folder, got {str(root)!r}; pass a folder that holds text files")
    texts: list[bytes] = []
    files = size = 0
    for path in sorted(root.rglob("*.py" if folder is None else "*")):
        inside = path.relative_to(root).parts
        if any(part in _SKIPPED_FOLDERS or part.startswith(".") for part in inside) or not path.is_file():
            continue
        content = _read_text(path)
        if not content:
            continue
        texts += [piece[at : at + max_length] for piece in _BREAK.split(content) for at in range(0, len(piece), max_length)]
        files += 1
        size += len(content)
        if size >= _MAX_BYTES:
            break
    texts = [text for text in texts if len(text) > 1]  # a single byte predicts nothing
    if not texts:
        raise UserError(f"--data: no text found below {str(root)!r} (binary and unreadable files do not count); pass another")
    digest = hashlib.sha256(b"\0".join(texts)).hexdigest()
    return Documents(str(root), [torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in texts], files, digest)


def _read_text(path: Path) -> bytes:
    try:
        content = path.read_bytes()[:_MAX_BYTES]
    except OSError:
        return b""
    return b"" if b"\0" in content else content


def draw(documents: Documents, config: Config, step: int) -> list[Tensor]:
    """The documents of one step, of (seed, step) alone, so that a resumed run needs no data state.

    The buffer is filled to a share that is drawn anew each step, between 40 and 100 %: the token count changes every step.
    """
    chance = random.Random(f"{config.seed}/{step}")
    room = int(config.max_tokens * chance.uniform(0.4, 1.0))
    chosen: list[Tensor] = []
    for text in chance.choices(documents.texts, k=4 * config.max_seqs):
        rows = -(-len(text) // config.pad_multiple) * config.pad_multiple
        if rows <= room or not chosen:
            chosen.append(text)
            room -= rows
        if len(chosen) == config.max_seqs:
            break
    return chosen
