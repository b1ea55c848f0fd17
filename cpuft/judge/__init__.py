"""How good a trained model is: baseline, figures that tell where it fails, errors, and comparisons of two runs."""
