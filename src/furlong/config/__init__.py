"""Flags, their checks, and the functions that users name in them. Imports no torch.

`load(argv)` gives the configuration of a run with the source of every value, or a ConfigError with every problem.
"""

from furlong.config.checks.validate import validate
from furlong.config.command_line import Resolved, argv_from_config, load, parse
from furlong.config.sections import Config

__all__ = ["Config", "Resolved", "argv_from_config", "load", "parse", "validate"]
