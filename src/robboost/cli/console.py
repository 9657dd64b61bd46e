"""What commands share: progress on stderr, results on stdout, errors in one line."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import nn

from robboost.data import Dataset
from robboost.distributed import Processes, joined
from robboost.errors import InputError
from robboost.journal import resumable
from robboost.mixtures import Progress as Tell
from robboost.observability import resources
from robboost.store import hash_member

__all__ = ["check_writable", "fail", "progress", "resumed", "show", "to_json", "together", "write_text"]


def fail(message: str, code: int) -> NoReturn:
    """One line on stderr, and the exit code."""
    sys.stderr.write(f"robboost: {' '.join(message.split())}\n")
    sys.exit(code)


@contextmanager
def progress() -> Iterator[Tell]:
    """Bars with the time left on stderr; where that is no terminal, one line at the start of each stage."""
    console = Console(stderr=True)
    if not console.is_terminal:
        seen: set[str] = set()

        def line(what: str, _done: int, total: int) -> None:
            if what not in seen:
                seen.add(what)
                console.print(f"{what}: {total} steps", markup=False, highlight=False)

        yield line
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=console) as bars:
        tasks: dict[str, Any] = {}

        def tell(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield tell


@contextmanager
def resumed(command: str, networks: Sequence[nn.Module], data: Sequence[Dataset], **identity: Any) -> Iterator[None]:
    """What the block computes is kept until it is done: interrupted, the same command on the same files continues."""
    known = {
        "command": command,
        "networks": [hash_member(network) for network in networks],
        "data": [images.sha256() for images in data],
        **identity,
    }
    with resumable(known) as journal:
        if journal.before:
            sys.stderr.write(f"continuing: {journal.before} parts of an interrupted run are there\n")
        yield


@contextmanager
def together(alone: torch.device | None = None) -> Iterator[tuple[Processes, Tell | None]]:
    """The processes of the job, one without torchrun (on the device `alone`); the first shows progress for all."""
    with joined(device=str(alone or "cpu")) as processes:
        if processes.rank > 0:
            yield processes, None
            return
        with progress() as tell:
            yield processes, tell


def show(result: Any, as_json: bool) -> None:
    """A result on stdout: its text, or its dictionary as JSON."""
    if as_json:
        values = result if isinstance(result, Mapping) else result.to_dict()
        typer.echo(to_json({**values, "resources": resources().to_dict()}))
    else:
        typer.echo(str(result))


def to_json(values: Mapping[str, Any]) -> str:
    """JSON that every parser reads: NaN and infinity, which it has no words for, become null."""
    return json.dumps(_plain(values), indent=2, allow_nan=False)


def write_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise InputError(
            f"{path}: cannot be written ({error.strerror}); expected a place with space and access"
        ) from None
    finally:
        if temporary.exists():
            temporary.unlink()


def check_writable(path: Path) -> None:
    """Refuses a result file that could not be written, before hours are spent on its content."""
    folder = path.absolute().parent
    while not folder.exists():
        folder = folder.parent
    probe = folder / f".{path.name}.probe"
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}); expected a folder with write access") from None
    if path.is_dir():
        raise InputError(f"{path}: a folder; expected the name of a file")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
