"""One run from preflight checks to its end: start-up, run folder, log and outcome."""
