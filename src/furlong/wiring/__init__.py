"""From a configuration to parts: the only package that names concrete classes."""
