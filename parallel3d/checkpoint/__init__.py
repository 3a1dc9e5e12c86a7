"""Checkpoints that know no layout: save, load, list, verify."""
