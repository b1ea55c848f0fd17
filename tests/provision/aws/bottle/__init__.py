"""A simulated AWS region with real instances: endpoint, metadata service and instances run on this machine."""
