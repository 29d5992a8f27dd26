"""Medusa heads: the modules, and how they are saved and loaded."""

from medusa_kit.heads.checkpoint import load_heads, read_config, save_heads
from medusa_kit.heads.config import HeadsConfig
from medusa_kit.heads.kinds import MedusaHeads

__all__ = ["HeadsConfig", "MedusaHeads", "load_heads", "read_config", "save_heads"]
