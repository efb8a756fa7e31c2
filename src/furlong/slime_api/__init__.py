"""What functions written for slime import: its names, served by furlong's own parts.

`table` maps slime's modules and names to the functions and classes here and elsewhere in furlong;
`furlong.core.slime_modules` makes them importable as `slime.*`.
"""
