"""Decoding, the page to read first: propose trees, verify them in one forward, accept, commit.

Rows join and leave a batch between steps. Every drafter goes through this loop; plain decoding is
the drafter that proposes the root alone. The root is the base model's own next token: emitted when
it is chosen, committed by the next step.

Shapes: B rows, N nodes of all their trees, D hidden.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Protocol

import torch

from medusa_kit.infer.cuda_graph.group import CapturedGroup, Joining, captured_group, check_alike
from medusa_kit.infer.cuda_graph.runner import GraphRunner
from medusa_kit.infer.draft import Drafter, State, StatelessDrafter, flat_nodes, tell_end
from medusa_kit.infer.group import Group, by_row
from medusa_kit.infer.memory import explain_oom
from medusa_kit.infer.prefixes import HeldPrefixes
from medusa_kit.infer.request import Emitted, Row
from medusa_kit.infer.schedule import Schedule
from medusa_kit.infer.tree_cache import TreeCache
from medusa_kit.infer.tree_step import RaggedScores
from medusa_kit.infer.verifier import Verifier


@torch.inference_mode()
def decode(
    verifier: Verifier,
    drafter: Drafter,
    rows: Sequence[Row],
    graphs: GraphRunner | None = None,
    max_rows: int | None = None,
    lender: "Lender | None" = None,
) -> Iterator[Emitted]:
    """Decode rows until all have finished, at most `max_rows` of them together; yields what each
    step emitted. `graphs`: runs whole steps on the device, where it can. `lender`: has batches of
    earlier requests, which may hold what prompts begin with.

    Raises DeviceMemoryError where an accelerator's memory is too small; a smaller request works.
    """
    max_rows = min(max_rows or len(rows), len(rows))
    num_slots = max(row.num_slots for row in rows) + drafter.num_nodes - 1
    with explain_oom(verifier.base, max_rows, drafter.num_nodes, num_slots):
        prompts = [row.prompt_ids for row in rows]
        lend = lender.borrowed if lender is not None else _new_batch
        with lend(verifier, prompts, max_rows, num_slots, graphs) as batch:
            try:
                for row in rows:
                    batch.add(row, drafter)
                while batch.num_rows:
                    if emitted := batch.step():
                        yield emitted
            except GeneratorExit:  # not read to its end; that is between two steps
                batch.clear()
                raise
            except torch.OutOfMemoryError:
                batch.close()
                if graphs is not None:
                    graphs.forget()
                raise
            finally:
                batch.close()


class Lender(Protocol):
    """Lends batches (kept_batches.py)."""

    def borrowed(
        self,
        verifier: Verifier,
        prompts: Sequence[Sequence[int]],
        max_rows: int,
        num_slots: int,
        graphs: GraphRunner | None,
    ) -> "AbstractContextManager[Batch]":
        """A batch for at most `max_rows` rows at once, which may hold what prompts begin with."""


class Batch:
    """Rows that are decoded together, at most `max_rows` of them. One thread owns it.

    `num_slots`: tokens and nodes that a row may have; more is made room for as rows are added.
    `prompt_budget`: tokens of prompts that are read between two steps while rows run; None: all.
    `graphs`: runs whole steps on the device for rows that it can take, and gives back memory where
    there is too little for prompts. `reuse_prefixes`: what a
    place still holds of an earlier row is not read again for a prompt that begins with it.
    """

    def __init__(
        self,
        verifier: Verifier,
        max_rows: int,
        num_slots: int = 0,
        prompt_budget: int | None = None,
        graphs: GraphRunner | None = None,
        reuse_prefixes: bool = True,
    ) -> None:
        self.verifier, self._graphs, self._reuse = verifier, graphs, reuse_prefixes
        self.cache: TreeCache = verifier.new_cache(max_rows, num_slots)
        self.held = HeldPrefixes(max_rows)
        self._schedule: Schedule[Row] = Schedule(max_rows, prompt_budget)
        self._longest = self._most_nodes = 1
        self._drafters: dict[Row, Drafter] = {}
        self._groups: dict[int, Group] = {}  # rows that run, by their drafter
        self._captured: dict[int, CapturedGroup] = {}  # the same of steps on the device

    @property
    def num_rows(self) -> int:
        """Rows that have not left yet; those that have finished leave with the next step."""
        self._let_go()
        return self._schedule.num_rows

    def add(self, row: Row, drafter: Drafter) -> None:
        """Let a row in as soon as a place is free. Rows with the same drafter draft together."""
        if self._graphs is not None:
            check_alike(drafter, row, self._drafters)
        self._longest = max(self._longest, row.num_slots)
        self._most_nodes = max(self._most_nodes, drafter.num_nodes)  # rows may be padded to these
        if (needed := self._longest + self._most_nodes - 1) > self.cache.num_slots:
            self.cache.grow(needed)
        self._drafters[row] = drafter
        self._schedule.add(row, len(row.prompt_ids))

    def grow(self, num_slots: int, num_places: int) -> None:
        """Make room for longer rows, and for more of them."""
        new = num_places - len(self.cache.lengths)
        self.cache.grow(num_slots, num_places)
        self.held.add_places(new)
        self._schedule.add_places(new)

    def use(self, max_rows: int) -> None:
        """Decode at most so many rows at once from now on."""
        self._schedule.max_rows = max_rows

    def clear(self) -> None:
        """Cancel every row; what they hold stays for others."""
        for row in self._drafters:
            self.cancel(row)
        self._let_go()

    def close(self) -> None:
        """Give back the steps that were lent, whatever has gone wrong; the batch is over if there
        were any."""
        for group in self._captured.values():
            group.give_back()

    def cancel(self, row: Row) -> None:
        """End a row here; it keeps what it has emitted."""
        row.finish_reason = row.finish_reason or "cancelled"

    @torch.inference_mode()
    def step(self) -> Emitted:
        """Read what is due of prompts, then verify a tree for each row that runs. Rows whose first
        token this step chose are verified by the next one where none ran before."""
        self._let_go()
        ran = self._runs
        emitted = self._read_prompts()
        if self._runs and (ran or not emitted):
            emitted += self._run_captured()
            if self._groups:
                emitted += self._verify_trees()
        return emitted

    @property
    def _runs(self) -> bool:
        return bool(self._groups or self._captured)

    def _let_go(self) -> None:
        """Rows that have finished leave; their drafters hear what has become of them."""
        gone = [row for row in self._drafters if row.finish_reason is not None]
        if not gone:
            return
        for key, captured in list(self._captured.items()):
            captured.let_go()
            if captured.is_empty:
                del self._captured[key]
        for row in gone:
            if (place := self._schedule.leave(row)) is not None:
                text = [*row.prompt_ids, *row.token_ids]
                self.held.leave(place, text[: self.cache.lengths[place]])
        for key, group in list(self._groups.items()):
            if any(row.finish_reason is not None for row in group.rows):
                group.let_go()
            if not group.rows:
                del self._groups[key]
        for drafter in {id(self._drafters[row]): self._drafters[row] for row in gone}.values():
            ended = [row for row in gone if self._drafters[row] is drafter and row.is_complete]
            tell_end(drafter, [row.token_ids for row in ended])
        for row in gone:
            del self._drafters[row]

    def _read_prompts(self) -> Emitted:
        """The first token of each row whose prompt has been read to its end."""
        for row, _ in self._schedule.admit(self._place_for):
            on_device = self._graphs and self._graphs.may_take(self._drafters[row], row)
            by = self._graphs if on_device and self._graphs else self.verifier
            row.begin(by.steps_run_by, by.attention)
        emitted: Emitted = []
        left = self._schedule.prompt_budget if self._runs else None
        while left is None or left > 0:
            most = self.verifier.prompt_chunk(1)
            pieces = self._schedule.pieces(most if left is None else min(most, left))
            if not pieces:
                break
            left = None if left is None else left - sum(one.end - one.start for one in pieces)
            places = [piece.place for piece in pieces]
            texts = [piece.key.prompt_ids[piece.start : piece.end] for piece in pieces]
            read = partial(self.verifier.read_prompts, self.cache, places, texts)
            hidden_BD, logits_BV = self._graphs.with_room(read) if self._graphs else read()
            for index, piece in enumerate(pieces):
                if piece.is_last:
                    row = piece.key
                    root = row.chooser.choose(logits_BV[index], row.prompt_ids)
                    if row.counts_near_ties:
                        scores = RaggedScores(hidden_BD, logits_BV[index : index + 1])
                        row.near_ties += int(scores.near_ties(row.rounding_tolerance))
                    emitted.append((row, row.take([root])))
                    self._begin(row, root, hidden_BD[index : index + 1])
        return emitted

    def _place_for(self, row: Row, free: Sequence[int]) -> tuple[int, int]:
        """(where to put a row, tokens of its prompt that the cache holds there)."""
        if not self._reuse:
            self.cache.keep_first(min(free), 0)
            return min(free), 0
        # Between steps the cache holds exactly the committed tokens of a row that runs.
        running = {self._schedule.place_of(one): text for one, text in self._texts().items()}
        start = self.held.start(row.prompt_ids, free, running)
        if start.source is not None:
            self.cache.copy_first(start.source, start.place, start.length)
        else:
            self.cache.keep_first(start.place, start.length)
        row.num_cached = start.length
        return start.place, start.length

    def _texts(self) -> dict[Row, list[int]]:
        """What the cache holds of the rows that run."""
        texts = {row: row.prompt_ids for one in self._captured.values() for row in one.rows}
        for group in self._groups.values():
            texts.update(zip(group.rows, group.state.tokens, strict=True))
        return texts

    def _begin(self, row: Row, root: int, hidden_1D: torch.Tensor) -> None:
        self._schedule.begin(row)
        if row.finish_reason is not None:  # its first token was its last
            return
        state = State([list(row.prompt_ids)], [root], hidden_1D, [row.chooser])
        joining = Joining(row, self._schedule.place_of(row), state)
        drafter, key = self._drafters[row], id(self._drafters[row])
        split = key in self._groups and not isinstance(drafter, StatelessDrafter)
        if self._graphs is None or split or not self._graphs.may_take(drafter, row):
            self._join_group(joining)
            return
        if key not in self._captured:
            self._captured[key] = captured_group(self._graphs, drafter, self.cache)
        self._captured[key].add(joining)

    def _join_group(self, joining: Joining) -> None:
        """Let a row join whose trees are verified here."""
        row, drafter = joining.row, self._drafters[joining.row]
        row.steps_run_by, row.attention = self.verifier.steps_run_by, self.verifier.attention
        self._groups.setdefault(id(drafter), Group(drafter)).add(row, joining.state)

    def _run_captured(self) -> Emitted:
        """A step of the rows whose steps run whole on the device."""
        emitted: Emitted = []
        for key, group in list(self._captured.items()):
            for joining in group.prepare():
                self._join_group(joining)
            if group.is_empty:
                del self._captured[key]
            else:
                emitted += group.step()
        return emitted

    def _verify_trees(self) -> Emitted:
        groups = list(self._groups.values())
        drafts = [group.propose() for group in groups]
        rows = [row for group in groups for row in group.rows]
        places = [self._schedule.place_of(row) for row in rows]
        nodes = flat_nodes(drafts)
        scores = self.verifier.score_trees(self.cache, nodes, places)
        scored = by_row(nodes, scores, rows)
        kept, emitted, first = list[list[int]](), list(), 0
        for group, draft in zip(groups, drafts, strict=True):
            own = scored[first : first + len(group.rows)]
            first += len(own)
            step = group.accept(draft, own, self._last_position)
            kept += [[0, *path] for path in step.paths]
            emitted += group.go_on(step, own)
        self.cache.commit(kept, places)
        for row, padding in zip(rows, self.verifier.num_padding(nodes.counts), strict=True):
            row.num_padding += padding
        return emitted

    @property
    def _last_position(self) -> int:
        return self.verifier.base.info.context_length - 1


@contextmanager
def _new_batch(
    verifier: Verifier,
    prompts: Sequence[Sequence[int]],
    max_rows: int,
    num_slots: int,
    graphs: GraphRunner | None,
) -> Iterator[Batch]:
    yield Batch(verifier, max_rows, num_slots, graphs=graphs, reuse_prefixes=False)
