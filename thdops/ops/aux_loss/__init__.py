"""The load-balancing loss of an MoE router, with a token count that may live on the device."""
