"""Measurements of attention, spikes and memory, and the report that shows them."""
