"""The end of a quick run: one table, the same as JSON and Markdown, and what to type next."""

import shlex
from collections.abc import Sequence
from typing import Any

from medusa_kit import console
from medusa_kit.base.origin import HEADS
from medusa_kit.bench.doubts import doubt, says_nothing
from medusa_kit.bench.report import NO_DRAFTER, known_by
from medusa_kit.data.answer_settings import activations_in
from medusa_kit.files import write_json, write_text
from medusa_kit.heads.formats.engines import ENGINES, engines_for
from medusa_kit.quick.plan import minutes
from medusa_kit.quick.session import Session
from medusa_kit.quick.settings import FEATURES, heads_for
from medusa_kit.quick.state import PHASES, folder_bytes
from medusa_kit.settings.engine import FLOAT32
from medusa_kit.settings.quick import MadeFor
from medusa_kit.settings.recipe import HeadsSection

NAMES = {"held_out": "held-out answers", "answers": "answers", "training": "training",
         "search": "tree search", "verify": "verify", "bench": "bench"}  # fmt: skip
MEASURED: dict[str | None, str] = {
    NO_DRAFTER: "plain decoding",
    "medusa": "heads alone",
    "auto": "auto, the default",
}
Row = tuple[str, str]


def engines(engine: MadeFor) -> str:
    """Which engines will load the heads, in a sentence."""
    heads = HeadsSection.model_validate(heads_for(engine))
    if engine == "kit":
        return (
            f"heads of kind {heads.kind}, which draft best, for medusa-kit: no other engine will "
            "load them; --for vllm or --for tgi trains heads that vLLM or TGI loads"
        )
    return f"heads of kind {heads.kind} for {ENGINES[engine]}: {engines_for(heads)} will load them"


def record_of(session: Session) -> dict[str, Any]:
    """All figures of a finished run, for JSON."""
    state, request = session.state, session.request
    return {
        "model": request.model,
        "base_fingerprint": state.recall("base"),
        "prompts": request.prompts,
        "hours": request.hours,
        "for": request.engine,
        "seconds": round(state.seconds(), 1),
        "phases": {
            name: {"seconds": round(state.phase_seconds(name), 1), **state.figures(name)}
            for name in PHASES
        },
        "rates": state.recall("rates"),
        "disk": {
            "heads": folder_bytes(session.heads),
            "hidden_states": folder_bytes(session.path(FEATURES)),
            "all": folder_bytes(request.output),
        },
        "heads": str(session.heads),
        "heads_digest": state.recall(HEADS),
        "next": next_commands(session),
    }


def next_commands(session: Session) -> list[Row]:
    """(command, what it does)."""
    model, heads = shlex.quote(session.request.model), shlex.quote(str(session.heads))
    device = session.request.device
    where = "" if device == "auto" else f" --device {shlex.quote(device)}"
    engine = session.request.engine
    commands = [
        (f"medusa-kit chat -m {model} --heads {heads}{where}", "talk to it"),
        (f"medusa-kit serve -m {model} --heads {heads}{where}", "OpenAI's API"),
        (f"medusa-kit push {heads} ORG/NAME", "heads with a card, to the Hub"),
    ]
    if engine != "kit":
        folder = shlex.quote(str(session.path(engine)))
        commands.append((
            f"medusa-kit convert {heads} {folder} --to {engine} -m {model}",
            f"heads for {ENGINES[engine]}; prints how to serve them",
        ))  # fmt: skip
    return commands


def rows_of(record: dict[str, Any]) -> list[Row]:
    """The lines of the table."""
    phases = record["phases"]
    text, training, search = phases["answers"], phases["training"], phases["search"]
    chosen = search["chosen"]
    tree = f"{chosen['nodes']}{' dynamic' if chosen['dynamic'] else ''} nodes"
    tree = "none gains on this machine" if chosen["nodes"] == 1 else (
        f"{tree}, acceptance length {chosen['acceptance_length']:.2f}")  # fmt: skip
    times = ", ".join(f"{NAMES[name]} {minutes(phases[name]['seconds'])}" for name in PHASES)
    static = _by_nodes(search["static"])
    return [
        ("text", f"{text['answers']:,} answers{_rounded(text)}{_looping(text)}, "
                 f"{training['positions']:,} training tokens, {training['epochs']:g} epochs"),
        ("held out", f"{phases['held_out']['answers']:,} answers for the tree, "
                     f"{search['calibration_positions']:,} tokens used"),
        ("time", f"{minutes(record['seconds'])} of {minutes(3600 * record['hours'])}"),
        ("of it", times),
        *([("acceptance length, static trees", static)] if static else []),
        *lengths_before(search),
        *_chained(record["for"], search),
        ("chosen tree", tree),
        ("predicted speed-up", f"{search['predicted_speed_up']:.2f} × plain decoding, by the heads "
                               "alone on held-out answers; auto copies text too"),
        *_measured(phases["bench"]),
        ("verify", _verified(phases["verify"])),
        ("disk", f"heads {_mb(record['disk']['heads'])}, hidden states "
                 f"{_mb(record['disk']['hidden_states'])}, all {_mb(record['disk']['all'])}"),
    ]  # fmt: skip


