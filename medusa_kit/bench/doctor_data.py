"""The doctor's checks of the base model and the data.

Shapes: B batch, T tokens, D hidden, V vocabulary.
"""

import torch

from medusa_kit.base.model import RELATIVE_TOLERANCE, relative_error
from medusa_kit.bench.doctor_case import DRAWN, Case, Finding, check, ok, problem, skipped, warning
from medusa_kit.data.chat import encode_conversation, encode_prompt
from medusa_kit.data.readers import Conversation
from medusa_kit.data.template import chat_template as template_of
from medusa_kit.data.turns import GENERATION_MARK
from medusa_kit.errors import DataError

MIN_TRAINED = 0.02  # share of tokens that are trained on
MIN_ENDING = 0.9  # share of answers that end with a stop token
MIN_OWN = 0.5  # share of trained tokens that the base itself would have written
CHUNK = 256  # positions whose logits are in memory at once
SAMPLE = [
    {"role": "user", "content": "Name a tree."},
    {"role": "assistant", "content": "An oak."},
    {"role": "user", "content": "Another one?"},
    {"role": "assistant", "content": "A birch."},
]
SELF_DISTIL = "let the base write the answers itself: `medusa-kit data generate`"


@check("chat template")
def chat_template(case: Case) -> Finding:
    """Is there one, does training see the prompts of decoding, do several turns work?"""
    tokenizer = case.base.tokenizer
    if tokenizer is None:
        return skipped("the base model has no tokenizer")
    template = template_of(tokenizer)
    if template is None:
        if any(isinstance(row, Conversation) for row in case.rows or ()):
            return problem(
                "absent, and the data holds conversations",
                "give answer rows (`medusa-kit data generate`), or a model with a chat template",
            )
        return warning("absent: prompts are encoded as plain text", "serve it as plain text too")
    marked = GENERATION_MARK.search(template)
    what = f"present, {'with' if marked else 'without'} {{% generation %}} marks"
    try:
        trained = encode_conversation(tokenizer, SAMPLE[:2])
        prompt = encode_prompt(tokenizer, SAMPLE[:1])
    except DataError as error:
        return problem(
            f"{what}; one question and its answer cannot be encoded: {_reason(error)}",
            error.hint or "the template should take a user message and an assistant message",
        )
    if trained.input_ids[: len(prompt)] != prompt:
        return problem(
            f"{what}; a rendered conversation does not begin with the prompt used in decoding",
            "compare the template with and without add_generation_prompt",
        )
    distance = trained.loss_mask.index(True) - len(prompt)
    if distance:
        return warning(
            f"{what}; the first trained token is {abs(distance)} tokens "
            f"{'after' if distance > 0 else 'before'} the end of the prompt used in decoding",
            "the assistant's header should be in the generation prompt, not in the answer",
        )
    try:
        encode_conversation(tokenizer, SAMPLE)
    except DataError as error:
        return warning(f"{what}; only single turns can be encoded: {_reason(error)}", error.hint)
    return ok(f"{what}; several turns of a row can be trained on")


def _reason(error: DataError) -> str:
    return error.message.removeprefix("row 0: ")  # the sample is no row of the data


@check("loss mask")
def loss_mask(case: Case) -> Finding:
    """How much of the data is trained on, and how many rows cannot be used?"""
    if case.rows is None:
        return skipped("no data given")
    if case.data_error is not None or case.report is None:
        message = case.data_error.message if case.data_error else "no row was encoded"
        return problem(message, "`medusa-kit data inspect` shows what is trained on")
    report = case.report
    share = report.trained_tokens / report.tokens
    what = f"{share:.1%} of {report.tokens:,} tokens in {len(case.examples)} rows are trained on"
    if share < MIN_TRAINED:
        return warning(what, "give rows with longer answers, or shorter prompts")
    if report.skipped:
        row, reason = report.skipped[0]
        return warning(f"{what}; {len(report.skipped)} skipped, the first is row {row}: {reason}")
    return ok(what)


@check("stop token", data=True)
def stop_token(case: Case) -> Finding:
    """Do answers that are not cut off end with a token that ends decoding?"""
    stops = case.base.stop_token_ids
    if not stops:
        return warning(
            "the base model names no stop token", "set eos_token_id in its generation_config.json"
        )
    kinds, last = {row.row: row for row in case.rows or ()}, []
    for example in case.examples:
        kind = kinds[example.row]
        whole = len(example.input_ids) < case.max_length
        if whole and (isinstance(kind, Conversation) or kind.finish_reason == "stop"):
            written = zip(example.input_ids, example.loss_mask, strict=True)
            last.append([token for token, trained in written if trained][-1])
    if not last:
        return warning(
            f"none of {len(case.examples)} rows ends by itself: all were cut off by length",
            "heads never see an answer end: generate with a larger --max-new-tokens",
        )
    ending = sum(token in stops for token in last)
    what = f"{ending} of {len(last)} answers end with a stop token ({sorted(stops)})"
    if not ending:
        hint = f"they end with token {last[0]}: is it missing from the generation config's eos?"
        return problem(f"{what}, so it is never trained on", hint)
    if ending < MIN_ENDING * len(last):
        return warning(what, "answers that end without it teach heads to continue")
    return ok(what)


