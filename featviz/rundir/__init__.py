"""The run directory: what its files hold (`schema`), and how they are read back (`read`)."""
