"""The registry's entries, one file an op."""
