"""What can be wrong with a run: before it starts, while it runs, and after it died."""
