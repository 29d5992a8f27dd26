"""`medusa-kit chat`: a streaming chat in the terminal."""

from typing import Annotated, Any

import typer

from medusa_kit import console
from medusa_kit.cli import engine_options, options
from medusa_kit.errors import ContextLengthError

HELP = """/help           this list
/reset          forget the conversation
/system TEXT    start over with this system message
/compare        answer the last prompt once more plainly, and say how much faster the drafter is
/tree           draw the candidate tree
/exit           leave (so does Ctrl-D)
Ctrl-C stops an answer and keeps what there is."""


@options.with_sampling()
@engine_options.with_engine()
def chat(
    loading: engine_options.Loading = engine_options.GIVEN,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_new_tokens: options.MaxNewTokens = 512,
    sampling: options.Sampling = options.GIVEN,
) -> None:
    """Chat with the model; each answer closes with its speed and acceptance length."""
    import medusa_kit
    from medusa_kit.engine.before_loading import check_bias
    from medusa_kit.settings.sampling import SamplingParams

    check_bias(loading["name"], loading.get("revision"), SamplingParams.of(sampling))
    engine = medusa_kit.load(**loading)
    settings = {"max_new_tokens": max_new_tokens, **sampling}
    console.note(_greeting(engine))
    Chat(engine, settings, system).run()


def _greeting(engine: Any) -> str:
    info = engine.base.info
    drafting = f"drafter {engine.own_drafter}"
    if engine.own_drafter == "none":
        drafting = "plain decoding"
    elif engine.own_drafter in ("auto", "combined", "medusa") and engine.heads is not None:
        drafting += f", {engine.heads.num_heads} heads, a tree of {engine.tree.num_nodes} nodes"
    elif engine.own_drafter == "auto":
        drafting += ", no heads"
    about = f"{info.model_type}, {info.dtype}, {info.device}, {engine.attention.name}"
    about += options.weights_note(engine)
    return f"{info.name} ({about}); {drafting}. /help helps."


class Chat:
    """The conversation so far and what the person types."""

    def __init__(self, engine: Any, settings: dict[str, Any], system: str | None) -> None:
        self.engine, self.settings = engine, settings
        self.reset(system)

    def reset(self, system: str | None) -> None:
        self.system = system
        self.messages: list[dict[str, str]] = []
        if system:
            self.messages.append({"role": "system", "content": system})
        self.last: tuple[list[dict[str, str]], Any] | None = None

    def run(self) -> None:
        while True:
            try:
                line = input("› ").strip()
            except KeyboardInterrupt:  # at the prompt it clears the line
                typer.echo()
                continue
            except EOFError:
                typer.echo()
                return
            if line in ("/exit", "/quit"):
                return
            if line.startswith("/"):
                self.command(line)
            elif line:
                self.answer(line)

    def answer(self, line: str) -> None:
        prompt = [*self.messages, {"role": "user", "content": line}]
        try:
            streaming = self.engine.stream(prompt, **self.settings)
        except ContextLengthError as error:
            console.warn(f"{error.message}; /reset forgets the conversation")
            return
        try:
            for piece in streaming:
                typer.echo(piece, nl=False)
        except KeyboardInterrupt:
            typer.echo(" …", nl=False)
        typer.echo()
        result = streaming.result
        self.messages = [*prompt, {"role": "assistant", "content": result.text}]
        self.last = (prompt, result)
        console.note(_closing(result))
        for said in result.stats.drafter_notes[:1]:
            console.note(said)

    def command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name == "/help":
            typer.echo(HELP)
        elif name == "/reset":
            self.reset(self.system)
        elif name == "/system":
            self.reset(rest.strip() or None)
        elif name == "/tree":
            from medusa_kit.tree.render import describe_tree

            typer.echo(describe_tree(self.engine.tree))
        elif name == "/compare":
            self.compare()
        else:
            console.warn(f"{name} is no command; /help lists them")

    def compare(self) -> None:
        if self.last is None:
            console.warn("there is no answer yet to compare with")
            return
        prompt, result = self.last
        if not result.token_ids:
            console.warn("the last answer was stopped before its first token")
            return
        settings = {**self.settings, "max_new_tokens": len(result.token_ids), "drafter": "none"}
        try:
            plain = self.engine.generate(prompt, **settings)
        except KeyboardInterrupt:
            console.warn("comparison stopped")
            return
        ratio = result.stats.tokens_per_second / plain.stats.tokens_per_second
        same = "the same tokens" if plain.token_ids == result.token_ids else "OTHER TOKENS"
        same += options.rule_note(result.stats)
        console.note(
            f"plain decoding: {plain.stats.tokens_per_second:.1f} tokens/s; with drafter "
            f"{self.engine.own_drafter} {ratio:.2f} × as fast, {same}"
        )


def _closing(result: Any) -> str:
    stats = result.stats
    return (
        f"{stats.new_tokens} tokens, {stats.tokens_per_second:.1f} tokens/s, acceptance length "
        f"{stats.acceptance_length:.2f} ({result.finish_reason}){options.rule_note(stats)}"
    )
