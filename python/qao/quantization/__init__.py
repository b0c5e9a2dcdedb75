"""quantize_ and dequantize_: which layers of a model are replaced, by which modules, and the report.

Nothing is imported here: the command line reads ``report`` before torch is imported.
"""
