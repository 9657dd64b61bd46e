"""One HTML page, and the figures on it as files, from a comparison."""

from __future__ import annotations

from robboost.report.page import write_report
from robboost.report.study import Study, study

__all__ = ["Study", "study", "write_report"]
