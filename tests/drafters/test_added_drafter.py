"""The drafter that docs/drafters.md writes, registered as it says, does all that others do."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs/drafters.md"
USED = """
import sys, types
from medusa_kit.settings.drafter_names import REGISTERED

REGISTERED["repeat"] = "repeat"
module = types.ModuleType("medusa_kit.drafters.repeat")
exec(sys.argv[1], vars(module))
sys.modules[module.__name__] = module

import medusa_kit
from medusa_kit.bench.bench import bench
from medusa_kit.bench.methods import standard_methods
from medusa_kit.cli import app

engine = medusa_kit.load("debug-tiny", heads="untrained", device="cpu", guesses="all")
prompts = [[5, 6, 7], [9, 9, 9, 9, 9], [3, 5]]
plain = engine.generate(prompts, drafter="none", max_new_tokens=24)
found = engine.generate(prompts, drafter="repeat", max_new_tokens=24)
assert [one.token_ids for one in found] == [one.token_ids for one in plain]
assert all(one.stats.drafter == "repeat" for one in found)
assert all(one.stats.nodes_per_step == 4.0 for one in found)
with engine.shared_batch(max_rows=2) as shared:
    asked = [shared.submit(prompt, drafter="repeat", max_new_tokens=24) for prompt in prompts]
    assert [one.result().token_ids for one in asked] == [one.token_ids for one in plain]
methods = standard_methods({"ours": engine}, None, 8, drafters=["repeat"])
report = bench(methods, prompts, 8)
assert [result.name for result in report.results][1:] == ["medusa-kit, repeat"]
assert [result.total.identical for result in report.results] == [3, 3]
app(["generate", "Hello", "-m", "debug-tiny", "-n", "4", "--drafter", "repeat"],
    standalone_mode=False)
"""


@pytest.mark.slow
def test_the_drafter_of_the_docs_does_all_that_others_do() -> None:
    (code,) = re.findall(
        r"```python\n(.*?)```", DOCS.read_text().split("## Adding a drafter")[1], re.S
    )
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    done = subprocess.run(
        [sys.executable, "-c", USED, code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
