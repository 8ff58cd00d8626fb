"""Integer models as C: kernels that are written by hand, and a writer for the model around them."""
