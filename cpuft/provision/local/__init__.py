"""A cluster of network namespaces on this machine."""
