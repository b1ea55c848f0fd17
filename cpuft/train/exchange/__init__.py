"""How gradients or parameters travel between ranks: see `base.py` for the contract and `table.py` for the choice."""
