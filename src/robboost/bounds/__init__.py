"""Bounds of a network over a threat set: intervals, relaxations, backward passes, and the linear margins they prove."""

from robboost.bounds.crosscheck import checked_examples, cross_check
from robboost.bounds.margins import MarginBounds, Options, margin_bounds

__all__ = ["MarginBounds", "Options", "checked_examples", "cross_check", "margin_bounds"]
