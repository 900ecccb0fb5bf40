"""Folder that `evaluate.load` reads; it can be uploaded as a metric Space as it is."""
