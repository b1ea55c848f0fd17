"""The training step measured: against the Hugging Face Trainer, and against what the matrix products alone take."""
