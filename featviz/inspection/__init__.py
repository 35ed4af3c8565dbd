"""What a model is, without an image: its layers, its cost, its kernels."""
