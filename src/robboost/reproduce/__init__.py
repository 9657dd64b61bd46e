"""The paper's tables and figures, each from one command, and the pools that ship."""

from __future__ import annotations

from robboost.reproduce.commands import COMMANDS, Outcome, reproduce
from robboost.reproduce.request import Request

__all__ = ["COMMANDS", "Outcome", "Request", "reproduce"]
