"""The run page: `furlong view RUN` serves what a run has recorded to a browser, and writes it to one file."""
