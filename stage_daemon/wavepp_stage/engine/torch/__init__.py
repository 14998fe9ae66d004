"""The torch engine and its torch.distributed activation link (DESIGN.md).

Importing this package imports no torch: `facts` reads model folders with the standard library
alone, so that commands start quickly. The daemon's start-up imports `engine` (TorchEngine) and
`gloo_link` (GlooLink, open_store) only when the operator chose them.
"""
