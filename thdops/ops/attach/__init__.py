"""attach_loss: hanging a loss on a tensor whose gradient passes by."""
