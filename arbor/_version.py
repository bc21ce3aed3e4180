"""The version, one number for the package, its command and its traces."""

__version__ = "0.1.0"
