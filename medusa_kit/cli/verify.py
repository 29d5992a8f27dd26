"""`medusa-kit verify`: are the tokens the base model's own?"""

from pathlib import Path
from typing import Annotated, Any

import typer

from medusa_kit import console
from medusa_kit.cli import engine_options, options
from medusa_kit.cli.chat import notes
from medusa_kit.cli.prompts import OWN_PROMPTS, load_both, read_prompts
from medusa_kit.outputs import check_file, has_keys
from medusa_kit.settings.sampling import SamplingParams


@options.with_sampling(only=("top_k", "top_p", "seed"))
@engine_options.with_engine(dtype="float32")
def verify(
    loading: engine_options.Loading = engine_options.GIVEN,
    prompts: Annotated[str | None, options.prompts_option("; default: those shipped")] = None,
    limit: options.Limit = None,
    max_new_tokens: options.MaxNewTokens = 128,
    temperature: Annotated[
        float, typer.Option(help="Temperature of the sampled half; 0 leaves it out.")
    ] = 0.8,
    sampling: options.Sampling = options.GIVEN,
    layer_by_layer: Annotated[
        bool | None,
        typer.Option(
            "--layer-by-layer/--whole-model",
            help="Read the second model's weights layer by layer as they are needed, or all at "
            "once; default: layer by layer where memory is too small.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[Path | None, options.output_option("File for the report, as JSON.")] = None,
) -> None:
    """Compare token by token with plain transformers on an untouched second model.

    Greedy answers against transformers generate, sampled ones against plain decoding with the
    same seed. Prompts' token ids against those that the library tokenizers reads from the base's
    tokenizer.json, if it has one. Exit code 1 when a difference is more than rounding.

    In float32 unless --dtype or the engine's file says otherwise, since in 16 bits many differences
    pass for rounding. Where memory has no room for a second model in float32, its weights are read
    layer by layer: it then says which token it chooses at each place of an answer, greedy or
    sampled, and no answer of its own is generated.

    With --activations int16 or int8 all answers are compared with plain decoding in the same
    precision, one prompt at a time. How many agree with the second model, which computes in
    float32, is counted apart and fails nothing.

    With --weights int8 the second model is rounded as well. That shows that decoding adds nothing
    to the rounding, not that answers are those of the checkpoint.
    """
    from medusa_kit.bench.machine import write_verify
    from medusa_kit.bench.verify import verify as run
    from medusa_kit.data.without_template import tell_template

    params = SamplingParams.of({"temperature": temperature, **sampling})
    if output is not None:
        check_file(output, "--output", has_keys("greedy"))
    conversations = read_prompts(prompts, limit)
    console.note(
        f"{console.counted(len(conversations), 'prompt')} of at most {max_new_tokens} new tokens, "
        f"{'greedy' if params.greedy else 'greedy, then sampled'}; the model is loaded twice, "
        "for medusa-kit and for transformers"
    )
    engine, oracle = load_both(loading, same_weights=True, layerwise=layer_by_layer)
    tell_template(engine.base.tokenizer, engine.base.info.name)
    reports = {"greedy": run(engine, oracle, conversations, max_new_tokens=max_new_tokens)}
    if not params.greedy:
        reports["sampled"] = run(
            engine, oracle, conversations, max_new_tokens=max_new_tokens, sampling=params
        )
    _print(engine, reports)
    if output is not None:
        write_verify(reports, engine, prompts or OWN_PROMPTS, output, conversations)
    if any(report.failed for report in reports.values()):
        differs = any(report.bugs for report in reports.values())
        problem = (
            "a difference is more than rounding" if differs else "prompts are tokenized differently"
        )
        console.err.print(f"error: {problem}", style="bold red")
        raise typer.Exit(1)


def _print(engine: Any, reports: dict[str, Any]) -> None:
    rows = [
        (
            name,
            report.num_prompts,
            report.num_tokens,
            report.identical,
            len(report.differences) - len(report.bugs),
            len(report.bugs),
            f"{report.acceptance_length:.3f}",
        )
        for name, report in reports.items()
    ]
    lossy = engine.base.info.lossy
    same = "as the rounded" if lossy else "identical"
    columns = ("decoding", "prompts", "tokens", same, "differ by\nrounding", "differ by\nmore",
               "acceptance\nlength")  # fmt: skip
    if lossy:
        console.note(
            f"weights rounded to {engine.weights} are LOSSY: answers are held against those of the "
            "same rounded model, not of the checkpoint, and none counts as identical"
        )
    if (note := notes.quantised_note(engine)) is not None:
        console.note(note)
    # How it was computed is in the file of --output alone.
    title = (
        f"{engine.base.info.name}{notes.weights_note(engine)}, drafter {engine.own_drafter}, "
        f"held to {_references(reports)}"
    )
    console.out.print(console.table(title, columns, rows))
    for mismatch in reports["greedy"].encodings:
        console.out.print(
            f"prompt {mismatch.prompt}, token {mismatch.position}, after {mismatch.text!r}: "
            f"expected ids {mismatch.expected}… by {reports['greedy'].encoded_by}, "
            f"got {mismatch.actual}…: BUG",
            highlight=False,
            markup=False,
        )
    for name, report in reports.items():
        if report.agreement is not None:
            note = f"{name}: {report.agreement.describe('plain transformers')}"
            console.out.print(note, highlight=False, markup=False)
        for d in report.differences:
            console.out.print(
                f"{name}: prompt {d.prompt}, token {d.position}: expected {d.expected}, got "
                f"{d.actual}; margin {d.margin:.2e}, "
                f"rounding tolerance {d.rounding_tolerance:.2e}: "
                f"{'rounding' if d.is_rounding else 'BUG'}",
                highlight=False,
            )
    if (said := _verdict(engine, reports)) is not None:
        console.out.print(said, highlight=False, markup=False)


def _references(reports: dict[str, Any]) -> str:
    return " and ".join(dict.fromkeys(report.reference for report in reports.values()))


def _verdict(engine: Any, reports: dict[str, Any]) -> str | None:
    """What the table comes to, in a sentence; None where an error says it."""
    if any(report.failed for report in reports.values()):
        return None
    answers = sum(report.num_prompts for report in reports.values())
    identical = sum(report.identical for report in reports.values())
    heads = "" if engine.heads_source is not None else "; heads can be trained for this model"
    if identical < answers:
        return (f"passed: {answers - identical} of {answers} answers differ, by rounding "
                f"alone{heads}")  # fmt: skip
    if engine.base.info.lossy:
        return f"passed: all {answers} answers are those of the same rounded model{heads}"
    return f"passed: all {answers} answers are identical to those of {_references(reports)}{heads}"
