"""The MoE router: which experts a token goes to, with what weight, and what balances their load."""
