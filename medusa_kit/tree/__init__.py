"""Candidate trees: shape, rank statistics, search, replay, drawing.

Pure Python and numpy: no torch, no model. Step times are passed in as a plain table. The function
`replay` must be imported from its module, since exported here it would hide the module.
"""

from medusa_kit.tree.candidate_tree import CandidateTree, Path, load_tree, save_tree
from medusa_kit.tree.dynamic import DynamicTree
from medusa_kit.tree.plan import TreePlan, load_plan, save_plan
from medusa_kit.tree.render import render_tree
from medusa_kit.tree.replay import ReplayResult
from medusa_kit.tree.search import SearchResult, best_trees, ranked_paths
from medusa_kit.tree.statistics import MISSING, NOT_AVAILABLE, RankStatistics

__all__ = [
    "MISSING",
    "NOT_AVAILABLE",
    "CandidateTree",
    "DynamicTree",
    "Path",
    "RankStatistics",
    "ReplayResult",
    "SearchResult",
    "TreePlan",
    "best_trees",
    "load_plan",
    "load_tree",
    "ranked_paths",
    "render_tree",
    "save_plan",
    "save_tree",
]
