"""A region in a bottle: AWS's endpoint, metadata and instances on this machine, real but for their owner."""
