"""Predicted time and memory of one step of a layout."""
