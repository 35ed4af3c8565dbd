"""IMAGE arguments to samples, and files to pictures as a person sees them."""
