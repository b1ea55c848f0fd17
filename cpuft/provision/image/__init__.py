"""The golden image: its recipe, and building it."""
