"""Search for the best layout of a model on a cluster."""
