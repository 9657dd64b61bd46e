"""All commands, and what becomes of an error: one line, exit code 2 for wrong usage or input."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

import robboost
from robboost.cli import bench, catalogue, demo, ensembles, exports, stores, training
from robboost.cli.console import fail
from robboost.errors import RobBoostError, SoundnessError
from robboost.observability import log_json, profiled, resources

__all__ = ["app", "main"]

app = typer.Typer(
    name="robboost",
    help="Ensembles of neural networks whose robustness is proved.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for part in (demo, training, stores, ensembles, exports, bench, catalogue):
    part.register(app)


# "Wrong usage" of click; some versions of typer carry a click of their own, so it is reached through typer.
_USAGE: type[Exception] = typer.BadParameter.__mro__[1]
_INTERRUPTED = "interrupted: the same command, given again, continues where it stopped"


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"robboost {robboost.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    profile: Annotated[bool, typer.Option("--profile", help="Say on stderr where the time and memory went.")] = False,
    log: Annotated[
        Path | None, typer.Option("--log", help="Append events to this file, one JSON object a line.")
    ] = None,
) -> None:
    del version
    if log is not None:
        context.with_resource(log_json(context.with_resource(log.open("a", encoding="utf-8"))))
    if profile:
        context.with_resource(_profile())


@contextmanager
def _profile() -> Iterator[None]:
    with profiled() as found:
        yield
    peak = resources()
    gpu = "" if peak.gpu is None else f", {peak.gpu / 1e6:.0f} MB on the GPU"
    sys.stderr.write(f"{found}\npeak memory                      {peak.memory / 1e6:.0f} MB{gpu}\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point. Exit codes: 0 success, 1 a contradiction to a proof, 2 wrong usage or input, 130 interrupted."""
    try:
        code = app(args=None if arguments is None else list(arguments), standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        fail(_INTERRUPTED, 130)
    except _USAGE as error:
        fail(error.format_message(), 2)  # type: ignore[attr-defined]
    except SoundnessError as error:
        fail(f"INTERNAL CONTRADICTION: {error}", 1)
    except RobBoostError as error:
        fail(str(error), 2)
    except BrokenPipeError:  # the reader of our output went away: nothing to tell, and no one to tell it to
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        fail(f"{where}{error.strerror or error}; expected a place that can be read and written", 2)
    except MemoryError:
        fail("out of memory: expected less to do at once, so use fewer images (--limit)", 2)
    if code == 130:  # some versions of typer turn Ctrl-C into an exit code, and say nothing
        fail(_INTERRUPTED, 130)
    sys.exit(code if isinstance(code, int) else 0)
