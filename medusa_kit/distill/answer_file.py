"""The file that answers are appended to. Runs can go on with it, and it never mixes two settings.

FILE.meta.json beside FILE has the settings that its rows were made with. It is written with the
first row, so a run that fails earlier leaves neither file. A row holds a digest of what was asked,
since another file of prompts may give the same id to another prompt. An answer belongs to one
prompt of a run: the one with its id, or else one without an id of its own that asks the same. Rows
that were made when text was tokenized differently count where the prompt's tokens are the same
(earlier_answers.py).

After a run the file holds the answers to its prompts and no others: rows that belong to none of
them, of another file of prompts or of ones that were edited since, move to FILE.earlier.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from medusa_kit import console
from medusa_kit.base.fingerprint import OLD_NOTE, Match, compare
from medusa_kit.base.origin import BASE, BASE_DTYPE, CONFIG, tell_unknown
from medusa_kit.base.origin import compare as compare_origins
from medusa_kit.base.tokenizer.encoding_digest import ENCODING
from medusa_kit.data.answer_digests import FORM, check_rows, parts_of, with_origin
from medusa_kit.data.answer_settings import (
    ACTIVATIONS,
    SERVED,
    activations_in,
    compared_rows,
    read_settings,
    settings_path,
    tell_doubtful,
    with_form,
    write_settings,
)
from medusa_kit.data.readers import Message
from medusa_kit.distill.earlier_answers import (
    EarlierAnswers,
    Prompt,
    earlier_files,
    put_aside,
    set_aside,
)
from medusa_kit.errors import ConfigError, DataError, MedusaKitError
from medusa_kit.files import atomic_write, link_target, parse_json
from medusa_kit.outputs import check_file
from medusa_kit.paths import expanded
from medusa_kit.process_lock import process_lock

ASKED = "asked"  # a row's digest of what was asked
SAID_LATER = (CONFIG, BASE_DTYPE)  # which earlier versions did not write
OTHER_ROWS = (
    "remove these rows, and their prompts are answered again, or choose another output file"
)


def digest_of(messages: Sequence[Message], chat_template: Any, tools: Any = None) -> str:
    """A digest of what was asked. Token ids are not in it: templates may write the date."""
    text = json.dumps([list(messages), chat_template, *([tools] if tools else [])], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def digest_of_ids(prompt_ids: Sequence[int]) -> str:
    """The same for a prompt of which the tokens alone are known."""
    return hashlib.sha256(json.dumps(list(prompt_ids)).encode()).hexdigest()[:16]


def check_answer_file(path: Path, option: str = "--output") -> None:
    """Raises ConfigError, before anything is loaded, for a place where no answers can be written,
    and where they would be added to, or replace, what is no file of answers. `option`: what names
    it."""
    check_file(path, option)
    described = read_settings(path)
    if path.is_file() and path.stat().st_size and described is None:
        raise _not_described(path)
    if described is not None and not described.keys() & {"max_new_tokens", SERVED}:
        raise ConfigError(
            f"{settings_path(path)} does not say how answers were made, and would be replaced",
            hint="choose another output file",
        )
    if described is not None and path.is_file():
        compared_rows(path, described, OTHER_ROWS)


def _not_described(path: Path) -> ConfigError:
    return ConfigError(
        f"{path} exists, but {settings_path(path).name} is missing, so it is unknown how its "
        "rows were made",
        hint="choose another output file",
    )


@contextlib.contextmanager
def answer_file(
    path: Path, settings: dict[str, Any], earlier: Sequence[Path] = ()
) -> Iterator["AnswerFile"]:
    """The file, for one run at a time. `earlier`: files whose answers serve too.

    Raises ConfigError, naming who, while another writes to it, MedusaKitError where nothing can be
    written, and what AnswerFile raises.
    """
    path = expanded(path)
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; expected a file to write answers to")

    def refusal(who: str) -> ConfigError:
        return ConfigError(
            f"{path} is being written to by another run{who}",
            hint="wait for its end or stop it, or choose another output file",
        )

    with contextlib.ExitStack() as stack:
        try:
            file = link_target(path)
            file.parent.mkdir(parents=True, exist_ok=True)  # errors before an hour of answers
            lock, holder = (file.with_name(f".{file.name}.{kind}") for kind in ("lock", "json"))
            stack.enter_context(process_lock(lock, holder, refusal, lambda: not file.is_file()))
        except OSError as error:
            raise MedusaKitError(f"cannot write to {path}: {error.strerror}") from error
        yield AnswerFile(path, settings, earlier)


class AnswerFile:
    """Rows that are there already count as done. A half-written last line is cut off."""

    def __init__(self, path: Path, settings: dict[str, Any], earlier: Sequence[Path] = ()) -> None:
        """Raises ConfigError when the file was made with other settings, DataError when broken."""
        self.path = Path(path)
        self._meta = settings_path(self.path)
        self._settings = with_form(settings)
        self._ids: set[str] = set()
        self._claimed: set[str] = set()  # ids of answers that belong to a prompt of this run
        self._kept: set[int] = set()  # their rows, counted from 0
        # By what was asked, (id, row) of others.
        self._free: dict[str | tuple[int, ...], list[tuple[str, int]]] = {}
        self.num_rows = 0
        self._stored: dict[str, Any] | None = None  # settings of the rows that are there
        self._outdated: dict[str, Any] | None = None  # settings, where tokens were others
        self._earlier = EarlierAnswers()
        if self.path.is_file() and self.path.stat().st_size:
            stored = self._check_settings(settings)
            whole_lines(self.path)
            tell_doubtful(self.path, compared_rows(self.path, stored, OTHER_ROWS))
            if stored.get(ENCODING) == settings.get(ENCODING):
                self._stored = stored
                self._read(self.path, self._remember)
            else:
                self._outdated = stored
                self._read(self.path, self._earlier.add)
        for path in [*earlier_files(link_target(self.path)), *earlier]:
            described = read_settings(path) or {}
            if not _differing(settings, described):
                rows = check_rows(path, described)
                tell_doubtful(path, rows)
                self._read(path, self._earlier.add, {*rows.doubtful})

    def claim(
        self, identity: str, digest: str, prompt_ids: list[int], any_id: bool = False
    ) -> bool:
        """Whether there is an answer to this under this id, or `any_id`, that belongs to no other
        prompt yet. `digest`: of what is asked.

        Rows of an older version say what was asked by prompt_ids.
        """
        for key in (digest, tuple(prompt_ids)):
            found = self._free.get(key, [])
            same = [index for index, (other, _) in enumerate(found) if other == identity]
            if found and (any_id or same):
                other, row = found.pop(same[0] if same else 0)
                self._claimed.add(other)
                self._kept.add(row)
                return True
        return False

    def keep_earlier(self, prompts: Sequence[Prompt], stop_ids: Collection[int] | None) -> set[str]:
        """Ids of those of the prompts, not answered yet, that an answer serves which was made when
        text was tokenized differently, or for another run. These answers become rows of this
        file; what else there was in it is set aside."""
        self._set_others_aside()
        picked = list(self._earlier.pick(prompts, stop_ids))
        file, then = link_target(self.path), self._outdated
        try:
            aside = None if then is None else set_aside(file, then)
        except OSError as error:
            raise MedusaKitError(f"{self.path} cannot be renamed: {error.strerror}") from error
        if picked:
            claims = [{"id": prompt.id, ASKED: prompt.asked} for prompt, _ in picked]
            self.append([row | new for (_, row), new in zip(picked, claims, strict=True)])
        if aside is not None and self._earlier.all_used:
            aside.unlink()
            settings_path(aside).unlink()
        elif aside is not None:
            console.note(
                f"{self.path} was made with another tokenizer or chat template, or does not say "
                f"with which: {len(picked)} of its answers serve prompts whose tokens are the "
                f"same now, other prompts are answered again. As it was, the file is {aside}"
            )
        return {prompt.id for prompt, _ in picked}

    def _set_others_aside(self) -> None:
        """Leave only the rows that belong to this run's prompts."""
        if self._stored is None or len(self._kept) == self.num_rows:
            return
        file, lines = link_target(self.path), whole_lines(self.path).splitlines()
        others = [line for row, line in enumerate(lines) if row not in self._kept]
        new = [line for line in others if not self._earlier.has(parse_json(line))]
        try:
            where = f"in {put_aside(file, new, self._stored)}" if new else "there already"
            with atomic_write(file) as temporary:
                kept = (lines[row] + b"\n" for row in sorted(self._kept))
                temporary.write_bytes(b"".join(kept))
            if not self._kept:
                file.unlink()
                self._meta.unlink(missing_ok=True)
        except OSError as error:
            raise MedusaKitError(f"cannot write {self.path}: {error.strerror}") from error
        self.num_rows = len(self._kept)
        console.note(
            f"{self.path} held {len(others)} answers to other prompts than these: they are {where}"
        )

    def has_asked(self, digest: str) -> bool:
        """Whether a row says by this digest what was asked."""
        return digest in self._free

    def has_id(self, identity: str) -> bool:
        return identity in self._ids

    def is_claimed(self, identity: str) -> bool:
        return identity in self._claimed

    def append(self, records: Sequence[dict[str, Any]]) -> None:
        """Write rows through to the disk. Raises MedusaKitError when it is full."""
        before = self.path.stat().st_size if self.path.is_file() else 0
        parts = parts_of((self._stored if before else None) or self._settings)
        text = "".join(json.dumps(with_origin(record, parts)) + "\n" for record in records)
        try:
            if not before:
                self._stored = self._settings
                write_settings(self.path, self._settings)
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            if not before:
                self.path.unlink(missing_ok=True)
                self._meta.unlink(missing_ok=True)
            else:
                os.truncate(self.path, before)  # shrinking needs no space
            raise MedusaKitError(
                f"cannot write to {self.path}: {error.strerror}; {self.num_rows} rows are safe",
                hint="make room, then run the same command again to resume",
            ) from error
        for record in records:
            self._free.setdefault(record[ASKED], [])  # known, and nobody's to claim
        self.num_rows += len(records)

    def _remember(self, record: dict[str, Any]) -> None:
        key = record[ASKED] if ASKED in record else tuple(record["prompt_ids"])
        self._free.setdefault(key, []).append((str(record["id"]), self.num_rows))
        self._ids.add(str(record["id"]))
        self.num_rows += 1

    def _check_settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The settings that are there. Raises ConfigError where they are others."""
        stored = read_settings(self.path)
        if stored is None:
            raise _not_described(self.path)
        if differing := _differing(settings, stored):
            raise ConfigError(
                f"{self.path} holds answers made with other settings (now ≠ then): "
                + "; ".join(differing),
                hint="choose another output file",
            )
        if _is_older(settings, stored):
            console.note(f"{self._meta}: {OLD_NOTE}")
        tell_unknown(self._meta, [key for key in SAID_LATER if key in settings.keys() - stored])
        return stored

    def _read(
        self,
        path: Path,
        remember: Callable[[dict[str, Any]], None],
        without: Collection[int] = (),
    ) -> None:
        """Calls `remember` with each row but those `without`, numbered from 1. Raises DataError."""
        for number, line in enumerate(whole_lines(path).splitlines(), start=1):
            if number in without:
                continue
            try:
                remember(parse_json(line))
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(f"{path}:{number} is no answer row: {error}") from error


def _differing(now: dict[str, Any], then: dict[str, Any]) -> list[str]:
    """Each setting that is another, but how text is encoded. Earlier versions wrote neither
    config nor dtype."""
    said = compare_origins(then, {key: now.get(key) for key in SAID_LATER})
    now, then = ({**one, ACTIVATIONS: activations_in(one)} for one in (now, then))
    return [f"{key}: {here!r} ≠ {there!r}" for key, (there, here) in said.other.items()] + [
        f"{key}: {now.get(key)!r} ≠ {then.get(key)!r}"
        for key in sorted({*now, *then} - {ENCODING, FORM, *SAID_LATER})
        if now.get(key) != then.get(key) and not (key == BASE and _same_base(now, then))
    ]


def _same_base(now: dict[str, Any], then: dict[str, Any]) -> bool:
    return compare(now.get(BASE), then.get(BASE)) in (Match.SAME, Match.OLD)


def _is_older(now: dict[str, Any], then: dict[str, Any]) -> bool:
    """Whether `then` names the base by a fingerprint of version 1."""
    return compare(now.get(BASE), then.get(BASE)) is Match.OLD


def whole_lines(path: Path) -> bytes:
    """What the file holds, after a half-written last line, as a crash leaves it, was cut off."""
    raw = path.read_bytes()
    whole = raw.rfind(b"\n") + 1
    if whole < len(raw):
        console.warn(f"{path}: the last line was cut off; it is dropped")
        os.truncate(path, whole)
    return raw[:whole]
