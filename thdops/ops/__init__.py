"""One folder per op family: `op.py` (public functions, specs), `reference.py`, `kernels*.py` (Triton), `samples.py`."""
