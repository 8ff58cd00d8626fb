"""Whole models in planned memory."""