@check("tied embeddings")
def tied_embeddings(case: Case) -> Finding:
    """Own projections on a tied base each copy a matrix that the base stores once."""
    info = case.base.info
    what = "tied" if info.tied_embeddings else "not tied"
    if case.heads is None or case.heads.config.projection != "own":
        return ok(what)
    heads = case.heads.num_heads
    added = heads * info.vocab_size * info.hidden_size
    what += f"; {heads} own projections of {added:,} parameters, compared with "
    what += f"{info.num_parameters:,} of the base model"
    if info.tied_embeddings:
        return warning(what, "projections shared and reduced add no such parameters")
    return ok(what)


@check("hidden states")
def hidden_states(case: Case) -> Finding:
    """Do heads read the output embedding's input, in training and in decoding?"""
    base, probe_1T = case.base, case.probe_T[None]
    hidden_1TD, logits_1TV = base.hidden_and_logits(probe_1T, use_cache=False)
    decoded_1TD = base.hidden_states(probe_1T)
    errors = {
        "head_logits against the model's own logits": relative_error(
            base.head_logits(hidden_1TD), logits_1TV
        ),
        "hidden_states against the hook's": relative_error(decoded_1TD, hidden_1TD),
    }
    if case.hidden_before_TD is not None:
        before_1TD = case.hidden_before_TD[None]
        errors["decoding's layers against training's"] = relative_error(decoded_1TD, before_1TD)
    allowed = RELATIVE_TOLERANCE[base.dtype]
    wrong = [f"{name}: {error:.1e}" for name, error in errors.items() if not error <= allowed]
    if wrong:
        return problem(
            f"off by more than {allowed:.0e} of the spread: {'; '.join(wrong)}",
            "heads would not read the output embedding's input: please report the family",
        )
    worst = max(errors.values())
    return ok(f"{probe_1T.shape[1]} tokens, largest error {worst:.1e} (allowed {allowed:.0e})")


@check("vocabulary")
def vocabulary(case: Case) -> Finding:
    """Do all ids of the tokenizer, the data and the heads have rows in the embeddings?"""
    size, wrong = case.smallest_vocabulary, []
    what = f"{size:,} embedding rows"
    if case.base.tokenizer is not None:
        known = len(case.base.tokenizer)
        what += f", {known:,} tokens in the tokenizer"
        if known > size:
            wrong.append(f"the tokenizer has {known:,} tokens for {size:,} embedding rows")
    if case.examples:
        highest = max(max(example.input_ids) for example in case.examples)
        what += f", highest id in the data {highest:,}"
        if highest >= size:
            wrong.append(f"the data holds id {highest:,}, expected 0..{size - 1:,}")
    if case.heads is not None and case.heads.config.vocab_size != case.base.info.vocab_size:
        of_heads, of_base = case.heads.config.vocab_size, case.base.info.vocab_size
        wrong.append(f"the heads have a vocabulary of {of_heads:,}, the base of {of_base:,}")
    if wrong:
        return problem("; ".join(wrong), "tokenizer, data and heads must be of this base")
    return ok(what)


@check("the base's own words", data=True)
@torch.no_grad()
def own_words(case: Case) -> Finding:
    """How much of the data would the base have written? Decoding shows heads no other text."""
    if case.is_drawn:
        return skipped(DRAWN)
    same = total = 0
    for answer in case.answers:
        ids_T = torch.tensor([*answer.prompt_ids, *answer.response_ids], device=case.base.device)
        first = len(answer.prompt_ids)
        hidden_TD = case.base.hidden_states(ids_T[None])[0, first - 1 : -1]
        for start in range(0, len(hidden_TD), CHUNK):
            best_T = case.base.head_logits(hidden_TD[start : start + CHUNK]).argmax(-1)
            same += int((best_T == ids_T[first + start :][: len(best_T)]).sum())
        total += len(hidden_TD)
    what = f"the base would have written {same / total:.0%} of {total:,} trained tokens"
    if same < MIN_OWN * total:
        return warning(f"{what}: the data is not its own text", SELF_DISTIL)
    return ok(what)
