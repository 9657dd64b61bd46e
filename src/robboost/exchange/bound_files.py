"""Linear lower bounds of margins as arrays in a file: what other verifiers hand in, and what RobBoost hands out."""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file
from safetensors.numpy import save as to_safetensors

from robboost.errors import DataError, InputError, RobBoostError
from robboost.models.files import check_safetensors, check_zip, existing_file, parse_json, write_atomically
from robboost.threat import Norm

__all__ = ["LinearBounds", "load_linear_bounds", "save_linear_bounds"]

Array = npt.NDArray[Any]
_FORMAT = "robboost-linear-bounds"
_VERSION = 1
_MAX_BYTES = 2**40
_MAX_MEMBERS = 10_000
_DUAL_ORDER: dict[str, float] = {"linf": 1, "l2": 2, "l1": np.inf}
_INDICES = ("examples", "targets")


@dataclass(frozen=True)
class LinearBounds:
    """For member t and pair n (an example and a target class), on the whole threat set of the example:

        margin_tn(x) >= <slopes[t, n], x - centre_n> + intercepts[t, n]     for ||(x - centre_n) / radius_n||_p <= 1

    The centre is that of the set: the example itself, or for l_inf with a box of pixels the middle of the interval that
    is left, where radius then differs between pixels (`Threat.region` gives both). A pixel of radius zero is fixed.
    Nothing here proves that the bounds hold: `check_linear_bounds` tries to refute them.

    Attributes:
        slopes: [T, n, d] (or [T, n, *input]), float16, float32 or float64; stored flat. They are taken as they are:
            who rounds slopes lowers the intercepts by what that can cost.
        intercepts: [T, n], the values at the centre.
        radius: scalar, [d], [n, d], or [n, 1] (stored as [n, d]). Not negative.
        norm: "linf", "l2" or "l1".
        examples: [n], index of each pair's example in the data set, or None.
        targets: [n], each pair's target among the other classes in class order, the true one skipped, or None.
        names: of the members, or ().
    """

    slopes: Array = field(repr=False)
    intercepts: Array = field(repr=False)
    radius: Array = field(repr=False)
    norm: Norm = "linf"
    examples: Array | None = field(default=None, repr=False)
    targets: Array | None = field(default=None, repr=False)
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.norm not in get_args(Norm):
            raise InputError(f"norm={self.norm!r}, expected one of 'linf', 'l2', 'l1'")
        slopes = _floats("slopes", self.slopes)
        if slopes.ndim < 3 or 0 in slopes.shape or len(slopes) > _MAX_MEMBERS:
            raise InputError(f"slopes have shape {slopes.shape}, expected [members, pairs, inputs], none of them zero")
        slopes = slopes.reshape(*slopes.shape[:2], -1)
        intercepts = _floats("intercepts", self.intercepts)
        if intercepts.shape != slopes.shape[:2]:
            raise InputError(f"intercepts have shape {intercepts.shape}, expected {slopes.shape[:2]} as the slopes")
        radius = _radius(self.radius, slopes.shape[1:])
        for name in _INDICES:
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _indices(name, value, slopes.shape[1]))
        names = tuple(self.names)
        if names and (len(names) != len(slopes) or not all(isinstance(name, str) for name in names)):
            raise InputError(f"names={names}, expected one text for each of the {len(slopes)} members, or none")
        for key, value in {"slopes": slopes, "intercepts": intercepts, "radius": radius, "names": names}.items():
            object.__setattr__(self, key, value)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(members T, pairs n, inputs d)."""
        return self.slopes.shape

    def margins(self) -> Array:
        """Certified margin of each member on each pair, [T, n]: intercept - ||radius * slope||_q, q dual."""
        scaled = self.slopes.astype(np.float64) * self.radius
        return np.asarray(self.intercepts - np.linalg.norm(scaled, ord=_DUAL_ORDER[self.norm], axis=2))


def save_linear_bounds(bounds: LinearBounds, path: str | Path) -> None:
    """Writes bounds as .npz or .safetensors (by the ending of `path`); the layout is that of `LinearBounds`.

    Arrays have the names of its attributes; .npz holds "norm", "names" and "format" as arrays of text and "version" as
    a number, .safetensors holds them as JSON under "robboost-linear-bounds" in its metadata.
    """
    file = Path(path)
    arrays = {"slopes": bounds.slopes, "intercepts": bounds.intercepts, "radius": bounds.radius}
    arrays |= {name: value for name in _INDICES if (value := getattr(bounds, name)) is not None}
    if file.suffix == ".npz":
        buffer = io.BytesIO()
        texts = {"format": np.array(_FORMAT), "norm": np.array(bounds.norm), "names": np.array(bounds.names, str)}
        np.savez(buffer, **arrays, **texts, version=np.array(_VERSION))  # type: ignore[arg-type]
        write_atomically(file, buffer.getvalue())
    elif file.suffix == ".safetensors":
        text = json.dumps({"version": _VERSION, "norm": bounds.norm, "names": bounds.names})
        contiguous = {name: np.asarray(value, order="C") for name, value in arrays.items()}
        write_atomically(file, to_safetensors(contiguous, metadata={_FORMAT: text}))
    else:
        raise InputError(f"path={str(path)!r}, expected a name that ends in .npz or .safetensors")


def load_linear_bounds(path: str | Path) -> LinearBounds:
    """Reads and validates what `save_linear_bounds` writes, or what another tool writes in its layout.

    In .npz files only "slopes", "intercepts" and "radius" are required. Nothing is unpickled, and no array is allocated
    that the file does not hold. Raises DataError for a damaged file and InputError for arrays that do not fit together.
    """
    try:
        file = existing_file(path, max_bytes=_MAX_BYTES)
        arrays, described = _read_npz(file) if file.suffix == ".npz" else _read_safetensors(file)
        if described.get("version", _VERSION) != _VERSION:
            raise DataError(f"{file}: version {described['version']!r}, expected {_VERSION}")
        missing = [name for name in ("slopes", "intercepts", "radius") if name not in arrays]
        if missing:
            raise DataError(f"{file}: no array {missing[0]!r}, expected slopes, intercepts and radius")
        return LinearBounds(
            arrays["slopes"],
            arrays["intercepts"],
            arrays["radius"],
            described.get("norm", "linf"),
            arrays.get("examples"),
            arrays.get("targets"),
            tuple(described.get("names", ())),
        )
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except DataError:
        raise
    except RobBoostError as error:  # the file checks speak of model files
        raise DataError(str(error)) from None


def _read_npz(file: Path) -> tuple[dict[str, Array], Mapping[str, Any]]:
    check_zip(file, compressed=True)
    arrays: dict[str, Array] = {}
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            name = entry.filename.removesuffix(".npy")
            if name in ("slopes", "intercepts", "radius", *_INDICES, "format", "norm", "names", "version"):
                try:
                    with archive.open(entry) as stream:
                        arrays[name] = _read_array(stream, entry.file_size)
                # zlib.error, BadZipFile, EOFError, NotImplementedError, RuntimeError (encrypted) and numpy's own
                except Exception as error:
                    raise DataError(f"{file}: array {name!r} is damaged ({_line(error)})") from None
    described: dict[str, Any] = {}
    for name in ("norm", "format"):
        if name in arrays:
            described[name] = _text(arrays.pop(name), file)
    if "names" in arrays:
        described["names"] = [_text(value, file) for value in arrays.pop("names").reshape(-1)]
    if "version" in arrays:
        version = arrays.pop("version")
        described["version"] = int(version) if version.shape == () and version.dtype.kind in "iu" else "?"
    if described.get("format", _FORMAT) != _FORMAT:
        raise DataError(f"{file}: format {described['format']!r}, expected {_FORMAT!r}")
    return arrays, described


def _read_array(stream: Any, size: int) -> Array:
    """An array whose claimed shape is compared with the bytes that are there, before it is allocated."""
    version = np.lib.format.read_magic(stream)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"version {version} of the array format")
    shape, fortran, dtype = readers[version](stream, max_header_size=10_000)
    held = size - stream.tell()
    if dtype.hasobject or dtype.kind not in "fiuU" or len(shape) > 8:
        raise ValueError(f"type {dtype}, expected numbers or text")
    if any(side < 0 for side in shape) or math.prod(shape) * dtype.itemsize != held:
        raise ValueError(f"shape {shape} of {dtype} for {held} bytes")
    values = np.frombuffer(stream.read(held), dtype=dtype)
    return values.reshape(shape, order="F" if fortran else "C")


def _read_safetensors(file: Path) -> tuple[dict[str, Array], Mapping[str, Any]]:
    if file.suffix != ".safetensors":
        raise DataError(f"{file}: unknown kind of file, expected .npz or .safetensors")
    metadata = check_safetensors(file).get("__metadata__", {})
    described = parse_json(metadata.get(_FORMAT, "{}"), f"{file}: metadata")
    names = described.get("names", []) if isinstance(described, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(f"{file}: damaged metadata, expected a table with norm and names")
    if not isinstance(described.get("norm", "linf"), str):
        raise DataError(f"{file}: damaged metadata, expected norm as a text")
    try:
        return dict(load_file(file)), described
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{file}: damaged ({_line(error)}), expected floats and integers") from None


def _floats(name: str, value: Any) -> Array:
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    array = np.asarray(value)
    if array.dtype.kind != "f" or array.dtype.itemsize not in (2, 4, 8):
        raise InputError(f"{name} are of type {array.dtype}, expected float16, float32 or float64")
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    if not np.isfinite(array).all():
        raise InputError(f"{name} hold NaN or infinity, expected finite numbers")
    return array


def _radius(value: Any, shape: tuple[int, ...]) -> Array:
    array = _floats("radius", np.float64(value) if isinstance(value, (int, float)) else value)
    pairs, inputs = shape
    if array.ndim > 2 and array.size == pairs * inputs:
        array = array.reshape(pairs, inputs)
    allowed = [(), (inputs,), (pairs, inputs), (pairs, 1)]
    if array.shape not in allowed:
        raise InputError(f"radius has shape {array.shape}, expected one of {', '.join(map(str, allowed))}")
    if (array < 0).any():
        raise InputError(f"radius has lowest value {array.min():g}, expected none below zero")
    return np.broadcast_to(array, shape).copy() if array.shape == (pairs, 1) else array


def _indices(name: str, value: Any, pairs: int) -> Array:
    array = np.asarray(value.detach().cpu().numpy() if hasattr(value, "detach") else value)
    if array.dtype.kind not in "iu" or array.shape != (pairs,) or (array < 0).any():
        raise InputError(f"{name} are {array.dtype} of shape {array.shape}, expected {pairs} integers, none below zero")
    return array.astype(np.int64)


def _text(value: Any, file: Path) -> str:
    if np.asarray(value).dtype.kind != "U" or np.asarray(value).size != 1:
        raise DataError(f"{file}: {value!r}, expected a text")
    return str(np.asarray(value).reshape(-1)[0])


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200]
