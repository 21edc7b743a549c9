"""Batchwright sizes, forms, schedules and runs batches for PyTorch, and backs every choice with a measurement."""

__version__ = "0.1.0"
