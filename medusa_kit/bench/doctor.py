"""Doctor: checks the known causes of "good in training, bad in serving", one by one.

Checks of base and data are in doctor_data.py, those of heads in doctor_heads.py; doctor_case.py has
what they examine.
"""

from collections.abc import Sequence
from pathlib import Path

from medusa_kit import console
from medusa_kit.base.model import BaseModel
from medusa_kit.bench import doctor_data, doctor_heads
from medusa_kit.bench.doctor_case import Case, Finding, check, examine, ok, problem
from medusa_kit.data.readers import AnswerRow, Conversation
from medusa_kit.errors import IncompatibleBaseError

__all__ = ["CHECKS", "Case", "Finding", "diagnose", "examine"]


@check("tree attention")
def tree_attention(case: Case) -> Finding:
    """Can trees be verified on this base at all?"""
    if case.engine is None:
        error = case.engine_error or IncompatibleBaseError("no engine was built")
        return problem(error.message, error.hint)
    measured = case.engine.check
    return ok(f"trees score as plain text does, error {measured.relative_error:.1e}")


CHECKS = (
    doctor_data.chat_template,
    doctor_data.loss_mask,
    doctor_data.stop_token,
    doctor_data.vocabulary,
    doctor_data.own_words,
    doctor_data.tied_embeddings,
    doctor_data.hidden_states,
    tree_attention,
    doctor_heads.heads_fit,
    doctor_heads.projection,
    doctor_heads.head_offset,
    doctor_heads.replay_equals_decoding,
    doctor_heads.data_is_like_decoded_text,
    doctor_heads.data_is_like_calibration,
    doctor_heads.trained_accuracy,
)


def diagnose(
    base: BaseModel,
    rows: Sequence[Conversation | AnswerRow] | None = None,
    heads: str | Path | None = None,
    tolerance: float = 0.1,
) -> list[Finding]:
    """One finding for every check; a check without the inputs that it needs is skipped.

    `heads`: as for `medusa_kit.load`, a folder, a Hub id or auto. `tolerance`: the allowed
    difference between two shares of right draft tokens.
    """
    case = examine(base, rows, heads, tolerance)
    findings = []
    with console.progress("examining", len(CHECKS), "checks") as bar:
        for run_check in CHECKS:
            findings.append(run_check(case))
            bar.advance(note=findings[-1].name)
    return findings
