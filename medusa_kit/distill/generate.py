"""Self-distillation data: prompts in, the base model's own answers out (arXiv 2401.10774, §2.3.2).

Answers are decoded in a batch that prompts join as others finish, by plain decoding, or fetched
from a server. They are appended in the prompts' order, each as soon as those before it are there,
so an interrupted run loses little and goes on where it stopped.
"""

import itertools
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from medusa_kit import console
from medusa_kit.base.model import BaseModel
from medusa_kit.base.origin import BASE_DTYPE
from medusa_kit.base.tokenizer.encoding_digest import ENCODING, encoding_digest
from medusa_kit.base.tokenizer.ids import check_token_ids
from medusa_kit.data.answer_settings import ACTIVATIONS
from medusa_kit.data.chat import encode_row_prompt
from medusa_kit.data.readers import AnswerRow, BadRow, Conversation, Message
from medusa_kit.data.row_keys import refuse_extras
from medusa_kit.data.rows import EXAMPLES
from medusa_kit.distill.answer_file import ASKED, AnswerFile, answer_file, digest_of
from medusa_kit.drafters.plain import PlainDrafter
from medusa_kit.errors import ConfigError, DataError, unknown_value
from medusa_kit.infer.cpu.packed.int8_weights import refuse_int8_weights
from medusa_kit.infer.cpu.verifier import NativeVerifier
from medusa_kit.infer.decode.accept.logits_processing import check_bias_ids
from medusa_kit.infer.decode.request import Request, make_request
from medusa_kit.infer.decode.scheduler import Scheduler
from medusa_kit.infer.mkl_linear import pack_for_rows
from medusa_kit.infer.runners.backends import Backends, prepare_backends
from medusa_kit.loops import loop_start
from medusa_kit.settings.engine import FLOAT32
from medusa_kit.settings.sampling import SamplingParams

GROUP_BATCHES = (
    16  # of prompts that are decoded in one run; the last rows of a run have room beside them
)
HOPELESS_REFUSALS = 8  # refusals before any answer, after which the rows are not to blame
# Fetches one answer: (response ids, finish reason, whether the ids were re-tokenised from text).
Fetch = Callable[[list[Message]], tuple[list[int], str, bool]]


@dataclass
class GenerateReport:
    """What a run added; `skipped`: (row, reason)."""

    written: int = 0
    already_there: int = 0
    changed: int = 0  # rows whose id already has an answer, to another prompt
    tokens: int = 0
    stopped: int = 0  # answers that ended by themselves
    loops: int = 0  # answers that end in one
    skipped: list[tuple[int, str]] = field(default_factory=list)
    unused: set[str] = field(default_factory=set)  # keys of rows that were left out


@dataclass(frozen=True)
class _Task:
    id: str
    row: int
    messages: list[Message]
    prompt_ids: list[int]
    asked: str  # a digest of it
    named: bool  # the id is from the source; other ids contain the row's number
    answered: bool = False


def generate_answers(
    base: BaseModel,
    rows: Iterable[Conversation | AnswerRow | BadRow],
    out_path: Path,
    *,
    max_new_tokens: int = 256,
    batch_size: int = 16,
    sampling: SamplingParams | None = None,
    turns: str = "first",
    on_error: str = "skip",
    earlier: Sequence[Path] = (),
    activations: str = FLOAT32,
) -> GenerateReport:
    """Append the model's answers to `out_path`, going on where an earlier run stopped. `earlier`:
    files of answers that serve too, where they were made in the same way. `activations`: the
    precision of what quantised weights are multiplied by.

    Raises ConfigError when the file holds answers made with other settings, for a lossy acceptance
    rule or rounded weights, for activations that these steps do not have and for a bias on a token
    the model does not have, DataError for a bad
    row with on_error="fail", IncompatibleBaseError for a model that takes no tree (heads would be
    of no use to it), MedusaKitError for a full disk.
    """
    sampling = sampling or SamplingParams()
    if sampling.lossy:
        raise ConfigError(
            "typical acceptance is lossy; expected exact: data holds the model's own answers",
            hint="leave out --acceptance",
        )
    refuse_int8_weights(base, "data holds the model's own answers")
    check_bias_ids(sampling, base.info.vocab_size)
    base.changes()  # the file says of which weights the answers are
    settings = {
        **base.origin,
        BASE_DTYPE: base.info.dtype,
        "max_new_tokens": max_new_tokens,
        "turns": turns,
        "sampling": sampling_record(sampling),
        **({} if activations == FLOAT32 else {ACTIVATIONS: activations}),
    }
    room = base.info.context_length - max_new_tokens
    with answer_file(out_path, settings, earlier) as out:
        report = GenerateReport()
        vocab_size = base.info.vocab_size
        tasks = _tasks(base.tokenizer, rows, turns, on_error, room, vocab_size, out, report)
        tasks = _with_earlier(tasks, out, report, base.stop_token_ids)
        _answer(base, tasks, out, report, max_new_tokens, batch_size, sampling, activations)
    return report


