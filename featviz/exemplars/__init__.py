"""Find the images, and the places in them, that excite each channel most."""
