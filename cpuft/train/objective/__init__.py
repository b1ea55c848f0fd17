"""What a model is trained for and measured by."""
