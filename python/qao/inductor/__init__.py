"""The backend of ``torch.compile(model, backend="qao")``: Inductor with graph passes for qao's operators.

backend.py holds the backend and its options, graph_pass.py runs the passes, and each other module is one pass.
"""