def _answer(
    base: BaseModel,
    tasks: Sequence[_Task],
    out: AnswerFile,
    report: GenerateReport,
    max_new_tokens: int,
    batch_size: int,
    sampling: SamplingParams,
    activations: str,
) -> None:
    # Answers come through the cache and attention of trees.
    backends = prepare_backends(base, activations=activations)
    missing = [task for task in tasks if not task.answered]
    with console.progress("answering", len(tasks), "prompts", done=report.already_there) as bar:
        for task, request in _answered(backends, missing, max_new_tokens, batch_size, sampling):
            assert request.finish_reason is not None
            records = [_record(task, request.token_ids, request.finish_reason, sampling)]
            out.append(records)
            _count(report, records)
            bar.advance(1, f"{report.tokens:,} tokens")


def fetch_answers(
    tokenizer: Any,
    rows: Iterable[Conversation | AnswerRow | BadRow],
    out_path: Path,
    fetch: Fetch,
    settings: dict[str, Any],
    *,
    sampling: SamplingParams,
    concurrency: int = 8,
    turns: str = "first",
    on_error: str = "skip",
) -> GenerateReport:
    """Append a server's answers to `out_path`, going on where an earlier run stopped. `fetch`
    answers one conversation; `concurrency` of them run at once.

    A row that the server refuses (DataError) is skipped or fatal. `settings` (the server's model
    and limits) are kept beside the file and compared with those of a later run.
    """
    record = {
        **settings,
        ENCODING: encoding_digest(tokenizer),
        "turns": turns,
        "sampling": sampling_record(sampling),
    }
    with answer_file(out_path, record) as out:
        report = GenerateReport()
        sent = (_sent(row, turns) for row in rows)
        tasks = _tasks(tokenizer, sent, turns, on_error, None, None, out, report)
        tasks = _with_earlier(tasks, out, report, None)
        _fetch(tasks, out, report, fetch, sampling, concurrency, on_error)
    return report


def _fetch(
    tasks: Sequence[_Task],
    out: AnswerFile,
    report: GenerateReport,
    fetch: Fetch,
    sampling: SamplingParams,
    concurrency: int,
    on_error: str,
) -> None:
    from concurrent.futures import ThreadPoolExecutor

    tasks = [task for task in tasks if not task.answered]
    pool, refused = ThreadPoolExecutor(concurrency), 0
    waiting = [(task, pool.submit(fetch, task.messages)) for task in tasks]
    try:
        with console.progress("fetching", len(tasks), "prompts") as bar:
            for task, answer in waiting:  # in file order, so that a resumed file is the same
                try:
                    ids, reason, again = answer.result()
                except DataError as error:
                    refused += 1
                    hopeless = not out.num_rows and refused == min(len(tasks), HOPELESS_REFUSALS)
                    if on_error == "fail" or hopeless:
                        raise DataError(
                            f"row {task.row}: {error.message}", hint=error.hint
                        ) from error
                    report.skipped.append((task.row, error.message))
                    continue
                extra = {"retokenized": True} if again else {}
                records = [{**_record(task, ids, reason, sampling), **extra}]
                out.append(records)
                _count(report, records)
                bar.advance(1, f"{report.tokens:,} tokens")
    finally:
        pool.shutdown(cancel_futures=True)


