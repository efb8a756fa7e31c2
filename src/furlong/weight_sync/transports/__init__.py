"""One file per weight transport."""
