"""Linear extreme classifiers side by side: the same vectors, the same machine, one process per measurement."""
