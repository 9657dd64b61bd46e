"""All commands, and what becomes of an error: one line, exit code 2 for wrong usage or input."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import click
import typer

import robboost
from robboost.cli import catalogue, demo, ensembles
from robboost.cli.console import fail
from robboost.errors import RobBoostError, SoundnessError

__all__ = ["app", "main"]

app = typer.Typer(
    name="robboost",
    help="Ensembles of neural networks whose robustness is proved.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for part in (demo, ensembles, catalogue):
    part.register(app)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"robboost {robboost.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    del version


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point. Exit codes: 0 success, 1 a contradiction to a proof, 2 wrong usage or input, 130 interrupted."""
    try:
        code = app(args=None if arguments is None else list(arguments), standalone_mode=False)
    except click.exceptions.Abort:
        fail("interrupted: the same command continues from what is saved, where it saves", 130)
    except click.ClickException as error:
        fail(error.format_message().replace("\n", " "), 2)
    except SoundnessError as error:
        fail(f"INTERNAL CONTRADICTION: {error}", 1)
    except RobBoostError as error:
        fail(str(error), 2)
    except BrokenPipeError:  # the reader of our output went away: nothing to tell, and no one to tell it to
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except KeyboardInterrupt:
        fail("interrupted: the same command continues from what is saved, where it saves", 130)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        fail(f"{where}{error.strerror or error}; expected a place that can be read and written", 2)
    except MemoryError:
        fail("out of memory: expected less to do at once, so use fewer images (--limit)", 2)
    sys.exit(code if isinstance(code, int) else 0)
