"""`report`: a run directory as HTML. `report.py` tells the story."""

from featviz.options.commands import ReportOptions
from featviz.report.report import ReportResult, build_report

__all__ = ["ReportOptions", "ReportResult", "build_report"]
