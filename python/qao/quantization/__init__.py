"""quantize_ and dequantize_: selection and replacement of a model's layers, and the report.

This file imports nothing, because the command line imports ``report`` before torch.
"""
