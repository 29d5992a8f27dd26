"""`medusa-kit generate`: answer one prompt, or a file of them."""

import itertools
import json
import shlex
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer

from medusa_kit import console
from medusa_kit.cli import engine_options, options
from medusa_kit.cli.chat import notes
from medusa_kit.cli.chat import sampling as chat_sampling
from medusa_kit.data.text_files import FILE_KINDS, PIPE, PIPED
from medusa_kit.errors import UsageError
from medusa_kit.garbage import no_search
from medusa_kit.settings.sampling import ANSWER_TOKENS

SHOWN = 60  # characters of a prompt


@options.with_sampling(temperature_of_model=True)
@engine_options.with_engine(argument=False)
def generate(
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The prompt; or give --prompts.")
    ] = None,
    prompts: Annotated[str | None, options.prompts_option()] = None,
    loading: engine_options.Loading = engine_options.GIVEN,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_new_tokens: options.MaxNewTokens = ANSWER_TOKENS,
    sampling: options.Sampling = options.GIVEN,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be repeated.")] = None,
    batch_size: Annotated[int, typer.Option(help="Prompts decoded together.")] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON line for each answer, with statistics.")
    ] = False,
) -> None:
    """Answer one prompt, or a file of them: text or JSON lines with statistics on stdout."""
    if (prompt is None) == (prompts is None):
        raise UsageError(
            "give either a prompt or --prompts, and not both",
            hint='medusa-kit generate "Why is the sky blue?", or --prompts FILE',
        )
    if prompt is not None and (named := _named(prompt)):
        raise UsageError(
            f"the prompt {prompt!r} is the name of {named}",
            hint=f"--prompts {shlex.quote(prompt)} answers the prompts in it; to ask about the "
            "name, write a sentence",
        )
    if batch_size < 1:
        raise UsageError(f"batch size {batch_size} is out of range; expected 1 or more")
    with no_search():
        import medusa_kit.engine.load
        from medusa_kit.data.without_template import tell_template
        from medusa_kit.engine.before_loading import check_bias
        from medusa_kit.infer.decode.drafter import first_reason
        from medusa_kit.settings.sampling import SamplingParams

    conversations = _prompts(prompt, prompts, system)
    check_bias(loading["model"], loading.get("revision"), SamplingParams.checked(sampling))
    engine = medusa_kit.load(**loading)
    tell_template(engine.base.tokenizer, engine.base.info.name)
    chosen, origin = chat_sampling.choose(sampling, False, engine.base.generation_config)
    if origin:
        console.note(chat_sampling.describe(chosen, origin))
    number = itertools.count(1)
    for start in range(0, len(conversations), batch_size):
        batch = conversations[start : start + batch_size]
        results = engine.generate(
            batch, max_new_tokens=max_new_tokens, stop=stop, batch_size=batch_size, **chosen
        )
        for messages, result in zip(batch, results, strict=True):
            if prompts is not None:
                console.note(_label(next(number), messages))
            typer.echo(_as_json(messages, result) if as_json else result.text, color=True)
            stats = result.stats
            console.note(
                f"{stats.new_tokens} tokens, {stats.tokens_per_second:.1f} tokens/s, "
                f"acceptance length {stats.acceptance_length:.2f} ({stats.drafter})"
                f"{notes.rule_note(stats)}"
            )
            if reason := first_reason(stats.drafter_notes):
                console.note(reason)


def _label(number: int, messages: Any) -> str:
    """The prompt's number and beginning, before its answer."""
    from medusa_kit.data.rows import text_of

    asked = " ".join(text_of(messages[-1]["content"]).split()) if messages else ""
    return f"prompt {number}: {textwrap.shorten(asked, SHOWN, placeholder=' …')}"


def _named(prompt: str) -> str | None:
    """What it names, where it is no sentence. A prompt may be longer than a name can be."""
    if prompt == PIPE:
        return PIPED
    try:
        if Path(prompt).is_file():
            return "a file"
    except (OSError, ValueError):
        return None
    named = prompt.lower().endswith(FILE_KINDS) and len(prompt.split()) == 1
    return "a file that is not there" if named else None


def _prompts(prompt: str | None, source: str | None, system: str | None) -> list[Any]:
    from medusa_kit.data.readers import Conversation, read_rows
    from medusa_kit.data.row_keys import refuse_extras
    from medusa_kit.data.rows import EXAMPLES
    from medusa_kit.errors import DataError

    first = [{"role": "system", "content": system}] if system else []
    if prompt is not None:
        return [[*first, {"role": "user", "content": prompt}]]
    prompts = []
    for row in read_rows(str(source), extras=True):
        if not isinstance(row, Conversation):
            raise DataError(
                f"{source}: row {row.row} is an answer, expected a prompt", hint=EXAMPLES
            )
        messages = row.messages
        while messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        try:
            refuse_extras(messages, row.tools)
        except DataError as error:
            raise DataError(f"{source}:{row.row}: {error.message}", hint=error.hint) from error
        prompts.append([*first, *messages])
    return prompts


def _as_json(messages: Any, result: Any) -> str:
    record = {
        "messages": messages,
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "stats": result.stats.as_dict(),
    }
    return json.dumps(record, ensure_ascii=False)
