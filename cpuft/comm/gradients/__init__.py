"""How gradients and parameters travel in fewer bytes."""
