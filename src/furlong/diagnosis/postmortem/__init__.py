"""What a run died of: told from an exception, and from the folder that a run left."""
