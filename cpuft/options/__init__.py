"""Every option once: fields of frozen dataclasses become flags, help, YAML keys and a worker's arguments."""
