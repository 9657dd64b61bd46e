"""Arguments that several commands share, and how they become pools, data and threats."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import nn

from robboost.data import DATASETS, Dataset, load_dataset
from robboost.errors import CheckpointError, InputError
from robboost.models import Pool, load_model, read_metadata, read_mix, read_pool
from robboost.threat import Threat

PoolArgument = Annotated[
    list[Path], typer.Argument(help="A folder of networks (with or without manifest.json), or several files.")
]
ModelArgument = Annotated[
    Path, typer.Argument(help="A network or an ensemble: .safetensors, .pt, .onnx, or the folder of a shipped pool.")
]
DataOption = Annotated[
    str | None, typer.Option("--data", help=f"One of {', '.join(DATASETS)}, or an .npz file.  [default: the pool's]")
]
LimitOption = Annotated[int | None, typer.Option("--limit", help="Use only the first so many images.")]
EpsOption = Annotated[str | None, typer.Option("--eps", help='Radius, such as 0.1 or "8/255".  [default: the pool\'s]')]
NormOption = Annotated[str | None, typer.Option("--norm", help="linf, l2 or l1.  [default: the pool's, or linf]")]
ClipOption = Annotated[
    str, typer.Option("--clip", help='Box of valid pixels, such as "0,1", or "none".', show_default=True)
]
BoundsOption = Annotated[
    str,
    typer.Option(
        "--bounds",
        help='ibp, crown-ibp, same-slope, crown, alpha-crown, tightest, or several joined: "ibp+crown".',
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", help="CPU threads (small networks often run best on one).")
]
DeviceOption = Annotated[str | None, typer.Option("--device", help="cpu, cuda, ...  [default: a GPU if there is one]")]
ArchitectureOption = Annotated[
    str | None,
    typer.Option("--architecture", help="For files that do not describe themselves: a name or a structure text."),
]
ShapeOption = Annotated[
    str | None, typer.Option("--input-shape", help='For such files: shape of an image, such as "1,28,28".')
]


def open_pool(paths: list[Path], architecture: str | None, input_shape: str | None) -> Pool:
    """All files are checked before the first result is computed."""
    source: Path | list[Path] = paths[0] if len(paths) == 1 else list(paths)
    shape = None if input_shape is None else _numbers(input_shape, "--input-shape", int)
    return read_pool(source, architecture=architecture, input_shape=shape)


class OpenedModel(NamedTuple):
    """A network, and what its file says about it."""

    network: nn.Module
    input_shape: tuple[int, ...] | None
    notes: Mapping[str, Any]


def open_model(path: Path, architecture: str | None, input_shape: str | None) -> OpenedModel:
    """A network or ensemble from a file, or the published mix of a pool's folder."""
    if path.is_dir():
        shipped = read_mix(path)
        return OpenedModel(shipped.ensemble, shipped.pool.input_shape, shipped.notes)
    shape = None if input_shape is None else _numbers(input_shape, "--input-shape", int)
    network = load_model(path, architecture=architecture, input_shape=shape)
    try:
        stated = read_metadata(path)
    except CheckpointError:  # a file that some other tool wrote
        return OpenedModel(network, shape, {})
    return OpenedModel(network, stated.input_shape, stated.notes)


def open_data(name: str | None, notes: Mapping[str, Any], split: str, limit: int | None) -> Dataset:
    """The data named, or the one that the pool's manifest names."""
    chosen = name or notes.get("dataset")
    if not isinstance(chosen, str):
        raise InputError(f"--data is missing and the pool names none: expected one of {', '.join(DATASETS)}, or .npz")
    return load_dataset(chosen, split=split).at_most(limit)


def open_threat(eps: str | None, norm: str | None, clip: str, notes: Mapping[str, Any]) -> Threat:
    """The threat named, with gaps filled from the pool's manifest."""
    known = notes.get("threat")
    stated: Mapping[str, Any] = known if isinstance(known, Mapping) else {}
    radius = eps if eps is not None else stated.get("eps")
    if radius is None:
        raise InputError("--eps is missing and the pool states no threat: expected a radius such as 0.1 or 8/255")
    box = None if clip.lower() == "none" else _numbers(clip, "--clip", float)
    return Threat(radius, norm or str(stated.get("norm", "linf")), box)


def set_threads(threads: int | None) -> None:
    """CPU threads of PyTorch for this process."""
    if threads is None:
        return
    if threads < 1:
        raise InputError(f"--threads {threads}: expected at least 1")
    torch.set_num_threads(threads)


def _numbers(text: str, name: str, kind: type) -> tuple[Any, ...]:
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"{name} {text!r}: expected numbers with commas between them") from None
