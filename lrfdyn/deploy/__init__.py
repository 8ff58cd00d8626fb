"""Trained models outside of training."""
