"""`deepspeed.launcher.runner`, as accelerate names it."""

# File of a user with lines NAME=VALUE for the environment of all nodes.
DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"
