"""One pass over the images, many observers."""
