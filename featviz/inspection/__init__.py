"""A model without an image: a list of its layers, the cost of a forward pass, its
kernels."""
