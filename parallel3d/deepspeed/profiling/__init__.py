"""`deepspeed.profiling`, as scripts name it."""
