"""Files of tensors, numbers and strings: written atomically, read without executing anything."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any, BinaryIO

import torch

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]


def write_atomically(path: Path, content: dict[str, Any]) -> None:
    """Writes ``content`` beside ``path`` and moves it into place, so that a reader sees the old file or the new one.

    Raises:
        OSError: it could not be written; what was at ``path`` is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            with contextlib.suppress(OSError):  # a file system without locks, which nothing is removed from then
                _lock(file)
            _save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _remove_leftovers(path)
    finally:
        temporary.unlink(missing_ok=True)


def _remove_leftovers(path: Path) -> None:
    """Temporary files of the same path whose process was killed as it wrote: its number is free, and nobody holds their lock.

    The number may be another machine's or container's, which share a file's lock and not their processes.
    """
    for other in path.parent.glob(f"{glob.escape(path.name)}.*.tmp"):
        process = other.name.removeprefix(f"{path.name}.").removesuffix(".tmp")
        with contextlib.suppress(OSError):
            if process.isdigit() and not _is_running(int(process)):
                with open(other, "rb") as file:
                    _lock(file)
                    other.unlink(missing_ok=True)


def _is_running(process: int) -> bool:
    if fcntl is None:
        return True  # who knows
    try:
        os.kill(process, 0)  # asks, and sends nothing
    except ProcessLookupError:
        return False
    except OSError:
        pass  # another user's
    return True


def _lock(file: BinaryIO) -> None:
    """Until it is closed, or its process ends.

    Raises:
        OSError: another process has it.
    """
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _save(content: dict[str, Any], file: BinaryIO) -> None:
    try:
        torch.save(content, file)
    except RuntimeError as error:  # of torch's writer, which says where it stopped and not why
        raise OSError(errno.EIO, "torch could not write all of it; is the disk full?", file.name) from error


def read_tensors(path: Path, expected_format: str, names: Collection[str]) -> dict[str, Any]:
    """Reads a file of :func:`write_atomically` with ``weights_only=True``.

    Args:
        path: of the file.
        expected_format: its kind and version, ``"<kind> <number>"``.
        names: what it must hold.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a file of that format, of another version of it, or without one of ``names``.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can fail in the unpickler in any way
        # Of one that was cut short torch looks for the end before its beginning.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        # Torch's words go on to how its own checks could be switched off.
        raise ValueError(
            f"{path} is not a torchgpmc file, or is damaged. Expected one that torchgpmc wrote, or a new path."
        ) from error
    found = content.get("format") if isinstance(content, dict) else None
    if found != expected_format:
        kind = expected_format.rpartition(" ")[0]
        other = isinstance(found, str) and found.rpartition(" ")[0] == kind
        remedy = " Another version of torchgpmc wrote it; read it with that one, or sample again to another path." if other else ""
        raise ValueError(f"{path} holds {found!r}. Expected {expected_format!r}.{remedy}")
    missing = [name for name in names if name not in content]
    if missing:
        raise ValueError(f"{path} is damaged: it lacks {', '.join(missing)}. Expected a file as torchgpmc wrote it.")
    return content
