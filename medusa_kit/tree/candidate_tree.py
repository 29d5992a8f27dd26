"""The shape of a candidate tree: which draft token of which head fills which node.

A path is the tuple of ranks from the root to a node: (0, 2) is the third draft token of the second
head below the best draft token of the first. The root, the base model's own next token, is the
empty path; it is always there and never stored. Node 0 is the root; the other nodes follow by
(depth, path), so every parent comes before its children.

Shapes: N nodes with root.
"""

import json
import pathlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from medusa_kit.errors import StorageError, TreeError, unreadable
from medusa_kit.files import GivenTwiceError, parse_written_json, write_text
from medusa_kit.paths import expanded

Path = tuple[int, ...]

FORMAT = "medusa-kit-tree"
VERSION = 1
RESERVED = ("format", "version", "num_nodes", "choices")


@dataclass(frozen=True)
class CandidateTree:
    """A prefix-closed set of paths ("Medusa", arXiv 2401.10774, §2.1.2), sorted by (depth, path).

    Raises TreeError when a path is empty, holds something other than ranks >= 0, occurs twice, or
    lacks its parent.
    """

    paths: tuple[Path, ...]

    def __post_init__(self) -> None:
        paths = sorted((_checked_path(path) for path in self.paths), key=lambda p: (len(p), p))
        known: set[Path] = {()}
        for path in paths:
            if path in known:
                raise TreeError(f"path {list(path)} occurs twice; each node is listed once")
            if path[:-1] not in known:
                raise TreeError(
                    f"path {list(path)} has no parent: {list(path[:-1])} is missing",
                    hint=f"add {list(path[:-1])}, or remove {list(path)}",
                )
            known.add(path)
        object.__setattr__(self, "paths", tuple(paths))

    @classmethod
    def root_only(cls) -> "CandidateTree":
        """The tree with one node: plain decoding."""
        return cls(())

    @classmethod
    def chain(cls, depth: int) -> "CandidateTree":
        """The best draft token of each of the first `depth` heads, one below the other."""
        if depth < 0:
            raise TreeError(f"a chain of depth {depth} cannot exist; expected a depth >= 0")
        return cls(tuple((0,) * d for d in range(1, depth + 1)))

    @classmethod
    def from_choices(cls, choices: Iterable[Sequence[int]]) -> "CandidateTree":
        """A tree from a list of paths as published for Medusa: `[[0], [1], [0, 0], ...]`, in any
        order."""
        if isinstance(choices, str | bytes | dict) or not isinstance(choices, Iterable):
            raise TreeError(f"choices are {_shown(choices)}; expected a list of paths like [0, 2]")
        return cls(tuple(choices))  # type: ignore[arg-type]  # made tuples by the checks

    def to_choices(self) -> list[list[int]]:
        return [list(path) for path in self.paths]

    @property
    def num_nodes(self) -> int:
        """Nodes, root included: the rows that one verify forward runs over."""
        return len(self.paths) + 1

    @property
    def depth(self) -> int:
        """Length of the longest path, which is the number of heads needed; 0 for the root alone."""
        return len(self.paths[-1]) if self.paths else 0

    @cached_property
    def num_ranks(self) -> int:
        """Draft tokens needed from each head: the highest rank + 1; 0 for the root alone."""
        return max((path[-1] + 1 for path in self.paths), default=0)

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """Node of each node's parent; -1 for the root. Always smaller than the node itself."""
        node_of = {path: node for node, path in enumerate(((), *self.paths))}
        return (-1, *(node_of[path[:-1]] for path in self.paths))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        return (0, *(len(path) for path in self.paths))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Rank of each node among the draft tokens of its head; 0 for the root."""
        return (0, *(path[-1] for path in self.paths))

    @cached_property
    def _children(self) -> tuple[tuple[int, ...], ...]:
        children: list[list[int]] = [[] for _ in range(self.num_nodes)]
        for node, parent in enumerate(self.parents[1:], start=1):
            children[parent].append(node)
        return tuple(tuple(nodes) for nodes in children)

    def children(self, node: int) -> tuple[int, ...]:
        """Nodes right below `node`, by rising rank."""
        return self._children[node]

    def ancestors(self) -> np.ndarray:
        """Bool [N, N]; row i marks the nodes that node i sees: its ancestors and itself."""
        ancestors_NN = np.eye(self.num_nodes, dtype=bool)
        for node, parent in enumerate(self.parents[1:], start=1):
            ancestors_NN[node] |= ancestors_NN[parent]
        return ancestors_NN

    def check_fits(self, num_heads: int, num_ranks: int) -> None:
        """Raise TreeError when the tree needs more heads, or more draft tokens of a head, than
        given."""
        if self.depth > num_heads:
            raise TreeError(
                f"the tree has depth {self.depth}, expected at most {num_heads}, one per head",
                hint="search a tree for these heads, or train more heads",
            )
        if self.num_ranks > num_ranks:
            raise TreeError(
                f"the tree uses rank {self.num_ranks - 1}, expected ranks below {num_ranks}",
                hint="search a tree with fewer ranks, or keep more draft tokens of each head",
            )


def save_tree(tree: CandidateTree, path: str | pathlib.Path, extra: dict[str, Any]) -> None:
    """Write the tree as JSON, with the further fields of `extra` (how it was found).

    Raises TreeError when `extra` uses the name of a field of the format.
    """
    taken = [name for name in RESERVED if name in extra]
    if taken:
        raise TreeError(f"extra field {taken[0]!r} is a field of the tree format itself")
    document = {"format": FORMAT, "version": VERSION, "num_nodes": tree.num_nodes}
    fields = {**document, "choices": tree.to_choices(), **extra}
    lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in fields.items()]
    write_text(expanded(path), "{\n" + ",\n".join(lines) + "\n}\n")


def load_tree(path: str | pathlib.Path) -> tuple[CandidateTree, dict[str, Any]]:
    """(tree, extra fields) as `save_tree` wrote them, or from a file with only a list of paths.

    Raises TreeError, which names the file and the fault.
    """
    try:
        return _tree_of_document(_read_json(expanded(path)))
    except TreeError as error:
        raise TreeError(f"{path}: {error.message}", hint=error.hint) from error


def _read_json(path: pathlib.Path) -> Any:
    try:
        return parse_written_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        if unreadable(error) is StorageError:
            raise StorageError(f"{path}: cannot be read: {error.strerror}") from error
        raise TreeError(f"cannot be read: {error.strerror}") from error
    except GivenTwiceError as error:
        raise TreeError(str(error), hint="keep one of them") from error
    except (ValueError, RecursionError) as error:
        raise TreeError(f"not a JSON file: {error}") from error


def _tree_of_document(document: Any) -> tuple[CandidateTree, dict[str, Any]]:
    if isinstance(document, list):
        return CandidateTree.from_choices(document), {}
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise TreeError(
            f"not a tree file: expected a list of paths, or an object with format {FORMAT!r}"
        )
    if document.get("version") != VERSION:
        raise TreeError(
            f"tree format version {document.get('version')!r}, expected {VERSION}",
            hint="the file was written by another version of medusa-kit",
        )
    tree = CandidateTree.from_choices(document.get("choices"))  # type: ignore[arg-type]
    if document.get("num_nodes") != tree.num_nodes:
        found = document.get("num_nodes")
        raise TreeError(
            f"num_nodes is {found!r}, but the choices make {tree.num_nodes} nodes with the root",
            hint="the file was cut or edited; count the root as a node",
        )
    return tree, {name: value for name, value in document.items() if name not in RESERVED}


def _checked_path(path: Any) -> Path:
    if not isinstance(path, list | tuple):
        raise TreeError(f"path {_shown(path)} is not a list of ranks like [0, 2]")
    if not path:
        raise TreeError(
            "a path is empty; expected at least one rank",
            hint="the root is always there; leave it out of the list",
        )
    for rank in path:
        # A bool is an int to Python; in a file it is a mistake.
        if isinstance(rank, bool) or not isinstance(rank, int | np.integer) or rank < 0:
            raise TreeError(f"path {_shown(path)} holds {rank!r}; expected whole ranks >= 0")
    return tuple(int(rank) for rank in path)


def _shown(value: Any) -> str:
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 60 else text[:57] + "..."
