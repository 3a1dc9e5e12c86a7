"""Measurements on this host that the predictions use."""
