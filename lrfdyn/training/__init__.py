"""Training: the loop, and files that are whole or absent."""