def asked_messages(messages: Sequence[Message], turns: str) -> list[Message]:
    """The messages that the model answers: up to the first user turn, or up to the last one.

    Raises DataError for a conversation without a user turn, ConfigError for another `turns`.
    """
    if turns not in ("first", "last"):
        raise unknown_value("turns", turns, ("first", "last"))
    users = [index for index, message in enumerate(messages) if message["role"] == "user"]
    if not users:
        raise DataError("the conversation has no user turn", hint=EXAMPLES)
    prompt = messages[: (users[0] if turns == "first" else users[-1]) + 1]
    return [{k: v for k, v in message.items() if k != "weight"} for message in prompt]


def _sent(row: Conversation | AnswerRow | BadRow, turns: str) -> Conversation | AnswerRow | BadRow:
    """A row that a server is asked with: messages of role and content."""
    if isinstance(row, Conversation):
        try:
            refuse_extras(asked_messages(row.messages, turns), row.tools)
        except DataError as error:
            return BadRow(error.message, row.row, row.source, error.hint)
    return row


def _tasks(
    tokenizer: Any,
    rows: Iterable[Conversation | AnswerRow | BadRow],
    turns: str,
    on_error: str,
    room: int | None,
    vocab_size: int | None,
    out: AnswerFile,
    report: GenerateReport,
) -> list[_Task]:
    """All prompts that can be answered. Those already answered are among them, since the order
    depends on all. `room`: for a prompt's tokens; `vocab_size`: of the base's embeddings."""
    tasks: list[_Task] = []
    seen: set[str] = set()
    first: DataError | None = None  # why the first skipped row was skipped
    for row in rows:
        try:
            if isinstance(row, BadRow):
                raise DataError(row.reason, hint=row.hint)
            if not isinstance(row, Conversation):
                raise DataError("it is an answer already, expected a prompt", hint=EXAMPLES)
            messages = asked_messages(row.messages, turns)
            ids = encode_row_prompt(tokenizer, messages, row.tools)
            if not ids:
                raise DataError("the prompt has no token")
            if vocab_size is not None:
                _check_prompt(ids, vocab_size, tokenizer)
            if room is not None and len(ids) > room:
                raise DataError(f"the prompt has {len(ids)} tokens; there is room for {room}")
        except DataError as error:
            named = DataError(f"{row.source}:{row.row}: {error.message}", hint=error.hint)
            if on_error == "fail":
                raise named from error
            report.skipped.append((row.row, error.message))
            first = first or named
            continue
        identity = row.id or f"{Path(row.source).stem}:{row.row}"
        if identity in seen:  # rows of a source may share an id; answers must not
            identity = _unused(f"{identity}#{row.row}", lambda name: name in seen)
        digest = digest_of(messages, getattr(tokenizer, "chat_template", None), row.tools)
        tasks.append(_Task(identity, row.row, messages, ids, digest, identity == row.id))
        seen.add(identity)
        report.unused.update(row.unused)
    if not tasks:
        reason = f", the first: {first.message}" if first else ""
        raise DataError(
            f"no prompt is left to answer ({len(report.skipped)} skipped{reason})",
            hint=(first and first.hint) or EXAMPLES,
        )
    return _matched(tasks, seen, out, report)


def _check_prompt(ids: Sequence[int], vocab_size: int, tokenizer: Any) -> None:
    """Raises DataError for token ids that the model does not have, since the row is to blame."""
    try:
        check_token_ids(ids, vocab_size, tokenizer)
    except ConfigError as error:
        raise DataError(error.message, hint=error.hint) from error


