"""Attention row by row, in the state that it must hold."""
