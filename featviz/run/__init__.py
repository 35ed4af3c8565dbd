"""Draw the feature maps of images into a run directory."""