def _by_nodes(lengths: dict[str, float]) -> str:
    return " · ".join(f"{n}: {length:.2f}" for n, length in lengths.items())


def lengths_before(search: dict[str, Any]) -> list[Row]:
    """A row on the heads that training went on from, or that the base had; none without any."""
    now, before = search["static"], search.get("static_before")
    if not before:
        return []
    gained = sum(now.values()) > sum(before.values())
    kept = "" if gained else "; as good on this text, so keep them"
    return [("the same of the heads that were there", f"{_by_nodes(before)}{kept}")]


def _rounded(text: dict[str, Any]) -> str:
    activations = activations_in(text)
    return "" if activations == FLOAT32 else f" with {activations} activations"


def _looping(text: dict[str, Any]) -> str:
    loops = text.get("loops", 0)
    return f" ({loops:,} end in a loop)" if loops else ""


def _chained(engine: MadeFor, search: dict[str, Any]) -> list[Row]:
    """A row on the heads in another engine, which verifies a chain, not a tree."""
    if engine == "kit":
        return []
    chain = search["chain"]
    depths = " · ".join(f"{share:.0%}" for share in chain["acceptance_by_depth"])
    length = chain["acceptance_length"]
    return [(f"acceptance length, a chain as in {ENGINES[engine]}",
             f"{length:.2f}; by depth {depths}")]  # fmt: skip


def _measured(bench: dict[str, Any]) -> list[Row]:
    """Speeds by method, and what they were measured on; no gain where only loops were timed."""
    loops = bench.get("loops", 0)  # earlier versions did not count them
    nothing = says_nothing(bench["prompts"], loops)
    methods, rows = bench["methods"], list[Row]()
    for name, figures in methods.items():
        drafter = known_by(name)["drafter"]
        speed = f"{console.number(figures['decoding_tokens_per_second'], '.1f')} tokens/s"
        if drafter not in (None, NO_DRAFTER) and figures["against_plain"] and not nothing:
            length = figures["acceptance_length"]
            speed += f", {figures['against_plain']:.2f} × plain decoding"
            speed += "" if length is None else f", acceptance length {length:.2f}"
        rows.append((f"measured: {MEASURED.get(drafter, name)}", speed))
    return [*rows, ("measured on", _measured_on(bench["prompts"], bench["max_new_tokens"], loops))]


def _measured_on(prompts: int, max_new_tokens: int, loops: int) -> str:
    if (why := doubt(prompts, loops, loops)) is not None and says_nothing(prompts, loops):
        return why
    said = f"{console.counted(prompts, 'prompt')}, at most {max_new_tokens} new tokens each"
    if loops:
        said += f"; {loops} with answers that end in a loop are left out"
    return said if why is None else f"{said}; {why}"


def _verified(figures: dict[str, Any]) -> str:
    if "not_run" in figures:
        return f"not run: {figures['not_run']}"
    if figures["bugs"]:
        return f"{figures['bugs']} of {figures['answers']} answers differ by more than rounding"
    if figures.get("encodings"):
        return f"{figures['encodings']} of {figures['prompts']} prompts are tokenized differently"
    rounding = figures["answers"] - figures["identical"]
    more = f", {rounding} differ by rounding" if rounding else ""
    identical = f"{figures['identical']} of {figures['answers']} answers identical"
    return f"{identical}{more} ({figures['held_to']})"


def _mb(size: float) -> str:
    return f"{size / 1e6:,.1f} MB"


def write(session: Session) -> tuple[str, list[Row], list[Row]]:
    """report.json and report.md; returns (title, rows of the table, what to type next)."""
    record = record_of(session)
    rows, commands = rows_of(record), next_commands(session)
    title = f"heads for {session.request.model}"
    try:
        write_json(session.path("report.json"), record)
        write_text(session.path("report.md"), _markdown(title, rows, commands))
    except OSError:
        if not session.state.was_finished:  # then they are there, in a folder that may be read-only
            raise
    return title, rows, commands


def _markdown(title: str, rows: Sequence[Row], commands: Sequence[Row]) -> str:
    lines = [f"# {title[0].upper()}{title[1:]}", "", console.markdown(("", ""), rows), ""]
    lines += ["What to type next:", "", "```sh"]
    lines += [f"{command}  # {description}" for command, description in commands]
    return "\n".join([*lines, "```", ""])
