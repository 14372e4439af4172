"""What is counted and lost about a router's choices, besides the aux loss: token counts, z-loss, sequence losses, expert bias."""
