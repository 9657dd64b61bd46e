"""Networks: the paper's architectures, ensembles, and files."""

from __future__ import annotations

from robboost.models.ensemble import Ensemble

__all__ = ["Ensemble"]
