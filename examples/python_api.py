"""Answers, streams, lists and statistics from Python: `python examples/python_api.py [MODEL]`."""

import sys

import medusa_kit

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct"

with medusa_kit.load(MODEL) as engine:  # heads="auto": those that are shipped or lie beside it
    question = [{"role": "user", "content": "Why is the sky blue?"}]
    answer = engine.generate(question, max_new_tokens=48)
    print(answer.text)
    print(f"{answer.stats.acceptance_length:.2f} tokens a step")

    plain = engine.generate(question, max_new_tokens=48, drafter="none")
    print("the same without drafting:", plain.token_ids == answer.token_ids)

    for piece in engine.stream(question, max_new_tokens=48, temperature=0.7, seed=1):
        print(piece, end="", flush=True)
    print()

    talk = engine.conversation(system="Answer in one sentence.")
    for turn in ("Name a river.", "Where does it begin?"):
        print(talk.send(turn, max_new_tokens=32).text)

    for result in engine.generate(["To be, or not", "Once upon a time"], max_new_tokens=16):
        print(repr(result.text))
