"""cpuft: fine-tune transformers on a cluster of CPU hosts, and show honestly how much faster N hosts are than one."""

__version__ = "0.1.0"
