"""Model files, read without running what they hold."""
