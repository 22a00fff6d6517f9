"""A step whose loss or gradient is not finite: who caused it, saved so that it can be run again."""
