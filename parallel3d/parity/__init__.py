"""Whether a layout computes what one process computes in plain PyTorch: the work behind `p3d check`."""

from parallel3d.config.layout import PartialLayout
from parallel3d.parity.check import Settings, check
from parallel3d.parity.report import Report
from parallel3d.user_model import Subject

__all__ = ["PartialLayout", "Report", "Settings", "Subject", "check"]
