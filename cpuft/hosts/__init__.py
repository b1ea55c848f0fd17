"""Which machines a run uses, what they are like, and how they are reached."""
