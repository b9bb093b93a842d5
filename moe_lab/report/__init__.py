"""Reports: a notebook executed and written as one HTML file that works with the network off."""

from moe_lab.report.execute import CellError
from moe_lab.report.reproduce import Moved, Reproduction, reproduce
from moe_lab.report.run import Report, run, show_progress

__all__ = ["CellError", "Moved", "Report", "Reproduction", "reproduce", "run", "show_progress"]
