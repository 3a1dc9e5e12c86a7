"""Failures: all ranks agree which rank is at fault, report it once, and end."""
