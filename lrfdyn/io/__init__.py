"""Weights, model folders, the hub, and what a path or name stands for."""
