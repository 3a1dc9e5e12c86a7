"""The topology planning tool: the best layouts of a model on a cluster, predicted from what the runtime itself would run."""
