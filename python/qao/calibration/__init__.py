"""Quantizers that look at data."""

from .calibrating import METHODS, calibrate

__all__ = ["METHODS", "calibrate"]
