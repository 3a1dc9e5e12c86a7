"""Report of a plan: one HTML page, drawings as SVG, and JSON, all from a PlanResult alone."""

from parallel3d.planner.report.page import differences, drawings, html_page, write_report
