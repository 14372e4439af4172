"""Padding of packed tensors: where it is, how to zero it, and the metadata around it."""
