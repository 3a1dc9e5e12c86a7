"""Clusters: their file, its schema, and the graph of devices and links."""
