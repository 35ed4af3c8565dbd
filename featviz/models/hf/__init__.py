"""Models of the library transformers, from folders as its save_pretrained writes them."""
