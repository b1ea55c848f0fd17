"""The options of the commands as dataclasses, one module per group of options; each is defined once, as a field."""
