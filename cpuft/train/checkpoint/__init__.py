"""What a run leaves: the trained model at its end; until then checkpoints, from which it can go on."""
