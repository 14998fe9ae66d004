"""The TensorRT-LLM engine. Never executed against the real package; see DESIGN.md, section "The trtllm engine"."""
