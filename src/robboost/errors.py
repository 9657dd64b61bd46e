"""The errors that RobBoost raises, all below one base class.

Every message is one line: the value that was given, what was expected, and what to do about it.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "DataError",
    "DistributedError",
    "DivergedError",
    "InputError",
    "PrecisionError",
    "RobBoostError",
    "SoundnessError",
    "StoreError",
    "UnsupportedOperationError",
]


class RobBoostError(Exception):
    """Base class: `except RobBoostError` catches everything that this library raises on purpose."""


class InputError(RobBoostError, ValueError):
    """An argument has a wrong value, shape, type or name."""


class DataError(RobBoostError):
    """A data set is missing, damaged, or not in the format that was expected."""


class CheckpointError(RobBoostError):
    """A model file is missing, damaged, unsafe to load, or does not fit its architecture."""


class UnsupportedOperationError(RobBoostError):
    """A network holds an operation without a bound rule; nothing is approximated in its place."""


class SoundnessError(RobBoostError):
    """A proved statement was contradicted: by an attack, or by a recomputation in higher precision."""


class PrecisionError(SoundnessError):
    """A large job's numbers disagree with a recomputation in float64: the machine's arithmetic is not to be trusted."""


class StoreError(RobBoostError):
    """A bound store on disk is damaged, incomplete, locked, or holds bounds of something else."""


class DistributedError(RobBoostError):
    """Another process of the job ended, or is out of reach."""


class DivergedError(RobBoostError):
    """Training left the numbers that a network can recover from (NaN, infinity, or an exploding loss)."""
