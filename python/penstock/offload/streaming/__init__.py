"""Inference with weights streamed from storage: models that do not fit into memory."""
