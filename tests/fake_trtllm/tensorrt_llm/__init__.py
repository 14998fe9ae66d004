"""A stand-in for TensorRT-LLM that runs on a CPU: the names and rules of the real package, none of its speed.

Owns nothing of WavePP and knows nothing of it. Put `tests/fake_trtllm` on PYTHONPATH and `import
tensorrt_llm` finds this. It behaves as one of two versions, chosen by FAKE_TRTLLM_VINTAGE; README.md
beside this package lists the other variables. Every rule comes from the reference that the adapter is
written against, not from a run of the real package.
"""

from ._fake import knobs

__version__ = "1.3.0rc26+fake" if knobs.is_rc26() else "1.4.0rc4+fake"
