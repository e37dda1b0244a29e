"""The released checkpoint format: its files, its names, and both directions between them and the parameters."""
