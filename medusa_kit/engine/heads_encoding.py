"""Warns of heads and trees that were made when their base's text was tokenized differently, and of
heads that were trained when the base computed otherwise.

They are used all the same: what is emitted does not depend on them, only how much is accepted.
"""

import shlex
from pathlib import Path

from medusa_kit import console
from medusa_kit.base.model import BaseModel
from medusa_kit.base.origin import CONFIG, tell_unknown
from medusa_kit.base.origin import compare as compare_origins
from medusa_kit.base.tokenizer.encoding_digest import DIFFERS, ENCODING, Encodings, compare
from medusa_kit.heads.checkpoint import CONFIG_NAME
from medusa_kit.heads.config import HeadsConfig
from medusa_kit.tree.plan import read_fields


def warn_if_tokenizer_differs(
    config: HeadsConfig, base: BaseModel, folder: Path, tree: Path | None
) -> None:
    """At most one line, for heads from `folder` with the tree of that file. A base without a
    tokenizer has no text. Templates are no matter: heads see tokens."""
    if (now := base.encoding) is None:
        return
    of_heads = compare(config.encoding, now)
    of_tree = compare(read_fields(tree).get(ENCODING), now)
    calibrated = of_tree not in DIFFERS
    again = f"`{_command(base, folder)}` calibrates them anew"
    if of_heads is Encodings.OTHER:
        console.warn(
            f"the heads in {folder} were trained on text that was tokenized differently than "
            f"{base.info.name} tokenizes it now: answers stay exact, but fewer draft tokens "
            "may be accepted; " + ("newly trained heads draft better" if calibrated else again)
        )
    elif of_heads is Encodings.UNKNOWN and not calibrated:
        console.note(
            f"the heads in {folder} do not say how text was tokenized when they were trained. If "
            f"differently than now, fewer draft tokens are accepted; {again}"
        )
    elif of_tree is Encodings.OTHER:
        console.note(
            f"{tree} was found on text that was tokenized differently than {base.info.name} "
            f"tokenizes it now; {again}"
        )


def warn_if_config_differs(
    config: HeadsConfig, base: BaseModel, folder: Path, tree: Path | None
) -> None:
    """At most one line, for heads that learned the base with another config. What a tree of theirs
    says or does not say is told of where that is checked (tree_origin.py)."""
    compared = compare_origins(config.origin, base.identity)
    if CONFIG in compared.other:
        told, now = compared.other[CONFIG]
        console.warn(
            f"the heads in {folder} were trained when the config of {base.info.name} said {told}, "
            f"now it says {now}: answers stay exact, but fewer draft tokens may be accepted"
        )
    elif CONFIG in compared.unknown and (tree is None or not tree.is_file()):
        tell_unknown(folder / CONFIG_NAME, [CONFIG])


def _command(base: BaseModel, folder: Path) -> str:
    arguments = ["-m", base.info.name, "--heads", str(folder)]
    return f"medusa-kit tree-search {shlex.join(arguments)} --prompts FILE"
