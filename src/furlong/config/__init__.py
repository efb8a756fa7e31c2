"""Flags, their checks, and loading of user functions. Imports no torch.

`load(argv)` returns the configuration of a run and the source of every value, or raises ConfigError with every problem.
"""

from furlong.config.checks.validate import validate
from furlong.config.command_line import Resolved, argv_from_config, load, parse
from furlong.config.sections import Config

__all__ = ["Config", "Resolved", "argv_from_config", "load", "parse", "validate"]
