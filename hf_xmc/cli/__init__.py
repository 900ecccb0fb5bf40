"""The command `hf-xmc`."""
