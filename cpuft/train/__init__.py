"""What runs on a rank: data, model, updates, evaluation, checkpoints. The launcher starts it as a process."""
