"""One c10d process group over any library of blocking collectives."""
