"""Follows one request through the code: the modules that it passes, and the forms that the draft
tokens of a step take.

    python benchmarks/trace_request.py --model debug-tiny

A module counts where one of its functions gets the request, or a list that holds it, or the text
that becomes it. A form is a class of this kit that holds draft tokens, and that a function returns
belongs to. Each is listed where it comes first.
"""

import argparse
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import medusa_kit
from medusa_kit.drafters.trie import Trie
from medusa_kit.infer.decode.accept.scored_tree import ScoredTree
from medusa_kit.infer.draft import Draft, RequestText, State, StepResult
from medusa_kit.infer.tree_step import Nodes, NodeScores

PACKAGE = Path(medusa_kit.__file__).parent
FORMS = (Trie, Draft, Nodes, NodeScores, ScoredTree, StepResult)
PROMPT = [{"role": "user", "content": "Write one, one, one and one again."}]


def holds_it(value: Any) -> bool:
    if isinstance(value, RequestText | State) or value is PROMPT:
        return True
    return isinstance(value, list | tuple) and any(isinstance(one, RequestText) for one in value)


class Trace:
    """What `sys.setprofile` calls. Modules and forms, in the order in which they come first."""

    def __init__(self) -> None:
        self.modules: dict[str, str] = {}
        self.forms: dict[str, str] = {}

    def __call__(self, frame: FrameType, event: str, value: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event not in ("call", "return") or PACKAGE not in path.parents:
            return
        module = str(path.relative_to(PACKAGE))
        if event == "call":
            if any(holds_it(one) for one in frame.f_locals.values()):
                self.modules.setdefault(module, frame.f_code.co_name)
            return
        some = value[0] if isinstance(value, list | tuple) and value else value
        for found in (some, frame.f_locals.get("self")):
            if isinstance(found, FORMS):
                self.forms.setdefault(type(found).__name__, f"{module}: {frame.f_code.co_name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="debug-tiny")
    parser.add_argument("--heads", default="untrained")
    options = parser.parse_args()
    engine = medusa_kit.load(options.model, heads=options.heads)
    engine.generate(PROMPT, max_new_tokens=48)  # what is made once
    trace = Trace()
    sys.setprofile(trace)
    try:
        engine.generate(PROMPT, max_new_tokens=48)
    finally:
        sys.setprofile(None)
    print(f"{len(trace.modules)} modules that a request passes:")
    for number, (module, function) in enumerate(trace.modules.items(), start=1):
        print(f"  {number:2} {module}: {function}")
    print(f"{len(trace.forms)} forms of a step's draft tokens:")
    for name, where in trace.forms.items():
        print(f"     {name}, first from {where}")


if __name__ == "__main__":
    main()
