"""What a run learns: see `base.py` for the contract and `table.py` for the objective of each kind of task."""
