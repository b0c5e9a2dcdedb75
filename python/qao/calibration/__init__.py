"""Calibrated quantization with data: GPTQ and SmoothQuant."""

from .calibrating import METHODS, calibrate

__all__ = ["METHODS", "calibrate"]
