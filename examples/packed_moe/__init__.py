"""The pieces of `train_packed_moe.py`: documents, model, training step, modes, checks, checkpoint and report."""
