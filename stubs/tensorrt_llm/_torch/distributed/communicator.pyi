from typing import Any

# PPCommTorch or PPCommNCCL, or whatever has their send and recv; None before the first load.
_pp_comm: Any
