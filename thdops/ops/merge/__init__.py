"""Merging of partial attention results: `merge_attention`."""
