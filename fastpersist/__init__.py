"""fastpersist: checkpoints of PyTorch models at the speed of the disk, never torn, never lost."""

from fastpersist._version import __version__

__all__ = ["__version__"]
