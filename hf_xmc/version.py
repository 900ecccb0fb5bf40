"""The version of the package, apart so that it can be read without importing anything else."""

__version__ = "0.2.0.dev0"
