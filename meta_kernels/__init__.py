"""The contract of each op, torch only: `check_*` (legal inputs, error wording) and `fake_*` (shapes, dtypes, strides, device).

Nothing here imports thdops or triton, so that contracts can be read, tested and reused without either.
"""
