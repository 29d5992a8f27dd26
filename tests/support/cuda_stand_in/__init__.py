"""A stand-in for a CUDA device."""

from support.cuda_stand_in.install import installed
from support.cuda_stand_in.state import Counts, Device, Memory, Wait

__all__ = ["Counts", "Device", "Memory", "Wait", "installed"]
