"""The report of a plan: one HTML page, drawings as SVG, and JSON, all from a PlanResult alone."""

from parallel3d.planner.report.files import memory_svg, timeline_svg, to_json, trade_off_svg, write_report
from parallel3d.planner.report.page import html_page

__all__ = ["html_page", "memory_svg", "timeline_svg", "to_json", "trade_off_svg", "write_report"]
