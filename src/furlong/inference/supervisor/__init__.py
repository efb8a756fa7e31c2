"""Engine servers of a run: started, watched, replaced and shut down."""
