"""Rows and metadata of context-parallel ranks: the device ops of `thdops.context_parallel`."""
