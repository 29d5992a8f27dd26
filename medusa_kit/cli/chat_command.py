"""The command: loads an engine, says what it is and how it samples, and hands over to the chat."""

import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from medusa_kit import console
from medusa_kit.cli import engine_options, options
from medusa_kit.cli.chat import notes
from medusa_kit.cli.chat import sampling as chat_sampling
from medusa_kit.cli.chat.conversation import OPENINGS, PROMPT, Chat
from medusa_kit.cli.chat.view import counted
from medusa_kit.ctrl_c import ends_at_once
from medusa_kit.garbage import no_search
from medusa_kit.settings.sampling import ANSWER_TOKENS


@options.with_sampling(temperature_of_model=True)
@engine_options.with_engine()
def chat(
    loading: engine_options.Loading = engine_options.GIVEN,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_new_tokens: options.MaxNewTokens = ANSWER_TOKENS,
    sampling: options.Sampling = options.GIVEN,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Say more: folders, prefill, nodes and step times.")
    ] = False,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="Always the likeliest token, as --temperature 0.")
    ] = False,
) -> None:
    """Chat with the model: greedy unless its own config asks for sampling."""
    chat_sampling.check(sampling, greedy)
    with console.details(verbose):
        _chat(loading, system, max_new_tokens, sampling, greedy)


def _chat(
    loading: Mapping[str, Any], system: str | None, max_new_tokens: int,
    sampling: Mapping[str, Any], greedy: bool,
) -> None:  # fmt: skip
    with console.stages("loading the libraries", PROMPT):
        with ends_at_once(), no_search():
            import torch  # noqa: F401
            import transformers  # noqa: F401

            import medusa_kit
            import medusa_kit.engine.load
            from medusa_kit.data.without_template import template_note
            from medusa_kit.engine.before_loading import check_bias
            from medusa_kit.settings.sampling import SamplingParams

        params = SamplingParams.checked(sampling)
        check_bias(loading["model"], loading.get("revision"), params)
        engine = medusa_kit.load(**loading)
        if (steps := engine.scheduler.steps) is not None and engine.own_drafter != "none":
            _ = steps.cost  # timed now if need be, rather than before the first answer
    chosen, where = chat_sampling.choose(sampling, greedy, engine.base.generation_config)
    settings = {"max_new_tokens": max_new_tokens, **chosen}
    talk = Chat(
        engine, settings, system, template_note(engine.base.tokenizer, engine.base.info.name)
    )
    console.note(_greeting(engine))
    console.note(f"{chat_sampling.describe(chosen, where)}. /help lists the commands.")
    if talk.continues:
        console.note(talk.continues)
    if sys.stdin.isatty():
        console.note("to begin with:\n  " + "\n  ".join(OPENINGS))
    talk.run()


def _greeting(engine: Any) -> str:
    info = engine.base.info
    drafting = f"drafter {engine.own_drafter}"
    if engine.own_drafter == "none":
        drafting = "plain decoding"
    elif engine.own_drafter in ("auto", "medusa") and engine.heads is not None:
        heads = counted(engine.heads.num_heads, "head")
        drafting += f", {heads}, a tree of {counted(engine.tree.num_nodes, 'node')}"
    elif engine.own_drafter == "auto":
        drafting += ", no heads"
    about = f"{info.model_type}, {info.dtype}, {info.device}, {engine.attention.name}"
    about += notes.weights_note(engine)
    return f"{info.name} ({about}); {drafting}"
