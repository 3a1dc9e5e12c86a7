"""Report of a plan: one HTML page, drawings as SVG, and JSON, all from a PlanResult alone."""

from parallel3d.planner.report.page import drawings, html_page, write_report
