"""DeepSpeed's names and import paths; aliases.py has the table of its modules."""
