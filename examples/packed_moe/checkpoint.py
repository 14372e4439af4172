"""Checkpoints that are whole or refused.

A file is a magic, the SHA-256 of the rest, and the rest: what `torch.save` writes. It is written beside its place and renamed, so a
killed run leaves the previous one. The digest finds what a zip's own checks let through.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from pathlib import Path
from typing import Any

import torch

from packed_moe.config import UserError

_MAGIC = b"packed-moe checkpoint 2\n"


def save(path: Path, content: dict[str, Any]) -> None:
    """Write `content` (tensors, numbers, strings, containers of them) to `path`, atomically."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    payload = buffer.getvalue()
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(_MAGIC + hashlib.sha256(payload).digest() + payload)
            file.flush()
            os.fsync(file.fileno())  # a rename may reach the disk before the data does
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load(path: Path, expected: dict[str, Any]) -> dict[str, Any]:
    """What `save` wrote, on the CPU. Raises `UserError` where the file is damaged or its "run" differs from `expected`."""
    data = path.read_bytes()
    head, payload = data[: len(_MAGIC) + 32], data[len(_MAGIC) + 32 :]
    if head != _MAGIC + hashlib.sha256(payload).digest():
        raise UserError(f"--resume: {path} is corrupt or no checkpoint of this example (its digest differs); delete it")
    try:
        content = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError) as error:
        raise UserError(f"--resume: {path} was written by an incompatible version ({error}); delete it") from error
    recorded = content["run"]
    for name in sorted({*recorded, *expected}):
        if recorded.get(name) != expected.get(name):
            raise UserError(
                f"--resume: {path} belongs to another run: {name} was {recorded.get(name)!r}, is now {expected.get(name)!r};"
                " resume with the same settings, or start anew in another --out"
            )
    return content
