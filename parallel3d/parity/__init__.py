"""Check whether a layout computes what one process computes in plain PyTorch, as `p3d check` does."""

from parallel3d.config.layout import PartialLayout
from parallel3d.models.user_model import Subject
from parallel3d.parity.check import Report, check
from parallel3d.parity.settings import Settings
