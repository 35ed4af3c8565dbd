"""Find channels that do nothing for some images."""
