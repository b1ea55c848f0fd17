"""The fast path: cheaper layers, dropout, embedding and optimizer for a loaded model, patched in from outside."""
