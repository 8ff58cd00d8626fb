"""Models in integers: a short list of exact operations from pixels to logits, which gives the same bits everywhere."""
