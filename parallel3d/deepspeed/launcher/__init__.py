"""`deepspeed.launcher`, as libraries name it."""