def _matched(
    tasks: list[_Task], seen: set[str], out: AnswerFile, report: GenerateReport
) -> list[_Task]:
    """The tasks, marked where answered already; ids of other prompts' answers are changed."""
    tasks = [replace(t, answered=out.claim(t.id, t.asked, t.prompt_ids)) for t in tasks]
    for index, task in enumerate(tasks):
        answered = task.answered
        if not answered and not task.named:
            answered = out.claim(task.id, task.asked, task.prompt_ids, any_id=True)
            tasks[index] = replace(task, answered=answered)
        report.already_there += answered
    for index, task in enumerate(tasks):
        if task.answered or not out.has_id(task.id):
            continue
        if task.named or not out.is_claimed(task.id):
            report.changed += 1
            continue
        name = f"{task.id}#{task.row}"
        identity = _unused(name, lambda name: name in seen or out.has_id(name))
        seen.add(identity)
        tasks[index] = replace(task, id=identity)
    return tasks


def _with_earlier(
    tasks: list[_Task], out: AnswerFile, report: GenerateReport, stop_ids: frozenset[int] | None
) -> list[_Task]:
    """The tasks, those marked too that an answer to the same tokens serves which is older."""
    kept = out.keep_earlier([task for task in tasks if not task.answered], stop_ids)
    report.already_there += len(kept)
    return [replace(task, answered=task.answered or task.id in kept) for task in tasks]


def _unused(name: str, used: Callable[[str], bool]) -> str:
    """The name, or the first of name#2, name#3 ... that is not in use."""
    names = itertools.chain([name], (f"{name}#{number}" for number in itertools.count(2)))
    return next(candidate for candidate in names if not used(candidate))


def _answered(
    backends: Backends,
    tasks: Sequence[_Task],
    max_new_tokens: int,
    batch_size: int,
    sampling: SamplingParams,
) -> Iterator[tuple[_Task, Request]]:
    """Answers by plain decoding, in the tasks' order. A group of tasks is decoded at a time, so
    that few answers wait in memory for an earlier, longer one.

    A prompt draws by its own seed, so that its answer is the same in every batch.
    """
    verifier, group = backends.verifier, batch_size * GROUP_BATCHES
    # A system prompt is read once where that leaves every bit as it is.
    reuse = isinstance(verifier, NativeVerifier)
    for start in range(0, len(tasks), group):
        tasks_together = tasks[start : start + group]
        requests = [
            make_request(
                verifier,
                task.prompt_ids,
                replace(sampling, seed=(sampling.seed << 32) + zlib.crc32(task.id.encode())),
                max_new_tokens,
            )
            for task in tasks_together
        ]
        pack_for_rows(verifier.base.own_modules(), min(batch_size, len(requests)))
        waiting = deque(zip(tasks_together, requests, strict=True))
        drafter = PlainDrafter(verifier.base.device)
        scheduler = Scheduler(verifier, reuse_prefixes=reuse)
        for _ in scheduler.run(requests, drafter, batch_size):
            while waiting and waiting[0][1].is_complete:  # others are cut where one has failed
                yield waiting.popleft()


def sampling_record(sampling: SamplingParams) -> dict[str, Any]:
    """Sampling options as rows and the file's settings have them. Newer ones are left out where
    they are not in use."""
    record: dict[str, Any] = {"temperature": sampling.temperature}
    if not sampling.greedy:
        record |= {"top_k": sampling.top_k, "top_p": sampling.top_p, "seed": sampling.seed}
    defaults = asdict(SamplingParams(sampling.temperature, seed=sampling.seed))
    record |= {name: v for name, v in asdict(sampling).items() if v != defaults[name]}
    if sampling.logit_bias:  # JSON's keys are strings
        record["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    return record


def _record(task: _Task, ids: list[int], reason: str, sampling: SamplingParams) -> dict[str, Any]:
    return {
        "id": task.id,
        ASKED: task.asked,
        "prompt_ids": task.prompt_ids,
        "response_ids": ids,
        "finish_reason": reason,
        "sampling": sampling_record(sampling),
    }


def _count(report: GenerateReport, records: Sequence[dict[str, Any]]) -> None:
    report.written += len(records)
    report.tokens += sum(len(record["response_ids"]) for record in records)
    report.stopped += sum(record["finish_reason"] == "stop" for record in records)
    report.loops += sum(loop_start(record["response_ids"]) is not None for record in records)
