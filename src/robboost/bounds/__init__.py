"""Bounds of a network over a threat set: intervals, relaxations, backward passes, and the linear margins they prove."""

from robboost.bounds.margins import MarginBounds, Options, margin_bounds

__all__ = ["MarginBounds", "Options", "margin_bounds"]
