"""How time, size, memory and latency grow from ten thousand to one million labels, on synthetic data."""
