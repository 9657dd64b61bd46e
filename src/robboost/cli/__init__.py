"""The command line: `robboost COMMAND`. The only part of RobBoost that prints."""

from __future__ import annotations

from robboost.cli.application import main

__all__ = ["main"]
