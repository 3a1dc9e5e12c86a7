"""`deepspeed.checkpoint`, as libraries name it."""
