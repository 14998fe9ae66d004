"""What stands where the original has a CUDA stream: everything is done when a call returns."""

from __future__ import annotations


class CpuStream:
    cuda_stream = 0

    def synchronize(self) -> None:
        """Nothing is under way."""

    def wait_stream(self, stream: object) -> None:
        """Nothing is under way."""
