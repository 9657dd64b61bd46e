"""What a file from elsewhere may claim to hold, checked before any of it is allocated."""

from __future__ import annotations

import json
import math
import zipfile
from pathlib import Path
from typing import Any

from robboost.errors import CheckpointError

__all__ = [
    "MAX_BYTES",
    "check_safetensors",
    "check_zip",
    "existing_file",
    "parse_json",
    "safetensors_metadata",
    "write_atomically",
]

MAX_BYTES = 4 * 2**30  # of one file; the largest network of the paper has 3.2 MB
MAX_HEADER_BYTES = 16 * 2**20
MAX_TENSORS = 100_000
MAX_AXES = 8
_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "F64": 8,
    "I64": 8, "U64": 8,
}  # fmt: skip


def existing_file(path: str | Path, *, max_bytes: int = MAX_BYTES) -> Path:
    """The path of a readable file of acceptable size, or CheckpointError."""
    file = Path(path)
    try:
        if not file.is_file():
            what = "a folder" if file.is_dir() else "missing"
            raise CheckpointError(f"{file}: {what}, expected a model file")
        size = file.stat().st_size
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{str(file)!r}: cannot be read ({error}), expected a model file") from None
    if not 0 < size <= max_bytes:
        raise CheckpointError(f"{file}: {size} bytes, expected more than 0 and at most {max_bytes}")
    return file


def check_safetensors(file: Path) -> dict[str, Any]:
    """The header of a safetensors file after checking every size in it against the file; CheckpointError otherwise."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{file}: damaged, its header claims {length} bytes of {size} (.safetensors expected)"
            )
        header = parse_json(stream.read(length), f"{file}: header")
    if not isinstance(header, dict) or len(header) > MAX_TENSORS:
        raise CheckpointError(f"{file}: damaged, its header is no table of at most {MAX_TENSORS} tensors")
    for name, entry in header.items():
        if name != "__metadata__" and not _entry_fits(entry, size - 8 - length):
            raise CheckpointError(f"{file}: damaged or unsupported, tensor {name!r} does not fit its bytes in the file")
    metadata = header.get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{file}: damaged, its metadata is no table of texts")
    return header


def safetensors_metadata(file: Path) -> dict[str, str]:
    """The metadata of a safetensors file; only its header is read."""
    return dict(check_safetensors(file).get("__metadata__", {}))


def check_zip(file: Path, *, compressed: bool = False) -> None:
    """Refuses archives that would unpack to more than the file holds; `compressed` ones may be 20 times as large."""
    size = file.stat().st_size
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: damaged archive ({_line(error)}), expected an intact file") from None
    if len(entries) > MAX_TENSORS or len({entry.filename for entry in entries}) != len(entries):
        raise CheckpointError(
            f"{file}: archive with repeated or too many names ({len(entries)}), expected an intact file"
        )
    if not compressed and any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise CheckpointError(f"{file}: compressed archive, expected one that PyTorch wrote (uncompressed)")
    total = sum(entry.file_size for entry in entries)
    if total > (max(20 * size, 2**28) if compressed else size):
        raise CheckpointError(f"{file}: archive that unpacks to {total} bytes from {size}, refused")


def parse_json(text: bytes | str, what: str) -> Any:
    """JSON, with numbers that JSON does not have (NaN) and nesting too deep refused by CheckpointError."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # covers JSONDecodeError and UnicodeDecodeError
        raise CheckpointError(f"{what}: no valid JSON ({_line(error)})") from None


def write_atomically(file: Path, content: bytes) -> None:
    """Writes beside the file and renames: an interrupted run leaves the old file or the new one, never half of one."""
    temporary = file.with_name(f".{file.name}.part")
    try:
        temporary.write_bytes(content)
        temporary.replace(file)
    except OSError as error:
        raise CheckpointError(
            f"{file}: cannot be written ({error.strerror}), expected a folder with write access"
        ) from None
    finally:
        temporary.unlink(missing_ok=True)


def _entry_fits(entry: Any, data_bytes: int) -> bool:
    dtype = entry.get("dtype") if isinstance(entry, dict) else None
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        return False
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not isinstance(shape, list) or not isinstance(offsets, list):
        return False
    if any(type(number) is not int or number < 0 for number in [*shape, *offsets]):
        return False
    if len(shape) > MAX_AXES or len(offsets) != 2 or not offsets[0] <= offsets[1] <= data_bytes:
        return False
    return bool(math.prod(shape) * _ITEM_BYTES[dtype] == offsets[1] - offsets[0])


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
